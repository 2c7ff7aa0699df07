"""Nothing survives a controller that closes, or that is killed; a backend survives its own helpers' death."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.hardware.topology import discover_node
from cluster.local import LocalCluster
from cluster.node.guardian import LEASE_VARIABLE, Guardian, environment_of, marked_processes
from cluster.processes import process_info
from tests.cluster.gangs import PRELOAD, end_of, launch, living, parent, run, wait_for_pids, wait_until
from tests.support import ROOT
from trials.outcome import GangLost, Measured

BACKENDS = ["local", pytest.param("ray", marks=pytest.mark.ray)]

pytestmark = [pytest.mark.slow, pytest.mark.fault]


@pytest.fixture
def controller(request, tmp_path):
    """A controller process with a running gang of six processes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.controller", request.param, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def lease_of(pid):
    (entry,) = [entry for entry in environment_of(pid) if entry.startswith(f"{LEASE_VARIABLE}=".encode())]
    return entry.partition(b"=")[2].decode()


def any_marked(folder):
    """The lease whose ranks have signed in to ``folder``."""
    for pid in living(folder):
        if any(entry.startswith(LEASE_VARIABLE.encode()) for entry in environment_of(pid)):
            return lease_of(pid)
    raise AssertionError("no process carries a lease")


def guardians_of(lease):
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if lease.encode() in read(path)]


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.representative("local")
@pytest.mark.parametrize("controller", BACKENDS, indirect=True)
def test_death_leaves_nothing(controller, tmp_path):
    lease = any_marked(tmp_path / "pids")
    assert len(living(tmp_path / "pids")) == 6
    controller.kill()
    controller.wait()
    wait_until(lambda: not guardians_of(lease), "the guardian to finish")
    assert marked_processes(lease) == {}
    assert living(tmp_path / "pids") == []


@pytest.mark.representative("local")
@pytest.mark.parametrize("controller", BACKENDS, indirect=True)
def test_close_leaves_nothing(controller, tmp_path):
    lease = any_marked(tmp_path / "pids")
    output, _ = controller.communicate("close\n")
    assert controller.returncode == 0
    assert output == "", "standard output belongs to the caller"
    assert living(tmp_path / "pids") == []
    assert marked_processes(lease) == {}
    assert guardians_of(lease) == []


@pytest.fixture
def cluster(tmp_path):
    with LocalCluster(tmp_path / "work", discover_node(num_devices=2), preload=PRELOAD) as cluster:
        yield cluster


def test_gangs_outlive_the_fork_server(cluster, pids):
    gang = launch(cluster, "hangs_at_start", spec={"pids": pids})
    wait_for_pids(pids, 2)
    fork_server = parent(parent(living(pids)[0]))
    os.kill(fork_server, signal.SIGKILL)
    wait_until(lambda: not process_info(fork_server).is_running, "the fork server's death")
    assert isinstance(run(cluster, "ok").outcome, Measured), "there is a new one"
    assert len(living(pids)) == 2
    cluster.kill(gang.attempt_id, "enough")
    assert end_of(cluster, gang).outcome.evidence.message == "enough"
    assert living(pids) == []


def test_a_dead_warden_loses_its_gang_and_leaves_nothing(cluster, pids):
    gang = launch(cluster, "spawns", spec={"pids": pids, "then": "hang"})
    wait_for_pids(pids, 6)
    wait_until(lambda: len({parent(pid) for pid in living(pids)}) == 1, "the warden to adopt the orphans")
    warden = parent(living(pids)[0])
    os.kill(warden, signal.SIGKILL)
    end = end_of(cluster, gang)
    assert living(pids) == []
    assert isinstance(end.outcome, GangLost)
    assert "warden" in end.outcome.evidence.message


def test_the_guardian_ends_what_carries_its_mark_and_spares_the_rest():
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    guardian = Guardian("lease-under-test")
    marked = subprocess.Popen(sleep, env={LEASE_VARIABLE: "lease-under-test"})
    other = subprocess.Popen(sleep, env={LEASE_VARIABLE: "another-lease"})
    try:
        wait_until(lambda: marked_processes("lease-under-test") == {marked.pid: False}, "the marked process")
        guardian.close()
        assert marked.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
