"""What can go wrong in a rank, how to tell which kind an error is, and what follows. Standard library only.

::

    InfeasibleSpec (ValueError)      no launch of this specification can work
    DataError (ValueError)           the training data cannot be read, or is too short
    NonFiniteLoss (ArithmeticError)  the loss or the gradient norm became inf or nan
    NodeFault (RuntimeError)         the node failed, not the candidate

Everything else is known by its words: :data:`trials.failure.signs.SIGNS` is the table of them, and
:mod:`trials.failure.logs` finds them in the log of a process that aborted. :data:`TREATMENTS` says what each leads to.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from trials.failure.signs import SIGNS, FailureClass


class InfeasibleSpec(ValueError):  # noqa: N818  # named like the outcome it leads to
    """The runner refuses the specification: retrying cannot help. The message names the rule and the remedy."""


class DataError(ValueError):
    """The training data cannot be read or is too short. The message names the path and the remedy."""


class NonFiniteLoss(ArithmeticError):  # noqa: N818  # says what was found
    """Training diverged. The message names the step and the value."""


class NodeFault(RuntimeError):  # noqa: N818  # says whose fault it is
    """The node is at fault or something on it is in the way; another launch may work. The message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What follows from a class of failures."""

    ends_as: Literal["oom", "host_oom", "infeasible", "diverged", "crashed", "gang_lost"]
    """Kind of the gang's outcome (:mod:`trials.outcome`)."""
    strikes_node: bool = False
    """Whether the node is to blame: it goes into quarantine when that happens repeatedly, and the attempt is launched
    elsewhere."""
    remedy: str = ""
    """What people can do about it, as the end of a sentence; empty where the message says it or nothing is to do."""


TREATMENTS: Mapping[str, Treatment] = {
    "oom": Treatment(ends_as="oom"),
    "host_oom": Treatment(ends_as="host_oom"),
    "infeasible": Treatment(ends_as="infeasible"),
    "data": Treatment(ends_as="infeasible"),
    "diverged": Treatment(ends_as="diverged"),
    "disk": Treatment(ends_as="gang_lost", strikes_node=True, remedy="free the node's disk"),
    "port": Treatment(ends_as="gang_lost", strikes_node=True),
    "lost": Treatment(ends_as="gang_lost", strikes_node=True),
    "device_lost": Treatment(
        ends_as="gang_lost",
        strikes_node=True,
        remedy="look for it in the node's kernel log (dmesg), reset or replace the device",
    ),
    "device_busy": Treatment(
        ends_as="gang_lost", strikes_node=True, remedy="end what else holds the device: nvidia-smi or its like shows it"
    ),
    "node_setup": Treatment(
        ends_as="gang_lost",
        strikes_node=True,
        remedy="mend the node: driver, /dev/shm, limit on locked memory, network interfaces",
    ),
    "device_suspect": Treatment(  # a kernel of the candidate's may be the reason as well
        ends_as="gang_lost",
        remedy="where it repeats on one node, look at its devices; for one candidate, at its kernels",
    ),
    "connection": Treatment(  # where no failure of a peer's explains it
        ends_as="gang_lost", remedy="where it repeats, look at the network between the nodes"
    ),
    "error": Treatment(ends_as="crashed"),
}


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Numbers of errors that say that nothing can be written on this host: no fault of the candidate."""

_BY_ERRNO: Mapping[int, FailureClass] = {
    errno.ENOMEM: "host_oom",
    **dict.fromkeys(_DISK, "disk"),
    errno.EADDRINUSE: "port",
}

_BY_TYPE_NAME: Mapping[str, FailureClass] = {
    "InfeasibleSpec": "infeasible",
    "DataError": "data",
    "NonFiniteLoss": "diverged",
    "NodeFault": "lost",
    "DeviceUnavailableError": "node_setup",
    "OutOfMemoryError": "oom",
    "MemoryError": "host_oom",
    "DistNetworkError": "connection",
    "DistStoreError": "connection",
    "RendezvousTimeoutError": "connection",
    "RendezvousConnectionError": "connection",
    "RendezvousClosedError": "connection",
}

_OF_CODE = frozenset(
    {
        "ValueError",
        "TypeError",
        "LookupError",
        "KeyError",
        "IndexError",
        "AttributeError",
        "NameError",
        "AssertionError",
    }
    | {"NotImplementedError", "ImportError", "ModuleNotFoundError", "SyntaxError", "ZeroDivisionError"}
)
"""Types of errors that tell of a mistake in the code: of their words, only the most peculiar mean something else."""


def classify(error: BaseException, device: str = "cpu", *, is_memory_full: bool = False) -> FailureClass:
    """Say what kind of failure ``error`` of a rank on ``device`` is, looking through its chain of causes.

    The innermost error with a kind of its own wins. "connection" means collateral: some peer of the gang failed first,
    so it counts only when nothing in the chain says more; "error" is everything not recognised. A rank on the CPU has
    the host's memory (its share, by :func:`trials.training.device.memory.limit_memory`) for a device's: for it there
    is no "host_oom".

    Args:
        is_memory_full: whether the device has next to no memory left, which tells what some words of libraries mean.
    """
    kinds = [_classify_one(link, is_memory_full) for link in _chain(error)]
    for kind in reversed(kinds):
        if kind not in ("connection", "error"):
            return "oom" if kind == "host_oom" and device == "cpu" else kind
    return "connection" if "connection" in kinds else "error"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _classify_one(error: BaseException, is_memory_full: bool) -> FailureClass:
    names = [cls.__name__ for cls in type(error).__mro__]
    found = _by_words(str(error).lower(), is_memory_full, is_of_code=not _OF_CODE.isdisjoint(names))
    if found not in (None, "port", "connection"):
        return found
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number in _BY_ERRNO:
        return _BY_ERRNO[number]
    if found == "port":
        return found
    if name := next((name for name in names if name in _BY_TYPE_NAME), None):
        return _BY_TYPE_NAME[name]
    return "connection" if found or isinstance(error, ConnectionError) else "error"


def _by_words(message: str, is_memory_full: bool, *, is_of_code: bool) -> FailureClass | None:
    for sign in SIGNS:
        counts = (is_memory_full or not sign.is_only_if_full) and (sign.is_for_logs or not is_of_code)
        if counts and sign.part_in(message) is not None:
            return sign.kind
    return None
