"""Chooses the attention kernel for a device, a number format and a shape, before anything runs.

Facts are those of torch's own choice (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``sdp_utils_cpp.cpp``),
as of the releases in which they are strictest: kernels that later learned to share keys get copies of them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from trials.accelerator.kinds import DeviceKind
from trials.spec import LlamaModel

Kernel = Literal["flash", "efficient", "cudnn", "math"]
"""``flash``, ``efficient`` and ``cudnn`` never hold the scores ``[B, H, S, S]``; ``math`` does."""

TAKES_GROUPED: Mapping[DeviceKind, frozenset[Kernel]] = {
    "cpu": frozenset({"flash"}),
    "cuda": frozenset({"flash", "cudnn"}),
    "rocm": frozenset({"flash"}),
}
"""Kernels that let several query heads share a head of keys and values. For the others keys and values are repeated:
torch would fall back to ``math``, whose memory grows with the square of the sequence."""

_MAX_HEAD_SIZE = 256
_FIRST_FLASH_CAPABILITY = (8, 0)
"""CUDA compute capability from which flash attention runs: Ampere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """How a trial computes attention."""

    kernel: Kernel
    """The kernel for pieces of a sequence; for whole ones what torch is expected to take, or what it is told to."""
    dtype: torch.dtype
    """Number format of queries, keys and values."""
    expands: bool = False
    """Whether keys and values are repeated for every query head first."""


def plan_attention(
    model: LlamaModel,
    wanted: Literal["auto"] | Kernel,
    dtype: torch.dtype,
    device: DeviceKind,
    capability: tuple[int, int] | None = None,
) -> AttentionPlan:
    """The plan for ``wanted``, a value of :class:`~trials.spec.Kernels` ``attention``.

    ``capability`` is the CUDA compute capability where it is known; a dry run takes the target to be Ampere or later.
    """
    kernel = _usual(device, dtype, model.hidden_size // model.num_heads, capability) if wanted == "auto" else wanted
    is_grouped = model.num_kv_heads < model.num_heads
    # Torch's math kernel repeats them itself.
    takes_grouped = kernel in TAKES_GROUPED.get(device, frozenset()) or (kernel == "math" and device in TAKES_GROUPED)
    return AttentionPlan(kernel=kernel, dtype=dtype, expands=is_grouped and not takes_grouped)


def _usual(device: DeviceKind, dtype: torch.dtype, head_size: int, capability: tuple[int, int] | None) -> Kernel:
    """The kernel where the user leaves the choice to us."""
    if device == "cpu":
        return "flash"
    if device not in ("cuda", "rocm"):
        return "math"  # the only one whose log-sum-exp torch defines there; whole sequences go to torch's own choice
    is_short = dtype in (torch.bfloat16, torch.float16)
    is_flash_device = device == "rocm" or (capability or _FIRST_FLASH_CAPABILITY) >= _FIRST_FLASH_CAPABILITY
    if is_short and is_flash_device and head_size % 8 == 0 and head_size <= _MAX_HEAD_SIZE:
        return "flash"
    return "efficient" if head_size % (8 if is_short else 4) == 0 else "math"
