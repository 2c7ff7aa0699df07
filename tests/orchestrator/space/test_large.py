"""Spaces too large to enumerate: reported, drawn from by the cost model or at random, and searched."""

import functools
import io
import random

import pytest
from rich.console import Console

from cluster.hardware.topology import uniform_topology
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.controller import controller
from orchestrator.errors import ConfigError
from orchestrator.planning import planner
from orchestrator.planning.planner import make_plan
from orchestrator.search.predictor import make_predictor
from orchestrator.search.search import GuidedSearch, Search, _Space
from orchestrator.space import space
from orchestrator.space.notation import feature_columns, flat_params
from orchestrator.space.rules import check
from orchestrator.space.space import Lookup, make_space, without_effect
from orchestrator.sweep.events import Budget
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import Home
from orchestrator.terminal.plan_screen import render_plan
from tests.orchestrator.controller.test_virtual_sweeps import SWEEP
from tests.support.story import created, ended, failures, launched, measured, proposed
from tests.support.sweep_files import changed, write
from tests.support.virtual_sweeps import Quiet

CHOICES = {
    "dp_replicate": [1, 2, 4],
    "dp_shard": [1, 2, 4, 8, 16],
    "zero_stage": [0, 1, 2, 3],
    "pp": [1, 2, 4],
    "tp": [1, 2, 4, 8],
    "sequence_parallel": [True, False],
    "micro_batch_size": [1, 2, 4, 8],
    "recompute": ["none", "full"],
    "num_workers": list(range(33)),
    "prefetch_factor": list(range(1, 17)),
    "compile": ["off", "block"],
    "attention": ["auto", "math"],
    "world_size": 16,
}
LARGE = changed(SWEEP, ("space",), CHOICES)
TOPOLOGY = uniform_topology(2, 8, device_name="A100-80GB", memory_bytes=80 * 10**9)


@functools.cache
def spec():
    return SweepSpec.model_validate(LARGE)


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(planner, "MAX_ENUMERATED", 3000)
    return make_plan(spec(), TOPOLOGY)


def shown_text(renderable):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def is_legal(candidate):
    return not check(candidate, spec().to_workload(), TOPOLOGY, spec().filters)


def run(search, made, num_trials):
    """Trials of a made-up machine whose memory is short without recompute, and the reasons given for them."""
    reasons = []
    events = [created(workload=spec().to_workload(), budget=Budget(max_trials=num_trials))]
    events += [proposed(0, made.baseline), launched(0), ended(0, measured(9.0, world_size=16))]
    for number in range(1, num_trials):
        suggestion = search.suggest(number, fold(events))
        events += [proposed(number, suggestion.candidate), launched(number)]
        reasons.append(suggestion.reason)
        candidate = suggestion.candidate
        is_full = not candidate.recompute.full and candidate.layout.tp * candidate.layout.dp_shard < 8
        time_s = 4.0 + candidate.layout.pp / 4 + candidate.loader.num_workers / 40
        events.append(ended(number, failures()["oom"] if is_full else measured(time_s, world_size=16)))
    return fold(events), reasons


def test_the_plan_of_a_huge_space_reports_it_and_holds_a_legal_sample(made):
    assert made.product_size > 20_000_000
    assert f"too large to enumerate: {made.product_size:,} combinations" in made.too_large
    assert "sampled where the cost model predicts the best" in made.to_json(0)["too_large"]
    assert 1500 < len(made.candidates) == len(set(made.candidates)) <= 3000
    assert all(map(is_legal, made.candidates))
    assert made.candidates == make_plan(spec(), TOPOLOGY).candidates
    layouts = {(c.layout, c.micro_batch_size) for c in made.candidates}
    assert len(layouts) > 0.9 * len(made.beyond.space.frames), "every layout is there"


def test_without_a_cost_model_candidates_of_a_large_space_are_drawn_at_random(monkeypatch):
    monkeypatch.setattr(planner, "SAMPLE_SIZE", 1500)
    unknown = uniform_topology(2, 8, device_name="an unknown device", memory_bytes=80 * 10**9)
    found = make_plan(spec(), unknown)
    assert "sampled at random, and conditional TPE explores further ones" in found.too_large
    assert len(found.candidates) == len(set(found.candidates)) == 1500
    assert all(map(is_legal, found.candidates))


def test_a_space_that_can_be_enumerated_is(made):
    small = make_plan(SweepSpec.model_validate(SWEEP), TOPOLOGY)
    assert small.beyond is None
    assert small.too_large == ""


def test_the_guide_continues_beyond_the_sample_and_conditional_tpe_over_the_whole_space(made, caplog):
    guide = GuidedSearch(make_predictor(spec().to_workload(), made.candidates, TOPOLOGY))

    def search(sampler):
        options = {"sampler": sampler, "seed": 3, "guide": guide, "beyond": made.beyond}
        return Search(made.candidates, features=flat_params, **options)

    for sampler in ("guided", "tpe"):
        state, reasons = run(search(sampler), made, 24)
        tried = [trial.candidate for trial in state.trials]
        assert len(set(tried)) == 24
        assert all(map(is_legal, tried))
        again, _ = run(search(sampler), made, 24)
        assert [trial.candidate for trial in again.trials] == tried
        if sampler == "guided":
            assert "too large to enumerate" in caplog.text
            assert not any("TPE" in reason for reason in reasons)
            assert set(tried[1:]) <= set(made.candidates)
        else:
            assert sum("conditional TPE" in reason for reason in reasons) > 10
            assert not set(tried[1:]) <= set(made.candidates), "not only what was drawn"


def test_candidates_ruled_out_by_out_of_memory_are_not_proposed_from_beyond_the_sample(made):
    state, _ = run(Search(made.candidates, features=flat_params, sampler="tpe", seed=1, beyond=made.beyond), made, 40)
    seen = []
    for trial in state.trials:
        for witness in seen:
            same = witness.layout == trial.candidate.layout and witness.kernels == trial.candidate.kernels
            same = same and witness.loader == trial.candidate.loader and witness.recompute == trial.candidate.recompute
            assert not (same and trial.candidate.micro_batch_size >= witness.micro_batch_size)
        if trial.status == "oom":
            seen.append(trial.candidate)
    assert seen


def test_a_candidate_is_found_by_its_knobs(made):
    encoder = _Space(feature_columns(made.candidates, flat_params))
    lookup = Lookup(made.beyond, flat_params, encoder.encode, encoder.spans)
    rng = random.Random(0)
    for candidate in made.candidates[:200]:
        assert lookup.nearest(encoder.encode(flat_params(candidate)), rng) == candidate


def test_knobs_without_effect_follow_from_the_knobs_that_disable_them(made):
    for candidate in made.candidates[:300]:
        idle = without_effect(candidate)
        assert ("schedule" in idle) == (candidate.layout.pp == 1)
        assert ("sequence_parallel" in idle) == (candidate.layout.tp == 1)
        assert ("prefetch_factor" in idle) == (candidate.loader.num_workers == 0)


def test_very_many_layouts_are_sampled_and_other_parts_refused(monkeypatch):
    monkeypatch.setattr(space, "MAX_SETTINGS", 300)
    content = changed(LARGE, ("space", "num_workers"), [0, 1])
    content = changed(content, ("space", "prefetch_factor"), [2])
    large = SweepSpec.model_validate(content)
    frames = make_space(large.choices, large.to_workload().model).frames
    assert 0 < len(frames) <= 300 * 4
    assert len({frame.layout.pp for frame in frames}) == 3
    with pytest.raises(ConfigError, match="loader have"):
        make_plan(spec())


def test_a_sweep_over_a_space_too_large_to_enumerate_finishes(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "MAX_ENUMERATED", 3000)
    content = changed(LARGE, ("budget", "max_trials"), 14)
    result = controller.submit(load_sweep(write(tmp_path, content)), Home(tmp_path / "home"), Quiet())
    assert result.state.status == "finished"
    tried = [trial.candidate for trial in result.state.trials]
    assert len(set(tried)) == len(tried) == 14
    assert all(map(is_legal, tried))
    assert all(trial.expected is not None for trial in result.state.trials[1:])


def test_the_shown_plan_reports_that_the_space_is_too_large(made):
    shown = " ".join(shown_text(render_plan(made)).split())
    assert f"{len(made.candidates):,} legal candidates drawn" in shown
    assert made.too_large in shown
    assert "alike" not in shown, "they were not counted"
