"""Mixed precision: autocast, 16-bit parameters with fp32 masters, and loss scaling."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from trials.accelerator.device import capability, device_name
from trials.failure import InfeasibleSpec
from trials.reports.findings import LossScaleState
from trials.spec import LossScale, Precision

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIN_CAPABILITY = {"tf32": (8, 0), "bfloat16": (8, 0), "float16": (7, 0)}
"""CUDA compute capability with tensor cores for the number format: Ampere, Volta. Every device computes in float32."""


def check_device(precision: Precision, device: torch.device) -> None:
    """Refuse a 16-bit type the CUDA device has no fast path for.

    Raises:
        InfeasibleSpec: naming the device and what it lacks.
    """
    wanted, have = MIN_CAPABILITY.get(precision.dtype), capability(device)
    if have is None or wanted is None:
        return
    if have < wanted:
        name = device_name(device)
        raise InfeasibleSpec(
            f"{precision.dtype} is not fast on {name}: that takes compute capability {_version(wanted)}, the device has"
            f" {_version(have)}; {_remedy(precision.dtype, have)}"
        )


def _version(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))


def _remedy(dtype: str, have: tuple[int, int]) -> str:
    """What to use instead of ``dtype`` on a device of this capability."""
    if dtype == "bfloat16" and have >= MIN_CAPABILITY["float16"]:
        return "use float16 with loss scaling, or level O0 (float32)"
    return "use level O0 (float32)"


def compute_dtype(precision: Precision) -> torch.dtype:
    """Type that matmuls compute in: that of autocast under O1, of the parameters under O2, else fp32."""
    return _DTYPES[precision.dtype]


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context of the forward pass: autocast for O1 and O1-fp8, else nothing."""
    if precision.level not in ("O1", "O1-fp8"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=compute_dtype(precision))


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of fp32 products for the duration of the body: of matmuls, as in
    ``torch.set_float32_matmul_precision``, and of cuDNN's convolutions, which torch leaves on TF32 unless told.

    The setting by ``allow_tf32`` is the one that every release knows and that inductor reads.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    _set_precision(precision, tf32_convolutions=precision != "highest")
    try:
        yield
    finally:
        _set_precision(before[0], tf32_convolutions=before[1])


def _set_precision(precision: str, *, tf32_convolutions: bool) -> None:
    with warnings.catch_warnings():
        # Some releases say that this will go, and the others do not have what is to take its place.
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32_convolutions


def parameter_dtype(precision: Precision, *, sharded: bool) -> torch.dtype:
    """Type that parameters are stored in. FSDP stores fp32 and casts when gathering, so its shards are the masters."""
    return _DTYPES[precision.dtype] if keeps_masters(precision, sharded=sharded) else torch.float32


def keeps_masters(precision: Precision, *, sharded: bool) -> bool:
    """Whether the optimiser has to keep fp32 copies of 16-bit parameters."""
    return precision.level == "O2" and not sharded


def mixed_precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    """FSDP2's form of O2: gather and compute in 16 bits, reduce gradients in fp32."""
    if precision.level != "O2":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=_DTYPES[precision.dtype], reduce_dtype=torch.float32)


class LossScaler:
    """Follows the schedule of :class:`~trials.spec.LossScale`.

    Torch's own scaler shrinks at the first overflow; this one after ``backoff_interval`` in a row, and it is told
    about overflows instead of looking for them, so that all ranks agree whatever the layout.
    """

    def __init__(self, config: LossScale) -> None:
        self.config = config
        self.scale = config.initial
        self.num_skipped = 0
        self._num_finite = 0
        self._num_overflowed = 0

    def update(self, *, finite: bool) -> None:
        """Take in whether the step's gradients were finite."""
        self.num_skipped += not finite
        if not self.config.dynamic:
            return
        self._num_finite = self._num_finite + 1 if finite else 0
        self._num_overflowed = 0 if finite else self._num_overflowed + 1
        if self._num_finite == self.config.growth_interval:
            self._rescale(self.config.growth_factor)
        elif self._num_overflowed == self.config.backoff_interval:
            self._rescale(self.config.backoff_factor)

    def state(self) -> LossScaleState:
        """The scale and its counters now."""
        return LossScaleState(
            scale=self.scale,
            num_finite=self._num_finite,
            num_overflowed=self._num_overflowed,
            num_skipped=self.num_skipped,
        )

    def _rescale(self, factor: float) -> None:
        rescaled = self.scale * factor
        # The scaled loss is computed in fp32, which bounds the scale.
        if 0.0 < rescaled < torch.finfo(torch.float32).max:
            self.scale = rescaled
        self._num_finite = self._num_overflowed = 0
