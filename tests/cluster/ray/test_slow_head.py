"""A private Ray whose head is slow to answer, as on a busy host, or is gone."""

import os
import signal
import time

import pytest

from cluster.base import ClusterLostError
from cluster.connect import connect
from cluster.ray import lease
from cluster.request import ClusterRequest
from tests.cluster.gangs import PRELOAD, run
from trials.outcome import Measured

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.fault, pytest.mark.exhaustive]


@pytest.fixture
def cluster(tmp_path):
    asked = ClusterRequest(device="cpu", devices_per_node=2)
    with connect(asked, workdir=tmp_path / "work", preload=PRELOAD) as cluster:
        yield cluster


@pytest.mark.parametrize(("limit_s", "stopped_s"), [(2.0, 8.0), (30.0, 42.0)])
def test_our_own_head_is_waited_for_while_its_process_lives(cluster, monkeypatch, caplog, limit_s, stopped_s):
    monkeypatch.setattr(lease, "HEAD_LOST_S", limit_s)
    (head,) = cluster._lease._head.pids
    os.kill(head, signal.SIGSTOP)
    try:
        until_s = time.monotonic() + stopped_s
        while time.monotonic() < until_s:
            assert cluster.poll(0.5) == []
    finally:
        os.kill(head, signal.SIGCONT)
    assert any("it is waited for" in record.getMessage() for record in caplog.records)
    assert len(cluster.topology.nodes) == 1, cluster.lost_nodes
    assert isinstance(run(cluster, "ok").outcome, Measured)
    assert cluster.lost_nodes == frozenset()


def test_our_own_head_that_is_gone_is_not_waited_for_as_long(cluster, monkeypatch):
    monkeypatch.setattr(lease, "HEAD_LOST_S", 2.0)
    (head,) = cluster._lease._head.pids
    os.kill(head, signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(ClusterLostError, match="has not answered for 2 s"):
        while time.monotonic() < began_s + 60.0:
            cluster.poll(0.5)
