"""Programs of five frameworks: what is laid over their commands is what they say then, and nothing else changes."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.frameworks import documents
from orchestrator.frameworks.catalog import recognise, training
from orchestrator.frameworks.edit import Overlay
from tests.orchestrator.frameworks.commands import (
    FRAMEWORKS,
    MINDFORMERS_CONFIG,
    as_it_stands,
    candidates,
    differing,
    errors,
    program,
    request_for,
    run_of,
)
from tests.orchestrator.frameworks.configurations import MODEL
from trials.script.logs import make_parser


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_command_stays_as_it_is_where_nothing_is_asked_of_it(name):
    run = program(name, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    candidate = as_it_stands(run, name)
    request = dataclasses.replace(request_for(run, name, candidate), seed=None)
    laid = training(name).overlay(run, request)
    placed = tuple(run.argv[at] if word.startswith("{") else word for at, word in enumerate(laid.argv))
    added = ("--trainer.devices=8",) if name == "lightning" else ()  # which Lightning compares with its ranks
    assert (placed, laid.env, errors(laid)) == ((*run.argv, *added), {}, set())
    assert all(text == run.files[file] for file, text in laid.files.items())


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_is_recognised_and_its_log_is_known(name):
    found = recognise(program(name))
    assert found is training(name)
    make_parser(found.log)


@pytest.mark.parametrize("name", FRAMEWORKS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_command_says_the_candidate_that_was_laid_over_it_or_why_it_cannot(name, data):
    run, candidate = program(name), data.draw(candidates(name))
    request = request_for(run, name, candidate)
    laid = training(name).overlay(run, request)
    if errors(laid):
        return
    again = run_of(laid, run)
    assert differing(again, name, candidate) == set()
    said = training(name).read(again)
    assert said.global_batch_size in (None, 96)
    assert said.num_microbatches in (None, request.num_microbatches)
    assert differing(run_of(training(name).trial_mode(laid, 9), run), name, candidate) == set()


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("megatron", {"tp": 4}, "--tensor-model-parallel-size 4"),
        ("torchtitan", {"tp": 4}, "--parallelism.tensor-parallel-degree 4"),
        ("lightning", {"dp_replicate": 1, "dp_shard": 8, "zero_stage": 2}, "--trainer.strategy=deepspeed_stage_2"),
        ("paddlenlp", {"tp": 4}, "tensor_parallel_degree=4"),
        ("mindformers", {"tp": 4}, "parallel_config.model_parallel=4"),
    ],
)
def test_a_change_is_written_where_the_user_said_it_and_all_else_is_kept(name, changes, words):
    run = program(name)
    candidate = as_it_stands(run, name)
    candidate = dataclasses.replace(candidate, layout=dataclasses.replace(candidate.layout, **changes))
    laid = training(name).overlay(run, request_for(run, name, candidate))
    assert errors(laid) == set()
    keys = {
        f"{key}={value}"
        for file in laid.files
        for key, value in documents.flat(documents.load(laid.files[file], run.paths[file]))
    }
    assert words in " ".join(laid.argv) or words in keys
    kept = [word for word in laid.argv if word.startswith("--") and word in run.argv]
    assert kept == [word for word in run.argv if word in kept]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_trial_leaves_nothing_behind_and_ends_by_itself(name):
    run = program(name)
    candidate = as_it_stands(run, name)
    laid = training(name).trial_mode(training(name).overlay(run, request_for(run, name, candidate)), 12)
    text = " ".join((*laid.argv, *laid.files.values()))
    assert all(words in text for words in _TRIAL[name])
    assert not any(words in text for words in _GONE[name])


_TRIAL = {
    "megatron": ("--exit-interval 12", "--eval-iters 0", "--log-interval 1", "--log-throughput", "--ckpt-format"),
    "torchtitan": ("--training.steps 12 ", "--checkpoint.no_enable", "--metrics.no_enable_wandb", "{out}/titan"),
    "lightning": ("--trainer.max_steps=12", "--trainer.logger=false", "--ckpt_path=null", '[{"class_path": "my.Own"}]'),
    "mindformers": ("stop_step: 12", "load_checkpoint: ''", "--log_dir={out}/msrun_log", "--join=True", "{out}/output"),
    "paddlenlp": ('"max_steps": 12', '"decay_steps": 10000', '"warmup_steps": 100', "--log_dir {out}/log"),
}
_GONE = {
    "megatron": ("--save", "--load", "--tensorboard-dir", "--profile ", "--exit-duration-in-mins"),
    "torchtitan": ("--checkpoint.enable", "--metrics.enable_wandb"),
    "lightning": ("--trainer.max_epochs=3",),
    "mindformers": ("CheckpointMonitor", "/ckpt", "--log_dir=msrun_log"),
    "paddlenlp": ("./checkpoints", '"do_eval": true', '"warmup_ratio": 0.01'),
}


def test_the_users_yaml_keeps_its_spelling_and_its_copy_its_place():
    run = program("mindformers")
    candidate = as_it_stands(run, "mindformers")
    candidate = dataclasses.replace(candidate, micro_batch_size=2)
    laid = training("mindformers").overlay(run, request_for(run, "mindformers", candidate))
    said = documents.load(laid.files["config"], "config.yaml")
    before = documents.load(MINDFORMERS_CONFIG, "config.yaml")
    changed = {key for key, value in documents.flat(said) if documents.value_at(before, key) != value}
    assert changed == {"runner_config.batch_size", "parallel_config.micro_batch_num"}
    assert "1.e-6" in laid.files["config"]  # what others read as a number
    assert laid.argv[laid.argv.index("--config") + 1] == "{config}"


def test_shapes_are_those_of_the_decoder():
    for name in ("megatron", "mindformers", "paddlenlp"):
        reading = training(name).read(program(name))
        assert (reading.shape, reading.seq_length, reading.notes) == (MODEL, 128, ())


def test_what_a_lightning_script_leaves_behind_goes_into_the_trials_own_folder():
    laid = training("lightning").trial_mode(Overlay(argv=("python", "fit.py", "--bs", "4"), env={"A": "1"}), 9)
    assert laid.argv == ("python", "fit.py", "--bs", "4")
    assert laid.env == {"A": "1", "PL_TRAINER_DEFAULT_ROOT_DIR": "{out}"}
