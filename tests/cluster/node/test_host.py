"""What else happens on a gang's host: load by others, host memory and the kernel's kills, agents that cannot start."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.base import ClusterError, ClusterRequest
from cluster.connect import connect
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import DeviceHandle
from cluster.local import LocalCluster
from cluster.node import load_watch
from cluster.node.agent import Agent
from cluster.node.load_watch import (
    DeviceWatch,
    LoadWatch,
    OomKills,
    available_bytes,
    most_used,
    parse_samples,
    shortage,
    with_devices,
)
from tests.cluster.gangs import PRELOAD, living, run, wait_until
from tests.support import ROOT
from trials.failure import classify
from trials.health import FOREIGN_CPU_LIMIT, Disturbance, most_disturbed, reasons_in
from trials.outcome import GangLost, HostOutOfMemory

BURN = "import sys, time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass"
CLOCKS = """\
0, GPU-1f6b2a54-7a1e-ea31-9c5d-6c2f2b1f0a01, 0x0000000000000004, 1755, 1980, 61, 9000, 97, 410.25
1, GPU-5d0c9b12-03c7-51ab-8f0e-9a7be3d4c102, 0x0000000000000040, 1245, 1980, 88, 20, 3, 95.50
2, GPU-aa11bb22-3344-5566-7788-99aabbccdd03, [Not Supported], [N/A], [N/A], 45, [N/A], [N/A], [N/A]
0, GPU-1f6b2a54-7a1e-ea31-9c5d-6c2f2b1f0a01, 0x0000000000000004, 1740, 1980, 63, 12000, 99, 415.75
1, GPU-5d0c9b12-03c7-51ab-8f0e-9a7be3d4c102, 0x00000000000"""
"""What ``nvidia-smi -l`` has written when it is killed: two GPUs with figures, one without, the last line cut off."""


def called(*names):
    return [DeviceHandle(name=name) for name in names]


SMI = """#!/bin/sh
case "$1" in
--help-query-gpu) echo '"{known}"' ;;
--query-gpu=*{known},*) echo '0, GPU-0, 0x40, 1755, 1980, 61, 9000, 97, 410.25' ;;
--query-gpu=*) echo 'Field is not a valid field to query.'; exit 2 ;;
esac
"""


@pytest.mark.parametrize("known", ["clocks_event_reasons.active", "clocks_throttle_reasons.active"])
def test_clock_throttle_reasons_are_read_under_the_name_of_the_driver_version(known, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.format(known=known))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    watch = DeviceWatch(called("0"), tmp_path)
    wait_until(watch.samples, "a sample")
    assert watch.end(Disturbance(node="n", seconds=9.0), ()).throttled_by == reasons_in(0x40) != ()


@pytest.fixture
def burner():
    """A process that keeps one processor busy and is not the sweep's: it descends from this one by no parent."""
    popen = f"subprocess.Popen([sys.executable, '-c', {BURN!r}], stdout=subprocess.DEVNULL)"
    script = f"import subprocess, sys\nprint({popen}.pid, flush=True)"
    started = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    return int(started.stdout)


def test_descendants_of_the_owner_are_not_foreign_load():
    """However busy the host is: from the first process all others descend but the kernel's own threads."""
    before = load_watch.sample_cpu()
    time.sleep(load_watch.MIN_WINDOW_S)
    after = load_watch.sample_cpu()
    found = load_watch.disturbance("n", before, after, owner=1)
    assert found.foreign_cpu is not None and found.foreign_cpu < 2 * FOREIGN_CPU_LIMIT
    kernel = {one.name for one in after.processes.values() if one.parent_pid == 2}
    assert {name.rpartition(" ")[0] for name in found.foreign_processes} <= kernel


def test_a_busy_foreign_process_is_found_and_named(burner):
    before = load_watch.sample_cpu()
    end_s = time.monotonic() + load_watch.MIN_WINDOW_S
    while time.monotonic() < end_s:  # our own load, next to it
        pass
    after = load_watch.sample_cpu()
    own = load_watch.family(after.processes, os.getpid())
    assert os.getpid() in own and burner not in own
    burnt_s = (after.processes[burner].own_ticks - before.processes[burner].own_ticks) / os.sysconf("SC_CLK_TCK")
    found = load_watch.disturbance("n", before, after, owner=os.getpid())
    assert found.foreign_cpu is not None
    assert found.foreign_cpu >= 0.9 * burnt_s / found.seconds / after.num_cpus - 0.02
    assert found.foreign_cpu <= 1 - 0.9 * _burnt_here(before, after) / found.seconds / after.num_cpus
    assert found.is_disturbing == (found.foreign_cpu >= FOREIGN_CPU_LIMIT)


def _burnt_here(before, after):
    pid = os.getpid()
    return (after.processes[pid].own_ticks - before.processes[pid].own_ticks) / os.sysconf("SC_CLK_TCK")


def test_a_window_too_short_to_measure_yields_no_figure(tmp_path):
    watch = LoadWatch("n", (), tmp_path)
    watch.end()
    assert watch.found is None, "it never measured"
    watch.enter("measuring")
    watch.end()
    assert watch.found is not None
    assert (watch.found.foreign_cpu, watch.found.is_disturbing) == (None, False)


def test_throttling_clocks_and_heat_are_read_from_what_nvidia_smi_prints():
    assert [one.throttle_mask for one in parse_samples(CLOCKS)] == [4, 64, None, 4]
    quiet = with_devices(Disturbance(node="n", seconds=9.0), CLOCKS, "", called("0", "2"), ())
    assert (quiet.throttled_by, quiet.highest_temperature_c, quiet.is_disturbing) == ((), 63.0, False)
    assert quiet.lowest_clock == pytest.approx(1740 / 1980), "a power cap lowers it, and is normal"
    hot = with_devices(Disturbance(node="n", seconds=9.0), CLOCKS, "", called("GPU-5d0c"), ())
    assert (hot.throttled_by, hot.highest_temperature_c, hot.is_disturbing) == (("hw_thermal",), 88.0, True)
    nothing = with_devices(Disturbance(node="n", seconds=9.0), "", "", called("0"), ())
    assert nothing == Disturbance(node="n", seconds=9.0), "no output of nvidia-smi: unknown, and no error"


def test_usage_of_a_busy_node_is_sampled_and_halved_when_full(monkeypatch):
    monkeypatch.setattr(load_watch, "USAGE_PERIOD_S", 0.05)
    monkeypatch.setattr(load_watch, "MAX_USAGE", 8)
    watch = load_watch.UsageWatch()
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        watch.sample()
    cpu, memory = watch.usage()
    assert (cpu.kind, memory.kind) == ("cpu_percent", "memory_bytes")
    assert 0.1 <= cpu.period_s <= 0.4 and 4 <= len(cpu.values) < 8
    assert 80 / len(os.sched_getaffinity(0)) <= cpu.mean <= 100, "this process alone keeps one processor busy"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert all(0 < value < total for value in memory.values)


def test_usage_of_the_gangs_devices_is_read_from_what_nvidia_smi_prints():
    found = {(one.kind, one.device): one.values for one in load_watch.device_usage(parse_samples(CLOCKS), called("0"))}
    assert found == {
        ("device_percent", "0"): (97.0, 99.0),
        ("device_memory_bytes", "0"): (9000 << 20, 12000 << 20),
        ("device_power_w", "0"): (410.25, 415.75),
    }
    assert load_watch.device_usage(parse_samples(CLOCKS), called("2")) == (), "it reports none"


def test_the_most_memory_in_use_on_devices_is_kept():
    samples = parse_samples(CLOCKS)
    assert (most_used(samples, called("0", "1")), most_used(samples, called("GPU-5d0c"))) == (12000 << 20, 20 << 20)
    assert most_used(samples, called("2")) == 0, "not reported"


def test_foreign_processes_on_devices_are_distinguished_from_the_gang():
    uuid, mine, other, hidden = CLOCKS.split(", ")[1], os.getpid(), os.getppid(), 4194305
    texts = "".join(f"{uuid}, {pid}\n" for pid in (mine, other, hidden, "[N/A]"))
    found = with_devices(Disturbance(node="n", seconds=9.0), CLOCKS, texts, called("0"), {mine})
    assert found.foreign_on_devices == (f"pid {other} on GPU 0",), "a pid unknown here has no owner"
    assert not with_devices(Disturbance(node="n", seconds=9.0), CLOCKS, texts, called("1"), {mine}).foreign_on_devices


def test_a_slice_has_the_clocks_and_heat_of_its_gpu_but_not_its_memory_or_processes():
    """nvidia-smi reports whole GPUs; other slices of one may be in use by others, as on another machine."""
    uuid = CLOCKS.split("\n")[1].split(", ")[1]
    part = [DeviceHandle(name="MIG-cccc", uuid="MIG-cccc", gpu_uuid=uuid)]
    found = with_devices(Disturbance(node="n", seconds=9.0), CLOCKS, f"{uuid}, {os.getppid()}\n", part, ())
    assert (found.throttled_by, found.highest_temperature_c) == (("hw_thermal",), 88.0)
    assert found.lowest_clock == pytest.approx(1245 / 1980)
    assert not found.foreign_on_devices
    assert most_used(parse_samples(CLOCKS), part) == 0


def test_only_the_most_disturbed_of_many_nodes_are_kept():
    quiet = [Disturbance(node=f"n{i}", seconds=5.0, foreign_cpu=0.001 * i) for i in range(20)]
    kept = most_disturbed([*quiet, replace(quiet[0], node="busy", steal=0.4)])
    assert len(kept) == 8 and kept[0].node == "busy" and kept[1].node == "n19"


LIMIT_BYTES = 1 << 30
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@pytest.fixture(scope="module")
def small_group():
    """A memory control group with a limit of :data:`LIMIT_BYTES`."""
    root, limit = (V1, "memory.limit_in_bytes") if V1.is_dir() else (V2, "memory.max")
    group = root / f"tune-cluster-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no memory control group can be made here: {error}")
    yield group
    group.rmdir()


@pytest.fixture(scope="module")
def cluster(small_group, tmp_path_factory):
    """All processes of this cluster live in the small group: they are started while this process is in it."""
    home = load_watch.memory_group()
    (small_group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        cluster = LocalCluster(tmp_path_factory.mktemp("work"), discover_node(num_devices=2), preload=PRELOAD)
    finally:
        (home.folder / "cgroup.procs").write_text(str(os.getpid()))
    with cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("where", ["rank", "loader"])
def test_a_rank_killed_by_the_oom_killer_is_distinguished_from_other_deaths(cluster, pids, where):
    end = run(cluster, "eats_memory", spec={"pids": pids, "where": where})
    assert living(pids) == []
    assert isinstance(end.outcome, HostOutOfMemory), end.outcome
    assert end.outcome.evidence.rank == 0
    other = run(cluster, "dies", spec={"rank": 1}).outcome
    assert isinstance(other, GangLost) and other.cause == "killed", "SIGKILL from elsewhere"


@pytest.mark.slow
def test_ranks_that_may_exceed_host_memory_are_not_started(cluster, pids):
    end = run(cluster, "hangs_at_start", spec={"pids": pids, "memory_limit_bytes": LIMIT_BYTES})
    assert isinstance(end.outcome, GangLost)
    assert "2 rank(s) may use 1.0 GiB each, but 0." in end.outcome.evidence.message
    assert list(Path(pids).iterdir()) == []
    assert not isinstance(run(cluster, "raises", spec={"rank": 0, "memory_limit_bytes": 1 << 20}).outcome, GangLost)


def test_memory_is_short_when_all_ranks_may_exceed_what_is_available():
    available = available_bytes()
    assert shortage(1, available // 2) is None
    assert shortage(4, available // 2) is not None


GROUPS = {
    "v2": ("0::/job\n", "job", {"memory.events": "low 0\noom 3\noom_kill 2\n", "memory.max": "1000", "memory.current":
           "900", "memory.stat": "anon 5\ninactive_file 300\n"}),
    "v1": ("5:memory:/job\n0::/\n", "memory/job", {"memory.oom_control": "oom_kill 2\n",
           "memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "900",
           "memory.stat": "total_inactive_file 300\n"}),
    "v2 in a container": ("0::/../../host/path\n", "", {"memory.events": "oom_kill 2\n", "memory.max": "1000",
           "memory.current": "900", "memory.stat": "inactive_file 300\n"}),
}  # fmt: skip


@pytest.mark.parametrize("version", GROUPS)
def test_both_versions_of_control_groups_are_read(version, tmp_path, monkeypatch):
    """Only one version is mounted on a host: their files are laid out here as the kernel's documentation has them."""
    listed, path, files = GROUPS[version]
    folder = tmp_path / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    (tmp_path / "listed").write_text(listed)
    monkeypatch.setattr(load_watch, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(load_watch, "_OWN_GROUPS", tmp_path / "listed")
    assert available_bytes() == 1000 - 900 + 300
    kills = OomKills()
    assert not kills.grew()
    counter = next(name for name in files if "oom_kill" in files[name])
    (folder / counter).write_text(files[counter].replace("oom_kill 2", "oom_kill 3"))
    assert kills.grew()


@pytest.mark.parametrize(
    ("error", "on_cpu", "on_cuda"),
    [
        (MemoryError(), "oom", "host_oom"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom", "host_oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "oom", "host_oom"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "oom", "oom"),
        (RuntimeError("NCCL error: ncclSystemError: System call failed"), "connection", "connection"),
    ],
)
def test_host_memory_is_distinct_from_device_memory_only_with_a_gpu(error, on_cpu, on_cuda):
    assert (classify(error, "cpu"), classify(error, "cuda")) == (on_cpu, on_cuda)


def test_a_small_dev_shm_is_reported_with_consequence_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(load_watch, "SHARED_MEMORY", tmp_path)
    assert load_watch.shared_memory_shortage(1) is None
    assert re.match(r"\d+ of \d+ MiB are free in .* NCCL .* --shm-size=8g", load_watch.shared_memory_shortage(1 << 60))
    monkeypatch.setattr(load_watch, "SHARED_MEMORY", tmp_path / "none")
    assert "does not exist" in load_watch.shared_memory_shortage(1)


def test_a_fork_server_that_cannot_start_reports_its_output(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ClusterError, match="did not start: ModuleNotFoundError: No module named torch"):
        Agent(node="n", workdir=tmp_path / "work")


WITH_LITTLE_SHARED_MEMORY = """
import pathlib, runpy, sys
import cluster.node.load_watch as host_memory
host_memory.SHARED_MEMORY = pathlib.Path({folder!r})
sys.argv = sys.argv[sys.argv.index("-m") + 1 :]
runpy.run_module("cluster.node.warden", run_name="__main__")
"""


@pytest.mark.parametrize("is_short", [True, False])
def test_an_agent_warns_of_a_small_dev_shm_when_it_starts(tmp_path, monkeypatch, caplog, is_short):
    """Which its fork server looks at, where ranks come from; here in a folder of the test's."""
    text = WITH_LITTLE_SHARED_MEMORY.format(folder=str(tmp_path / "none" if is_short else "/dev"))
    if not is_short:
        text = text.replace("sys.argv =", "host_memory.MIN_SHARED_BYTES = 0\nsys.argv =", 1)
    (tmp_path / "server.py").write_text(text)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    agent = Agent(node="n7", workdir=tmp_path / "work", preload=("json",), search_path=sys.path)
    agent.close()
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    warned = [
        text
        for text in texts
        if text.startswith("fork server on n7: ") and "does not exist" in text and "--shm-size=8g" in text
    ]
    assert (texts != [], warned) == (is_short, texts)


@pytest.mark.exhaustive
@pytest.mark.ray
def test_a_lease_whose_agents_cannot_start_ends_at_once(tmp_path):
    """What waits for nodes would otherwise wait for ever: it would be the same tomorrow."""
    name = discover_node().name
    (tmp_path / f"fork-server-{name}.log").mkdir(parents=True)
    texts = []
    began_s = time.monotonic()
    with pytest.raises(ClusterError, match=r"the agent did not start on node .* Is a directory"):
        connect(ClusterRequest(devices_per_node=1), workdir=tmp_path, on_wait=texts.append)
    assert time.monotonic() - began_s < 100
