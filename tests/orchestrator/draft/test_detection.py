"""Programs of unknown users are run for a few steps: the true batch, what a changed run proves about options."""

import json
import os
import shlex
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from cluster.queue import Claim, HostAdmission, QueuePolicy
from orchestrator import process_support
from orchestrator.cli.main import main
from orchestrator.commands.detection import Detector
from orchestrator.draft.command_draft import draft_script, read_command
from orchestrator.draft.machine import machine_here
from orchestrator.draft.observed import (
    Detected,
    Filled,
    OptionChange,
    changes,
    found_options,
    proof,
    template,
    with_value,
)
from orchestrator.draft.program_reading import read_program
from orchestrator.draft.static_reading import ScriptOption, take_apart
from orchestrator.errors import ConfigError
from trials.reports import ScriptFacts, ScriptReport, SeenOption

STRANGERS = Path(__file__).parents[2] / "data/programs/strangers"
BATCH, COUNT, WORKERS = "micro_batch_size", "accumulation", "workers"
TORCHRUN = "torchrun --nproc-per-node 2"
PROGRAMS = {
    # typed: batch, micro-batch, micro-batches, ranks; option by proven role; words of the drafted command
    "trainer_in_code": (f"{TORCHRUN} trainer_in_code.py", (24, 3, 4, 2), {}, []),
    "keys": (
        "python keys.py data.size=24 train.repeat=2",
        (48, 24, 2, 1),
        {BATCH: "data.size", COUNT: "train.repeat"},
        ["data.size={micro_batch_size}", "train.repeat={accumulation}"],
    ),
    "lightning_code": ("python lightning_code.py", (32, 16, 2, 1), {}, []),
    "accelerate_loop": (
        "python accelerate_loop.py",
        (18, 6, 3, 1),
        {BATCH: "--bsz", COUNT: "--accumulate"},
        ["--bsz", "{micro_batch_size}", "--accumulate", "{accumulation}"],
    ),
    "images": (
        "python images.py -b 16",
        (16, 16, 1, 1),
        {BATCH: "--batch-size", COUNT: "--grad-accum-steps", WORKERS: "--workers", "amp": "--amp"},
        ["-b", "{micro_batch_size}", "--grad-accum-steps", "{accumulation}", "--workers", "{num_workers}"],
    ),
    "gan": ("python gan.py", (32, 32, 1, 1), {}, []),
    "nano": (
        f"{TORCHRUN} nano.py --batch_size=4",
        (32, 4, 4, 2),
        {BATCH: "--batch_size", COUNT: "--gradient_accumulation_steps"},
        ["--batch_size={micro_batch_size}", "--gradient_accumulation_steps={total_accumulation}"],
    ),
    "from_json": (
        "python from_json.py settings.json",
        (15, 5, 3, 1),
        {BATCH: "batch_size", COUNT: "accumulation"},
        ["{config}"],
    ),
    "stream": ("python stream.py", (8, 8, 1, 1), {BATCH: "BATCH_SIZE"}, []),
    "two_models": (
        f"{TORCHRUN} two_models.py --batch 16",
        (16, 8, 1, 2),
        {BATCH: "--batch", COUNT: "--accum-iter"},
        ["--batch", "{total_micro_batch_size}", "--accum-iter", "{accumulation}"],
    ),
    "moe": (
        f"{TORCHRUN} moe.py --ep 1",
        (16, 2, 4, 2),
        {BATCH: "--batch-size", COUNT: "--grad-accum", "ep": "--expert-parallel", "dtype": "--dtype"},
        ["--ep", "{ep}", "--batch-size", "{micro_batch_size}", "--grad-accum", "{accumulation}"],
    ),
    "agent": ("srun -n 1 python agent.py", (20, 20, 1, 1), {BATCH: "--minibatch-size"}, []),
}


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(STRANGERS, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.slow
@pytest.mark.representative("from_json")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_draft_has_the_true_batch_and_the_options_that_act(folder, name):
    typed, (batch, micro, count, ranks), proven, words = PROGRAMS[name]
    result = run("init", "--json", "--run-time", 500, "--", *shlex.split(typed))
    assert result.exit_code == 0, result.output
    seen = json.loads(result.stdout)["seen"]
    assert seen is not None, result.output
    assert (seen["micro_batch_size"], seen["micro_batches"], seen["world_size"]) == (micro, count, ranks)
    assert {role: one["option"] for role, one in seen["options"].items()} == proven
    written = yaml.safe_load((folder / "sweep.yaml").read_text())
    assert written["workload"]["global_batch_size"] == batch
    assert written["workload"]["run"][2:] == words or not words
    assert ("micro_batch_size" in written["space"]) == (COUNT in proven)
    assert run("plan", "sweep.yaml").exit_code == 0
    if name == "moe":
        assert (written["baseline"]["ep"], written["space"]["ep"]) == (1, [1, 2])
        assert (seen["experts"], seen["experts_per_token"], seen["tokens_per_expert"]) == (4, 2, 64.0)


def test_waiting_for_devices_uses_up_no_run_time(folder):
    script = read_command(take_apart(["python", "keys.py"], folder), folder, recipe=None, is_gpu=False, ranks=1)
    other = HostAdmission(process_support.host_queue(folder), QueuePolicy(), devices_per_node=1)
    other.beat(Claim(sweep="other", user="u", held=1))
    (folder / "runs").mkdir()
    heard, begun_s = [], time.monotonic()
    detector = Detector(script, machine_here(1), folder / "runs", heard.append)
    threading.Timer(4.0, other.leave).start()
    detector.observe(Filled(argv=tuple(script.command.argv), env={}, files={}), 100)
    assert heard[0].startswith("waits for devices held by sweep other")
    assert not [line for line in heard if "first step" in line]
    assert 0 < detector.spent_s < time.monotonic() - begun_s - 3


def test_a_batch_size_other_than_observed_is_an_error_with_the_right_number(folder):
    command = take_apart(shlex.split("python from_json.py settings.json"), folder)
    detected = Detected(facts=FACTS)
    script = read_command(command, folder, recipe=None, is_gpu=False, ranks=2, detected=detected)
    machine = machine_here(2)
    assert draft_script(script, machine, folder=folder).global_batch_size == 32
    assert draft_script(script, machine, folder=folder, global_batch_size=32).global_batch_size == 32
    with pytest.raises(ConfigError, match="uses 32 samples per optimiser step, not 7"):
        draft_script(script, machine, folder=folder, global_batch_size=7)


@pytest.mark.parametrize(
    ("seen", "longest", "length"), [(16, 16, 16), (16, 17, 16), (16, 0, 16), (16, 24, None), (None, 9, None)]
)
def test_samples_that_vary_have_no_length(seen, longest, length):
    assert ScriptReport(facts=facts(seq_length=seen), longest_sample=longest).sample_length == length


@pytest.mark.parametrize(
    ("typed", "given", "seen", "drafted", "is_read"),
    [
        ("python keys.py", None, 16, 16, True),
        ("python keys.py", 64, 16, 64, False),
        ("python nano.py --block_size=32", None, 64, 32, False),
        ("python keys.py", None, None, None, False),
    ],
)
def test_tokens_per_sample_come_from_model_inputs_unless_configured(folder, typed, given, seen, drafted, is_read):
    command = take_apart(shlex.split(typed), folder)
    detected = Detected(facts=facts(seq_length=seen))
    script = read_command(command, folder, recipe=None, is_gpu=False, ranks=2, detected=detected)
    text = draft_script(script, machine_here(2), folder=folder, seq_length=given).text
    assert yaml.safe_load(text)["workload"].get("seq_length") == drafted
    assert ("read from the model's inputs" in text) == is_read


def test_a_program_that_cannot_run_is_drafted_from_its_source_and_marked(folder):
    (folder / "broken.py").write_text("import argparse, nowhere_to_be_found\np.add_argument('--bs', default=4)\n")
    result = run("init", "--json", "--", "python", "broken.py")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["seen"] is None
    assert "nowhere_to_be_found" in document["not_seen"]
    assert document["global_batch_size"] == 4


FACTS = ScriptFacts(
    micro_batch_size=8, forwards_per_step=2, backwards_per_step=2, num_optimizers=1, world_size=2, num_workers=0
)


def facts(**changed):
    named = {name: getattr(FACTS, name) for name in FACTS.__dataclass_fields__}
    return ScriptFacts(**{**named, **changed})


@pytest.mark.parametrize(
    ("role", "value", "after", "way"),
    [
        (BATCH, "4", {"micro_batch_size": 4}, "as_is"),
        (BATCH, "4", {"micro_batch_size": 4, "forwards_per_step": 4, "backwards_per_step": 4}, "balanced"),
        (BATCH, "8", {"micro_batch_size": 4}, "over_ranks"),
        (BATCH, "4", {}, None),
        (BATCH, "4", {"micro_batch_size": 3}, None),
        (COUNT, "4", {"forwards_per_step": 4, "backwards_per_step": 4}, "as_is"),
        (COUNT, "8", {"forwards_per_step": 4, "backwards_per_step": 4}, "over_ranks"),
        (COUNT, "4", {"micro_batch_size": 4, "forwards_per_step": 4, "backwards_per_step": 4}, None),
        (WORKERS, "1", {"num_workers": 1}, "as_is"),
        (WORKERS, "1", {}, None),
        ("amp", True, {"dtype": "bfloat16"}, "switched"),
        ("checkpointing", True, {"layer_calls_per_forward": 2.0}, "switched"),
    ],
)
def test_effects_of_a_changed_run_classify_an_option(role, value, after, way):
    change = OptionChange(role=role, option=ScriptOption(names=("--x",)), value=value)
    found = proof(change, facts(dtype="float32"), facts(**{"dtype": "float32", **after}))
    assert (found.way if found else None) == way


def test_a_proven_option_has_the_role_of_the_knob_that_it_is(folder):
    option = ScriptOption(names=("--bf16-on",), is_flag=True)
    change = OptionChange(role="amp", option=option, value=True)
    shown = proof(change, facts(dtype="float32"), facts(dtype="bfloat16"))
    detected = Detected(facts=FACTS, options=(option,), proofs={"amp": shown})
    found = read_program(("python", "t.py"), None, is_gpu=True, ranks=2, detected=detected)
    assert found.own == {"--bf16-on": {"values": [False, True], "memory": "falls", "role": "precision"}}
    assert (found.micro_batch_size, found.accumulation) == (8, 2)


@pytest.mark.parametrize(
    ("forwards", "backwards", "optimizers", "samples"),
    [(2, 2, 1, 16), (4, 2, 1, 16), (1, 2, 1, 8), (3, 2, 2, 8), (2, None, None, 16), (None, None, None, None)],
)
def test_samples_of_a_step_follow_from_its_passes(forwards, backwards, optimizers, samples):
    found = facts(forwards_per_step=forwards, backwards_per_step=backwards, num_optimizers=optimizers)
    assert found.samples_per_step == samples


def test_options_are_found_in_every_notation(folder):
    seen = (
        SeenOption(kind="argparse", name="bs", value=8, flags=("-b", "--batch")),
        SeenOption(kind="environment", name="ACCUM", value=2),
        SeenOption(kind="omegaconf", name="data.size", value=8),
        SeenOption(kind="environment", name="WORLD_SIZE", value=2),
        SeenOption(kind="argparse", name="shift", value=0, flags=("--shift",)),
        SeenOption(kind="argparse", name="nw", value=0, flags=("--nw",)),
    )
    filled = Filled(argv=("train.py", "x.json", "a.x=1", "--c", "8"), files={"x.json": '{"d": {"e": 8}, "f": "text"}'})
    options = found_options(filled, None, seen)
    assert [one.names[0] for one in options] == [
        "--batch",
        "ACCUM",
        "data.size",
        "--shift",
        "--nw",
        "d.e",
        "a.x",
        "--c",
    ]
    tried = [(change.role, change.option.names[0]) for change in changes(filled.argv, options, FACTS, is_gpu=False)]
    sizes = [(BATCH, "--batch"), (BATCH, "data.size"), (BATCH, "d.e"), (COUNT, "ACCUM")]
    assert tried == [*sizes, (WORKERS, "--nw"), (WORKERS, "--shift")], "the likelier name first"
    for option in (one for one in options if one.default != 0):
        filled = with_value(filled, option, "{accumulation}")
    assert filled.argv[2:5] == ("a.x={accumulation}", "--c", "{accumulation}")
    assert set(filled.argv[5:]) == {"--batch", "{accumulation}", "data.size={accumulation}"}
    assert filled.env == {"ACCUM": "{accumulation}"}
    assert '"e": {accumulation}' in template(filled.files["x.json"])
