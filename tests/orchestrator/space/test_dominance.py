"""Dominance by memory: laws of a partial order, soundness against a memory model, witnesses."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.space.rules import Pruner
from trials.spec import Candidate, Kernels, Layout, Loader, Precision, Recompute, SelectiveRecompute

GLOBAL_BATCH = 64
LAYERS = ((3, 2), (2, 3))


def dominates_memory(a, b, *, global_batch_size=None):
    """Whether ``a`` needs at least as much memory as ``b``."""
    return bool(Pruner([a], global_batch_size=global_batch_size).add(b))


def pruned(candidates, witnesses):
    """Rule and witness of every candidate that is ruled out."""
    pruner = Pruner(candidates)
    return {
        candidates[row]: (rule_id, witness)
        for witness in dict.fromkeys(witnesses)
        for row, rule_id in pruner.add(witness).items()
    }


@st.composite
def recomputes(draw, shape):
    """Canonical: nothing selective below full, no pattern without layers."""

    def counts(least):
        return tuple(tuple(draw(st.integers(low, 2)) for low in row) for row in least)

    zero = tuple((0,) * shape[1] for _ in range(shape[0]))
    full = draw(st.just(zero) | st.builds(lambda: counts(zero)))
    selective = []
    for pattern in draw(st.sampled_from([(), ("mul",), ("mul", "norm")])):
        chosen = counts(full)
        if chosen != full:
            selective.append(SelectiveRecompute(pattern=pattern, num_layers=chosen))
    communication = draw(st.sampled_from([zero, full])) if full == zero else zero
    return Recompute(
        full=() if full == zero else full,
        selective=tuple(selective),
        communication=() if communication == zero else communication,
    )


@st.composite
def candidates(draw):
    """Canonical candidates, close enough to each other to be comparable now and then."""
    pp, v, layers = draw(st.sampled_from([(1, 1, ()), (2, 1, ((4, 6),)), (2, 2, LAYERS)]))
    zero_stage = draw(st.integers(0, 3))
    tp, cp = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([1, 1, 2]))
    layout = Layout(
        pp=pp,
        dp_replicate=draw(st.sampled_from([1, 2])),
        dp_shard=draw(st.sampled_from([2, 4])) if zero_stage else 1,
        cp=cp,
        tp=tp,
        zero_stage=zero_stage,
        replicate_with=draw(st.sampled_from(["ddp", "fsdp2"])) if zero_stage == 0 else "ddp",
        sequence_parallel=tp > 1 and draw(st.booleans()),
        tp_engine=draw(st.sampled_from(["dtensor", "local"])) if tp > 1 else "dtensor",
        cp_method=draw(st.sampled_from(["all_gather", "ulysses"])) if cp > 1 else "all_gather",
        schedule="interleaved" if v > 1 else "1f1b",
        num_virtual_stages=v,
        stage_layers=layers,
    )
    return Candidate(
        layout=layout,
        micro_batch_size=draw(st.sampled_from([1, 2, 4])),
        recompute=draw(recomputes((v, pp))),
        precision=draw(st.sampled_from([Precision(), Precision(level="O1", dtype="bfloat16")])),
        loader=draw(st.sampled_from([Loader(), Loader(num_workers=2, prefetch_factor=2)])),
    )


@st.composite
def pairs(draw):
    """A candidate and another that differs in few knobs."""
    a, b = draw(candidates()), draw(candidates())
    mixed = {
        name: getattr(draw(st.sampled_from([a, a, b])), name) for name in ("micro_batch_size", "precision", "loader")
    }
    if a.layout.stage_layers == b.layout.stage_layers and draw(st.booleans()):
        mixed["recompute"] = b.recompute
    if a.layout.stage_layers == b.layout.stage_layers and draw(st.booleans()):
        mixed["layout"] = b.layout
    return a, dataclasses.replace(a, **mixed)


def memory(c, weights, activation):
    """Bytes of the fullest rank by a plain model: states over shards, activations in flight, and what is kept."""
    layout = c.layout
    shard = [1 if layout.zero_stage < least else layout.dp_shard for least in (3, 2, 1)]
    states = sum(size / share for size, share in zip((2, 4, 12), shard, strict=True)) * weights / layout.tp
    norms = 1 / layout.tp if layout.sequence_parallel else 1.0
    m = max(1, c.num_microbatches(GLOBAL_BATCH))
    shape = layout.stage_layers or ((10,),)
    selective = {part.pattern: part.num_layers for part in c.recompute.selective}
    worst = 0.0
    for stage in range(layout.pp):
        held = min(m, layout.pp - stage) if layout.num_virtual_stages == 1 else min(m, layout.pp + 1)
        kept = 0.0
        for chunk, row in enumerate(shape):
            for layer in range(row[stage]):
                full = c.recompute.full and layer < c.recompute.full[chunk][stage]
                parts = {"rest": 3.0 / layout.tp + norms, "mul": 1.5 / layout.tp, "norm": norms}
                for pattern, counts in selective.items():
                    if layer < counts[chunk][stage]:
                        parts[pattern] = 0.0
                kept += 0.1 * norms if full else sum(parts.values())
        embedding = weights / (2 if layout.shard_embedding else 1)
        worst = max(worst, held * kept * activation * c.micro_batch_size / layout.cp + embedding)
    return states + worst + 1e-3 * c.loader.num_workers


@settings(deadline=None)
@given(candidates())
def test_reflexive(a):
    assert dominates_memory(a, a)


@settings(max_examples=100, deadline=None)
@given(pairs())
def test_antisymmetric_on_canonical_candidates(pair):
    a, b = pair
    if dominates_memory(a, b) and dominates_memory(b, a):
        assert a == b


@settings(max_examples=100, deadline=None)
@given(pairs(), st.data())
def test_transitive(pair, data):
    a, b = pair
    _, c = data.draw(pairs())
    for x, y, z in ((a, b, c), (a, c, b), (c, a, b), (b, a, c)):
        if dominates_memory(x, y) and dominates_memory(y, z):
            assert dominates_memory(x, z)


@settings(max_examples=200, deadline=None)
@given(pairs(), st.floats(0.1, 100), st.floats(0.1, 100))
def test_sound_for_a_plain_memory_model(pair, weights, activation):
    for a, b in (pair, pair[::-1]):
        if dominates_memory(a, b, global_batch_size=GLOBAL_BATCH):
            assert memory(a, weights, activation) >= memory(b, weights, activation) * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(candidates(), min_size=1, max_size=8), st.lists(st.integers(0, 7), max_size=3))
def test_exactly_what_dominates_a_witness_is_pruned(space, chosen):
    space += [dataclasses.replace(c, micro_batch_size=4) for c in space]
    witnesses = [space[i % len(space)] for i in chosen]
    found = pruned(space, witnesses)
    for candidate in space:
        expected = [w for w in witnesses if dominates_memory(candidate, w)]
        assert (candidate in found) == bool(expected)
        if expected:
            assert found[candidate][1] == expected[0]


def test_the_directions():
    base = Candidate(
        layout=Layout(dp_replicate=1, dp_shard=2, zero_stage=2, tp=2),
        recompute=Recompute(full=((2,),)),
        micro_batch_size=2,
    )

    def changed(**fields):
        layout = {name: fields.pop(name) for name in list(fields) if hasattr(base.layout, name)}
        return dataclasses.replace(base, layout=dataclasses.replace(base.layout, **layout), **fields)

    more = {
        "oom-micro-batch-size": changed(micro_batch_size=4),
        "oom-recompute": changed(recompute=Recompute(full=((1,),))),
        "oom-zero-stage": changed(zero_stage=1),
        "oom-tp": changed(tp=1),
        "oom-num-workers": changed(loader=Loader(num_workers=1)),
        "oom-several": changed(micro_batch_size=4, tp=1),
        "oom-same": base,
    }
    less = [
        changed(micro_batch_size=1),
        changed(recompute=Recompute(full=((3,),))),
        changed(zero_stage=3),
        changed(tp=4),
        changed(cp=2),
        changed(sequence_parallel=True),
        changed(dp_shard=4),
        changed(shard_embedding=True),
    ]
    found = pruned([*more.values(), *less], [base])
    assert {rule_id: candidate for candidate, (rule_id, _) in found.items()} == more
    back = pruned([base], less)
    assert back[base][1] == less[0]
    assert all(dominates_memory(base, candidate) for candidate in less)


@pytest.mark.parametrize(
    "other",
    [
        Candidate(layout=Layout(num_copies=2)),
        Candidate(precision=Precision(level="O2", dtype="bfloat16")),
        Candidate(kernels=Kernels(compile="block")),
        Candidate(layout=Layout(pp=2, stage_layers=((2, 2),))),
    ],
)
def test_undeclared_knobs_are_not_compared(other):
    assert not dominates_memory(other, Candidate())
    assert not dominates_memory(Candidate(), other)


def test_interleaved_and_plain_schedules_are_not_compared():
    plain = Candidate(layout=Layout(pp=2, stage_layers=((4, 4),)))
    layout = Layout(pp=2, num_virtual_stages=2, schedule="interleaved", stage_layers=((2, 2), (2, 2)))
    assert not dominates_memory(Candidate(layout=layout), plain)
    assert not dominates_memory(plain, Candidate(layout=layout))


def test_two_engines_are_not_compared_but_both_with_none():
    one, dtensor = Candidate(layout=Layout(tp=1)), Candidate(layout=Layout(tp=2))
    local = Candidate(layout=Layout(tp=2, tp_engine="local"))
    assert dominates_memory(one, dtensor)
    assert dominates_memory(one, local)
    assert not dominates_memory(local, dtensor)
    assert not dominates_memory(dtensor, local)


def test_accumulating_gradients_is_not_compared_with_one_micro_batch():
    small, large = Candidate(micro_batch_size=1), Candidate(micro_batch_size=2)
    assert dominates_memory(large, small)
    assert dominates_memory(large, small, global_batch_size=4)
    assert not dominates_memory(large, small, global_batch_size=2)


def test_inferred_outcomes_are_no_evidence():
    """A pruned candidate prunes nothing itself: only its witness's own dominators go."""
    small, middle, large = (Candidate(micro_batch_size=size) for size in (1, 2, 4))
    found = pruned([small, middle, large], [middle])
    assert set(found) == {middle, large}
    assert {witness for _, witness in found.values()} == {middle}


def test_one_witness_prunes_a_quadrant_of_a_large_space():
    space = [
        Candidate(layout=Layout(dp_replicate=r, tp=tp), micro_batch_size=m, recompute=Recompute(full=((n,),)))
        for r, tp, m, n in itertools.product(range(1, 11), range(1, 11), range(1, 11), range(1, 21))
    ]
    witness = Candidate(layout=Layout(dp_replicate=5, tp=3), micro_batch_size=9, recompute=Recompute(full=((4,),)))
    assert len(pruned(space, [witness])) == 5 * 3 * 2 * 4
