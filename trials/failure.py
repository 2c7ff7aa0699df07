"""Error messages of CUDA, HIP, SYCL, CANN, NCCL and torch, and the failures they mean. Standard library only."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSign:
    """Phrases by which libraries report one class of failures."""

    kind: FailureClass
    parts: tuple[str, ...]
    """Lower-case phrases of whole words; one is enough for a match."""
    is_only_if_full: bool = False
    """Whether the phrases mean ``kind`` only if the device's memory is almost full, and nothing otherwise."""
    is_for_logs: bool = True
    """Whether the phrases are specific enough to match lines of logs and errors of any type."""

    def part_in(self, text: str) -> str | None:
        """Return the first phrase that occurs in ``text``, which is lower-case, as whole words; None if none does. "uce
        error" does not match "reduce error"."""
        return next((part for part in self.parts if _mentions(text, part)), None)


def _mentions(text: str, words: str) -> bool:
    at = text.find(words)
    while at >= 0:
        end = at + len(words)
        is_begin = at == 0 or not (text[at - 1].isalnum() and words[0].isalnum())
        if is_begin and (end == len(text) or not (text[end].isalnum() and words[-1].isalnum())):
            return True
        at = text.find(words, at + 1)
    return False


def _cann(*codes: int) -> tuple[str, ...]:
    """Return CANN's error codes as printed by torch_npu, MindSpore and the runtime."""
    forms = ("error code is {}", "error code:{}", "runtime result = {}")
    return tuple(form.format(code) for code in codes for form in forms)


SIGNS: tuple[FailureSign, ...] = (
    # Registering memory with the network card fails because of the limit on locked memory, not for lack of memory;
    # NCCL's segments in shared memory because of a small /dev/shm, HSA's in a container without --ipc=host.
    FailureSign(
        kind="node_setup",
        parts=(
            "ibv_reg_mr",
            "ibv_create_cq",
            "ibv_create_qp",
            "ibv_alloc_pd",
            "ibv_open_device",
            "mlx5dv_create_qp",
            "error while creating shared memory segment /dev/shm/nccl",
            "failed to extend /dev/shm/nccl",
            "memory critical error by agent node",
        ),
    ),
    # torch's CPU allocator, C++, mmap and fork; loaders pass batches through /dev/shm, which is host memory too.
    FailureSign(
        kind="host_oom",
        parts=(
            "defaultcpuallocator: can't allocate memory",
            "defaultcpuallocator: not enough memory",
            "std::bad_alloc",
            "cudnn_status_internal_error_host_allocation_failed",
            "ur_result_error_out_of_host_memory",
            "dataloader's workers are out of shared memory",
            "caused by insufficient shared memory (shm)",
            "unable to allocate shared memory(shm)",
            "unable to write to file </torch_",
        ),
    ),
    FailureSign(kind="host_oom", parts=("cannot allocate memory",), is_for_logs=False),
    FailureSign(
        kind="disk",
        parts=(
            "errno 28] no space left on device",
            "errno 122] disk quota exceeded",
            "errno 30] read-only file system",
            "errno 5] input/output error",
        ),
        is_for_logs=False,
    ),
    # Allocators of torch, CUDA, HIP, SYCL and CANN; handles and workspaces of libraries.
    FailureSign(
        kind="oom",
        parts=(
            "cuda out of memory",
            "hip out of memory",
            "xpu out of memory",
            "npu out of memory",
            "cuda error: out of memory",
            "cuda driver error: out of memory",
            "hip error: out of memory",
            "cuda failure 2 'out of memory'",
            "cuda failure 'out of memory'",
            "hip failure 'out of memory'",
            "cuda_error_out_of_memory",
            "cublas_status_alloc_failed",
            "hipblas_status_alloc_failed",
            "cudnn_status_alloc_failed",
            "cudnn_status_internal_error_device_allocation_failed",
            "cusolver_status_alloc_failed",
            "hipsolver_status_alloc_failed",
            "cusparse_status_alloc_failed",
            "cufft_alloc_failed",
            "miopenstatusallocfailed",
            "rocblas_status_memory_error",
            "ur_result_error_out_of_device_memory",
            "ur_result_error_mem_object_allocation_failure",
            "el0004",
            *_cann(207001, 207018),
        ),
    ),
    FailureSign(kind="oom", parts=("out of memory",), is_for_logs=False),
    # Messages about handles, workspaces or scratch memory that do not fit, but also about some mistakes in code.
    FailureSign(
        kind="oom",
        parts=(
            "cublas_status_not_initialized",
            "hipblas_status_not_initialized",
            "cudnn_status_not_initialized",
            "cudnn_status_internal_error",
            "miopenstatusinternalerror",
            "miopenstatusunknownerror",
            "hsa_status_error_out_of_resources",
            "ur_result_error_out_of_resources",
            "ur_result_error_device_lost",
            "unable to find an engine to execute this computation",
            "no valid algorithm",
        ),
        is_only_if_full=True,
        is_for_logs=False,
    ),
    # Hardware: uncorrectable errors of memory and links, and devices that disappeared.
    FailureSign(
        kind="device_lost",
        parts=(
            "uncorrectable ecc error",
            "hiperroreccnotcorrectable",
            "uncorrectable nvlink error",
            "fallen off the bus",
            "gpu is lost",
            "gpu requires reset",
            "uce error",
            "hbm multi bit ecc",
            "hccs link error",
            *_cann(507010, 507053, 507054, 507056),
        ),
    ),
    FailureSign(
        kind="device_busy",
        parts=(
            "busy or unavailable",
            "ur_result_error_device_not_available",
            "maybe the last training process is running",
        ),
    ),
    # Software or network of the node, or a device that should be there and is not.
    FailureSign(
        kind="node_setup",
        parts=(
            "but this process sees no ",
            "no cuda-capable device is detected",
            "no rocm-capable device is detected",
            "no cuda gpus are available",
            "no hip gpus are available",
            "no xpu devices are available",
            "found no nvidia driver",
            "nvidia driver on your system is too old",
            "cuda driver initialization failed",
            "driver version is insufficient",
            "not supported in the installed cuda driver",
            "cuda driver is a stub library",
            "compiled with an unsupported toolchain",
            "unsupported display driver / cuda driver combination",
            "forward compatibility was attempted on non supported hw",
            "driver/library version mismatch",
            "unable to open /dev/kfd",
            "system not yet initialized",
            "error in the fabric manager or nvswitches",
            "mps client failed to connect",
            "mps server is not ready",
            "invalid device ordinal",
            "mismatched nccl version detected",
            "bootstrap : no socket interface found",
            "no usable listening interface found",
            "net/ib : no ip interface found",
            *_cann(207004, 507033),
        ),
    ),
    # Errors in a kernel of the candidate; its peers lose the connection and report that at greater length.
    FailureSign(
        kind="error",
        parts=(
            "an illegal memory access was encountered",
            "device-side assert triggered",
            "misaligned address",
            "memory access fault by gpu node",
            "duplicate gpu detected",
        ),
    ),
    # A kernel that stops without a reason: the fault of the device or the kernel. SYCL's "device lost" is one of them,
    # because its drivers also report it for allocations that are too large.
    FailureSign(
        kind="device_suspect",
        parts=(
            "unspecified launch failure",
            "an illegal instruction was encountered",
            "hardware stack error",
            "invalid access of peer gpu memory over nvlink or a hardware error",
            "the launch timed out and was terminated",
            "cuda error: unknown error",
            "hip error: unknown error",
            "cuda error: initialization error",
            "hip error: initialization error",
            "no kernel image is available for execution on the device",
            "device kernel image is invalid",
            "hsa_status_error_exception",
            "hw exception by gpu node",
            "ur_result_error_device_lost",
            "watchdog got stuck",
            "processgroupnccl watchdog hang",
            "heartbeat monitor timed out",
            "suspect mem error",
            "suspect remote error",
            *_cann(507011, 507014, 507015, 507018, 507034, 507035, 507046, 507048, 507049, 507050),
            *_cann(507055, 507057, 507899, 507901),
        ),
    ),
    FailureSign(kind="port", parts=("eaddrinuse", "address already in use"), is_for_logs=False),
    # A peer disappeared or never came: gloo, the stores, NCCL and its watchdog, InfiniBand, HCCL.
    FailureSign(
        kind="connection",
        parts=(
            "watchdog caught collective operation timeout",
            "collective operation timeout",
            "ncclremoteerror",
            "ncclsystemerror",
            "unhandled system error",
            "nccl communicator was aborted",
            "remote process exited",
            "observed flight recorder dump signal",
            "ibv_modify_qp",
            "got completion with error",
            "net/ib : got completion from peer",
            "net/ib: got completion from peer",
            "async fatal event",
            "call to connect failed",
            "socketstartconnect: connect to",
            "socketpollconnect: connect",
            "connection closed by remote peer",
            "socket recv failed while polling for opid",
            "ranks has already checked in",
            "but store->get('0') got error",
            "client socket has timed out",
            "client socket has failed to connect",
            "seconds waiting for clients",
            "connection was likely closed",
            "recvvalue failed on",
            "sendbytes failed on",
            "ei0002",
            "ei0006",
            "hccl op retry failed",
            *_cann(507904),
        ),
    ),
    FailureSign(
        kind="connection",
        parts=(
            "connection closed by peer",
            "connection reset",
            "connection refused",
            "connection timed out",
            "connection was closed",
            "read error [",
            "write error [",
            "broken pipe",
            "socket timeout",
            "socket closed",
            "timed out waiting",
            "wait timeout",
        ),
        is_for_logs=False,
    ),
)
"""Phrases and their meanings; if a message contains several, the first in the table counts."""


def sign_in_log(line: str) -> FailureSign | None:
    """Return the sign that a lower-case line of a log matches; None if none."""
    return next((sign for sign in SIGNS if sign.is_for_logs and sign.part_in(line) is not None), None)


# Detection of aborts and their reasons in the output of libraries and launchers. Standard library only.


_CHILD_ABORTED = re.compile(
    "|".join(
        (
            r"\bexitcode\s*: -6\b",  # torchrun and tools based on it: accelerate, LLaMA-Factory, ms-swift
            r"\bSignal 6 \(SIGABRT\) received by PID\b",
            r"\bexits with return code = -6\b",  # deepspeed
            r"\bdied with <Signals\.SIGABRT\b",  # Python's subprocess: accelerate without torchrun
            r"\bterminated with signal SIGABRT\b",  # torch.multiprocessing.spawn
            r"\bterminated with code -6\b",  # Lightning
            r"\bexited\s+on signal 6\b",  # Open MPI: mpirun, prterun
            r"\bKILLED BY SIGNAL: 6\b",  # Hydra: MPICH, Intel MPI
            r"\bEXIT STRING: Abort(?:ed)? \(signal 6\)",
            r"\bsrun: error: .{0,200}: Aborted\b",
            r"\] code -6 log\b",  # paddle.distributed.launch
            r"\bprocess \d+ exit with exception\b",  # msrun, without the signal
            r"\bAborted\s+\(core dumped\)",  # shells
            r"^Fatal Python error: Aborted\b",
        )
    ),
    re.MULTILINE,
)
"""Messages of launchers about an aborted child process; launchers themselves exit with a different code."""
_RESTART = "will restart worker group"
"""torchrun's message before it restarts all ranks: earlier errors were survived."""
_REASONS = ("terminated with exception:", "what():")
"""Phrases after which libraries print the reason of an abort."""
_ABORTS = (
    *_REASONS,
    "terminate called",
    "watchdog caught collective operation timeout",
    "watchdog got stuck",
    "heartbeat monitor timed out",
    "find exception when",
    "last error:",
    "nccl error in:",
    "hw exception by gpu node",
    "memory access fault by gpu node",
    "memory critical error by agent node",
    "fatal python error",
    "process abort signal",
)
"""First words of an abort's output, in lower case."""
_REASON_LINES = 8
"""Number of lines after such words that belong to them, unless a stack trace begins."""
_STACK = ("frame #", "exception raised from")


def mentions_abort(text: str) -> bool:
    """Whether a launcher's output reports that a process it started aborted."""
    return _CHILD_ABORTED.search(text) is not None


def cause_in_log(text: str) -> tuple[FailureClass, str] | None:
    """Find why a process aborted, in the end of its log: class and log line, or None if unknown.

    A broken device always counts. Other failures may have been survived, such as a kernel under tuning that ran out of
    memory, so they count only from the first abort on, and memory only within an abort's reason. If several ranks write
    to one log, a cause takes precedence over the connections that it broke.
    """
    lines = [line for line in text.rpartition(_RESTART)[2].splitlines() if line.strip()]
    begin = next((at for at, line in enumerate(lines) if _is_abort(line.lower())), None)
    causes_found = list(_causes(lines))
    broken = [found for found in causes_found if found[1] == "device_lost"]
    found = causes_found[::-1] if begin is None else [each for each in causes_found if each[0] >= begin]
    causes = [each for each in found if each[1] != "connection"]
    _, kind, line = (broken or causes or found or [(0, None, "")])[0]
    return None if kind is None else (kind, line.strip())


def _causes(lines: Sequence[str]) -> Iterator[tuple[int, FailureClass | None, str]]:
    """Yield lines that report a failure: number, class (None for an abort without a known reason) and text."""
    left, unknown = 0, None
    for at, line in enumerate((*lines, _STACK[0])):
        lowered = line.lower()
        if _is_abort(lowered):
            left = _REASON_LINES
            unknown = at if unknown is None and _has_reason(lowered) else unknown
        elif any(words in lowered for words in _STACK):
            left = 0
        sign = sign_in_log(lowered)
        if sign is not None and (left or sign.kind not in ("oom", "host_oom")):
            yield at, sign.kind, line
            unknown = None
        elif not left and unknown is not None:
            yield unknown, None, lines[unknown]
            unknown = None
        left = max(0, left - 1)


def _is_abort(line: str) -> bool:
    return any(words in line for words in _ABORTS)


def _has_reason(line: str) -> bool:
    return any(line.rpartition(words)[2].strip() for words in _REASONS if words in line)


# Errors of a rank, their classification, and the consequences. Standard library only.
#
# ::
#
#     InfeasibleSpec (ValueError)      no launch of this specification can work
#     DataError (ValueError)           the training data cannot be read, or is too short
#     NonFiniteLoss (ArithmeticError)  the loss or the gradient norm became inf or nan
#     NodeFault (RuntimeError)         the node failed, not the candidate
#
# All other errors are recognised by their messages: :data:`trials.failure.SIGNS` is the table, and
# :func:`cause_in_log` finds them in the log of an aborted process. :data:`TREATMENTS` has the consequences.


class InfeasibleSpec(ValueError):  # noqa: N818  # named like the outcome it leads to
    """The runner refuses the specification, so a retry cannot help. The message names the rule and the remedy."""

    refused: tuple[str, ...] = ()
    """Knobs that the program cannot take; see :class:`trials.outcome.Infeasible`."""


class DataError(ValueError):
    """The training data cannot be read or is too short. The message names the path and the remedy."""


class NonFiniteLoss(ArithmeticError):  # noqa: N818  # named after the finding
    """Training diverged. The message names the step and the value."""


class NodeFault(RuntimeError):  # noqa: N818  # named after the culprit
    """The node is at fault, or something on it is in the way; another launch may work. The message has the details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Consequences of a class of failures."""

    ends_as: Literal["oom", "host_oom", "infeasible", "diverged", "crashed", "gang_lost"]
    """Kind of the gang's outcome (:mod:`trials.outcome`)."""
    strikes_node: bool = False
    """Whether the node is to blame: the attempt is launched elsewhere, and the node is quarantined if this repeats."""
    remedy: str = ""
    """Remedy for people, as the end of a sentence; empty if the message has it or there is none."""


TREATMENTS: Mapping[str, Treatment] = {
    "oom": Treatment(ends_as="oom"),
    "host_oom": Treatment(ends_as="host_oom"),
    "infeasible": Treatment(ends_as="infeasible"),
    "data": Treatment(ends_as="infeasible"),
    "diverged": Treatment(ends_as="diverged"),
    "disk": Treatment(ends_as="gang_lost", strikes_node=True, remedy="free disk space on the node"),
    "killed": Treatment(ends_as="gang_lost"),  # a signal that neither this project nor the kernel sent
    "port": Treatment(ends_as="gang_lost", strikes_node=True),
    "lost": Treatment(ends_as="gang_lost", strikes_node=True),
    "device_lost": Treatment(
        ends_as="gang_lost",
        strikes_node=True,
        remedy="check the kernel log of the node (dmesg), and reset or replace the device",
    ),
    "device_busy": Treatment(
        ends_as="gang_lost",
        strikes_node=True,
        remedy="stop the other process on the device; nvidia-smi or its counterpart shows it",
    ),
    "node_setup": Treatment(
        ends_as="gang_lost",
        strikes_node=True,
        remedy="check the node: driver, /dev/shm, locked memory limit, network interfaces",
    ),
    "device_suspect": Treatment(  # a kernel of the candidate may also be the cause
        ends_as="gang_lost",
        remedy="if it recurs on one node, check its devices; if for one candidate, its kernels",
    ),
    "connection": Treatment(  # if no failure of a peer explains it
        ends_as="gang_lost", remedy="if it recurs, check the network between the nodes"
    ),
    "error": Treatment(ends_as="crashed"),
}


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Error numbers of a host on which nothing can be written: no fault of the candidate."""
_NO_PROCESS = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
"""Error numbers of a host that cannot start another process."""

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
"""Error types that indicate a mistake in the code; only the most specific phrases override that."""


def of_host(error: OSError) -> Literal["disk", "lost"] | None:
    """Classify an error in our own files and processes that is the host's fault; return None if it is not."""
    if error.errno in _DISK:
        return "disk"
    return "lost" if error.errno in _NO_PROCESS else None


def classify(error: BaseException, device: str = "cpu", *, is_memory_full: bool = False) -> FailureClass:
    """Classify ``error`` of a rank on ``device``, including its chain of causes.

    The innermost error of a specific class wins. "connection" is collateral: a peer failed first, so it counts only if
    nothing in the chain is more specific. "error" is everything not recognised. A rank on the CPU uses the host's
    memory (its share, by :func:`trials.training.measure.limit_memory`) as device memory, so it has no "host_oom".

    Args:
        is_memory_full: whether the device has almost no free memory, which decides the meaning of some phrases.
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
    found = _by_message(str(error).lower(), is_memory_full, is_of_code=not _OF_CODE.isdisjoint(names))
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


def _by_message(message: str, is_memory_full: bool, *, is_of_code: bool) -> FailureClass | None:
    for sign in SIGNS:
        counts = (is_memory_full or not sign.is_only_if_full) and (sign.is_for_logs or not is_of_code)
        if counts and sign.part_in(message) is not None:
            return sign.kind
    return None
