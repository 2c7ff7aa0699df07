"""A private Ray whose head is slow to answer, as on a busy host, or is gone."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cluster.base import ClusterRequest
from cluster.connect import connect
from cluster.ray import leases
from tests.cluster.gangs import PRELOAD, run
from tests.support import ROOT
from trials.outcome import Measured

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.fault, pytest.mark.exhaustive]


@pytest.fixture
def cluster(tmp_path):
    requested = ClusterRequest(device="cpu", devices_per_node=2)
    with connect(requested, workdir=tmp_path / "work", preload=PRELOAD) as cluster:
        yield cluster


STOPPED_S = 42.0
"""Longer than Ray's own calls wait for an answer of the head, which is 30 s."""


def test_a_private_head_is_waited_for_while_its_process_lives(cluster, monkeypatch, caplog):
    monkeypatch.setattr(leases, "HEAD_LOST_S", 2.0)
    head = cluster._lease._head.pids["gcs_server"]
    os.kill(head, signal.SIGSTOP)
    try:
        until_s = time.monotonic() + STOPPED_S
        while time.monotonic() < until_s:
            assert cluster.poll(0.5) == []
    finally:
        os.kill(head, signal.SIGCONT)
    assert any("waiting for it" in record.getMessage() for record in caplog.records)
    assert len(cluster.topology.nodes) == 1, cluster.lost_nodes
    assert isinstance(run(cluster, "ok").outcome, Measured)
    assert cluster.lost_nodes == frozenset()


GONE = """
import os, signal, sys, time
from pathlib import Path
from cluster.base import PrivateClusterLostError
from cluster.connect import connect
from cluster.base import ClusterRequest
from tests.cluster.gangs import PRELOAD, run

request, workdir = ClusterRequest(device="cpu", devices_per_node=2), Path(sys.argv[1])
try:
    with connect(request, workdir=workdir / "one", preload=PRELOAD) as cluster:
        os.kill(cluster._lease._head.pids["gcs_server"], signal.SIGKILL)
        began_s = time.monotonic()
        while time.monotonic() < began_s + 60.0:
            cluster.poll(0.5)
except PrivateClusterLostError as error:
    print(f"lost: {error}", flush=True)
with connect(request, workdir=workdir / "two", preload=PRELOAD) as cluster:
    print(run(cluster, "ok").outcome.kind, flush=True)
"""


def test_a_failed_private_ray_is_noticed_and_can_be_replaced(tmp_path):
    """In a separate process: Ray ends its driver, whatever it is doing, a minute after its head is gone."""
    words = [sys.executable, "-c", GONE, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert "lost: the private Ray on this host has failed: its gcs_server has ended" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "measured", done.stderr
