"""What was seen of a rank that made no progress: where its main thread stood, and how far it is in its collectives.

The numbers are those of torch's Flight Recorder: a process group counts its collective operations, all of its ranks in
the same order, so that ranks can be compared by them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal


class Blame(enum.IntEnum):
    """How likely a rank is the one for which the others wait; the smaller, the likelier."""

    STOPPED = 0
    """A signal has stopped it: it does not run at all."""
    ELSEWHERE = 1
    """It is in code that waits for no peer, or it cannot be asked for its stack; or its records show that it is
    behind."""
    UNCLEAR = 2
    """It is in code that both computes and communicates: the backward pass, FSDP, distributed tensors. Or it was asked
    for its stack and did not give it in time, as on a loaded node, or in a call of the kernel's."""
    WAITING = 3
    """It waits in a collective operation, or for a device that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """How far a rank is in one process group."""

    group: str
    """Backend and name of the group, the same on all of its ranks."""
    label: str
    """What the group is called for people."""
    ranks: tuple[int, ...]
    """Global ranks of its members, in the group's order; empty where the recorder does not know them."""
    entered: int
    """Number of the last collective that the rank has begun; 0 before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall:
    """The earliest collective of a group that a rank has begun and that has not ended, or a send or receive."""

    group: str
    number: int
    """The group's count of collectives; 0 for sends and receives, which each rank counts for itself."""
    name: str
    """The operation: ``all_reduce``."""
    sizes: str
    """Shapes of the inputs."""
    is_started: bool
    """Whether the device is known to be at work on it; nobody knows unless NCCL keeps timings
    (``TORCH_NCCL_ENABLE_TIMING``)."""
    peer: int | None = None
    """The other rank of a ``send`` or ``recv``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """The summary of a rank's Flight Recorder."""

    places: tuple[GroupPlace, ...] = ()
    calls: tuple[PendingCall, ...] = ()
    is_complete: bool = True
    """Whether the recorder still has all that it was told: it has not, once its buffer has gone round."""

    def place(self, group: str) -> GroupPlace | None:
        """How far the rank is in a group; None where it says nothing of it."""
        return next((place for place in self.places if place.group == group), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSight:
    """What one rank was doing when somebody looked."""

    rank: int
    stack: Literal["stopped", "elsewhere", "unclear", "waiting"]
    """What its stack says of it: a :class:`Blame` in lower case."""
    where: str
    """Function, file and line in which it was, as a clause for people."""
    progress: tuple[int, int] | None
    """Phase and step that it had reported, as numbers; None where it is not one to report any: that tells nothing."""
    record: FlightRecord | None = None
    """None where it gave none."""

    @property
    def blame(self) -> Blame:
        """What its stack alone says of it."""
        return Blame[self.stack.upper()]
