"""Process-wide settings that choose kernels: attention backend, matmul precision, how often Dynamo may compile."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
import torch._dynamo
from torch.nn.attention import SDPBackend, sdpa_kernel

from trials.failure import InfeasibleSpec
from trials.models.llama import causal_attention
from trials.parallel.context_parallel import attend_to_the_end
from trials.precision.mixed import matmul_precision
from trials.spec import LlamaModel, TrialSpec, decoder_of

ATTENTION_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

_MAX_GRAPHS_PER_FUNCTION = 128
"""Dynamo gives up on a function compiled more often; blocks of different shapes are one function to it."""


@contextlib.contextmanager
def kernel_settings(spec: TrialSpec, device: torch.device) -> Iterator[None]:
    """Apply the candidate's process-wide choices of kernels for the duration of the block.

    Raises:
        InfeasibleSpec: the device lacks the attention backend; names those it has.
    """
    kernels = spec.candidate.kernels
    with contextlib.ExitStack() as stack:
        decoder = decoder_of(spec.workload.model)
        if kernels.attention != "auto" and decoder is not None:
            _check_attention(spec, decoder, device)
            stack.enter_context(sdpa_kernel(ATTENTION_BACKENDS[kernels.attention]))
        if kernels.compile != "off":
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS_PER_FUNCTION))
        stack.enter_context(matmul_precision(kernels.matmul_precision))
        yield


def _check_attention(spec: TrialSpec, model: LlamaModel, device: torch.device) -> None:
    wanted = spec.candidate.kernels.attention
    dtype = getattr(torch, spec.candidate.precision.dtype)
    layout = spec.candidate.layout
    masked = layout.cp > 1 and layout.cp_method == "all_gather"
    available = [name for name in ATTENTION_BACKENDS if _runs_attention(name, model, dtype, device, masked=masked)]
    if wanted not in available:
        masks = " and the mask of split sequences" if masked else ""
        raise InfeasibleSpec(
            f"attention {wanted!r} is not available on this {device.type} device for {dtype} with head size "
            f"{model.hidden_size // model.num_heads}{masks}; use one of: auto, "
            f"{', '.join(available)}"
        )


def _runs_attention(
    name: str, model: LlamaModel, dtype: torch.dtype, device: torch.device, *, masked: bool = False
) -> bool:
    """Try a backend, forward and backward: what it can do depends on device, build, type and shape.

    ``masked`` tries what a rank that holds a part of each sequence calls too.
    """
    head_size = model.hidden_size // model.num_heads
    q, k, v = (
        torch.zeros(1, heads, 16, head_size, dtype=dtype, device=device, requires_grad=True)
        for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    )
    mask = torch.zeros(8, 16, dtype=dtype, device=device)
    with warnings.catch_warnings(action="ignore"), sdpa_kernel(ATTENTION_BACKENDS[name]):
        try:
            out = causal_attention(q, k, v)
            if masked:
                out = torch.cat([out, attend_to_the_end(q[:, :, :8], k, v, mask)], dim=2)
            torch.autograd.backward(out.sum())
        except RuntimeError:
            return False
    return True
