"""Programs on the Trainer of transformers, on Accelerate and on DeepSpeed: what their commands say, and candidates laid
over them. What exactly is written stands in tests/goldens; what the packages make of it in test_real_trainings."""

import random
from dataclasses import replace

import pytest

from orchestrator.frameworks.catalog import recognise
from orchestrator.frameworks.documents import load
from orchestrator.frameworks.edit import values_of
from orchestrator.frameworks.spelling import candidate_of
from tests.orchestrator.frameworks.programs import (
    COMMANDS,
    FILES,
    drawn,
    errors,
    laid_run,
    layers,
    program,
    recipe_of,
    request,
    written,
)
from trials.spec import Candidate, Kernels, Layout, Loader, Precision

TRAINER = [kind for kind in COMMANDS if recipe_of(kind) in ("transformers", "llamafactory", "ms-swift")]
BARE = "python trainer.py "
STAGE, MICRO, FULL = "layout.zero_stage", "micro_batch_size", "recompute.full"


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path)


# Reading


def reading(kind, folder, words="", **env):
    """What a command says; words that begin with ``python`` take its place, others are added."""
    known, run = program(kind, folder, **env)
    argv = tuple(words.split()) if words.startswith("python") else (*run.argv, *words.split())
    paths = known.find_files(argv, str(folder))
    files = {name: (folder / path).read_text() for name, path in paths.items()}
    assert recognise(run).name == recipe_of(kind)
    return known.read(replace(run, argv=argv, paths=paths, files=files))


@pytest.mark.parametrize(
    ("kind", "words", "says"),
    [
        ("transformers", "", {MICRO: 4, "precision.level": "O1", "precision.dtype": "bfloat16", STAGE: 0}),
        ("transformers", BARE, {MICRO: 8}),
        ("transformers-zero", "", {STAGE: 2, "precision.level": "O2"}),
        ("transformers-file", "", {STAGE: 2, "precision.level": "O2", MICRO: 4}),
        ("transformers-fsdp", "", {STAGE: 3, "precision.level": "O2"}),
        ("transformers-launch", "", {STAGE: 3, "precision.level": "O2"}),
        ("accelerate", "", {MICRO: 2, STAGE: 0}),
        ("accelerate-launch", "", {STAGE: 3, "precision.level": "O2"}),
        ("deepspeed", "", {STAGE: 1, "precision.level": "O2"}),
        ("llamafactory", "", {FULL: ((3,),)}),  # on unless it is switched off
        ("ms-swift", "", {STAGE: 2, "precision.level": "O2"}),
        ("ms-swift-file", "", {FULL: ((3,),)}),
        ("transformers", BARE + "--config args.yaml --bf16 False", {MICRO: 4}),
        ("transformers", BARE + "--config args.yaml --per_device_train_batch_size 2", {MICRO: 2}),
        ("transformers", BARE + '--deepspeed {"zero_optimization":{"stage":1}}', {STAGE: 1}),
        ("transformers", BARE + '--fsdp --fsdp_config {"reshard_after_forward":false}', {STAGE: 2}),
        ("transformers", BARE + "--fsdp shard_grad_op,auto_wrap", {STAGE: 2}),
        ("transformers", BARE + "--no_dataloader_pin_memory", {"loader.pin_memory": False}),
        ("transformers", BARE + "--use_cpu", {"loader.pin_memory": False}),
        ("transformers", BARE + "--dataloader_num_workers 2", {"loader.prefetch_factor": 2}),
        ("transformers", BARE + "--torch-compile-mode max-autotune", {"kernels.compile": "model"}),
        ("transformers", BARE + "--activation_checkpointing", {FULL: ((1,),)}),
        ("transformers", BARE + "--fp16 1", {"precision.dtype": "float16"}),
        ("transformers", BARE + "--attn_implementation eager", {"kernels.attention": "math"}),
    ],
)
def test_what_a_command_says(kind, words, says, folder):
    said = reading(kind, folder, words)
    assert {path: said.values.get(path) for path in says} == says
    assert said.notes == ()


@pytest.mark.parametrize(
    ("kind", "env", "says"),
    [
        ("transformers", {}, {"num_microbatches": 1, "global_batch_size": 8, "seed": 42, "world_size": 2}),
        ("llamafactory", {}, {"num_layers": 3, "seq_length": 128, "world_size": None}),
        ("ms-swift-file", {"NPROC_PER_NODE": "4"}, {"world_size": 4}),
        ("ms-swift", {"NPROC_PER_NODE": "2"}, {"num_microbatches": 4}),  # 16 samples per step
        ("deepspeed", {}, {"num_microbatches": 2, "global_batch_size": 16}),
    ],
)
def test_what_a_command_says_of_batch_and_model(kind, env, says, folder):
    said = reading(kind, folder, **env)
    assert {name: getattr(said, name) for name in says} == says


@pytest.mark.parametrize(
    ("kind", "words", "knob"),
    [
        ("transformers", "--per_device_train_batch_size many", MICRO),
        ("transformers", "--deepspeed nowhere.json", STAGE),
        ("transformers", "--torch_compile_mode odd", "kernels.compile_mode"),
        ("transformers", "--attn_implementation flex_attention", "kernels.attention"),
        ("transformers", "@more.txt", "workload"),
        ("transformers", "--auto_find_batch_size", MICRO),
        ("deepspeed", "python engine.py --deepspeed_config ds.json", MICRO),  # only the Trainer fills in "auto"
    ],
)
def test_what_is_not_understood_is_noted(kind, words, knob, folder):
    assert knob in {note.knob for note in reading(kind, folder, words).notes}


# Round trip


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_command_itself_laid_over_changes_no_word(kind, folder):
    known, run = program(kind, folder, NPROC_PER_NODE="2")
    said = known.read(run)
    values = {"layout.dp_replicate": 1, "layout.dp_shard": 1, **said.values}
    values["layout.dp_shard" if values.get(STAGE) else "layout.dp_replicate"] = 2
    candidate = candidate_of(values)
    total = 2 * candidate.micro_batch_size * (said.num_microbatches or 1)
    laid = known.overlay(run, request(known, run, candidate, total=total))
    assert not errors(laid)
    assert known.read(laid_run(laid, run)).values.items() <= values.items()
    for name, text in laid.files.items():
        assert load(text, run.paths.get(name, name)) == load(run.files[name], run.paths.get(name, name)) or (
            "deepspeed" in text  # written out where a file of arguments only pointed to it
        )
    kept = [word for word in run.argv if word.startswith("--") and "nproc" not in word and "num_gpus" not in word]
    assert [word for word in kept if word not in laid.argv and word != "--config_file"] == []


@pytest.mark.parametrize("kind", [*TRAINER, "accelerate", "accelerate-launch", "deepspeed"])
def test_what_is_laid_over_is_read_back(kind, folder):
    known, run = program(kind, folder)
    said, rng, stages = known.read(run), random.Random(kind), []
    for _ in range(24):
        candidate = drawn(rng, said.num_layers or 1)
        laid = known.overlay(run, request(known, run, candidate))
        if errors(laid):
            assert set(errors(laid)) <= {"precision.level", STAGE, *(() if kind in TRAINER else (FULL,))}
            continue
        again = known.read(laid_run(laid, run))
        asked = values_of(candidate)
        found = {path: value for path, value in again.values.items() if path in asked}
        assert found == {path: asked[path] for path in found}
        assert again.num_microbatches == 16 // (2 * candidate.micro_batch_size)
        assert again.notes == ()
        stages.append(candidate.layout.zero_stage)
    assert len(stages) > 4 and (set(stages) >= {2, 3} or kind == "accelerate")
    assert {name: (folder / name).read_text() for name in FILES} == FILES  # changes are made in copies


@pytest.mark.parametrize(
    ("kind", "words", "candidate", "knob"),
    [
        ("transformers", "", Candidate(layout=Layout(pp=2, stage_layers=((1, 1),))), "layout.pp"),
        ("transformers", "", Candidate(layout=Layout(tp=2)), "layout.tp"),
        ("transformers", "", Candidate(layout=Layout(cp=2)), "layout.cp"),
        ("transformers", "", Candidate(layout=Layout(dp_replicate=2, dp_shard=2, zero_stage=2)), "layout.dp_shard"),
        ("transformers", "", Candidate(precision=Precision(level="O2", dtype="bfloat16")), "precision.level"),
        ("transformers", "", Candidate(kernels=Kernels(compile="block")), "kernels.compile"),
        ("transformers", "", Candidate(kernels=Kernels(attention="flash")), "kernels.attention"),
        ("transformers", "", Candidate(loader=Loader(full_batch=True)), "loader.full_batch"),
        ("transformers", "", Candidate(kernels=Kernels(memory_format="nhwc")), "kernels.memory_format"),
        ("transformers-fsdp", "", Candidate(layout=Layout(dp_shard=2, zero_stage=1)), STAGE),
        ("transformers-fsdp", "--use_cpu", Candidate(layout=Layout(dp_shard=2, zero_stage=3)), STAGE),
        ("llamafactory", "", Candidate(recompute=layers(2)), FULL),
        ("accelerate", "", Candidate(recompute=layers(1)), FULL),
        ("accelerate", "", Candidate(kernels=Kernels(compile="model")), "kernels.compile"),
        ("deepspeed", "", Candidate(loader=Loader(num_workers=2, prefetch_factor=2)), "loader.num_workers"),
    ],
)
def test_what_a_program_cannot_do_is_an_error(kind, words, candidate, knob, folder):
    known, run = program(kind, folder)
    run = replace(run, argv=(*run.argv, *words.split()))
    asked = request(known, run, candidate, named=[knob], world=candidate.layout.world_size)
    assert knob in errors(known.overlay(run, asked))


def test_a_step_limit_moves_only_where_it_comes_too_early(folder):
    known, run = program("transformers", folder)
    for limit, kept in ((10, "16"), (1000, "1000")):
        limited = replace(run, argv=(*run.argv, "--max_steps", str(limit), "--resume_from_checkpoint", "x"))
        laid = known.overlay(limited, request(known, limited, Candidate(layout=Layout(dp_replicate=2))))
        trial = known.trial_mode(laid, 16)
        assert trial.argv[trial.argv.index("--max_steps") + 1] == kept
        assert "--resume_from_checkpoint" not in trial.argv
        assert any(note.knob == "workload" for note in trial.notes) == (kept == "16")
