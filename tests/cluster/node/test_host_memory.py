"""The kernel really kills for want of memory, in a control group with a small limit."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from cluster.node import load_watch
from cluster.node.load_watch import OomKills, available_bytes, shortage
from tests.cluster.gangs import PRELOAD, living, run
from trials.failure import classify
from trials.outcome import GangLost, HostOutOfMemory

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
def test_a_rank_killed_for_want_of_host_memory_is_told_from_other_deaths(cluster, pids, where):
    end = run(cluster, "eats_memory", spec={"pids": pids, "where": where})
    assert living(pids) == []
    assert isinstance(end.outcome, HostOutOfMemory), end.outcome
    assert end.outcome.evidence.rank == 0
    other = run(cluster, "dies", spec={"rank": 1}).outcome
    assert isinstance(other, GangLost) and other.cause == "killed", "SIGKILL from elsewhere"


@pytest.mark.slow
def test_ranks_that_may_use_more_than_there_is_are_not_started(cluster, pids):
    end = run(cluster, "hangs_at_start", spec={"pids": pids, "memory_limit_bytes": LIMIT_BYTES})
    assert isinstance(end.outcome, GangLost)
    assert "2 rank(s) may use 1.0 GiB each, but 0." in end.outcome.evidence.message
    assert list(Path(pids).iterdir()) == []
    assert not isinstance(run(cluster, "raises", spec={"rank": 0, "memory_limit_bytes": 1 << 20}).outcome, GangLost)


def test_memory_is_short_when_the_ranks_together_may_use_more_than_is_available():
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
def test_only_beside_a_gpu_is_host_memory_another_than_the_devices(error, on_cpu, on_cuda):
    assert (classify(error, "cpu"), classify(error, "cuda")) == (on_cpu, on_cuda)


def test_a_small_dev_shm_is_told_with_what_it_breaks_and_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(load_watch, "SHARED_MEMORY", tmp_path)
    assert load_watch.shared_memory_shortage(1) is None
    assert re.match(r"\d+ of \d+ MiB are free in .* NCCL .* --shm-size=8g", load_watch.shared_memory_shortage(1 << 60))
    monkeypatch.setattr(load_watch, "SHARED_MEMORY", tmp_path / "none")
    assert "there is no " in load_watch.shared_memory_shortage(1)
