"""Knobs that programs have no flag for, set within unchanged programs: each acts or is refused by name, and training
stays what it was: losses to the last bit, or as close as the number format allows."""

import json
import sys

import pytest
import torch

from tests.trials.script.hooked import launch
from trials.reports import ScriptReport, merge_scripts
from trials.script.command import HOOK_FOLDER, KNOBS_VARIABLE, CommandFile, ScriptCommand, inside_knobs
from trials.script.judge import Judge, NotApplied
from trials.script.report_lines import StepBook
from trials.spec import Protocol

EXACT, ROUNDED, BF16 = 0.0, 2e-5, 5e-3
"""How far the first two losses may be off: nothing, another order of sums, 8 bits of mantissa."""
RECOMPUTED = {"recompute": "3 of 3 x Layer run again"}

CASES = {
    "constants": (
        {
            "num_workers": 2,
            "prefetch_factor": 3,
            "persistent_workers": True,
            "recompute": "full",
            "attention": "math",
            "pin_memory": True,
            "cudnn_benchmark": True,
            "allocator": "expandable_segments:True",
            "ddp_bucket_mb": 1,
            "memory_format": "nhwc",
            "color": "blue",
        },
        {
            "num_workers": "2 worker processes alive",
            "prefetch_factor": "3 batches per worker",
            "persistent_workers": "kept",
            **RECOMPUTED,
            "attention": "3 calls, fused operators: none",
        },
        {
            "pin_memory": "no accelerator",
            "cudnn_benchmark": "no accelerator",
            "allocator": "no accelerator",
            "ddp_bucket_mb": "does not use DistributedDataParallel",
            "memory_format": "Decoder has no Conv2d",
            "color": "unknown knob",
        },
        ROUNDED,
    ),
    "constants scaler": ({"precision": "O1-bf16"}, {}, {"precision": "already uses "}, EXACT),
    "constants recomputes": (
        {"recompute": "full", "precision": "O1-bf16"},
        {"precision": "in bfloat16"},
        {"recompute": "already recomputes"},
        BF16,
    ),
    "constants counts": (
        {"recompute": "full", "precision": "O1-fp16"},
        {},
        {"recompute": "changes its buffer calls", "precision": "needs a gradient scaler"},
        EXACT,
    ),
    "constants compiles": (
        {"recompute": "full", "compile": "model", "num_workers": 1},
        {"num_workers": "1 worker"},
        {"recompute": "compile", "compile": "already compiles"},
        EXACT,
    ),
    "constants iterable": (
        {"num_workers": 2, "precision": "O1-bf16"},
        {"precision": "in bfloat16"},
        {"num_workers": "iterable data set"},
        BF16,
    ),
    "constants draws": ({"num_workers": 1}, {"num_workers": "items draw random numbers"}, {}, 0.2),
    "constants draws_early": ({"num_workers": 1}, {}, {"num_workers": "draws random numbers between"}, 0.2),
    "epochs": (
        {"num_workers": 1, "persistent_workers": True},
        {"num_workers": "1 worker"},
        {"persistent_workers": "changes its data set"},
        EXACT,
    ),
    "gan": (
        {"memory_format": "nhwc", "recompute": "full", "num_workers": "auto"},
        {"memory_format": "2 of 2 weights", "num_workers": "ms per batch by workers 0: "},
        {"recompute": "no repeated block"},
        ROUNDED,
    ),
    "images": (
        {"memory_format": "nhwc", "recompute": "full"},
        {"memory_format": "4 of 4 weights"},
        {"recompute": "BatchNorm2d"},
        ROUNDED,
    ),
    "parallel": (
        {"ddp_bucket_mb": 0.02, "ddp_gradient_as_bucket_view": True, "ddp_static_graph": True, "recompute": "full"},
        {
            "ddp_bucket_mb": "0.02 MiB",
            "ddp_gradient_as_bucket_view": "true",
            "ddp_static_graph": "true",
            **RECOMPUTED,
        },
        {},
        EXACT,
    ),
    "parallel no_sync": (
        {"ddp_static_graph": True, "precision": "O1-bf16"},
        {"precision": "in bfloat16"},
        {"ddp_static_graph": "accumulates under no_sync"},
        BF16,
    ),
    "lightning_fit.py": (
        {"num_workers": 1, "recompute": "full", "precision": "O1-bf16"},
        {"num_workers": "1 worker", "recompute": "2 of 2 x TransformerEncoderLayer", "precision": "in bfloat16"},
        {},
        BF16,
    ),
    "accelerate_loop.py": ({"num_workers": 1, "recompute": "full"}, {"num_workers": "1 worker"}, None, EXACT),
}
"""By program: what is wanted, what is seen of what is applied, and why the rest is refused (None: as it comes)."""


def knob_file(path, knobs, **more):
    path.write_text(json.dumps({"version": 1, "knobs": knobs, "fingerprint": None, "expect": None, **more}))
    return str(path)


def run(program, folder, *, knobs=None, **more):
    name, _, kind = program.partition(" ")
    argv = [program] if name.endswith(".py") else ["stranger.py", name, *filter(None, [kind])]
    env = {KNOBS_VARIABLE: knob_file(folder.parent / f"{folder.name}.json", knobs)} if knobs else {}
    reported = launch(argv, folder, ranks=2 if name == "parallel" else 1, **env, **more)
    assert [rank.code for rank in reported] == [0] * len(reported), reported[0].errors
    return reported


def states(rank):
    """The final report on each knob: state and detail."""
    return {line["name"]: (line["state"], line["detail"]) for line in rank.events("knob")}


@pytest.mark.slow
@pytest.mark.representative("constants")
@pytest.mark.parametrize("program", CASES)
def test_each_knob_acts_or_is_refused_and_training_is_unchanged(tmp_path, program):
    knobs, seen, refused, tolerance = CASES[program]
    plain = run(program, tmp_path / "plain")
    tuned = run(program, tmp_path / "tuned", knobs=knobs)
    for rank, before in zip(tuned, plain, strict=True):
        reported = states(rank)
        assert set(reported) == set(knobs)
        assert rank.events("note") == []
        draws = before.facts.get("items_draw", 0)
        assert (type(draws), draws) == (int, program == "constants draws")  # reports hold numbers
        for name, words in seen.items():
            assert reported[name][0] == "applied" and words in reported[name][1], reported[name]
        for name, words in (refused or {}).items():
            assert reported[name][0] == "refused" and words in reported[name][1], reported[name]
        assert rank.losses[:2] == pytest.approx(before.losses[:2], rel=0, abs=tolerance)
        if tolerance == EXACT:
            assert rank.losses == before.losses
        assert len(rank.events("fingerprint")) == 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_transformers_trainer_takes_arguments_and_its_recompute_switch(tmp_path):
    argv = [
        "trainer_loop.py",
        "--output_dir",
        str(tmp_path / "out"),
        "--max_steps",
        "4",
        "--use_cpu",
        "--logging_steps",
    ]
    argv += ["1", "--report_to", "none", "--save_strategy", "no", "--per_device_train_batch_size", "8"]
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    knobs = {"num_workers": 1, "recompute": "full", "training_arguments": arguments}
    (plain,) = launch(argv, tmp_path / "plain")
    (tuned,) = launch(argv, tmp_path / "tuned", **{KNOBS_VARIABLE: knob_file(tmp_path / "knobs.json", knobs)})
    reported = states(tuned)
    assert {name: state for name, (state, _) in reported.items()} == dict.fromkeys(knobs, "applied"), reported
    assert (
        "2 of 2 x LlamaDecoderLayer run again in the backward pass, with the model's own switch"
        in reported["recompute"][1]
    )
    assert tuned.facts == tuned.facts | {"micro_batch_size": 4, "forwards_per_step": 2}
    assert tuned.losses == pytest.approx(plain.losses, abs=1e-5)  # the same global batch


@pytest.mark.slow
@pytest.mark.exhaustive
def test_in_production_another_program_trains_unchanged_with_a_warning(tmp_path):
    (plain,) = run("constants", tmp_path / "plain")
    (trial,) = run("constants", tmp_path / "trial", knobs={"recompute": "full", "num_workers": 1})
    (line,) = trial.events("fingerprint")
    outside = {"TUNE_CLUSTER_REPORT": ""}
    for changed, words in ({}, "applied"), ({"roots": ["GPT, 1 parameters"]}, "WARNING: recompute is not applied"):
        path = knob_file(
            tmp_path / "knobs.json",
            {"recompute": "full", "num_workers": 1},
            fingerprint={**line["fingerprint"], **changed},
            expect={"recompute": "3 of 3"},
        )
        (reported,) = launch(["stranger.py", "constants"], tmp_path / "out", **{KNOBS_VARIABLE: path}, **outside)
        assert reported.code == 0
        assert reported.printed_losses == plain.printed_losses
        assert f"tune-cluster: {words}" in reported.errors
        assert reported.lines == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("text", ["{", '{"version": 2, "knobs": {}}', None])
def test_a_file_that_cannot_be_read_leaves_the_program_alone(tmp_path, text):
    path = tmp_path / "knobs.json"
    if text is not None:
        path.write_text(text)
    reported = launch(["-c", "print('on')"], tmp_path / "out", TUNE_CLUSTER_REPORT="", **{KNOBS_VARIABLE: str(path)})
    assert (reported[0].code, reported[0].output) == (0, "on\n")
    assert "no knobs are applied" in reported[0].errors


# ---- What the judge makes of it


def command(knobs):
    return ScriptCommand(
        argv=("python", "train.py"),
        cwd="/",
        env=((KNOBS_VARIABLE, "{knobs}"),),
        files=(CommandFile(name="knobs", file_name="knobs.json", text=json.dumps({"version": 1, "knobs": knobs})),),
        protocol=Protocol(),
        num_devices=2,
        tokens_per_step=8,
        samples_per_step=8,
    )


def judge_of(knobs, *reported):
    """A judge that has received lines of (rank, name, state)."""
    book = StepBook(command(knobs))
    for rank, name, state in reported:
        line = {"source": "hook:torch", "event": "knob", "name": name, "state": state, "detail": "as seen"}
        book.add_report_line(json.dumps(line), origin=f"rank{rank}.jsonl", arrived_s=0.0)
    return Judge(command(knobs), book)


@pytest.mark.parametrize(
    ("reported", "problem"),
    [
        ([(0, "recompute", "applied"), (1, "recompute", "applied")], None),
        ([(0, "recompute", "applied"), (1, "recompute", "refused")], "recompute is refused: as seen .*rank1"),
        ([(0, "recompute", "no_effect")], "recompute has no effect: as seen"),
        ([], "recompute: no report from the program"),
        ([(0, "recompute", "applied"), (1, "compile", "applied")], "recompute: no report from rank1.jsonl"),
    ],
)
def test_a_knob_that_does_not_act_on_every_rank_is_not_applied(reported, problem):
    judge = judge_of({"recompute": "full"}, *reported)
    assert inside_knobs(command({"recompute": "full"})) == ("recompute",)
    if problem is None:
        judge.check_knobs(is_last=True)
        assert judge.report(None, None).knobs == (("recompute", "as seen"),)
        return
    with pytest.raises(NotApplied, match=problem):
        judge.check_knobs(is_last=True)


@pytest.mark.parametrize(
    ("reported", "refused"),
    [
        ({"recompute": ("refused", "no block"), "precision": ("applied", "bf16")}, ("recompute",)),
        ({"recompute": ("refused", "no block"), "precision": ("refused", "autocast")}, ("recompute", "precision")),
        ({"num_workers": ("refused", "iterable"), "pin_memory": ("refused", "iterable")}, ("num_workers",)),
        ({"attention": ("no_effect", "no call")}, ()),
    ],
)
def test_a_refusal_names_the_knobs_at_fault(reported, refused):
    """Of several knobs refused for one reason, others may be refused only since the first is."""
    book = StepBook(command(dict.fromkeys(reported, True)))
    for name, (state, detail) in reported.items():
        line = {"source": "hook:torch", "event": "knob", "name": name, "state": state, "detail": detail}
        book.add_report_line(json.dumps(line), origin="rank0.jsonl", arrived_s=0.0)
    with pytest.raises(NotApplied) as error:
        Judge(command({}), book).check_knobs()
    assert error.value.refused == refused
    assert all(detail in str(error.value) for _, detail in reported.values() if _ != "applied")


def test_reports_keep_what_was_seen_and_the_fingerprint():
    silent, speaking = ScriptReport(), ScriptReport(knobs=(("recompute", "3 of 3"),), fingerprint='{"torch":"2.13"}')
    merged = merge_scripts((silent, speaking))
    assert (merged.knobs, merged.fingerprint) == (speaking.knobs, speaking.fingerprint)


@pytest.mark.parametrize("data", ["open file", "tensors"])
def test_unusual_programs_train_on(tmp_path, data):
    """Processes share the position in a file; iterators of workers cannot be pickled."""
    knobs = tmp_path / "knobs.json"
    wanted = {"num_workers": 2, "ddp_bucket_mb": 1}
    knobs.write_text(json.dumps({"version": 1, "knobs": wanted}))
    (reported,) = launch(["unusual_data.py", data], tmp_path, **{KNOBS_VARIABLE: str(knobs)})
    assert (reported.output, reported.code) == ("unharmed\n", 0), reported.errors
    states = {line["name"]: (line["state"], line["detail"]) for line in reported.events("knob")}
    assert states["ddp_bucket_mb"][0] == "refused"
    assert states["num_workers"][0] == ("refused" if data == "open file" else "applied"), states
    assert "which was already open" in states["num_workers"][1] or data == "tensors"


def test_outputs_that_need_no_change_are_passed_through():
    sys.path.append(str(HOOK_FOLDER))
    from tune_cluster_hook.model_knobs import _map_tensors

    class Pair(tuple):
        def __new__(cls, one, other):
            return super().__new__(cls, (one, other))

    full, half = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    for output in ([full, 1], Pair(full, full), Pair(half, half)):
        assert _map_tensors(output, lambda tensor: tensor.float()) is output
    assert _map_tensors([half], lambda tensor: tensor.float())[0].dtype == torch.float32
