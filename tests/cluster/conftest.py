"""Fixtures shared by the tests of :mod:`cluster`."""

import pytest

from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from tests.cluster.gangs import PRELOAD


@pytest.fixture(scope="session")
def local_cluster(tmp_path_factory):
    """One for all tests of a worker process."""
    with LocalCluster(tmp_path_factory.mktemp("local"), discover_node(num_devices=4), preload=PRELOAD) as cluster:
        yield cluster


@pytest.fixture
def pids(tmp_path):
    """Folder in which the processes of a gang leave their pids."""
    folder = tmp_path / "pids"
    folder.mkdir()
    return str(folder)
