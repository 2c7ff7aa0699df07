"""What is planned before a sweep has its cluster, and whether that is the plan it gets."""

import pytest

from cluster.hardware.topology import Topology
from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller
from orchestrator.controller.controller import create, plan_ahead, planned_topology
from orchestrator.errors import ConfigError
from orchestrator.planning.dry_runs import known_topology
from orchestrator.sweep.ledger import Ledger
from tests.support.sweep_files import changed, write
from tests.support.virtual_sweeps import SWEEP, home

RAY = {**SWEEP, "cluster": {"kind": "ray", "address": "10.0.0.1:6379"}}


@pytest.fixture
def plans(monkeypatch):
    """Topologies that plans were made for."""
    made, make_plan = [], controller.make_plan

    def recorded(spec, topology, estimates):
        made.append(topology)
        return make_plan(spec, topology, estimates)

    monkeypatch.setattr(controller, "make_plan", recorded)
    return made


def test_the_plan_made_in_advance_is_used(tmp_path, plans):
    spec, found = load_sweep(write(tmp_path, SWEEP)), home(tmp_path)
    topology = planned_topology(spec, known_topology(spec, found))
    ahead = plan_ahead(spec, found)
    with Ledger(tmp_path) as ledger:
        plan, _ = create(ledger, spec, topology, found, lambda: 0.0, ahead)
    assert plan is ahead.plan
    assert plans == [topology]


def test_a_cluster_other_than_expected_is_planned_again(tmp_path, plans):
    spec, found = load_sweep(write(tmp_path, SWEEP)), home(tmp_path)
    ahead = plan_ahead(spec, found)
    held = Topology(nodes=tuple(reversed(ahead.topology.nodes)))
    with Ledger(tmp_path) as ledger:
        create(ledger, spec, held, found, lambda: 0.0, ahead)
    assert plans == [ahead.topology, held]


def test_a_lease_that_may_grow_is_planned_for_at_its_largest(tmp_path, plans):
    content = changed(SWEEP, ("cluster", "min_nodes"), 1)
    ahead = plan_ahead(load_sweep(write(tmp_path, content)), home(tmp_path))
    assert plans == [ahead.topology]
    assert len(ahead.topology.nodes) == 2


def test_a_file_for_unknown_nodes_is_checked_but_not_planned(tmp_path, plans):
    assert plan_ahead(load_sweep(write(tmp_path, RAY)), home(tmp_path)) is None
    impossible = changed(RAY, ("space", "world_size"), 3)
    with pytest.raises(ConfigError, match="no legal candidate"):
        plan_ahead(load_sweep(write(tmp_path, impossible)), home(tmp_path))
    assert plans == []


def test_nodes_of_a_cluster_are_not_those_of_this_host(tmp_path):
    """One that is named on the command line only, or nowhere yet."""
    several = load_sweep(write(tmp_path, changed(RAY, ("cluster",), {"kind": "ray", "num_nodes": 2})))
    assert known_topology(several) is None
    one = load_sweep(write(tmp_path, changed(RAY, ("cluster",), {"kind": "ray", "device": "cpu"})))
    assert known_topology(one) is not None
    assert known_topology(one, address="10.0.0.1:6379") is None
    assert plan_ahead(one, home(tmp_path), address="10.0.0.1:6379") is None
