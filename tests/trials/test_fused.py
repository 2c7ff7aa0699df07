"""Fused operators take the place of a module's own only where they compute the same, and are seen to act."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from cluster.cost.cost_model import inputs_of
from cluster.cost.peak_memory import layer_activation_bytes
from cluster.cost.work import work_of
from orchestrator.report.descriptions import findings_lines
from tests.cluster.cost.test_tables import CANDIDATES_CLUSTER
from tests.trials.simulated import simulated_runs
from trials.dryrun.estimate import DryRunRequest
from trials.failure import InfeasibleSpec
from trials.files import to_json
from trials.models.fused import LIGER, FusedNorm, check_liger, fuse
from trials.reports import Findings
from trials.spec import (
    AdamW,
    Candidate,
    HuggingFaceModel,
    Kernels,
    LlamaModel,
    ModuleFacts,
    Protocol,
    TextData,
    TrialSpec,
    Workload,
)
from trials.worker import run_rank


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


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_norms_are_found_by_what_they_compute(dtypes):
    of_weights, of_inputs = (getattr(torch, name) for name in dtypes)
    model, x = sequence(), torch.randn(3, 5, 16, dtype=of_inputs)
    meter, before = fuse(fused := copy.deepcopy(model), "torch"), model.to(of_weights)
    assert [isinstance(one, FusedNorm) for one in fused] == [True, True, False, False, False, False]
    for norm, plain in zip(fused.to(of_weights)[:2], before, strict=False):
        torch.testing.assert_close(norm(x), plain(x), rtol=torch.finfo(of_inputs).eps * 8, atol=1e-6)  # and the type
    (operator,) = meter.operators(1)
    assert (operator.num_places, operator.num_calls) == (2, 2)
    lines = findings_lines(Findings(fused=(operator,)))
    assert lines == ["fused torch: norm in 2 places of the model, 2 calls per step"]


def test_places_that_are_never_called_are_named():
    meter = fuse(sequence(), "torch")
    assert "never called" in findings_lines(Findings(fused=meter.operators(1)))[0]


def test_modules_without_such_norms_are_refused():
    with pytest.raises(InfeasibleSpec, match="no root-mean-square norm"):
        fuse(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), "torch")


def _decoder():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = json.dumps({"model_type": "llama", "intermediate_size": 48, "vocab_size": 256, **sizes})
    facts = ModuleFacts(num_layers=2, has_loose_norms=True, head="lm_head")
    shape = LlamaModel(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, ffn_hidden_size=48, vocab_size=256)
    return HuggingFaceModel(config=config, vocab_size=256, facts=facts, shape=shape)


MODEL = _decoder()


def trial(fused):
    workload = Workload(
        model=MODEL, data=TextData(), seq_length=16, global_batch_size=8, optimizer=AdamW(lr=1e-3), seed=0
    )
    candidate = Candidate(micro_batch_size=8, kernels=Kernels(fused=fused))
    return TrialSpec(workload=workload, candidate=candidate, protocol=Protocol())


def test_dry_runs_and_the_cost_model_count_what_fused_operators_keep():
    requests = [DryRunRequest(spec=trial(fused), rank=0, mode="accelerator") for fused in ("auto", "torch", "liger")]
    runs = simulated_runs(requests)
    auto, of_torch, of_liger = (run.peak_bytes for run in runs)
    assert of_liger == of_torch < auto
    kept = [max(peak.by_category.get("activation", 0) for peak in run.peaks.values()) for run in runs]
    workload = requests[0].spec.workload
    x = inputs_of([(workload, one.spec.candidate) for one in requests], CANDIDATES_CLUSTER)
    predicted = layer_activation_bytes(x, work_of(x))
    # Two norms of each of two layers; the last one is not part of a layer.
    assert kept[0] - kept[1] == pytest.approx((predicted[0] - predicted[1]) * 2 * 5 / 4, rel=0.01)
    assert predicted[1] - predicted[2] == 8 * 16 * 48 * 4, "Liger computes the gate's activation again"


def test_predictions_count_only_norms_of_several_operators():
    without = dataclasses.replace(MODEL, facts=dataclasses.replace(MODEL.facts, has_loose_norms=False))
    workload = dataclasses.replace(trial("auto").workload, model=without)
    assert inputs_of([(workload, Candidate())], CANDIDATES_CLUSTER).loose_norms == 0
    compiled = Candidate(kernels=Kernels(compile="block"))
    assert inputs_of([(trial("auto").workload, compiled)], CANDIDATES_CLUSTER).loose_norms == 0


def test_a_rank_without_what_liger_needs_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InfeasibleSpec, match="CUDA device, not cpu; use fused torch"):
        run_rank(to_json(trial("liger")), lambda phase, **_: None)
    monkeypatch.setitem(sys.modules, LIGER, None)
    with pytest.raises(InfeasibleSpec, match="pip install"):
        check_liger("cuda")
