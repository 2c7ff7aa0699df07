"""What can go wrong in a rank, and how to tell which kind an error is. Standard library only.

::

    InfeasibleSpec (ValueError)      no launch of this specification can work
    DataError (ValueError)           the training data cannot be read, or is too short
    NonFiniteLoss (ArithmeticError)  the loss or the gradient norm became inf or nan
    NodeFault (RuntimeError)         the node failed, not the candidate
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Literal

FailureClass = Literal[
    "oom", "host_oom", "infeasible", "diverged", "data", "connection", "disk", "port", "lost", "error"
]


class InfeasibleSpec(ValueError):  # noqa: N818  # named like the outcome it leads to
    """The runner refuses the specification: retrying cannot help. The message names the rule and the remedy."""


class DataError(ValueError):
    """The training data cannot be read or is too short. The message names the path and the remedy."""


class NonFiniteLoss(ArithmeticError):  # noqa: N818  # says what was found
    """Training diverged. The message names the step and the value."""


class NodeFault(RuntimeError):  # noqa: N818  # says whose fault it is
    """The node is at fault or something on it is in the way; another launch may work. The message says what."""


_DEVICE_MEMORY = ("out of memory", "cublas_status_alloc_failed")
"""Lower-case message parts by which CUDA and cuBLAS report that device memory ran out."""

_HOST_MEMORY = (
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "std::bad_alloc",
    "cannot allocate memory",
)
"""Lower-case message parts by which torch's CPU allocator, C++, mmap and fork report that host memory ran out."""

_CONNECTION = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "connection was closed",
    "read error",
    "write error",
    "broken pipe",
    "socket timeout",
    "socket closed",
    "timed out waiting",
    "wait timeout",
    "collective operation timeout",
    "ncclremoteerror",
    "ncclsystemerror",
    "nccl communicator was aborted",
    "remote process exited",
)
"""Lower-case message parts by which gloo, the stores and NCCL report that a *peer* went away or never came."""

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Numbers of errors that say that nothing can be written on this host: no fault of the candidate."""

_PORT_TAKEN = ("eaddrinuse", "address already in use")
"""Lower-case message parts that say that somebody else listens on the port at which ranks were to meet: no fault of
the candidate, and the next attempt gets another port."""

_BY_TYPE_NAME: dict[str, FailureClass] = {
    "InfeasibleSpec": "infeasible",
    "DataError": "data",
    "NonFiniteLoss": "diverged",
    "NodeFault": "lost",
    "OutOfMemoryError": "oom",
    "MemoryError": "host_oom",
    "DistNetworkError": "connection",
    "DistStoreError": "connection",
}


def classify(error: BaseException, device: str = "cpu") -> FailureClass:
    """Say what kind of failure ``error`` of a rank on ``device`` is, looking through its chain of causes.

    The innermost error with a kind of its own wins. "connection" means collateral: some peer of the gang failed first,
    so it counts only when nothing in the chain says more; "error" is everything not recognised. A rank on the CPU has
    the host's memory (its share of it, by :func:`trials.training.memory.limit_memory`) for a device's: for it there
    is no "host_oom".
    """
    kinds = [_classify_one(link) for link in _chain(error)]
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


def _classify_one(error: BaseException) -> FailureClass:
    message = str(error).lower()
    if any(part in message for part in _HOST_MEMORY) or getattr(error, "errno", None) == errno.ENOMEM:
        return "host_oom"
    if any(part in message for part in _DEVICE_MEMORY):
        return "oom"
    if getattr(error, "errno", None) in _DISK:
        return "disk"
    if any(part in message for part in _PORT_TAKEN) or getattr(error, "errno", None) == errno.EADDRINUSE:
        return "port"
    for cls in type(error).__mro__:
        if cls.__name__ in _BY_TYPE_NAME:
            return _BY_TYPE_NAME[cls.__name__]
    if isinstance(error, ConnectionError) or any(part in message for part in _CONNECTION):
        return "connection"
    return "error"
