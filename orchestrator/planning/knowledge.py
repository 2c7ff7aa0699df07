"""Prior knowledge: what was known before a sweep's first trial and its proposals depend on, kept in its ledger.

It is gathered once, when the sweep is created: dry runs, probes and other sweeps that come later change nothing about
what a resumed sweep proposes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.probe.profile import Profile
from orchestrator.planning.dryrun.estimates import DryRunEstimates
from orchestrator.search.prediction.transfer import EarlierTrial, from_document, to_document
from orchestrator.sweep.ledger import Ledger
from trials.codec import from_json, to_json
from trials.dryrun.estimate import DryRunEstimate
from trials.spec import Candidate

DRY_RUNS, PROFILE, TRANSFER = "dry_runs", "profile", "transfer"
"""Names of the ledger's documents that hold it."""


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
        ledger.put_document(DRY_RUNS, _estimates_to_json(self.estimates))
        ledger.put_document(PROFILE, to_json(self.profile))
        ledger.put_document(TRANSFER, to_document(self.earlier))

    @classmethod
    def kept(cls, ledger: Ledger) -> PriorKnowledge:
        """Read back what :meth:`keep` wrote."""
        return cls(
            estimates=_estimates_from_json(ledger.document(DRY_RUNS)),
            profile=from_json(Profile | None, ledger.document(PROFILE)),
            earlier=from_document(ledger.document(TRANSFER)),
        )


def _estimates_to_json(estimates: DryRunEstimates) -> dict[str, Any]:
    return {
        "limit_bytes": estimates.limit_bytes,
        "context_bytes": estimates.context_bytes,
        "counted": [
            {"candidate": to_json(candidate), "estimate": to_json(estimate)}
            for candidate, estimate in estimates.by_candidate.items()
        ],
    }


def _estimates_from_json(document: Mapping[str, Any] | None) -> DryRunEstimates:
    if document is None:
        return DryRunEstimates()
    counted: dict[Candidate, DryRunEstimate] = {
        from_json(Candidate, item["candidate"]): from_json(DryRunEstimate, item["estimate"])
        for item in document["counted"]
    }
    return DryRunEstimates(
        by_candidate=counted, limit_bytes=document["limit_bytes"], context_bytes=document["context_bytes"]
    )
