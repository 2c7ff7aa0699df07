"""Whole sweeps on a real Ray of several hosts, with a fault in each: nothing is lost, doubled or left behind, and the
result is that of the undisturbed sweep."""

import pytest

from tests.end_to_end.nodes.endure import endure
from tests.end_to_end.nodes.faults import FAULTS
from tests.end_to_end.nodes.namespaces import why_not
from tests.end_to_end.nodes.ray_nodes import RayNodes
from tests.end_to_end.nodes.trial_sweep import Stage, Sweep

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.fault, pytest.mark.timeout(600)]


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


SWEEPS = (
    ("agent killed", "rank killed", "disk full"),
    ("warden killed", "raylet killed", "MLflow away"),
    ("node frozen", "controller killed", "controller and supervisor killed"),
    ("link cut", "head killed"),
    ("collective hangs",),
)
"""Faults of one sweep, one after the other: all but the last leave the gang they hit to be launched again."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", SWEEPS, ids=lambda names: ", ".join(names))
def test_faults_lose_double_and_leave_nothing(names, repaired, stage, undisturbed, tmp_path):
    endured = endure([FAULTS[name] for name in names], repaired, stage, tmp_path, undisturbed)
    print(*(f"{name}: detected {s:.1f} s" for name, s in zip(names, endured.detected_s, strict=True)), sep="\n")
    assert endured.problems == ()
    assert endured.leaks == ()


def test_no_fault_is_left_out():
    assert sorted(name for names in SWEEPS for name in names) == sorted(FAULTS)
