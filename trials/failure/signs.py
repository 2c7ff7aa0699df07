"""Words by which CUDA, HIP, SYCL, CANN, NCCL and torch report failures, and what each means. Standard library only."""

from __future__ import annotations

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
    """Words by which libraries report one class of failures."""

    kind: FailureClass
    parts: tuple[str, ...]
    """Lower-case parts of messages, whole words, any of which is enough."""
    is_only_if_full: bool = False
    """Whether the words mean ``kind`` only where the device's memory is almost used up, and nothing otherwise."""
    is_for_logs: bool = True
    """Whether they are peculiar enough to be believed of a line of a log, and of an error of any type."""

    def part_in(self, text: str) -> str | None:
        """The first of the parts that stands in ``text``, which is lower-case, as words of their own; None if none
        does: "uce error" is no part of "reduce error"."""
        return next((part for part in self.parts if _has_words(text, part)), None)


def _has_words(text: str, words: str) -> bool:
    at = text.find(words)
    while at >= 0:
        end = at + len(words)
        is_begin = at == 0 or not (text[at - 1].isalnum() and words[0].isalnum())
        if is_begin and (end == len(text) or not (text[end].isalnum() and words[-1].isalnum())):
            return True
        at = text.find(words, at + 1)
    return False


def _cann(*codes: int) -> tuple[str, ...]:
    """CANN's error codes in the forms of torch_npu, MindSpore and the runtime itself."""
    forms = ("error code is {}", "error code:{}", "runtime result = {}")
    return tuple(form.format(code) for code in codes for form in forms)


SIGNS: tuple[FailureSign, ...] = (
    # Registering memory with the network card fails by the limit on locked memory, not for want of memory; NCCL's
    # segments in shared memory by a small /dev/shm, HSA's by a container without --ipc=host.
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
    # torch's CPU allocator, C++, mmap and fork; loaders that pass batches through /dev/shm, memory of the host as well.
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
    # What libraries say when a handle, a workspace or scratch memory does not fit, and of some mistakes as well.
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
    # The node's software or network, or a device that it should have and does not show.
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
    # What a kernel of the candidate's did wrong, wherever it runs; peers lose it, and say so at more length.
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
    # A kernel that breaks off without saying why: the device's fault, or the kernel's. SYCL's "device lost" is one of
    # them, as its drivers say it of allocations that are too large as well.
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
    # A peer went away or never came: gloo, the stores, NCCL and its watchdog, InfiniBand, HCCL.
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
"""Words and what they mean; of several that occur in one message, the first of the table counts."""


def sign_in_log(line: str) -> FailureSign | None:
    """The sign by whose words a line of a log, lower-case, tells of a failure; None where it tells of none."""
    return next((sign for sign in SIGNS if sign.is_for_logs and sign.part_in(line) is not None), None)
