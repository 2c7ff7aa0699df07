"""Prior knowledge: what was known before a sweep's first trial and its proposals depend on, kept in its ledger.

It is gathered once, when the sweep is created: dry runs, probes and other sweeps that come later change nothing about
what a resumed sweep proposes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from cluster.probe.profile import Profile
from orchestrator.planning.dryrun.estimates import DryRunEstimates
from orchestrator.search.prediction.transfer import EarlierTrial
from orchestrator.sweep.documents import Document
from orchestrator.sweep.ledger import Ledger
from trials.codec import from_json, to_json
from trials.dryrun.estimate import DryRunEstimate
from trials.spec import Candidate

PROFILE = "profile"
"""Name of the document that holds the probe's :class:`cluster.probe.profile.Profile`, or null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedCandidate:
    """What a dry run counted for one candidate."""

    candidate: Candidate
    estimate: DryRunEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedCandidates(Document):
    """The ledger's document with what dry runs counted."""

    name: ClassVar[str] = "dry_runs"
    limit_bytes: int | None = None
    """Device memory; None where nobody knows."""
    context_bytes: int = 0
    """Device memory that the idle process holds."""
    communicator_bytes: int = 0
    """Device memory that each of its communicators holds besides."""
    host_limit_bytes: int | None = None
    """Host memory of the smallest node."""
    ranks_per_node: int = 1
    devices_are_host: bool = False
    counted: tuple[CountedCandidate, ...] = ()

    @classmethod
    def of(cls, estimates: DryRunEstimates) -> Self:
        """The document of these estimates."""
        counted = estimates.by_candidate.items()
        return cls(
            limit_bytes=estimates.limit_bytes,
            context_bytes=estimates.context_bytes,
            communicator_bytes=estimates.communicator_bytes,
            host_limit_bytes=estimates.host_limit_bytes,
            ranks_per_node=estimates.ranks_per_node,
            devices_are_host=estimates.devices_are_host,
            counted=tuple(CountedCandidate(candidate=one, estimate=estimate) for one, estimate in counted),
        )

    @property
    def estimates(self) -> DryRunEstimates:
        """Back from :meth:`of`."""
        counted = {one.candidate: one.estimate for one in self.counted}
        return DryRunEstimates(
            by_candidate=counted,
            limit_bytes=self.limit_bytes,
            context_bytes=self.context_bytes,
            communicator_bytes=self.communicator_bytes,
            host_limit_bytes=self.host_limit_bytes,
            ranks_per_node=self.ranks_per_node,
            devices_are_host=self.devices_are_host,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTrials(Document):
    """The ledger's document with what other sweeps measured."""

    name: ClassVar[str] = "transfer"
    trials: tuple[EarlierTrial, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorKnowledge:
    """What was known about the candidates and the hardware."""

    estimates: DryRunEstimates = field(default_factory=DryRunEstimates)
    """What dry runs counted."""
    profile: Profile | None = None
    """What a probe measured of the nodes in use."""
    earlier: tuple[EarlierTrial, ...] = ()
    """What other sweeps measured, for the guided sampler."""

    def keep(self, ledger: Ledger) -> None:
        """Write it into the ledger."""
        CountedCandidates.of(self.estimates).put(ledger)
        ledger.put_document(PROFILE, to_json(self.profile))
        EarlierTrials(trials=self.earlier).put(ledger)

    @classmethod
    def kept(cls, ledger: Ledger) -> PriorKnowledge:
        """Read back what :meth:`keep` wrote; nothing where nothing was kept.

        Raises:
            LedgerError: another version of this program wrote it, and it is not understood.
        """
        return cls(
            estimates=(CountedCandidates.read(ledger) or CountedCandidates()).estimates,
            profile=from_json(Profile | None, ledger.document(PROFILE)),
            earlier=(EarlierTrials.read(ledger) or EarlierTrials()).trials,
        )
