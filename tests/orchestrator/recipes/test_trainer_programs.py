"""Programs on the Trainer of transformers, and those of Accelerate and DeepSpeed: read, laid over, tried."""

import random
from dataclasses import replace

import pytest
import yaml

from orchestrator.recipes.documents import load
from orchestrator.recipes.fields import candidate_of
from orchestrator.recipes.overlays.lay import values_of
from orchestrator.recipes.trainings import recognise
from tests.orchestrator.recipes.programs import (
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
from trials.spec import Candidate, Kernels, Layout, Loader, OwnChoice, Precision

TRAINER = [kind for kind in COMMANDS if recipe_of(kind) in ("transformers", "llamafactory", "ms-swift")]
HALF = Precision(level="O1", dtype="bfloat16")


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path)


def said(known, run):
    return known.read(run).values


# ---- reading ----


@pytest.mark.parametrize("kind", COMMANDS)
def test_commands_are_recognised(kind, folder):
    _, run = program(kind, folder)
    assert recognise(run).name == recipe_of(kind)


def test_the_trainers_arguments_are_read_with_their_defaults(folder):
    known, run = program("transformers", folder)
    reading = known.read(run)
    assert (reading.num_microbatches, reading.global_batch_size, reading.seed) == (1, 8, 42)
    assert reading.values["micro_batch_size"] == 4
    assert (reading.values["precision.level"], reading.values["precision.dtype"]) == ("O1", "bfloat16")
    assert (reading.world_size, reading.values["layout.zero_stage"]) == (2, 0)
    bare = replace(run, argv=("python", "trainer.py"))
    assert said(known, bare)["micro_batch_size"] == 8
    assert known.read(bare).world_size is None
    assert known.read(bare).notes == ()


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("transformers-zero", 2),
        ("transformers-file", 2),
        ("transformers-fsdp", 3),
        ("transformers-launch", 3),
        ("accelerate-launch", 3),
        ("deepspeed", 1),
        ("ms-swift", 2),
    ],
)
def test_engines_are_read(kind, stage, folder):
    known, run = program(kind, folder)
    values = said(known, run)
    assert (values["layout.zero_stage"], values["precision.level"]) == (stage, "O2")


def test_frameworks_have_defaults_of_their_own(folder):
    known, run = program("llamafactory", folder)
    reading = known.read(run)
    assert reading.values["recompute.full"] == ((3,),)  # on unless it is switched off
    assert (reading.num_layers, reading.shape.hidden_size, reading.seq_length) == (3, 64, 128)
    known, run = program("ms-swift-file", folder, NPROC_PER_NODE="4")
    reading = known.read(run)
    assert (reading.values["recompute.full"], reading.world_size) == (((3,),), 4)
    known, run = program("ms-swift", folder, NPROC_PER_NODE="2")
    assert known.read(run).num_microbatches == 4  # 16 samples per step


@pytest.mark.parametrize(
    ("words", "knob"),
    [
        ("--per_device_train_batch_size many", "micro_batch_size"),
        ("--deepspeed nowhere.json", "layout.zero_stage"),
        ("--torch_compile_mode odd", "kernels.compile_mode"),
        ("--attn_implementation flex_attention", "kernels.attention"),
        ("@more.txt", "workload"),
        ("--auto_find_batch_size", "micro_batch_size"),
    ],
)
def test_what_is_not_understood_is_said(words, knob, folder):
    known, run = program("transformers", folder)
    reading = known.read(replace(run, argv=(*run.argv, *words.split())))
    assert knob in {note.knob for note in reading.notes}


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--config", "args.yaml", "--bf16", "False"], "micro_batch_size", 4),
        (["--config", "args.yaml", "--per_device_train_batch_size", "2"], "micro_batch_size", 2),
        (["args.yaml"], "layout.zero_stage", 2),
        (["--deepspeed", '{"zero_optimization": {"stage": 1}}'], "layout.zero_stage", 1),
        (["--fsdp", "--fsdp_config", '{"reshard_after_forward": false}'], "layout.zero_stage", 2),
        (["--fsdp", "shard_grad_op auto_wrap"], "layout.zero_stage", 2),
        (["--no_dataloader_pin_memory"], "loader.pin_memory", False),
        (["--use_cpu"], "loader.pin_memory", False),
        (["--dataloader_num_workers", "2"], "loader.prefetch_factor", 2),
        (["--torch-compile-mode", "max-autotune"], "kernels.compile", "model"),
        (["--activation_checkpointing"], "recompute.full", ((1,),)),
        (["--fp16", "1"], "precision.dtype", "float16"),
        (["--attn_implementation", "eager"], "kernels.attention", "math"),
    ],
)
def test_ways_to_write_an_argument(words, path, value, folder):
    known, run = program("transformers", folder)
    argv = ("python", "trainer.py", *words)
    paths = known.find_files(argv, str(folder))
    files = {name: FILES[path.rpartition("/")[2]] for name, path in paths.items()}
    reading = known.read(replace(run, argv=argv, paths=paths, files=files))
    assert reading.values[path] == value
    assert reading.notes == ()


def test_deepspeeds_auto_is_the_trainers(folder):
    known, run = program("deepspeed", folder)
    reading = known.read(replace(run, files={"deepspeed": FILES["ds.json"]}))
    assert {note.knob for note in reading.notes} == {"micro_batch_size"}
    assert reading.values["layout.zero_stage"] == 2 and "micro_batch_size" not in reading.values


# ---- overlays ----


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_command_itself_laid_over_changes_no_word(kind, folder):
    known, run = program(kind, folder, NPROC_PER_NODE="2")
    reading = known.read(run)
    values = {"layout.dp_replicate": 1, "layout.dp_shard": 1, **reading.values}
    values["layout.dp_shard" if values.get("layout.zero_stage") else "layout.dp_replicate"] = 2
    candidate = candidate_of(values)
    total = 2 * candidate.micro_batch_size * (reading.num_microbatches or 1)
    laid = known.overlay(run, request(known, run, candidate, total=total))
    texts = dict(laid.files)
    assert not errors(laid)
    assert known.read(laid_run(laid, run)).values.items() <= values.items()
    for name, text in texts.items():
        assert load(text, run.paths.get(name, name)) == load(run.files[name], run.paths.get(name, name)) or (
            "deepspeed" in text  # written out where a file of arguments only pointed to it
        )
    kept = [word for word in run.argv if word.startswith("--") and "nproc" not in word and "num_gpus" not in word]
    assert [word for word in kept if word not in laid.argv and word != "--config_file"] == []


@pytest.mark.parametrize("kind", TRAINER)
def test_what_is_laid_over_is_read_back(kind, folder):
    known, run = program(kind, folder)
    reading, rng, numbers = known.read(run), random.Random(kind), []
    for _ in range(24):
        candidate = drawn(rng, reading.num_layers or 1)
        laid = known.overlay(run, request(known, run, candidate))
        if not errors(laid):
            again = known.read(laid_run(laid, run))
            asked = values_of(candidate)
            found = {path: value for path, value in again.values.items() if path in asked}
            assert found == {path: asked[path] for path in found}
            assert again.num_microbatches == 16 // (2 * candidate.micro_batch_size)
            assert again.notes == ()
            numbers.append(candidate.layout.zero_stage)
        else:
            assert set(errors(laid)) <= {"precision.level", "layout.zero_stage"}
    assert len(numbers) > 4 and set(numbers) >= {2, 3}
    assert {name: (folder / name).read_text() for name in FILES} == FILES


def test_files_are_changed_in_copies_and_keep_the_rest(folder):
    known, run = program("transformers-file", folder)
    candidate = Candidate(
        layout=Layout(dp_shard=2, zero_stage=3), micro_batch_size=2, precision=HALF, loader=Loader(pin_memory=True)
    )
    laid = known.overlay(run, request(known, run, candidate))
    assert laid.argv == ("python", "trainer.py", "{args}")
    text = laid.files["args"]
    assert "learning_rate: 1e-5" in text and "output_dir: runs/one" in text
    content = yaml.safe_load(text)
    assert content["deepspeed"]["zero_optimization"] == {"stage": 3, "overlap_comm": True}
    assert content["deepspeed"]["torch_autocast"]["enabled"] is True and content["bf16"] is False
    assert (content["per_device_train_batch_size"], content["gradient_accumulation_steps"]) == (2, 4)


def test_numbers_in_deepspeeds_file_follow(folder):
    known, run = program("deepspeed", folder)
    candidate = Candidate(layout=Layout(dp_shard=2, zero_stage=3), micro_batch_size=1)
    laid = known.overlay(run, request(known, run, candidate))
    content = load(laid.files["deepspeed"], "ds.json")
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert [content[name] for name in sizes] == [1, 8, 16]
    assert content["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 5e7}
    assert content["bf16"] == {"enabled": False}
    assert laid.argv == ("python", "engine.py", "--deepspeed", "--deepspeed_config", "{deepspeed}")
    assert not errors(laid)


def test_accelerates_programs_are_told_by_variables_and_their_own_arguments(folder):
    known, run = program("accelerate-launch", folder)
    candidate = Candidate(
        layout=Layout(dp_shard=2, zero_stage=2),
        micro_batch_size=4,
        precision=Precision(level="O2", dtype="bfloat16"),
        loader=Loader(num_workers=2, prefetch_factor=2),
    )
    laid = known.overlay(run, request(known, run, candidate))
    assert not errors(laid)
    assert laid.argv == ("python", "loop.py", "--batch", "4", "--num-workers", "2")
    assert laid.env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "2"
    assert (laid.env["ACCELERATE_USE_FSDP"], laid.env["FSDP_RESHARD_AFTER_FORWARD"]) == ("true", "false")
    assert laid.env["ACCELERATE_MIXED_PRECISION"] == "bf16"


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
        ("transformers-fsdp", "", Candidate(layout=Layout(dp_shard=2, zero_stage=1)), "layout.zero_stage"),
        ("transformers-fsdp", "--use_cpu", Candidate(layout=Layout(dp_shard=2, zero_stage=3)), "layout.zero_stage"),
        ("llamafactory", "", Candidate(recompute=layers(2)), "recompute.full"),
        ("accelerate", "", Candidate(recompute=layers(1)), "recompute.full"),
        ("accelerate", "", Candidate(kernels=Kernels(compile="model")), "kernels.compile"),
        ("deepspeed", "", Candidate(loader=Loader(num_workers=2, prefetch_factor=2)), "loader.num_workers"),
    ],
)
def test_what_a_program_cannot_be_told_is_an_error(kind, words, candidate, knob, folder):
    known, run = program(kind, folder)
    run = replace(run, argv=(*run.argv, *words.split()))
    asked = request(known, run, candidate, named=[knob], world=candidate.layout.world_size)
    assert knob in errors(known.overlay(run, asked))


def test_own_knobs_are_arguments_by_the_frameworks_names(folder):
    own = (OwnChoice(name="optim", value="adafactor"), OwnChoice(name="ddp_bucket_cap_mb", value=5))
    for kind, expected in (("transformers", ("--optim", "adafactor")), ("transformers-file", ())):
        known, run = program(kind, folder)
        laid = known.overlay(run, request(known, run, Candidate(layout=Layout(dp_replicate=2), own=own)))
        assert laid.argv[-4:-2] == expected or "optim: adafactor" in laid.files["args"]


# ---- trials ----


@pytest.mark.parametrize("kind", TRAINER)
def test_trials_leave_nothing_behind_and_keep_the_schedule(kind, folder):
    known, run = program(kind, folder)
    laid = known.overlay(run, request(known, run, Candidate(layout=Layout(dp_replicate=2))))
    trial = known.trial_mode(laid, 16)
    file = load(trial.files["args"], "args.yaml") if "args" in trial.files else {}

    def value(name):
        words = [word for word in trial.argv if word.startswith(f"--{name}=")]
        joined = words[0].partition("=")[2] if words else None
        return file.get(name, trial.argv[trial.argv.index(f"--{name}") + 1] if f"--{name}" in trial.argv else joined)

    off = {name: value(name) for name in ("save_strategy", "eval_strategy", "report_to", "output_dir")}
    assert off == {"save_strategy": "no", "eval_strategy": "no", "report_to": "none", "output_dir": "{out}"}
    assert [str(value(name)).lower() for name in ("push_to_hub", "logging_nan_inf_filter", "logging_steps")] == [
        "false",
        "false",
        "1",
    ]
    assert value("max_steps") is None
    assert trial.env["WANDB_MODE"] == "disabled"


def test_a_limit_of_the_users_own_moves_only_where_it_comes_too_early(folder):
    known, run = program("transformers", folder)
    for limit, kept in ((10, "16"), (1000, "1000")):
        limited = replace(run, argv=(*run.argv, "--max_steps", str(limit), "--resume_from_checkpoint", "x"))
        laid = known.overlay(limited, request(known, limited, Candidate(layout=Layout(dp_replicate=2))))
        trial = known.trial_mode(laid, 16)
        assert trial.argv[trial.argv.index("--max_steps") + 1] == kept
        assert "--resume_from_checkpoint" not in trial.argv
        assert any(note.knob == "workload" for note in trial.notes) == (kept == "16")


def test_deepspeeds_monitors_are_off_in_trials(folder):
    known, run = program("deepspeed", folder)
    laid = known.overlay(run, request(known, run, Candidate(layout=Layout(dp_shard=2, zero_stage=1))))
    content = load(known.trial_mode(laid, 16).files["deepspeed"], "ds.json")
    assert content["tensorboard"] == {"enabled": False, "output_path": "runs"}
    assert (content["steps_per_print"], content["log_level"]) == (1, "info")
