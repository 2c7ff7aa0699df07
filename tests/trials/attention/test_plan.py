"""Which kernel is taken where, and for which keys and values are repeated."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.trials.tiny import tiny_spec
from trials.attention import plan_attention
from trials.dryrun.estimate import DryRunRequest
from trials.kernels import attention_plan
from trials.spec import Kernels, LlamaModel, Precision

GROUPED = LlamaModel(hidden_size=512, num_layers=1, num_heads=8, num_kv_heads=2, ffn_hidden_size=512)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "wanted", "kernel", "expands"),
    [
        ("cpu", FP32, "auto", "flash", False),
        ("cpu", BF16, "math", "math", False),
        ("cuda", BF16, "auto", "flash", False),
        ("cuda", BF16, "cudnn", "cudnn", False),
        ("cuda", FP32, "auto", "efficient", True),
        ("cuda", BF16, "efficient", "efficient", True),
        ("cuda", FP32, "math", "math", False),
        ("rocm", BF16, "auto", "flash", False),
        ("rocm", FP32, "auto", "efficient", True),
        ("npu", BF16, "auto", "math", True),
    ],
)
def test_grouped_queries_take_no_kernel_that_holds_all_scores(
    device: Any, dtype: torch.dtype, wanted: Any, kernel: str, expands: bool
) -> None:
    plan = plan_attention(GROUPED, wanted, dtype, device)
    assert (plan.kernel, plan.expands) == (kernel, expands)


@pytest.mark.parametrize(
    ("head_size", "dtype", "capability", "kernel"),
    [
        (64, torch.float16, (7, 0), "efficient"),
        (64, BF16, (9, 0), "flash"),
        (512, BF16, (9, 0), "efficient"),
        (4, BF16, (9, 0), "math"),
        (4, FP32, (9, 0), "efficient"),
    ],
)
def test_cuda_kernels_have_their_limits(head_size: int, dtype: torch.dtype, capability: Any, kernel: str) -> None:
    model = LlamaModel(hidden_size=8 * head_size, num_layers=1, num_heads=8, num_kv_heads=8, ffn_hidden_size=64)
    assert plan_attention(model, "auto", dtype, "cuda", capability).kernel == kernel


def test_the_number_format_is_that_of_the_attention_operator() -> None:
    """A dry run plans for the device that is meant, on the one it has; a list may keep attention in fp32."""

    def planned(**precision: Any) -> tuple[torch.dtype, str]:
        spec = tiny_spec(precision=Precision(level="O1", dtype="bfloat16", **precision), kernels=Kernels())
        request = DryRunRequest(spec=dataclasses.replace(spec, device="cuda"), rank=0)
        model = request.spec.workload.model
        assert isinstance(model, LlamaModel)
        plan = attention_plan(request.spec, model, torch.device("cpu"))
        return plan.dtype, plan.kernel

    assert planned() == (BF16, "flash")
    assert planned(black=("scaled_dot_product_attention",)) == (FP32, "efficient")
    assert planned(black=("linear",)) == (BF16, "flash")
