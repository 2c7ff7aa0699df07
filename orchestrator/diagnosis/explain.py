"""What the explanation of a sweep rests on besides its trials, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.hardware.topology import Topology
from orchestrator.planning.knowledge import Knowledge
from orchestrator.space.large import LargeSpace
from trials.spec import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Candidates and hardware of a sweep. The empty value is honest: then only what was measured is told."""

    candidates: tuple[Candidate, ...] = ()
    """Legal ones, as the sweep's plan has them."""
    beyond: LargeSpace | None = None
    """Of what these are a part, where the space was too large to list."""
    varied: frozenset[str] | None = None
    """Knobs with more than one value in the sweep's space; None: those in which the candidates differ."""
    topology: Topology | None = None
    """None where it is not known; the cost model then says nothing."""
    knowledge: Knowledge = field(default_factory=Knowledge)
    problem: str = ""
    """Why candidates or hardware are not known; empty where they are."""
