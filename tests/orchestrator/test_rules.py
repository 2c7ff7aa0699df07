"""Every rule fires exactly when its arithmetic says so, and agrees with what the runner refuses."""

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.candidates import canonicalize
from orchestrator.rules import RULES, Filters, check, matches
from tests.orchestrator.candidate_strategies import CANDIDATES, DEGREES, WORKLOADS
from tests.orchestrator.sweep_files import topology
from trials import legality
from trials.spec import Candidate, Layout, LlamaModel, NoRecompute, Precision, TextData, Workload

NODES = st.lists(st.integers(1, 8), min_size=1, max_size=4)
WORKLOAD = Workload(
    model=LlamaModel(
        hidden_size=64, num_layers=4, num_heads=8, num_kv_heads=4, ffn_hidden_size=96
    ),
    data=TextData(),
    seq_length=32,
    global_batch_size=16,
)  # fmt: skip


def broken(candidate, workload=WORKLOAD, where=None, filters=None):
    return {violation.rule_id for violation in check(candidate, workload, where, filters)}


def holds(rule_id, expected):
    """A property: ``expected(candidate, workload)`` says when the rule is broken."""

    @given(CANDIDATES, WORKLOADS)
    def test(candidate, workload):
        assert (rule_id in broken(candidate, workload)) == expected(candidate, workload)

    return test


test_shard_needs_zero = holds("shard-needs-zero", lambda c, w: (c.layout.dp_shard == 1) != (c.layout.zero_stage == 0))
test_heads = holds("tp-num-heads", lambda c, w: w.model.num_heads % c.layout.tp != 0)
test_kv_heads = holds("tp-num-kv-heads", lambda c, w: w.model.num_kv_heads % c.layout.tp != 0)
test_hidden = holds("tp-hidden-size", lambda c, w: w.model.hidden_size % c.layout.tp != 0)
test_ffn = holds("tp-ffn-hidden-size", lambda c, w: w.model.ffn_hidden_size % c.layout.tp != 0)
test_vocab = holds("tp-vocab-size", lambda c, w: w.model.vocab_size % c.layout.tp != 0)
test_sp_needs_tp = holds("sp-needs-tp", lambda c, w: c.layout.sequence_parallel and c.layout.tp < 2)
test_sp_seq_length = holds("sp-seq-length", lambda c, w: c.layout.sequence_parallel and w.seq_length % c.layout.tp > 0)
test_zero1_with_tp = holds("zero1-with-tp", lambda c, w: c.layout.zero_stage == 1 and c.layout.tp > 1)
test_ddp_with_tp = holds(
    "ddp-with-tp",
    lambda c, w: (
        c.layout.tp > 1 and c.layout.zero_stage == 0 and c.layout.dp_replicate > 1 and c.layout.replicate_with == "ddp"
    ),
)
test_global_batch = holds(
    "global-batch",
    lambda c, w: (
        w.global_batch_size
        not in range(0, w.global_batch_size + 1, c.micro_batch_size * c.layout.dp_replicate * c.layout.dp_shard)
    ),
)


@given(CANDIDATES, WORKLOADS)
def test_the_planner_rejects_exactly_what_the_runner_refuses(candidate, workload):
    candidate = canonicalize(candidate, workload.model.num_layers)
    assert bool(check(candidate, workload)) == bool(list(legality.violations(workload, candidate)))


@given(DEGREES, NODES)
def test_tp_in_node(tp, nodes):
    found = broken(Candidate(layout=Layout(tp=tp)), where=topology(*nodes))
    assert ("tp-in-node" in found) == all(tp > count for count in nodes)


@given(CANDIDATES, NODES)
def test_fits_lease_counts_whole_tensor_parallel_groups(candidate, nodes):
    layout, groups = candidate.layout, 0
    for free in nodes:
        while free >= layout.tp:
            free -= layout.tp
            groups += 1
    assert ("fits-lease" in broken(candidate, where=topology(*nodes))) == (groups < layout.dp)


@given(CANDIDATES, NODES, st.integers(1, 8))
def test_more_nodes_never_make_it_worse(candidate, nodes, more):
    assert broken(candidate, where=topology(*nodes, more)) <= broken(candidate, where=topology(*nodes))


@given(CANDIDATES, NODES, st.data())
def test_larger_nodes_never_make_it_worse(candidate, nodes, data):
    larger = list(nodes)
    larger[data.draw(st.integers(0, len(nodes) - 1))] += 1
    assert broken(candidate, where=topology(*larger)) <= broken(candidate, where=topology(*nodes))


@given(CANDIDATES, WORKLOADS, NODES)
def test_knowing_the_hardware_only_adds_reasons(candidate, workload, nodes):
    assert broken(candidate, workload) <= broken(candidate, workload, topology(*nodes))


@pytest.mark.parametrize(
    ("kind", "device", "refused"),
    [
        ("cuda", "NVIDIA H200", set()),
        ("cuda", "NVIDIA A100-SXM4-80GB", set()),
        ("cuda", "Tesla V100-SXM2-32GB", {"bfloat16"}),
        ("cuda", "Tesla T4", {"bfloat16"}),
        ("cuda", "NVIDIA GeForce RTX 2080 Ti", {"bfloat16"}),
        ("cuda", "Tesla P100-PCIE-16GB", {"bfloat16", "float16"}),
        ("cuda", "some accelerator nobody knows", set()),
        ("cpu", "Intel(R) Xeon(R) CPU", set()),
    ],
)
def test_amp_dtype_refuses_only_what_is_known_not_to_work(kind, device, refused):
    where = topology(1, kind=kind, name=device)
    found = {
        dtype
        for dtype in ("bfloat16", "float16")
        if "amp-dtype" in broken(Candidate(precision=Precision(level="O1", dtype=dtype)), where=where)
    }
    assert found == refused
    assert "amp-dtype" not in broken(Candidate(), where=where)


PATTERNS = st.fixed_dictionaries(
    {},
    optional={
        "tp": st.sampled_from([(1,), (2, 4)]),
        "micro_batch_size": st.sampled_from([(1, 2), (8,)]),
        "recompute": st.just((NoRecompute(),)),
        "world_size": st.sampled_from([(1,), (2, 4, 8)]),
    },
).filter(bool)


def selected(candidate, name):
    return {
        "tp": candidate.layout.tp,
        "micro_batch_size": candidate.micro_batch_size,
        "recompute": candidate.recompute,
        "world_size": candidate.layout.world_size,
    }[name]


@given(CANDIDATES, PATTERNS)
def test_a_pattern_matches_when_all_its_knobs_do(candidate, pattern):
    expected = True
    for name, accepted in pattern.items():
        expected = expected and selected(candidate, name) in accepted
    assert matches(pattern, candidate) == expected


@given(CANDIDATES, st.lists(PATTERNS, max_size=3), st.lists(PATTERNS, max_size=3))
def test_forbid_and_require_are_opposites(candidate, forbid, require):
    found = broken(candidate, filters=Filters(forbid=tuple(forbid), require=tuple(require))) - broken(candidate)
    assert found == {
        *(f"forbid.{i}" for i, pattern in enumerate(forbid) if matches(pattern, candidate)),
        *(f"require.{i}" for i, pattern in enumerate(require) if not matches(pattern, candidate)),
    }


@given(CANDIDATES, st.lists(st.integers(1, 16), min_size=1, max_size=4))
def test_world_size_is_a_filter(candidate, sizes):
    found = broken(candidate, filters=Filters(world_size=tuple(sizes)))
    assert ("world-size" in found) == (candidate.layout.world_size not in sizes)


@given(CANDIDATES, WORKLOADS, NODES)
def test_rules_keep_their_promise_about_what_they_read(candidate, workload, nodes):
    other = Candidate(layout=candidate.layout, micro_batch_size=candidate.micro_batch_size)
    on_layout = {rule.id for rule in RULES if rule.reads == "layout"}
    where = topology(*nodes)
    assert broken(candidate, workload, where) & on_layout == broken(other, workload, where) & on_layout


@given(CANDIDATES, WORKLOADS, NODES)
def test_reasons_are_one_line(candidate, workload, nodes):
    for violation in check(candidate, workload, topology(*nodes)):
        assert violation.reason and "\n" not in violation.reason


def test_rule_ids_are_unique():
    assert len({rule.id for rule in RULES}) == len(RULES)


@given(CANDIDATES, WORKLOADS)
def test_one_device_runs_every_plain_candidate(candidate, workload):
    plain = dataclasses.replace(candidate, layout=Layout(), precision=Precision())
    assume(workload.global_batch_size % plain.micro_batch_size == 0)
    assert broken(plain, workload, topology(1)) == set()
