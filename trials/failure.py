"""What can go wrong in a rank, how to tell which kind an error is, and what follows. Standard library only.

::

    InfeasibleSpec (ValueError)      no launch of this specification can work
    DataError (ValueError)           the training data cannot be read, or is too short
    NonFiniteLoss (ArithmeticError)  the loss or the gradient norm became inf or nan
    NodeFault (RuntimeError)         the node failed, not the candidate

Everything else is known by its words: :data:`SIGNS` is the table of them, :data:`TREATMENTS` says what each leads to.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

FailureClass = Literal[
    "oom",
    "host_oom",
    "infeasible",
    "diverged",
    "data",
    "connection",
    "disk",
    "port",
    "lost",
    "device_lost",
    "device_busy",
    "device_suspect",
    "node_setup",
    "error",
]


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


TREATMENTS: Mapping[str, Treatment] = {
    "oom": Treatment(ends_as="oom"),
    "host_oom": Treatment(ends_as="host_oom"),
    "infeasible": Treatment(ends_as="infeasible"),
    "data": Treatment(ends_as="infeasible"),
    "diverged": Treatment(ends_as="diverged"),
    "disk": Treatment(ends_as="gang_lost", strikes_node=True),
    "port": Treatment(ends_as="gang_lost", strikes_node=True),
    "lost": Treatment(ends_as="gang_lost", strikes_node=True),
    "device_lost": Treatment(ends_as="gang_lost", strikes_node=True),
    "device_busy": Treatment(ends_as="gang_lost", strikes_node=True),
    "node_setup": Treatment(ends_as="gang_lost", strikes_node=True),
    "device_suspect": Treatment(ends_as="gang_lost"),  # a kernel of the candidate's may be the reason as well
    "connection": Treatment(ends_as="gang_lost"),  # where no failure of a peer's explains it
    "error": Treatment(ends_as="crashed"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSign:
    """Words by which libraries report one class of failures."""

    kind: FailureClass
    parts: tuple[str, ...]
    """Lower-case parts of messages, any of which is enough."""
    is_only_if_full: bool = False
    """Whether the words mean ``kind`` only where the device's memory is almost used up, and nothing otherwise."""
    is_for_logs: bool = True
    """Whether they are peculiar enough to be believed of any line of a log."""


SIGNS: tuple[FailureSign, ...] = (
    # Registering memory with the network card fails by the limit on locked memory, not for want of memory.
    FailureSign(
        kind="node_setup",
        parts=(
            "ibv_reg_mr",
            "ibv_create_cq",
            "ibv_create_qp",
            "error while creating shared memory segment /dev/shm/nccl",
        ),
    ),
    # torch's CPU allocator, C++, mmap and fork.
    FailureSign(
        kind="host_oom",
        parts=(
            "defaultcpuallocator: can't allocate memory",
            "defaultcpuallocator: not enough memory",
            "std::bad_alloc",
        ),
    ),
    FailureSign(kind="host_oom", parts=("cannot allocate memory",), is_for_logs=False),
    # Allocators of torch, CUDA, HIP and CANN; handles and workspaces of libraries.
    FailureSign(
        kind="oom",
        parts=(
            "cuda out of memory",
            "hip out of memory",
            "xpu out of memory",
            "npu out of memory",
            "cuda error: out of memory",
            "hip error: out of memory",
            "cuda failure 2 'out of memory'",
            "cublas_status_alloc_failed",
            "hipblas_status_alloc_failed",
            "cudnn_status_alloc_failed",
            "cusolver_status_alloc_failed",
            "cufft_alloc_failed",
            "el0004",
        ),
    ),
    FailureSign(kind="oom", parts=("out of memory",), is_for_logs=False),
    # What cuBLAS and cuDNN say when handle or workspace do not fit, and of some mistakes as well.
    FailureSign(
        kind="oom",
        parts=(
            "cublas_status_not_initialized",
            "hipblas_status_not_initialized",
            "cudnn_status_not_initialized",
            "cudnn_status_internal_error",
            "unable to find an engine to execute this computation",
            "no valid algorithm",
        ),
        is_only_if_full=True,
        is_for_logs=False,
    ),
    # The hardware: uncorrectable errors of memory and links, devices that went away.
    FailureSign(
        kind="device_lost",
        parts=(
            "uncorrectable ecc error",
            "hiperroreccnotcorrectable",
            "uncorrectable nvlink error",
            "fallen off the bus",
            "gpu is lost",
            "gpu requires reset",
            "device lost",
            "hardware stack error",
            "nvrm: xid",
            "uce error",
            "hbm multi bit ecc",
            "hccs link error",
        ),
    ),
    FailureSign(
        kind="device_busy",
        parts=("busy or unavailable",),
    ),
    # The node's software, or a device that it should have and does not show.
    FailureSign(
        kind="node_setup",
        parts=(
            "but this process sees no ",
            "no cuda-capable device is detected",
            "no rocm-capable device is detected",
            "no cuda gpus are available",
            "no hip gpus are available",
            "found no nvidia driver",
            "driver version is insufficient",
            "unsupported display driver / cuda driver combination",
            "system not yet initialized",
            "mps client failed to connect",
            "invalid device ordinal",
        ),
    ),
    # A kernel that breaks off without saying why: the device's fault, or the kernel's.
    FailureSign(
        kind="device_suspect",
        parts=(
            "unspecified launch failure",
            "an illegal instruction was encountered",
            "the launch timed out and was terminated",
            "cuda error: unknown error",
            "hip error: unknown error",
            "hsa_status_error_exception",
            "watchdog got stuck",
            "processgroupnccl watchdog hang",
            "suspect mem error",
            "suspect remote error",
        ),
    ),
    FailureSign(kind="port", parts=("eaddrinuse", "address already in use"), is_for_logs=False),
    # A peer went away or never came: gloo, the stores, NCCL and its watchdog, HCCL.
    FailureSign(
        kind="connection",
        parts=(
            "watchdog caught collective operation timeout",
            "collective operation timeout",
            "ncclremoteerror",
            "ncclsystemerror",
            "nccl communicator was aborted",
            "remote process exited",
            "observed flight recorder dump signal",
            "ei0002",
            "ei0006",
            "hccl op retry failed",
        ),
    ),
    FailureSign(
        kind="connection",
        parts=(
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
        ),
        is_for_logs=False,
    ),
)
"""Words and what they mean; of several that occur, the first of the table counts."""

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
}


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


def cause_in_log(text: str) -> tuple[FailureClass, str] | None:
    """The class and the line that say why a process aborted, from the end of its log; None where nothing does."""
    lines = text.splitlines()
    for sign in SIGNS:
        if sign.is_for_logs:
            for line in lines:
                if any(part in line.lower() for part in sign.parts):
                    return sign.kind, line.strip()
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _classify_one(error: BaseException, is_memory_full: bool) -> FailureClass:
    message = str(error).lower()
    found = _by_words(message, is_memory_full)
    if found not in (None, "port", "connection"):
        return found
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number in _BY_ERRNO:
        return _BY_ERRNO[number]
    if found == "port":
        return found
    for cls in type(error).__mro__:
        if cls.__name__ in _BY_TYPE_NAME:
            return _BY_TYPE_NAME[cls.__name__]
    return "connection" if found or isinstance(error, ConnectionError) else "error"


def _by_words(message: str, is_memory_full: bool) -> FailureClass | None:
    for sign in SIGNS:
        if (is_memory_full or not sign.is_only_if_full) and any(part in message for part in sign.parts):
            return sign.kind
    return None
