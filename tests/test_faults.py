"""Whole sweeps on a real Ray of several hosts, with a fault in each: nothing is lost, doubled or left behind, and the
result is that of the undisturbed sweep."""

import pytest

from tests.nodes.endure import endure
from tests.nodes.faults import FAULTS
from tests.nodes.namespaces import why_not
from tests.nodes.ray_nodes import RayNodes
from tests.nodes.trial_sweep import Stage, Sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.fault,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    return Stage(tmp_path_factory.mktemp("faults") / "stage")


@pytest.fixture(scope="module")
def cluster(stage, tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    nodes = RayNodes(tmp_path_factory.mktemp("nodes"))
    nodes.env |= stage.env
    with nodes:
        yield nodes


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    sweep = Sweep(cluster, tmp_path_factory.mktemp("undisturbed"))
    sweep.run()
    return sweep.story()


@pytest.fixture
def repaired(cluster):
    yield cluster
    cluster.repair()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_loses_doubles_and_leaves_nothing(name, repaired, stage, undisturbed, tmp_path):
    endured = endure(FAULTS[name], repaired, stage, tmp_path, undisturbed)
    print(f"{name}: detected {endured.detected_s:.1f} s, recovered {endured.recovered_s:.1f} s")
    assert endured.problems == ()
    assert endured.leaks == ()
