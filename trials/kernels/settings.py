"""Process-wide settings that choose kernels: attention backend, matmul precision, how often Dynamo may compile."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trials.accelerator.device import capability
from trials.accelerator.kinds import FAMILIES
from trials.attention.kernels import causal_attention
from trials.attention.pieces import Back, Parts
from trials.attention.plan import TAKES_GROUPED, AttentionPlan, Kernel, plan_attention
from trials.failure import InfeasibleSpec
from trials.precision.mixed import compute_dtype, matmul_precision
from trials.spec import LlamaModel, TrialSpec, decoder_of

ATTENTION_BACKENDS: dict[Kernel, SDPBackend] = {
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


def attention_plan(spec: TrialSpec, model: LlamaModel, device: torch.device) -> AttentionPlan:
    """How the trial computes attention on the device it is meant for; a dry run computes on another, ``device``."""
    candidate = spec.candidate
    is_wide = "scaled_dot_product_attention" in candidate.precision.black
    dtype = torch.float32 if is_wide else compute_dtype(candidate.precision)
    is_target = device.type == FAMILIES[spec.device].torch_device
    known = capability(device) if is_target else None
    return plan_attention(model, candidate.kernels.attention, dtype, spec.device, known)


def expected_attention(spec: TrialSpec) -> contextlib.AbstractContextManager[None]:
    """Lets torch take on fake tensors the kernel that holds all scores where the device would take it."""
    model = decoder_of(spec.workload.model)
    if model is None or spec.device not in TAKES_GROUPED:
        return contextlib.nullcontext()
    kernel = attention_plan(spec, model, torch.device("cpu")).kernel
    return sdpa_kernel(SDPBackend.MATH) if kernel == "math" else contextlib.nullcontext()


def _check_attention(spec: TrialSpec, model: LlamaModel, device: torch.device) -> None:
    wanted = spec.candidate.kernels.attention
    available = [name for name in ATTENTION_BACKENDS if _runs_attention(name, spec, model, device)]
    if wanted not in available:
        dtype = attention_plan(spec, model, device).dtype
        raise InfeasibleSpec(
            f"attention {wanted!r} is not available on this {device.type} device for {dtype} with head size "
            f"{model.hidden_size // model.num_heads}; use one of: auto, "
            f"{', '.join(available)}"
        )


def _runs_attention(name: Kernel, spec: TrialSpec, model: LlamaModel, device: torch.device) -> bool:
    """Try a kernel, forward and backward: what it can do depends on device, build, type and shape.

    A rank that holds a part of each sequence calls it in another way, which is tried then.
    """
    kernels = dataclasses.replace(spec.candidate.kernels, attention=name)
    candidate = dataclasses.replace(spec.candidate, kernels=kernels)
    plan = attention_plan(dataclasses.replace(spec, candidate=candidate), model, device)
    q, k, v = (
        torch.zeros(1, heads, 16, model.hidden_size // model.num_heads, dtype=plan.dtype, device=device)
        for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    )
    layout = spec.candidate.layout
    with warnings.catch_warnings(action="ignore"), sdpa_kernel(ATTENTION_BACKENDS[name]):
        try:
            if layout.cp > 1 and layout.cp_method != "ulysses":
                _try_parts(plan, q, k, v)
            else:
                torch.autograd.backward(causal_attention(q.requires_grad_(), k, v, expands=plan.expands).sum())
        except RuntimeError:
            return False
    return True


def _try_parts(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> None:
    parts = Parts.by(plan)
    for causal in (True, False):
        out, lse, seeds = parts.attend(q, k, v, causal=causal)
        parts.backward(Back(out, out, lse, seeds), q, k, v, causal=causal)
