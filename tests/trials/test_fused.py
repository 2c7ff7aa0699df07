"""Fused operators take the place of a module's own only where they compute the same, and are seen to act."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from orchestrator.report.descriptions import findings_lines
from trials.failure import InfeasibleSpec
from trials.models.fused import FusedNorm, check_liger, fuse
from trials.reports import Findings


class WithoutRootRMSNorm(LlamaRMSNorm):
    """A norm by its name, which computes something else."""

    def forward(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def sequence():
    torch.manual_seed(0)
    norms = (LlamaRMSNorm(16, eps=1e-3), GemmaRMSNorm(16, eps=1e-6), WithoutRootRMSNorm(16), nn.LayerNorm(16))
    model = nn.Sequential(*norms, nn.RMSNorm(16), nn.Linear(16, 16))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_found_by_what_they_compute(dtype):
    model, x = sequence(), torch.randn(3, 5, 16, dtype=dtype)
    before = [norm(x) for norm in model[:2]]
    meter = fuse(model, "torch")
    assert [isinstance(one, FusedNorm) for one in model] == [True, True, False, False, False, False]
    for norm, expected in zip(model[:2], before, strict=True):
        found = norm(x)
        torch.testing.assert_close(
            found.float(), expected.float(), rtol=1e-5 if dtype == torch.float32 else 0.02, atol=1e-5
        )
    (operator,) = meter.operators(1)
    assert (operator.num_places, operator.num_calls) == (2, 2)
    assert findings_lines(Findings(fused=(operator,))) == ["fused torch: norm in 2 places, 2 calls per step"]


def test_places_that_are_never_called_are_named():
    meter = fuse(sequence(), "torch")
    assert "never called" in findings_lines(Findings(fused=meter.operators(1)))[0]


def test_modules_without_such_norms_are_refused():
    with pytest.raises(InfeasibleSpec, match="no root-mean-square norm"):
        fuse(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), "torch")


def test_liger_names_what_is_missing():
    with pytest.raises(InfeasibleSpec, match="CUDA device, not cpu"):
        check_liger("cpu")
    if importlib.util.find_spec("liger_kernel") is None:
        with pytest.raises(InfeasibleSpec, match="pip install"):
            check_liger("cuda")
