import pytest

from cluster.connect import connect
from cluster.hardware.topology import discover_node
from cluster.local import LocalCluster
from cluster.request import ClusterRequest
from tests.cluster.gangs import PRELOAD


@pytest.fixture(scope="module")
def local_cluster(tmp_path_factory):
    with LocalCluster(tmp_path_factory.mktemp("local"), discover_node(num_devices=4), preload=PRELOAD) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory):
    with connect(
        ClusterRequest(devices_per_node=4), workdir=tmp_path_factory.mktemp("ray"), preload=PRELOAD
    ) as cluster:
        yield cluster


@pytest.fixture
def pids(tmp_path):
    """Where the processes of a gang sign in."""
    folder = tmp_path / "pids"
    folder.mkdir()
    return str(folder)
