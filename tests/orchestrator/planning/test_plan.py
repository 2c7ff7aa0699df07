"""The plan: everything is accounted for, nothing illegal gets through, and the reasons add up."""

import json

import pytest
from hypothesis import given

from orchestrator.config.sweep import load_sweep
from orchestrator.errors import ConfigError
from orchestrator.planning.planner import NUM_EXAMPLES, check_plan, make_plan
from orchestrator.space.rules import check
from orchestrator.space.space import make_space
from tests.orchestrator.space.test_space import SPACES, spec_with
from tests.support.sweep_files import FULL, SMALL, topology, write


@given(SPACES)
def test_every_combination_is_a_candidate_a_rejection_or_a_duplicate(space):
    spec = spec_with(space)
    if spec is None:
        return
    where, workload = topology(4), spec.to_workload()
    space = make_space(spec.choices, workload.model)
    verdicts = [(candidate, check(candidate, workload, where, spec.filters)) for candidate in space]
    legal = tuple(candidate for candidate, found in verdicts if not found)
    if not legal:
        for refuse in (make_plan, check_plan):
            with pytest.raises(ConfigError, match="no legal candidate"):
                refuse(spec, where)
        return
    check_plan(spec, where)
    plan = make_plan(spec, where)
    assert tuple(plan.candidates) == legal
    assert plan.product_size == len(plan.candidates) + sum(plan.num_rejected.values()) + plan.num_duplicates
    first_rules = [found[0].rule_id for _, found in verdicts if found]
    assert plan.num_rejected == {rule_id: first_rules.count(rule_id) for rule_id in set(first_rules)}


def full_plan(folder, where=None):
    spec = load_sweep(write(folder, FULL))
    return spec, make_plan(spec, where)


def test_examples_are_rejected_for_the_reason_given(tmp_path):
    spec, plan = full_plan(tmp_path, topology(2))
    assert {example.rule_id for example in plan.examples} == set(plan.num_rejected)
    for example in plan.examples:
        first = check(example.candidate, spec.to_workload(), topology(2), spec.filters)[0]
        assert (first.rule_id, first.reason) == (example.rule_id, example.reason)
    for rule_id in plan.num_rejected:
        assert 1 <= sum(example.rule_id == rule_id for example in plan.examples) <= NUM_EXAMPLES
    assert list(plan.num_rejected.values()) == sorted(plan.num_rejected.values(), reverse=True)


def test_the_users_filters_hold(tmp_path):
    _, plan = full_plan(tmp_path)
    assert {candidate.layout.world_size for candidate in plan.candidates} <= {1, 2, 4}
    assert all(candidate.layout.tp == 1 for candidate in plan.candidates)  # forbidden with every micro-batch size


def test_patterns_compare_whole_canonical_values(tmp_path):
    space = {
        "recompute": ["none", {"full": 2}, "full"],
        "precision": ["O1", {"level": "O1", "dtype": "float16"}],
        "forbid": [{"recompute": {"full": 4}}, {"precision": "O1"}],
    }
    plan = make_plan(load_sweep(write(tmp_path, {**SMALL, "space": space})))
    assert {candidate.precision.dtype for candidate in plan.candidates} == {"float16"}
    assert {candidate.recompute.full for candidate in plan.candidates} == {(), ((2,),)}


def test_the_baseline_is_exempt_from_the_users_filters_only(tmp_path):
    content = {**SMALL, "baseline": {"dp_replicate": 2}, "space": {"dp_replicate": [1, 2], "world_size": 1}}
    plan = make_plan(load_sweep(write(tmp_path, content)), topology(2))
    assert plan.baseline.layout.world_size == 2
    assert [candidate.layout.world_size for candidate in plan.candidates] == [1]


def test_a_smaller_lease_leaves_a_part_of_the_candidates(tmp_path):
    _, everywhere = full_plan(tmp_path)
    _, here = full_plan(tmp_path, topology(2))
    assert set(here.candidates) < set(everywhere.candidates)
    assert here.num_rejected["fits-lease"] > 0
    assert here.product_size == everywhere.product_size


def test_the_order_is_fixed(tmp_path):
    assert full_plan(tmp_path)[1] == full_plan(tmp_path)[1]


def test_json(tmp_path):
    _, plan = full_plan(tmp_path, topology(2))
    data = json.loads(json.dumps(plan.to_json()))
    assert data["num_legal"] == len(data["candidates"]) == len(plan.candidates)
    assert data["candidates"][0]["config_key"] == plan.candidates[0].config_key
    assert sum(entry["count"] for entry in data["rejected"]) == sum(plan.num_rejected.values())
    assert all(entry["examples"][0]["reason"] for entry in data["rejected"])


def test_a_large_space_is_counted_without_building_its_illegal_part(tmp_path):
    numbers = list(range(1, 51))
    space = {"dp_replicate": numbers, "dp_shard": numbers, "micro_batch_size": numbers, "zero_stage": 3}
    space["world_size"] = list(range(1, 65))
    plan = make_plan(load_sweep(write(tmp_path, {**SMALL, "space": space})), topology(8, 8))
    assert plan.product_size == 50**3
    assert len(plan.candidates) == sum(
        16 % (replicate * shard * size) == 0 for replicate in numbers for shard in numbers for size in numbers
    )
    assert len(plan.examples) <= NUM_EXAMPLES * len(plan.num_rejected)


SIZES = {"dp_replicate": [1, 2, 4, 8], "micro_batch_size": [1, 2]}


def planned(folder, space, *nodes, **cluster):
    content = {**SMALL, "space": space, "cluster": {"kind": "ray", "address": "127.0.0.1:6379", **cluster}}
    return make_plan(load_sweep(write(folder, content)), topology(*nodes) if nodes else None)


def world_sizes(plan):
    return {candidate.layout.world_size for candidate in plan.candidates}


def test_candidates_use_the_whole_lease_unless_the_file_names_other_numbers(tmp_path):
    plan = planned(tmp_path, SIZES, 4, 4, num_nodes=2)
    assert (world_sizes(plan), plan.num_rejected) == ({8}, {"world-size": 6})
    assert plan.devices == (
        "candidates use 8 of 8 devices, the baseline 1; 6 with other device counts are excluded: "
        "set space.world_size to try them"
    )
    assert plan.examples[0].reason == "uses 1 of 8 devices, and space.world_size does not allow 1"
    named = planned(tmp_path, {**SIZES, "world_size": [2, 8]}, 4, 4, num_nodes=2)
    assert (world_sizes(named), named.devices) == ({2, 8}, "candidates use 2, 8 of 8 devices, the baseline 1")


def test_of_a_lease_that_may_shrink_the_part_that_is_always_held_counts(tmp_path):
    assert world_sizes(planned(tmp_path, SIZES, 4, 4, num_nodes=2, min_nodes=1)) == {4}


def test_with_unknown_devices_no_candidate_is_omitted_yet(tmp_path):
    plan = planned(tmp_path, SIZES)
    assert (world_sizes(plan), plan.devices) == ({1, 2, 4, 8}, "")


def test_a_space_without_the_whole_lease_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"uses 1 of 3 devices") as refused:
        planned(tmp_path, {"micro_batch_size": [1, 2]}, 3)
    assert "space.world_size" in refused.value.remedy
