"""Guided search without a cost model: what knobs usually do, corrected by the program's own trials."""

import dataclasses
import json
import math
import random
import tracemalloc

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.search.generic.programs import script_ranks, script_vision
from benchmarks.search.generic.sweeps import search
from cluster.candidate_table import CandidateTable
from cluster.cost.usual import EFFECTS, NUM_DRAWS, KnobColumns, MemoryShares, bytes_sent, column_of, drawn_programs
from orchestrator.cli.main import main
from orchestrator.search.knob_effects import (
    CustomEffects,
    EarlierTrial,
    RelativePredictor,
    UnmodelledKnobs,
    same_program,
    shares_of_peak,
)
from orchestrator.space.notation import flat_params
from tests.support.sweep_files import write
from trials.reports import ScriptFacts
from trials.spec import Candidate, CustomChoice, Layout, Loader, Precision, Recompute, ScriptData, ScriptModel, Workload

SCRIPT = ScriptModel(recipe="custom", run=("python", "train.py", "--batch", "{micro_batch_size}"), cwd="/code")
WORKLOAD = Workload(model=SCRIPT, data=ScriptData(), seq_length=1, global_batch_size=64)
BASELINE = Candidate(micro_batch_size=8)
AMP = Precision(level="O1", dtype="bfloat16")


def own(**values):
    return tuple(CustomChoice(name=f"--{name}", value=value) for name, value in sorted(values.items()))


def predictor(candidates, **options):
    settings = {"baseline": BASELINE, "features": flat_params, "limit_bytes": 16e9, **options}
    return RelativePredictor(WORKLOAD, candidates, **settings)


def gains(candidates, **options):
    found = predictor([BASELINE, *candidates], **options)
    return [found.gain_of(row) for row in range(1, len(candidates) + 1)]


def test_drawn_programs_have_exactly_the_means_and_spreads_of_the_table():
    drawn = drawn_programs("accelerator")
    values = np.hstack([drawn[effect.name] for effect in EFFECTS])
    assert values.shape == (NUM_DRAWS, len(EFFECTS))
    np.testing.assert_allclose(values.mean(0), [effect.mean for effect in EFFECTS], atol=1e-9)
    np.testing.assert_allclose(np.cov(values.T, bias=True), np.diag([e.std**2 for e in EFFECTS]), atol=1e-9)


def test_names_without_an_order_need_memory_by_the_square_of_their_number():
    candidates = [Candidate(own=own(kernel=f"k{i}")) for i in range(400)]
    tracemalloc.start()
    CustomEffects(CandidateTable.of(candidates), (), flat_params)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * 400**2


def test_typical_effects_of_knobs_have_the_usual_order():
    sizes = gains([Candidate(micro_batch_size=size) for size in (16, 32, 64)])
    assert 1 < sizes[0] < sizes[1] < sizes[2] and sizes[2] / sizes[1] < sizes[1] / sizes[0], "with diminishing return"
    workers = [Loader(), Loader(num_workers=2, prefetch_factor=2), Loader(num_workers=8, prefetch_factor=2)]
    few = gains([dataclasses.replace(BASELINE, loader=loader) for loader in workers])
    assert few[0] < few[1] < few[2]
    amp, again = (
        dataclasses.replace(BASELINE, precision=AMP),
        dataclasses.replace(BASELINE, recompute=Recompute(full=((1,),))),
    )
    fast, slow = gains([amp, again])
    assert 1.2 < fast < 2.5 and 0.7 < slow < 0.8
    assert gains([amp], kind="cpu")[0] < 1


def test_the_baseline_is_known_and_everything_else_is_uncertain():
    found = predictor([BASELINE, Candidate(micro_batch_size=32), dataclasses.replace(BASELINE, own=own(tile=4))])
    assert found.gain_of(0) == pytest.approx(1.0)
    assert found.log_spread_of(0) == pytest.approx(0.08)
    assert found.log_spread_of(2) > found.log_spread_of(0) and found.gain_of(2) == pytest.approx(1.0)
    assert found.posterior({}).log_time[0] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("name", "value", "column"),
    [
        ("--num-workers", 4, ("num_workers", 4.0)),
        ("data.loader:dataloader_num_workers", "2", ("num_workers", 2.0)),
        ("--dtype", "bfloat16", ("low_precision", 1.0)),
        ("--mixed_precision", "no", ("low_precision", 0.0)),
        ("$TORCH_COMPILE", "1", ("compiled", 1.0)),
        ("--gradient_checkpointing", True, ("repeated_share", 1.0)),
        ("--channels-last", False, ("channels_last", 0.0)),
        ("--save-checkpoint", True, None),
        ("--persistent-workers", True, ("persistent", 1.0)),
        ("--lr", 0.1, None),
    ],
)
def test_names_of_custom_knobs_imply_their_typical_effects(name, value, column):
    assert column_of(name, value) == column


@pytest.mark.parametrize(
    ("values", "name", "role"),
    [
        ((0, 8), "--num-workers", "num_workers"),
        (("fp32", "bf16"), "--dtype", "precision"),
        ((False, True), "--compile", "compile"),
    ],
)
def test_a_role_adds_what_a_name_does_not_imply(values, name, role):
    """The same search, whether the option is called like the built-in knob or has its role."""

    def found(called, roles):
        baseline, other = (
            dataclasses.replace(BASELINE, own=(CustomChoice(name=called, value=value),)) for value in values
        )
        return predictor([baseline, other], baseline=baseline, roles=roles).gain_of(1)

    assert found("--odd", {"--odd": role}) == found(name, {}) != found("--odd", {})


def test_negative_numbers_have_places_too():
    values = [-4, -1, 0, 2]
    table = CandidateTable.of([dataclasses.replace(BASELINE, own=own(limit=value)) for value in values])
    (places,) = UnmodelledKnobs(table, [], flat_params).places.T
    assert np.isfinite(places).all() and np.all(np.diff(places) > 0)


def test_memory_is_learned_from_peaks_and_from_running_out():
    sizes = [Candidate(micro_batch_size=size) for size in (8, 16, 32, 64)]
    before = predictor(sizes).memory
    assert np.all(np.diff(before.probability_fits()) < 0)
    roomy = before.after({0: 0.1}, (), ())
    assert roomy.probability_fits()[2] > before.probability_fits()[2]
    after_oom = before.after({0: 0.4}, (), (2,)).probability_fits()
    assert after_oom[3] < 0.1 < after_oom[1]


SHARES = MemoryShares(activations=0.4, weights=0.1, gradients=0.1, states=0.2)


@pytest.mark.parametrize("kind", ["accelerator", "cpu"])
def test_a_decomposed_peak_predicts_other_micro_batches(kind):
    """Activations grow with the micro-batch, the rest stays; a second peak shows how far."""
    sizes = [Candidate(micro_batch_size=size) for size in (2, 8, 32)]
    true = np.array([1.0, 2.2, 7.0])  # 0.6 + 0.2 per sample, in units of the first peak
    found = predictor(sizes, baseline=sizes[0], kind=kind)
    plain, belief = (one.after({0: 0.125}, (), ()) for one in (found.memory, found.memory_given({0: SHARES})))
    off = belief.expected_log()[:3] - np.log(0.125 * true)
    assert np.all(np.abs(off) < 2 * belief.std()[:3]) and np.all(np.abs(off) < 0.25)
    assert np.all(belief.std()[1:3] < 0.6 * plain.std()[1:3])
    again = belief.after({1: 0.125 * true[1]}, (), ())
    assert again.std()[2] < belief.std()[2] and abs(again.expected_log()[2] - math.log(0.125 * true[2])) < 0.1
    tight = belief.after({0: 0.5}, (), ()).probability_fits()
    assert tight[0] > 0.9 and tight[1] < 0.5 and tight[2] < 0.01


def test_the_parts_show_what_zero_shards_and_leaves():
    layouts = [Layout(dp_replicate=4), *(Layout(dp_shard=4, zero_stage=stage) for stage in (1, 2, 3))]
    candidates = [Candidate(layout=layout, micro_batch_size=8) for layout in layouts]
    found = predictor(candidates, baseline=candidates[0]).memory_given({0: SHARES}).after({0: 0.5}, (), ())
    relative = np.exp(found.expected_log()[:4]) / 0.5
    assert relative[1:] == pytest.approx([0.85, 0.775, 0.7], abs=0.06)
    activations_only = predictor(candidates, baseline=candidates[0]).memory_given({0: MemoryShares(activations=1.0)})
    assert np.ptp(activations_only.after({0: 0.5}, (), ()).expected_log()[:4]) < 0.02


@pytest.mark.parametrize(
    ("facts", "peak", "is_allocator", "shares"),
    [
        ({"activation_bytes": 40}, 100, True, (0.4, 0.1, 0.1, 0.2)),
        ({"activation_bytes": 65}, 100, True, (0.65, 0.1, 0.05, 0.2)),  # gradients were not there yet
        ({}, 100, True, (0.6, 0.1, 0.1, 0.2)),  # compiled
        ({}, 100, False, None),  # the process is part of the peak
        ({"activation_bytes": 40}, 0, True, None),
        ({"activation_bytes": 200}, 100, False, None),  # untouched storage
    ],
)
def test_a_peak_is_decomposed_by_counted_bytes(facts, peak, is_allocator, shares):
    seen = ScriptFacts(parameter_bytes_local=10, gradient_bytes=10, optimizer_bytes=20, **facts)
    found = shares_of_peak(seen, peak, is_allocator=is_allocator)
    assert (found and dataclasses.astuple(found)) == (shares and pytest.approx(shares))


def test_the_search_is_better_than_tpe_where_memory_binds_and_where_it_does_not():
    for make, seeds in ((script_ranks, (0, 1)), (script_vision, (0, 1))):
        made = [(seed, make(seed)) for seed in seeds]
        by = {name: [search(program, name, seed, 30) for seed, program in made] for name in ("guided", "tpe")}
        trials = {name: sum(one.to_best for one in found) for name, found in by.items()}
        assert trials["guided"] < trials["tpe"]
        assert sum(one.regret(10) for one in by["guided"]) < sum(one.regret(10) for one in by["tpe"])


def test_earlier_sweeps_of_the_same_script_teach_the_next():
    """A custom knob without known effects: the earlier sweep measured that a value halves the step."""
    candidates = [dataclasses.replace(BASELINE, own=own(engine=engine)) for engine in "abcd"]
    rng = random.Random(0)
    earlier = [
        EarlierTrial(
            sweep="one",
            workload=WORKLOAD,
            candidate=candidate,
            step_time_s=(0.5 if candidate.own[0].value == "c" else 1.0) * math.exp(rng.gauss(0.0, 0.01)),
        )
        for candidate in candidates
    ]
    taught = predictor(candidates, baseline=candidates[0], earlier=earlier)
    assert len(taught.earlier) == 4 and taught.earlier_rows == {4, 5, 6, 7}
    known = taught.earlier_times_s
    from orchestrator.search.acquisition import Seen, expected_log_times

    log_times = expected_log_times(taught.posterior(known), Seen(history=known))[:4]
    assert np.argmin(log_times) == 2 and log_times[2] == pytest.approx(math.log(0.5), abs=0.1)


def test_a_program_is_the_same_whatever_trials_fill_in():
    more = dataclasses.replace(SCRIPT, run=(*SCRIPT.run, "--workers={workers}", "--tile", "{tile}"))
    other = dataclasses.replace(SCRIPT, run=("python", "other.py", "--batch", "{micro_batch_size}"))
    fixed = dataclasses.replace(SCRIPT, run=(*SCRIPT.run, "--width", "256"))
    assert same_program(WORKLOAD, dataclasses.replace(WORKLOAD, model=more, global_batch_size=128))
    assert not any(same_program(WORKLOAD, dataclasses.replace(WORKLOAD, model=model)) for model in (other, fixed))
    assert not same_program(WORKLOAD, dataclasses.replace(WORKLOAD, seq_length=128))


def test_gathering_weights_twice_instead_of_once_sends_half_as_much_again():
    layouts = [Layout(dp_shard=4, zero_stage=stage) for stage in (1, 3)]
    several = dataclasses.replace(WORKLOAD, global_batch_size=128)
    pairs = [
        (workload, Candidate(micro_batch_size=16, layout=one)) for workload in (WORKLOAD, several) for one in layouts
    ]
    replicated, gathered, _, again = bytes_sent(KnobColumns.of_pairs(pairs))
    assert gathered / replicated == pytest.approx(1.5) and again / replicated == pytest.approx(3.0)


def test_layouts_count_without_a_cost_model():
    spread = [Candidate(micro_batch_size=8, layout=Layout(dp_replicate=dp)) for dp in (2, 8)]
    assert 1 > gains(spread)[0] > gains(spread)[1] > 0.5, "per device, what is sent costs"


def test_plan_orders_scripts_and_names_the_criterion(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("print('step')\n", encoding="utf-8")
    content = {
        "name": "script",
        "workload": {
            "recipe": "custom",
            "run": ["python", "train.py", "--batch-size", "{micro_batch_size}"],
            "cwd": str(tmp_path),
            "global_batch_size": 16,
            "metrics": {"log": r"step (?P<step>\d+): loss (?P<loss>\S+), (?P<step_ms>\S+) ms"},
        },
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 1},
        "baseline": {"micro_batch_size": 4, "own": {"--workers": 0, "--tile": 8}},
        "space": {"micro_batch_size": [4, 8], "own": {"--workers": [0, 2], "--tile": [8, 16]}},
    }
    file = write(tmp_path, content)
    arguments = ["plan", str(file), "--home", str(tmp_path / "home")]
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert found["forecast"] is None and "dimensions are unknown" in found["unpredicted"]
    top = found["usual"]["top"]
    assert len(top) == 8 and len({round(one["gain"], 6) for one in top}) > 2
    assert all(one["gain_low"] < one["gain"] < one["gain_high"] for one in top)
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(main, arguments, catch_exceptions=False).stdout
    assert "not a model of your program" in shown and max(map(len, shown.splitlines())) <= 80
    why = CliRunner().invoke(main, [*arguments, "--why", "{micro_batch_size: 8}"], catch_exceptions=False).stdout
    assert "typically" in why and "x the speed of the baseline" in why
