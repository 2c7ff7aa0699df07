"""Nothing survives a controller that closes, or that is killed; a backend survives its own helpers' death."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cluster.base import ClusterError
from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from cluster.node.guardian import LEASE_VARIABLE, Guardian, environment_of, marked_processes
from cluster.processes import descendants, process_info
from orchestrator.sweep.snapshot import Home
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
    return [path for path in Path("/proc").glob("[0-9]*") if lease.encode() in read(path / "cmdline")]


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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with LocalCluster(tmp_path_factory.mktemp("work"), discover_node(num_devices=2), preload=PRELOAD) as cluster:
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


TITLED = """
import ctypes, os, sys, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
begin, end = int(fields[47]), int(fields[48])
ctypes.memset(begin, 0, (end - begin) // 2)  # as a title does, which may be shorter
file = open(sys.argv[1], "a")
if len(sys.argv) > 2 and os.fork():
    os._exit(0)
file.write(f"{os.getpid()}\\n")
file.flush()
time.sleep(600)
"""
"""A process that overwrites the environment that others see, then writes its pid into a file that it holds open; with a
second argument, an orphan does."""


def test_the_guardian_finds_what_has_overwritten_its_environment(tmp_path):
    outside, inside = tmp_path / "pids", tmp_path / "lease" / "log"
    inside.parent.mkdir()
    titled, lease = [sys.executable, "-S", "-c", TITLED], "lease-of-titled-ones"
    below = f"import subprocess; subprocess.run({[*titled, str(outside)]!r})"
    guardian = Guardian(lease, remove=inside.parent)
    parent = subprocess.Popen([sys.executable, "-S", "-c", below], env={LEASE_VARIABLE: lease})
    subprocess.run([*titled, str(inside), "orphan"], env={LEASE_VARIABLE: lease, "Z": "z" * 200}, check=True)
    other = subprocess.Popen([*titled, str(tmp_path / "other")])
    wait_until(lambda: all(read(path).endswith(b"\n") for path in (outside, inside, tmp_path / "other")), "all of them")
    pids = [int(read(path)) for path in (outside, inside)]
    try:
        guardian.close()
        assert parent.wait() == -signal.SIGKILL
        assert not any((info := process_info(pid)) and info.is_running for pid in pids)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_a_controller_killed_soon_after_its_sweep_was_created_leaves_nothing(tmp_path, after_s):
    """Ray's agents start within that time, and take long to notice by themselves that their head is gone."""
    file, scratch = tmp_path / "sweep.yaml", Path(tempfile.mkdtemp(prefix="left-"))
    file.write_text(RAY_SWEEP)
    command = [sys.executable, "-m", "orchestrator", "submit", str(file), "--home", str(tmp_path / "home")]
    controller = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: Home(tmp_path / "home").sweeps() or controller.poll() is not None, "the sweep")
        time.sleep(after_s)
        assert holding(scratch)
        controller.kill()
        controller.wait()
        give_up_s = time.monotonic() + 20.0
        while left := holding(scratch):
            assert time.monotonic() < give_up_s, {pid: read(Path(f"/proc/{pid}/cmdline"))[:200] for pid in left}
            time.sleep(0.1)
    finally:
        controller.kill()
        for pid in holding(scratch):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)


RAY_SWEEP = """\
name: killed
workload: {model: {kind: linear, num_layers: 1, size: 16}, global_batch_size: 4}
cluster: {kind: ray, devices_per_node: 1, device: cpu}
space: {micro_batch_size: [1, 2, 4]}
"""


def holding(folder):
    """Processes with open files below ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()).startswith(f"{folder}/") for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def test_a_cluster_closes_after_a_fork_server_that_cannot_be_replaced(tmp_path, monkeypatch):
    before = set(descendants(os.getpid()))
    cluster = LocalCluster(tmp_path, discover_node(num_devices=1), preload=("json",))
    new = sorted(set(descendants(os.getpid())) - before)
    fork_server = next(pid for pid in new if b"cluster.node.warden" in read(Path(f"/proc/{pid}/cmdline")))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ClusterError, match="did not start"), cluster:
        os.kill(fork_server, signal.SIGKILL)
        while True:
            cluster.poll(1.0)
