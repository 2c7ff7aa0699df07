"""What people write to five frameworks, in our words; what is not understood is said, and what cannot be is refused."""

import dataclasses

import pytest

from orchestrator.frameworks.catalog import training
from orchestrator.frameworks.torchtitan_config import settings_of
from tests.orchestrator.frameworks.commands import (
    TITAN_CONFIG,
    as_it_stands,
    canonical,
    errors,
    program,
    request_for,
)
from trials.spec import Precision, Recompute

ALL = ((8,),)
AUTOCAST = Precision(level="O1", dtype="bfloat16")
ONE_STAGE = ("--pipeline-model-parallel-size", "1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), {"recompute.full": ((2, 2), (2, 2)), "layout.num_virtual_stages": 2, "layout.schedule": "interleaved"}),
        (ONE_STAGE, {"recompute.full": ALL, "layout.stage_layers": ()}),
        ((*ONE_STAGE, "--recompute-method", "block", "--recompute-num-layers=3"), {"recompute.full": ((3,),)}),
        ((*ONE_STAGE, "--recompute-method", "uniform", "--recompute-num-layers", "4"), {"recompute.full": ALL}),
        (("--recompute-granularity", "selective", "--recompute-modules", "moe_act"), {"recompute.full": ()}),
        (("--use-megatron-fsdp",), {"layout.zero_stage": 3}),
        (("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads"), {"layout.zero_stage": 2}),
        (("--attention-backend", "unfused", "--num-workers", "0"), {"kernels.attention": "math"}),
        (("--bf16", "--fp8-format", "hybrid"), {"precision.dtype": "bfloat16"}),
    ],
)
def test_arguments_of_megatron(words, says):
    values = training("megatron").read(program("megatron", *words)).values
    assert {path: values[path] for path in says} == says


@pytest.mark.parametrize(
    ("words", "held"),
    [
        (("--num-virtual-stages-per-pipeline-rank", "4"), ((1, 1),) * 4),
        (("--decoder-first-pipeline-num-layers", "3"), ((3, 5),)),
        (("--pipeline-model-parallel-layout", "Ettt|t*5L"), ((3, 5),)),
        (("--pipeline-model-parallel-layout", "E|(tt|)*3,tt|L"), ((0, 2), (2, 2), (2, 0))),
        (("--pipeline-model-parallel-layout", "E|t*8|x"), None),
        (("--pipeline-model-parallel-layout", "Et|(tt|)*2,tttL"), ((1, 2), (2, 3))),
        (("--num-layers", "6", "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
         ((3, 3),)),
    ],
)  # fmt: skip
def test_stages_of_megatron(words, held):
    run = program("megatron")
    at = run.argv.index("--num-layers-per-virtual-pipeline-stage")
    run = dataclasses.replace(run, argv=(*run.argv[:at], *run.argv[at + 2 :], *words))
    reading = training("megatron").read(run)
    assert reading.values.get("layout.stage_layers") == held
    assert bool(reading.notes) == (held is None)


@pytest.mark.parametrize(
    ("name", "words", "knob"),
    [
        ("megatron", ("--cp-comm-type", "a2a+p2p", "--context-parallel-size", "2"), "layout.cp_method"),
        ("megatron", ("--recompute-granularity", "selective", "--recompute-modules", "moe_act"), "recompute.selective"),
        ("megatron", ("--fp8-format", "hybrid"), "precision"),
        ("megatron", ("--use-torch-fsdp2",), "layout.zero_stage"),
        ("megatron", ("--expert-model-parallel-size", "8"), "layout"),
        ("megatron", ("--optimizer-cpu-offload", "--use-precision-aware-optimizer"), "offload.optimizer"),
        ("megatron", ("--cpu-offloading-num-layers", "4"), "offload.activations"),
        ("lightning", ("--trainer.strategy", "my.Strategy"), "layout.zero_stage"),
        ("lightning", ("--trainer.precision", "bf16-true"), "precision"),
        ("paddlenlp", ("--sharding", "stage2 offload"), "layout.zero_stage"),
        ("paddlenlp", ("--fp16_opt_level", "O3"), "precision.level"),
    ],
)
def test_what_is_not_understood_is_said_and_left_alone(name, words, knob):
    reading = training(name).read(program(name, *words))
    assert any(note.knob == knob and "not understood" in note.message for note in reading.notes)
    assert knob not in reading.values


def test_offloading_of_torchtitan_is_not_understood():
    run = program("torchtitan")
    at = run.argv.index("--module")
    run = dataclasses.replace(run, argv=(*run.argv[:at], "--training.enable_cpu_offload", *run.argv[at:]))
    reading = training("torchtitan").read(run)
    assert any(note.knob == "offload.optimizer" and "not understood" in note.message for note in reading.notes)
    assert "offload.optimizer" not in reading.values


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("megatron", ("--yaml-cfg", "x.yaml"), "--yaml-cfg"),
        ("torchtitan", ("--job.config_file", "train.toml"), "before 0.3"),
        ("lightning", ("--trainer.strategy", "fsdp", "--trainer.accelerator", "cpu"), "refuses CPUs"),
        ("megatron", ("--pipeline-model-parallel-size", "3"), "8 layers"),
    ],
)
def test_commands_that_cannot_be_tuned_are_refused(name, words, message):
    notes = training(name).read(program(name, *words)).notes
    assert any(note.severity == "error" and message in note.message for note in notes)


def with_layout(candidate, **changes):
    return canonical(dataclasses.replace(candidate, layout=dataclasses.replace(candidate.layout, **changes)))


@pytest.mark.parametrize(
    ("name", "change", "knob"),
    [
        ("megatron", lambda c: with_layout(c, tp=16), "layout.tp"),
        ("megatron", lambda c: with_layout(c, schedule="zbv", stage_layers=((2, 2), (2, 2))), "layout.schedule"),
        ("megatron", lambda c: dataclasses.replace(c, micro_batch_size=5), "micro_batch_size"),
        ("megatron", lambda c: dataclasses.replace(c, precision=AUTOCAST), "precision.level"),
        ("torchtitan", lambda c: with_layout(c, dp_shard=4, zero_stage=1), "layout.zero_stage"),
        ("torchtitan", lambda c: dataclasses.replace(c, recompute=Recompute(full=((3,),))), "recompute"),
        ("torchtitan", lambda c: with_layout(c, tp=3), "layout.tp"),
        ("lightning", lambda c: with_layout(c, tp=2), "layout.tp"),
        ("lightning", lambda c: with_layout(c, dp_replicate=2, dp_shard=4, zero_stage=3), "layout.dp_replicate"),
        ("mindformers", lambda c: with_layout(c, pp=4, stage_layers=((2, 0, 2, 4),)), "layout.stage_layers"),
        ("mindformers", lambda c: with_layout(c, tp=16), "layout.tp"),
        ("paddlenlp", lambda c: with_layout(c, pp=2, stage_layers=((4, 4),), zero_stage=3), "layout.zero_stage"),
        ("paddlenlp", lambda c: with_layout(c, pp=2, stage_layers=((5, 3),), zero_stage=1), "layout.stage_layers"),
    ],
)  # fmt: skip
def test_what_a_framework_refuses_is_illegal_with_its_reason(name, change, knob):
    run = program(name)
    candidate = change(as_it_stands(run, name))
    request = request_for(run, name, candidate)
    request = dataclasses.replace(request, reading=dataclasses.replace(request.reading, seq_length=128))
    assert knob in errors(training(name).overlay(run, request))


def test_a_configuration_function_of_torchtitan_is_read_without_being_run():
    said = settings_of(TITAN_CONFIG, "mine")
    assert (said["training.local_batch_size"], said["training.seq_len"], said["model_spec"]) == (2, 128, "mine")
    assert (said["activation_checkpoint"], said["compile.enable"]) == ("full", True)
    branch = "def f():\n    c = Trainer.Config()\n    if x:\n        c.training.steps = 3\n    return c\n"
    assert settings_of(branch, "f") == {"training.steps": "unknown"}
    assert settings_of("def f(:", "f") is None


def test_a_knob_that_a_framework_lacks_is_no_choice():
    run = program("megatron")
    candidate = as_it_stands(run, "megatron")
    kernels = dataclasses.replace(candidate.kernels, matmul_precision="high")
    request = request_for(run, "megatron", dataclasses.replace(candidate, kernels=kernels))
    named = dataclasses.replace(request, named=frozenset({"kernels.matmul_precision"}))
    assert "kernels.matmul_precision" in errors(training("megatron").overlay(run, named))


def test_megatron_gets_the_hardware_queue_that_it_insists_on():
    run = program("megatron")
    request = request_for(run, "megatron", as_it_stands(run, "megatron"))
    assert training("megatron").overlay(run, request).env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    sharded = with_layout(request.candidate, pp=1, num_virtual_stages=1, zero_stage=3)
    other = program("megatron", env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    laid = training("megatron").overlay(other, request_for(other, "megatron", sharded))
    assert any("above 1 or unset" in note.message for note in laid.notes)
