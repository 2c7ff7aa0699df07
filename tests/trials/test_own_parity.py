"""Modules whose code is not ours train alike whatever the layout: a user's encoder, and decoders of transformers."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.trials.gang import differences, run_gang
from tests.trials.simulated import FAMILIES, simulated_runs
from trials.dryrun.estimate import DryRunRequest
from trials.reports import FusedOperator
from trials.spec import (
    AdamW,
    Candidate,
    HuggingFaceModel,
    Kernels,
    Layout,
    LossScale,
    ModuleFacts,
    Precision,
    Protocol,
    PythonData,
    PythonModel,
    Recompute,
    SelectiveRecompute,
    TextData,
    TrialSpec,
    Workload,
)

pytestmark = [pytest.mark.slow, pytest.mark.parity, pytest.mark.timeout(600)]

MODULE = "tests.trials.own_modules"
PROTOCOL = Protocol(min_warmup_steps=1, max_warmup_steps=1, num_steps=3, max_steps=3)
ENCODER = PythonModel(
    model=f"{MODULE}:build",
    loss=f"{MODULE}:loss",
    layers="encoder.blocks",
    cwd=str(ROOT),
    before=("embed",),
    after=("head",),
    tensor_parallel=(
        ("encoder.blocks.*.query", "colwise"),
        ("encoder.blocks.*.key", "colwise"),
        ("encoder.blocks.*.value", "colwise"),
        ("encoder.blocks.*.merge", "rowwise"),
    ),
    facts=ModuleFacts(num_layers=3),
)
CONVOLVER = PythonModel(
    model=f"{MODULE}:convolver",
    loss=f"{MODULE}:loss",
    layers="blocks",
    cwd=str(ROOT),
    facts=ModuleFacts(num_layers=2, has_convolutions=True),
)
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 256, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip


def decoder(model_type, head="lm_head", **keys):
    config = json.dumps({"model_type": model_type, **SIZES, **keys})
    return HuggingFaceModel(config=config, vocab_size=256, facts=ModuleFacts(num_layers=3, head=head))


MODELS = {
    "encoder": ENCODER,
    "convolver": CONVOLVER,
    "llama": decoder("llama"),
    "qwen3": decoder("qwen3", tie_word_embeddings=False),
    "qwen3-tied": decoder("qwen3", tie_word_embeddings=True),
    "gpt_neox": decoder("gpt_neox"),
    "headless": decoder("llama", None),
}
PIPELINE = {"pp": 2, "stage_layers": ((1, 2),)}
O1 = Precision(level="O1", dtype="bfloat16")
O2 = Precision(level="O2", dtype="bfloat16")
KNOBS = {
    "one": {},
    "accumulation": {"micro_batch_size": 2},
    "full": {"recompute": Recompute(full=((2,),))},
    "selective": {"recompute": Recompute(selective=(SelectiveRecompute(pattern=r".*silu", num_layers=((3,),)),))},
    "O1": {"precision": O1},
    "block": {"kernels": Kernels(compile="block", backend="aot_eager")},
    "ddp": {"layout": Layout(dp_replicate=2)},
    "zero1": {"layout": Layout(dp_shard=2, zero_stage=1)},
    "zero2-O2": {"layout": Layout(dp_shard=2, zero_stage=2), "precision": O2},
    "zero3": {"layout": Layout(dp_shard=2, zero_stage=3)},
    "zero3-full-O1": {
        "layout": Layout(dp_shard=2, zero_stage=3),
        "recompute": Recompute(full=((2,),)),
        "precision": O1,
    },
    "zero3-block": {"layout": Layout(dp_shard=2, zero_stage=3), "kernels": Kernels(compile="block", backend="eager")},
    "replicate": {"layout": Layout(dp_replicate=2, replicate_with="fsdp2")},
    "tp": {"layout": Layout(tp=2)},
    "tp-full": {"layout": Layout(tp=2), "recompute": Recompute(full=((3,),)), "micro_batch_size": 4},
    "fused": {"kernels": Kernels(fused="torch")},
    "fused-zero3-O1": {
        "layout": Layout(dp_shard=2, zero_stage=3),
        "kernels": Kernels(fused="torch"),
        "precision": O1,
        "recompute": Recompute(full=((2,),)),
    },
    "fused-tp": {"layout": Layout(tp=2), "kernels": Kernels(fused="torch")},
    "fused-pp-block": {
        "layout": Layout(**PIPELINE),
        "micro_batch_size": 2,
        "kernels": Kernels(fused="torch", compile="block", backend="aot_eager"),
    },
    "chunks-zero3-O2": {"layout": Layout(dp_shard=2, zero_stage=3), "kernels": Kernels(loss_chunks=4), "precision": O2},
    "tp-block": {"layout": Layout(tp=2), "kernels": Kernels(compile="block", backend="aot_eager")},
    "tp-model": {"layout": Layout(tp=2), "kernels": Kernels(compile="model", backend="eager")},
    "tp-O1": {"layout": Layout(tp=2), "precision": O1},
    "tp-chunks": {"layout": Layout(tp=2), "kernels": Kernels(loss_chunks=3), "micro_batch_size": 2},
    "tp-chunks-zbv": {
        "layout": Layout(tp=2, pp=2, schedule="zbv", num_virtual_stages=2, stage_layers=((1, 1), (0, 1))),
        "kernels": Kernels(loss_chunks=2),
        "micro_batch_size": 2,
    },
    "pp": {"layout": Layout(**PIPELINE), "micro_batch_size": 2},
    "pp-full": {"layout": Layout(**PIPELINE), "micro_batch_size": 2, "recompute": Recompute(full=((1, 1),))},
    "zbv": {
        "layout": Layout(pp=2, schedule="zbv", num_virtual_stages=2, stage_layers=((1, 1), (0, 1))),
        "micro_batch_size": 2,
    },
    "pp-zero3-O1": {"layout": Layout(**PIPELINE, dp_shard=2, zero_stage=3), "micro_batch_size": 1, "precision": O1},
    "tp-zero2": {"layout": Layout(tp=2, dp_shard=2, zero_stage=2)},
    "tp-pp": {"layout": Layout(tp=2, **PIPELINE), "micro_batch_size": 2},
    "O1-fp16": {"precision": Precision(level="O1", dtype="float16", loss_scale=LossScale())},
    "nhwc": {"kernels": Kernels(memory_format="nhwc", cudnn_tuning_range=(1, 1))},
    "auto": {"kernels": Kernels(memory_format="auto")},
    "nhwc-zero3-O1": {
        "layout": Layout(dp_shard=2, zero_stage=3),
        "kernels": Kernels(memory_format="nhwc"),
        "precision": O1,
    },
}
NOT_FOR = {("qwen3-tied", knob) for knob in KNOBS if "pp" in knob or "zbv" in knob}
NOT_FOR |= {(model, knob) for model in ("encoder", "headless") for knob in KNOBS if "chunks" in knob}
NOT_FOR |= {("headless", knob) for knob in KNOBS if knob not in ("one", "tp-full", "tp-pp")}
NOT_FOR |= {(model, knob) for model in ("encoder", "gpt_neox") for knob in KNOBS if "fused" in knob}
DATASETS = {"convolver": f"{MODULE}:pictures"}
OF_IMAGES = ("nhwc", "auto", "nhwc-zero3-O1")
NOT_FOR |= {(model, knob) for model in MODELS for knob in KNOBS if model != "convolver" and knob in OF_IMAGES}
NOT_FOR |= {("convolver", knob) for knob in KNOBS if knob not in OF_IMAGES}
OF_VARIANTS = {
    "encoder": "one full O1 block ddp zero1 zero3 zero3-full-O1 tp tp-block pp zbv",
    "llama": "one accumulation O1-fp16 selective zero2-O2 zero3-full-O1 zero3-block replicate tp fused fused-zero3-O1"
    " fused-tp fused-pp-block chunks-zero3-O2 tp-model tp-O1 tp-chunks tp-chunks-zbv pp-full"
    " pp-zero3-O1 tp-pp",
    "qwen3": "one zero1 zero3 tp-full pp zbv",
    "qwen3-tied": "one zero3 tp-zero2 chunks-zero3-O2",
    "gpt_neox": "one O1 tp-full pp zbv tp-chunks",
}
"""Knobs that another architecture may break: its norms, biases and tied weights are sharded, cut, chunked, compiled.
The encoder computes its own loss; llama shows what layouts do to each other."""
NOT_FOR |= {(model, knob) for model, those in OF_VARIANTS.items() for knob in KNOBS if knob not in those.split()}
"""Combinations that legality refuses; of decoders like another, and of the one whose head computes no loss, what the
others show."""
CASES = [f"{model}/{knob}" for model in MODELS for knob in KNOBS if (model, knob) not in NOT_FOR]
FEW = [
    *(f"encoder/{knob}" for knob in ("full", "O1", "zero3", "pp", "tp")),
    "convolver/nhwc",
    *(f"llama/{knob}" for knob in ("tp-chunks", "zero3-full-O1", "pp-full", "fused")),
]


def spec_of(case):
    name, _, knob = case.partition("/")
    model = MODELS[name]
    data = (
        PythonData(dataset=DATASETS.get(name, f"{MODULE}:dataset"), cwd=str(ROOT))
        if isinstance(model, PythonModel)
        else TextData()
    )
    workload = Workload(
        model=model,
        data=data,
        seq_length=1 if isinstance(model, PythonModel) else 16,
        global_batch_size=8,
        optimizer=AdamW(lr=1e-3),
        seed=3,
    )
    knobs = KNOBS[knob]
    layout = knobs.get("layout", Layout())
    micro_batch_size = knobs.get("micro_batch_size", 8 // layout.dp)
    return TrialSpec(
        workload=workload, candidate=Candidate(**{**knobs, "micro_batch_size": micro_batch_size}), protocol=PROTOCOL
    )


@functools.cache
def results(world_size, few):
    names = [case for case in CASES if size_of(case) == world_size and (case in FEW) == few]
    if world_size == 1:  # what the others are compared with
        models = {case.partition("/")[0] for case in CASES if (case in FEW) == few}
        names += [f"{model}/one" for model in sorted(models) if f"{model}/one" not in names]
    with tempfile.TemporaryDirectory() as folder:
        found = run_gang([spec_of(name) for name in names], Path(folder), counts_peaks=few)
        return dict(zip(names, found, strict=True))


def size_of(case):
    return spec_of(case).candidate.layout.world_size


@pytest.mark.representative(*FEW)
@pytest.mark.parametrize("case", sorted(CASES, key=size_of))
def test_trains_like_a_single_process(case):
    few = case in FEW
    loss, norm = differences(results(size_of(case), few)[case], results(1, few)[f"{case.partition('/')[0]}/one"])
    is_exact = spec_of(case).candidate.precision.level == "O0"
    loss_limit, norm_limit = (1e-5, 2e-5) if is_exact else (5e-3, 5e-2)
    assert loss <= loss_limit and norm <= norm_limit, (loss, norm)


def test_trials_report_the_operators_that_they_fused():
    (found,) = results(1, few=True)["llama/fused"].findings.fused
    assert found == FusedOperator(name="norm", library="torch", num_places=7, num_calls=7)
    assert results(1, few=True)["llama/one"].findings.fused == ()


def test_a_dry_run_counts_the_tensors_of_the_trial(tmp_path):
    """The built-in decoder, a module of the user's and one of transformers, within 10%."""
    ours = dataclasses.replace(FAMILIES["single, fp32"], protocol=PROTOCOL)
    specs = {"built-in": ours} | {case: spec_of(case) for case in ("encoder/one", "llama/one")}
    reports = results(1, few=True) | {"built-in": run_gang([ours], tmp_path, counts_peaks=True)[0]}
    counted = simulated_runs([DryRunRequest(spec=spec, rank=0, mode="cpu") for spec in specs.values()])
    found = {
        case: reports[case].peak_allocated_bytes / run.peak_bytes for case, run in zip(specs, counted, strict=True)
    }
    assert all(0.9 < ratio < 1.1 for ratio in found.values()), found
