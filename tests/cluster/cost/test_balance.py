"""The stage balancer against trying everything, and on the shapes it is for."""

import itertools
import math
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.cost.balancer import balance
from cluster.cost.stage_balance import MAX_COMBINATIONS, BalanceProblem, DoesNotFitError, LayerState
from cluster.cost.work import in_flight_peaks

GIB = 2.0**30
NONE = LayerState(name="none", activation_bytes=10)
SILU = LayerState(name="silu", activation_bytes=7, extra_s=0.1, patterns=("mul",))
FULL = LayerState(name="full", activation_bytes=1, extra_s=0.9, transient_bytes=10, is_full=True)


def problem(**changes):
    values = {
        "num_layers": 8,
        "pp": 4,
        "num_microbatches": 8,
        "layer_s": 3.0,
        "layer_bytes": 0,
        "memory_limit_bytes": 1000,
        "states": (NONE, SILU, FULL),
    } | changes
    values.setdefault("fixed_bytes", (0.0,) * values["pp"])
    return BalanceProblem(**values)


@st.composite
def small_problems(draw):
    pp, v = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2)]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b"])) if v == 1 else draw(st.sampled_from(["interleaved", "zbv"]))
    return problem(
        num_layers=draw(st.integers(pp * v, 6)),
        pp=pp,
        num_virtual_stages=v,
        schedule=schedule,
        num_microbatches=draw(st.sampled_from([1, 2, 4])) * pp,
        layer_s=draw(st.sampled_from([1.0, 2.5])),
        head_s=draw(st.sampled_from([0.0, 2.2])),
        layer_bytes=draw(st.sampled_from([0, 3])),
        fixed_bytes=tuple(draw(st.lists(st.sampled_from([0.0, 4.0, 11.0]), min_size=pp, max_size=pp))),
        memory_limit_bytes=draw(st.integers(10, 160)) + 0.5,
        states=draw(st.sampled_from([(NONE,), (NONE, FULL), (NONE, SILU, FULL)])),
    )


def every_split(p):
    """Every way to split the layers, as counts ``[stage][chunk][state]``."""
    states, v = len(p.states), p.num_virtual_stages
    cell = [c for c in itertools.product(range(p.num_layers + 1), repeat=states) if 1 <= sum(c) <= p.num_layers]
    rank = [
        chunks
        for chunks in itertools.product(cell, repeat=v)
        if max(map(sum, chunks)) - min(map(sum, chunks)) <= p.max_chunk_difference
    ]
    by_size = {}
    for chunks in rank:
        by_size.setdefault(sum(map(sum, chunks)), []).append(chunks)
    for sizes in itertools.product(by_size, repeat=p.pp):
        if sum(sizes) == p.num_layers:
            yield [by_size[size] for size in sizes]


def bytes_of(p, stage, chunks):
    peaks = in_flight_peaks(
        p.schedule, pp=p.pp, num_virtual_stages=p.num_virtual_stages, num_microbatches=p.num_microbatches
    )
    kept = [sum(n * state.activation_bytes for n, state in zip(cell, p.states, strict=True)) for cell in chunks]
    used = [state.transient_bytes for k, state in enumerate(p.states) if any(cell[k] for cell in chunks)]
    held = max(sum(a * b for a, b in zip(moment, kept, strict=True)) for moment in peaks[stage])
    return p.fixed_bytes[stage] + p.layer_bytes * sum(map(sum, chunks)) + held + max(used)


def seconds_of(p, stage, chunks):
    return p.edge_s[stage] + sum(
        n * (p.layer_s + state.extra_s) for cell in chunks for n, state in zip(cell, p.states, strict=True)
    )


def shortest_step_by_trying(p):
    """The shortest step of any split: stages do not share memory, so each takes its fastest way to hold its layers."""
    best = math.inf
    for choices in every_split(p):
        seconds = [
            min((seconds_of(p, s, chunks) for chunks in options if bytes_of(p, s, chunks) <= p.memory_limit_bytes),
                default=math.inf)
            for s, options in enumerate(choices)
        ]  # fmt: skip
        if math.inf not in seconds:
            share = {"zbv": 0.0}.get(p.schedule, 1 / p.num_virtual_stages)
            best = min(best, p.num_microbatches * max(seconds) + share * (sum(seconds) - max(seconds)))
    return best


@settings(max_examples=40, deadline=None)
@given(small_problems(), st.sampled_from([MAX_COMBINATIONS, 0]))
def test_as_good_as_trying_everything(p, max_combinations):
    """With all combinations of a stage tried, and by the integer program."""
    with mock.patch("cluster.cost.stage_balance.MAX_COMBINATIONS", max_combinations):
        check_against_everything(p)


def check_against_everything(p):
    best = shortest_step_by_trying(p)
    if best == math.inf:
        with pytest.raises(DoesNotFitError) as error:
            balance(p)
        assert error.value.shortage_bytes > 0
        assert 0 <= error.value.stage < p.pp
        return
    found = balance(p)
    assert found.step_s == pytest.approx(best)
    assert found.bound_s == pytest.approx(best)
    assert max(found.peak_bytes) <= p.memory_limit_bytes


@settings(max_examples=60, deadline=None)
@given(small_problems())
def test_the_answer_is_consistent(p):
    try:
        found = balance(p)
    except DoesNotFitError:
        return
    terms = (found.ideal_s, found.recompute_s, found.imbalance_s, found.bubble_s)
    assert sum(terms) == pytest.approx(found.step_s)
    assert min(terms) >= -1e-9
    assert sum(map(sum, found.stage_layers)) == p.num_layers
    for stage in range(p.pp):
        chunks = [[found.state_counts[state.name][c][stage] for state in p.states] for c in range(p.num_virtual_stages)]
        assert [sum(cell) for cell in chunks] == [row[stage] for row in found.stage_layers]
        assert found.stage_s[stage] == pytest.approx(seconds_of(p, stage, chunks))
        assert found.peak_bytes[stage] == pytest.approx(bytes_of(p, stage, chunks))


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 5))
def test_peak_moments_follow_the_schedule(pp, v, rounds):
    m = pp * rounds
    for stage, moments in enumerate(in_flight_peaks("interleaved", pp=pp, num_virtual_stages=v, num_microbatches=m)):
        assert max(map(sum, moments)) == min(m * v, 2 * (pp - stage - 1) + (v - 1) * pp + 1)
        assert all(0 <= count <= m for moment in moments for count in moment)


def test_early_stages_recompute_more():
    """1F1B's first rank holds the most micro-batches."""
    found = balance(problem(num_layers=16, memory_limit_bytes=100, states=(NONE, FULL)))
    full = found.state_counts["full"][0]
    assert full[0] > full[-1] == 0
    assert list(full) == sorted(full, reverse=True)


def test_counts_become_recompute_of_first_layers():
    states = (NONE, SILU, FULL)
    p = problem(num_layers=6, pp=2, stage_layers=((3, 3),), state_counts=(((1, 1),), ((2, 0),)), states=states)
    found = balance(p)
    assert found.recompute.full == ((2, 0),)
    (selective,) = found.recompute.selective
    assert (selective.pattern, selective.num_layers) == ("mul", ((3, 1),))
    assert found.recompute.communication == ()


def test_given_layers_leave_only_recompute_to_choose():
    found = balance(problem(stage_layers=((5, 1, 1, 1),), memory_limit_bytes=130))
    assert found.stage_layers == ((5, 1, 1, 1),)
    assert found.state_counts["none"] != found.stage_layers


def test_given_recompute_leaves_only_layers_to_choose():
    found = balance(problem(states=(NONE, FULL), state_counts=(((2, 0, 0, 0),),), head_s=2.0))
    assert found.state_counts["full"] == ((2, 0, 0, 0),)
    assert sum(found.stage_layers[0]) == 8
    assert found.stage_layers[0][0] >= 2


def test_the_stage_that_lacks_memory_is_named():
    with pytest.raises(DoesNotFitError, match=r"stage 2 lacks 0.50 GiB for 2 layers") as error:
        balance(
            problem(
                layer_bytes=GIB,
                stage_layers=((2, 2, 2, 2),),
                fixed_bytes=(0, 0, 1.5 * GIB, 0),
                memory_limit_bytes=3 * GIB + 1000,
            )
        )
    assert error.value.stage == 2


def test_offsets_are_those_of_mindformers():
    found = balance(problem(num_layers=12, stage_layers=((1, 4, 4, 3),)))
    assert found.offset == ((-2, 1, 1, 0),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fixed_bytes": (0.0,)}, "1 entries for pp 4"),
        ({"states": (FULL,)}, "keeps everything"),
        ({"num_layers": 3}, "do not fill"),
        ({"stage_layers": ((2, 2, 2, 1),)}, "sum to 7, not 8"),
        ({"schedule": "zbv"}, "2 virtual stages"),
        ({"states": (NONE, SILU, LayerState(name="norm", activation_bytes=5, patterns=("norm",)))}, "must also"),
    ],
)
def test_invalid_problems_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        problem(**changes)


@pytest.mark.parametrize("limit_gib", [60, 14, 8])
def test_a_large_pipeline_is_solved_to_the_end(limit_gib):
    """16 ranks, 3 chunks, 100 layers, four ways to treat a layer."""
    unit = GIB / 8
    states = (
        LayerState(name="none", activation_bytes=unit),
        LayerState(name="silu", activation_bytes=0.75 * unit, extra_s=0.02, patterns=("mul",)),
        LayerState(name="norm", activation_bytes=0.6 * unit, extra_s=0.06, patterns=("mul", "norm")),
        LayerState(name="full", activation_bytes=0.05 * unit, extra_s=0.33, transient_bytes=unit, is_full=True),
    )
    found = balance(
        problem(
            num_layers=100,
            pp=16,
            num_virtual_stages=3,
            schedule="interleaved",
            num_microbatches=64,
            layer_s=1.0,
            head_s=1.5,
            layer_bytes=0.3 * GIB,
            fixed_bytes=(3 * GIB, *(GIB,) * 14, 4 * GIB),
            memory_limit_bytes=limit_gib * GIB,
            states=states,
        )
    )
    assert found.gap == 0
    assert max(found.peak_bytes) <= limit_gib * GIB * (1 + 1e-6)
    assert sum(map(sum, found.stage_layers)) == 100


def test_a_time_limit_leaves_an_honest_gap(monkeypatch):
    """Out of time after the first splits: the bound is that of a perfectly divisible model."""
    clock = itertools.count(step=0.1)
    monkeypatch.setattr("cluster.cost.balancer.time.monotonic", lambda: next(clock))
    found = balance(problem(num_layers=17, head_s=1.0, memory_limit_bytes=90), time_limit_s=2.5)
    assert 0 < found.gap < 1
    assert found.bound_s < found.step_s
    with pytest.raises(TimeoutError):
        balance(problem(num_layers=17), time_limit_s=0.15)


def test_llama_13b_on_two_nodes_recomputes_few_layers_and_none_late():
    """The guide's case: 64 GB cards, pp 2, 128 micro-batches, 40 layers; its expert ended at 4 and 0 layers in full,
    with SiLU and Mul recomputed elsewhere. Sizes: 16-bit activations of a flash-attention layer, 34 s h bytes and
    8 s f for SwiGLU instead of GeLU's; weights 2 + 2 bytes, states 12 sharded by 8."""
    s, h, f, parameters = 4096, 5120, 13824, 317e6
    kept = s * (18 * h + 8 * f)
    states = (
        LayerState(name="none", activation_bytes=kept),
        LayerState(name="silu", activation_bytes=kept - 4 * s * f, extra_s=0.004, patterns=(r"feed_forward\.mul",)),
        LayerState(name="full", activation_bytes=2 * s * h, extra_s=0.1, transient_bytes=kept, is_full=True),
    )
    embedding = 32000 * h * (4 + 12 / 8)
    found = balance(
        problem(
            num_layers=40,
            pp=2,
            num_microbatches=128,
            layer_s=0.3,
            head_s=0.1,
            layer_bytes=parameters * (4 + 12 / 8),
            fixed_bytes=(embedding + 2e9, embedding + s * 32000 * 10 + 2e9),
            memory_limit_bytes=57.2 * GIB,
            states=states,
            stage_layers=((20, 20),),
        )
    )
    full, silu = found.state_counts["full"][0], found.state_counts["silu"][0]
    assert full[1] == 0
    assert 0 <= full[0] <= 8
    assert silu[0] > silu[1]
    print(found)
    assert found.recompute_s < 0.05 * found.ideal_s
