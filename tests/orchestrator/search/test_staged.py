"""Kernels and data reading first, then layouts, then both together: what may be proposed when."""

import pytest

from orchestrator.search.staged import UNITS, Stages, settings
from orchestrator.sweep.events import Budget
from orchestrator.sweep.fold import fold
from tests.support.story import created, ended, failures, launched, measured, proposed
from trials.spec import Candidate, Kernels, Layout, Loader

CANDIDATES = [
    Candidate(
        layout=Layout(dp_replicate=dp),
        micro_batch_size=size,
        loader=Loader(num_workers=workers, prefetch_factor=2 if workers else 0, persistent_workers=bool(workers)),
        kernels=Kernels(compile=compiled, attention=attention),
    )
    for dp in (1, 2, 4)
    for size in (1, 2, 4)
    for workers in (0, 4)
    for compiled in ("off", "block")
    for attention in ("auto", "math")
]
BASELINE = CANDIDATES[0]
SPEED = {"workers": 0.9, "compiled": 0.8, "math": 1.3}


def step_s(candidate):
    """Settings scale the time of a layout, whatever it is."""
    factor = SPEED["workers"] if candidate.loader.num_workers else 1.0
    factor *= SPEED["compiled"] if candidate.kernels.compile != "off" else 1.0
    factor *= SPEED["math"] if candidate.kernels.attention == "math" else 1.0
    return 0.1 * factor / (candidate.micro_batch_size + 1) / candidate.layout.dp


def run(max_trials, baseline_outcome=None):
    """A sweep that takes the first candidate it may, with the stage of each."""
    stages = Stages(CANDIDATES, BASELINE, max_trials)
    first = baseline_outcome or measured(step_s(BASELINE))
    events = [created(budget=Budget(max_trials=max_trials)), proposed(0, BASELINE), launched(0), ended(0, first)]
    by_key = {candidate.config_key: candidate for candidate in CANDIDATES}
    seen, words = {BASELINE.config_key}, []
    for number in range(1, max_trials):
        stage = stages.now(fold(events), [key for key in by_key if key not in seen])
        candidate = next(c for key, c in by_key.items() if key in stage.keys)
        seen.add(candidate.config_key)
        words.append((stage.words[:12], candidate))
        outcome = measured(step_s(candidate), world_size=candidate.layout.world_size)
        events += [proposed(number, candidate), launched(number), ended(number, outcome)]
    return words, fold(events)


def differing(one, other):
    return sum(a != b for a, b in zip(settings(one), settings(other), strict=True))


def test_three_stages_in_order():
    words, state = run(16)
    order = [word for word, _ in words]
    assert order == sorted(order) and set(order) == {"stage 1 of 3", "stage 2 of 3", "stage 3 of 3"}
    first = [candidate for word, candidate in words if word == "stage 1 of 3"]
    assert len(first) == 3, "each setting on its own: workers, compile, attention"
    assert all(c.layout == BASELINE.layout and differing(c, BASELINE) == 1 for c in first)
    for candidate in (candidate for word, candidate in words if word == "stage 2 of 3"):
        assert candidate.loader.num_workers == 4 and candidate.kernels.compile == "block"
        assert candidate.kernels.attention == "auto"
    last = [candidate for word, candidate in words if word == "stage 3 of 3"]
    assert all(c.layout == state.best.candidate.layout for c in last)
    device_s = state.best.measurement.step_time_s * state.best.measurement.world_size
    assert device_s == pytest.approx(min(step_s(c) * c.layout.dp for c in CANDIDATES))


def test_the_first_stage_takes_no_more_than_its_share():
    words, _ = run(8)
    assert sum(word == "stage 1 of 3" for word, _ in words) == 2


def test_nothing_is_staged_where_all_can_be_tried_or_nothing_compared():
    assert {word for word, _ in run(len(CANDIDATES))[0]} == {""}
    assert {word for word, _ in run(20, baseline_outcome=failures()["oom"])[0]} == {""}


def test_what_the_first_stage_could_not_try_stays_open():
    """Two trials of the first stage leave one of three units untried; a baseline outside the space leaves all."""
    words, _ = run(8)
    first = [candidate for word, candidate in words if word == "stage 1 of 3"]
    tried = {i for c in first for i, value in enumerate(settings(c)) if value != settings(BASELINE)[i]}
    stages = Stages(CANDIDATES, BASELINE, 8)
    events = [created(budget=Budget(max_trials=8))]
    for number, candidate in enumerate([BASELINE, *first]):
        events += [proposed(number, candidate), launched(number), ended(number, measured(step_s(candidate)))]
    keys = stages.now(fold(events), [candidate.config_key for candidate in CANDIDATES]).keys
    open_now = [settings(candidate) for candidate in CANDIDATES if candidate.config_key in keys]
    varying = {i for i in range(len(UNITS)) if len({values[i] for values in open_now}) > 1}
    assert len(tried) == 2 and len(varying) == 1 and not varying & tried
    elsewhere = Candidate(layout=Layout(dp_replicate=8))
    assert not Stages(CANDIDATES, elsewhere, 16).is_worth_it


def test_every_loader_and_kernel_knob_is_in_a_unit():
    changed = {
        "loader": Loader(num_workers=1, prefetch_factor=3, persistent_workers=True, pin_memory=True, full_batch=True),
        "kernels": Kernels(
            compile="block",
            compile_mode="max-autotune",
            attention="math",
            matmul_precision="high",
            cudnn_tuning_range=(1, 2),
            memory_format="nhwc",
        ),
    }
    assert differing(Candidate(**changed), Candidate()) == len(UNITS)
