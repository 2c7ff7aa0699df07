"""Texts by which CUDA, NCCL, HIP and CANN report failures, as users have met them, and what kind each is."""

from __future__ import annotations

from dataclasses import dataclass

from trials.accelerator.kinds import DeviceKind


@dataclass(frozen=True)
class FailureText:
    """The message of an exception, its kind, and its kind where the device's memory is used up."""

    words: str
    kind: str
    device: DeviceKind = "cuda"
    if_full: str = ""

    @property
    def kind_if_full(self) -> str:
        return self.if_full or self.kind


RAISED = (
    FailureText("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB", "oom"),
    FailureText("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", "oom"),
    FailureText("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "oom"),
    FailureText("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "oom"),
    FailureText(
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "error", if_full="oom"
    ),
    FailureText("GET was unable to find an engine to execute this computation", "error", if_full="oom"),
    FailureText("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "error", if_full="oom"),
    FailureText(
        "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 63.98 GiB", "oom", "rocm"
    ),
    FailureText("NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity", "oom", "npu"),
    FailureText("EL0004: [PID: 553] 2025-09-17-04:55:13.065.712 Failed to allocate memory.", "oom", "npu"),
    FailureText("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes", "host_oom"),
    FailureText("CUDA error: uncorrectable ECC error encountered", "device_lost"),
    FailureText(
        "NCCL error: unhandled cuda error\nCuda failure 214 'uncorrectable ECC error encountered'", "device_lost"
    ),
    FailureText("CUDA error: uncorrectable NVLink error detected during the execution", "device_lost"),
    FailureText("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost. Reboot", "device_lost"),
    FailureText("HIP error: hipErrorECCNotCorrectable", "device_lost", "rocm"),
    FailureText("UCE ERROR, error code is 507053", "device_lost", "npu"),
    FailureText("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "device_busy"),
    FailureText("CUDA error: unspecified launch failure", "device_suspect"),
    FailureText("CUDA error: the launch timed out and was terminated", "device_suspect"),
    FailureText("CUDA error: an illegal memory access was encountered", "error"),
    FailureText("CUDA error: device-side assert triggered", "error"),
    FailureText("No CUDA GPUs are available", "node_setup"),
    FailureText(
        'the trial asks for device "cuda" but this process sees no CUDA device; check the driver', "node_setup"
    ),
    FailureText("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "node_setup"),
    FailureText("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "node_setup"),
    FailureText(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, ncclSystemError: System call failed\n"
        "Last error:\nCall to ibv_reg_mr failed with error Cannot allocate memory",
        "node_setup",
    ),
    FailureText(
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed.\nLast error:\n"
        "Error while creating shared memory segment /dev/shm/nccl-XYZ (size 96), error: No space left on device (28)",
        "node_setup",
    ),
    FailureText(
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting", "connection"
    ),
    FailureText("[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=880) ran for", "connection"),
    FailureText("store->get('0') got error: Socket Timeout", "connection"),
    FailureText(
        "EI0006: Getting socket times out. Reason: Remote Rank did not send the data in time", "connection", "npu"
    ),
)
