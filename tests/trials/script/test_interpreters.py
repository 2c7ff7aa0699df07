"""The hook in environments with other versions of Python and PyTorch: ``TUNE_CLUSTER_TEST_PYTHONS`` lists their
interpreters, separated as in PATH."""

import json
import os

import pytest

from tests.trials.script.hooked import launch
from trials.script.command import KNOBS_VARIABLE

VARIABLE = "TUNE_CLUSTER_TEST_PYTHONS"
PYTHONS = [python for python in os.environ.get(VARIABLE, "").split(os.pathsep) if python]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("python", PYTHONS or [pytest.param("", marks=pytest.mark.skip(f"{VARIABLE} names none"))]),
]


def test_steps_and_facts_are_reported_and_the_output_stays_the_same(tmp_path, python):
    argv = ["plain_loop.py", "--accum", "2", "--bf16", "--recompute", "full"]
    bare = launch(argv, tmp_path / "bare", ranks=2, hook=False, python=python)
    traced = launch(argv, tmp_path / "hooked", ranks=2, python=python)
    for rank, before in zip(traced, bare, strict=True):
        assert (rank.code, rank.output) == (0, before.output), rank.errors
        assert rank.events("note") == []
        assert rank.losses == pytest.approx(rank.printed_losses, abs=1e-6)
        parts = {"data_s", "forward_s", "backward_s", "recompute_s", "optimizer_s"}
        assert all(parts <= step.keys() for step in rank.steps[1:])
        seen = {"world_size": 2, "micro_batch_size": 4, "forwards_per_step": 2, "dtype": "bfloat16"}
        seen |= {"layers_recomputed": 3, "num_optimizers": 1, "flops_per_step": 23592960}
        assert rank.facts == rank.facts | seen


@pytest.mark.parametrize("wrap", ["model", "blocks"])
def test_a_compiled_program_has_the_same_graphs(tmp_path, python, wrap):
    argv = ["plain_loop.py", "--compile", wrap]
    (bare,) = launch(argv, tmp_path / "bare", hook=False, python=python)
    (traced,) = launch(argv, tmp_path / "hooked", python=python)
    assert (traced.code, traced.output) == (0, bare.output), traced.errors
    assert traced.events("note") == []
    if traced.facts["versions"]["torch"].startswith("2.1."):
        pytest.skip("PyTorch 2.1 breaks more graphs with the hook")
    assert (traced.facts["graph_breaks"], traced.facts["recompilations"]) == (0, 0)


def test_knobs_act(tmp_path, python):
    knobs = {"num_workers": 1, "prefetch_factor": 3, "recompute": "full", "attention": "math"}
    file = tmp_path / "knobs.json"
    file.write_text(json.dumps({"version": 1, "knobs": knobs, "fingerprint": None, "expect": None}))
    (plain,) = launch(["stranger.py", "constants"], tmp_path / "plain", python=python)
    (tuned,) = launch(["stranger.py", "constants"], tmp_path / "tuned", python=python, **{KNOBS_VARIABLE: str(file)})
    assert {event["name"]: event["state"] for event in tuned.events("knob")} == dict.fromkeys(knobs, "applied")
    assert tuned.losses[:2] == pytest.approx(plain.losses[:2], rel=0, abs=2e-5)
