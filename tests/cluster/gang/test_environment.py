"""The environment of ranks: precedence, owners of variables, and their documentation."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from pathlib import Path

import pytest

from cluster.base import Deadlines
from cluster.gang.environment import DEFAULTS, cache_folder, default_env, owner_of, rank_env, remove_old_caches
from cluster.gang.messages import NodeLaunch, RankSlot
from cluster.hardware.topology import DeviceHandle, Node, cores_near
from cluster.local import LocalCluster
from cluster.node.hang import BUFFER_SIZE
from tests.cluster.gangs import PRELOAD, run
from tests.support import ROOT
from trials.training.measure import DEFAULT_SETTINGS

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
SLOT = RankSlot(rank=0, local_rank=0, index=0)


def launch(attempt, runner="trials.worker:run_rank", **env):
    return NodeLaunch(
        attempt_id=attempt,
        token="t",
        runner=runner,
        spec={},
        node="n",
        directory=str(Path("/sweep/attempts") / attempt),
        slots=(SLOT,),
        world_size=1,
        deadlines=Deadlines(),
        env=env,
    )


def caches(attempt, **options):
    found = rank_env(launch(attempt, **options), SLOT)
    return {name: found[name] for name in CACHES if name in found}


@pytest.fixture
def own_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"tune-cluster-{os.getuid()}"


def test_compiler_caches_lie_on_the_local_disk_per_sweep(monkeypatch, own_disk):
    """Equal for all attempts of a lease on a node, whatever its environment, unless the sweep sets the folder."""
    for name in CACHES:
        monkeypatch.setenv(name, "/home/me/.cache")
    found = caches("a")
    assert found == caches("b")
    (folder,) = {Path(path).parent for path in found.values()}
    assert folder.parent == own_disk and folder.name.endswith("-cache-n")
    assert [Path(found[name]).name for name in CACHES] == ["inductor", "triton"]
    assert folder != cache_folder(Path("/other/attempts"), "n"), "another sweep has its own"
    assert caches("a", TRITON_CACHE_DIR="/fast/triton")["TRITON_CACHE_DIR"] == "/fast/triton"
    assert caches("a", runner="trials.script.runner:run_rank") == {}, "its program gets them with its own environment"


def test_caches_stay_in_the_work_folder_without_a_local_disk(own_disk):
    own_disk.symlink_to("/home")
    assert cache_folder(Path("/sweep/attempts"), "n") == Path("/sweep/attempts/cache-n")


def test_caches_of_killed_agents_are_removed_after_a_month(own_disk):
    ages = {"1-cache-n": 31, "2-cache-n": 29, "others": 99}
    for name, days in ages.items():
        (own_disk / name / "triton").mkdir(parents=True)
        os.utime(own_disk / name, (time.time() - days * 86400,) * 2)
    own_disk.chmod(0o700)
    remove_old_caches()
    assert sorted(path.name for path in own_disk.iterdir()) == ["2-cache-n", "others"]


def test_older_names_set_by_the_launch_or_a_user_program_are_not_overridden():
    cuda = dataclasses.replace(launch("a"), device_kind="cuda")
    assert rank_env(cuda, SLOT)["TORCH_NCCL_ENABLE_TIMING"] == "1"
    configured = dataclasses.replace(cuda, env={"NCCL_ENABLE_TIMING": "0"})
    assert "TORCH_NCCL_ENABLE_TIMING" not in rank_env(configured, SLOT)
    script = {"runner": "trials.script.runner:run_rank", "spec": {"env": [["NCCL_ENABLE_TIMING", "0"]]}}
    assert "TORCH_NCCL_ENABLE_TIMING" not in rank_env(dataclasses.replace(cuda, **script), SLOT)


def test_nodes_rendezvous_over_the_interface_that_connects_them():
    found = default_env("cuda", 2, "ens3", host={})
    assert found["NCCL_SOCKET_IFNAME"] == "=ens3", "exactly this one, not ens30"
    assert found["GLOO_SOCKET_IFNAME"] == "ens3"
    assert "NCCL_SOCKET_IFNAME" not in default_env("cuda", 1, "ens3", host={})
    assert default_env("npu", 2, "ens3", host={})["HCCL_SOCKET_IFNAME"] == "=ens3"
    assert default_env("cpu", 1, None, host={}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert "NCCL_SOCKET_IFNAME" not in default_env("cuda", 2, None, host={}), "unknown: left to NCCL"


def test_variables_of_the_host_override_defaults():
    found = default_env("cuda", 2, "ens3", host={"NCCL_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "INFO"})
    assert {"NCCL_SOCKET_IFNAME", "NCCL_DEBUG"}.isdisjoint(found)


def test_older_names_of_a_variable_override_its_default():
    """torch would read ours, and not the older name that the host has."""
    found = default_env("cuda", 1, None, host={"NCCL_ENABLE_TIMING": "0", "TORCH_FR_DUMP_ON_TIMEOUT": "0"})
    assert {"TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DUMP_ON_TIMEOUT"}.isdisjoint(found)
    assert default_env("rocm", 1, None, host={})["TORCH_NCCL_ENABLE_TIMING"] == "1"


@pytest.mark.parametrize(
    ("patience_s", "connect", "execute"), [(30, "120", "68"), (4000, "4000", "4000"), (20000, "7200", "17340")]
)
def test_hccl_timeouts_exceed_the_gang_deadlines_within_its_limits(patience_s, connect, execute):
    found = default_env("npu", 1, None, host={}, patience_s=patience_s)
    assert (found["HCCL_CONNECT_TIMEOUT"], found["HCCL_EXEC_TIMEOUT"]) == (connect, execute)
    assert "HCCL_EXEC_TIMEOUT" not in default_env("cuda", 1, None, host={})


def test_every_default_is_documented_with_its_reason():
    text = (ROOT / "docs/devices.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for default in DEFAULTS:
        assert any(f"| `{default.name}` | `{default.value}` |" in row and default.reason in row for row in rows), (
            default
        )


def test_defaults_set_elsewhere_match_the_table():
    elsewhere = {default.name: default.value for default in DEFAULTS if not default.is_set_here}
    buffers = dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_HCCL_TRACE_BUFFER_SIZE"), str(BUFFER_SIZE))
    assert elsewhere == {**buffers, "PYTORCH_CUDA_ALLOC_CONF": DEFAULT_SETTINGS}
    assert elsewhere.keys().isdisjoint(default_env("cuda", 1, None, host={}))


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT", "HIP_VISIBLE_DEVICES", "TUNE_CLUSTER_RENDEZVOUS", "NNODES"])
def test_launcher_variables_have_an_owner(name):
    assert owner_of(name) is not None
    assert owner_of("NCCL_IB_HCA") is owner_of("TUNE_CLUSTER_NUMA") is None


def test_cluster_variables_reach_ranks_and_the_fork_server(tmp_path):
    node = Node(
        name="n",
        address="127.0.0.1",
        num_devices=2,
        device_kind="cpu",
        device_name="core",
        device_memory_bytes=1 << 30,
        threads_per_device=1,
    )
    with LocalCluster(tmp_path, node, preload=PRELOAD, env={"EXTRA": "of the cluster"}) as cluster:
        seen = run(cluster, "environment").outcome.evidence.message
        assert "'EXTRA': 'of the cluster'" in seen
        options = {"env": {"EXTRA": "of the launch", "OMP_NUM_THREADS": "2"}}
        seen = run(cluster, "environment", options=options).outcome.evidence.message
    assert "'EXTRA': 'of the launch'" in seen
    assert "'threads': 2" in seen, "the number of threads that the launch requests, not that of the node"


@pytest.fixture
def two_sockets(tmp_path, monkeypatch):
    """sysfs of a host with two NUMA nodes, eight cores and a device on each; all cores may be used."""
    for node, cores in enumerate(("0-1,4-5", "2-3,6-7")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
        device = tmp_path / f"bus/pci/devices/0000:{node}7:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    unknown = tmp_path / "bus/pci/devices/0000:99:00.0"
    unknown.mkdir()
    (unknown / "numa_node").write_text("-1\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(7)))
    return tmp_path


def test_ranks_keep_to_the_cores_near_their_devices(two_sockets):
    first, second, unknown = "0000:07:00.0", "0000:17:00.0", "0000:99:00.0"
    assert cores_near([first], two_sockets) == {0, 1, 4, 5}
    assert cores_near([second], two_sockets) == {2, 3, 6}, "of those that may be used"
    assert cores_near([first, second], two_sockets) is None, "near all of them: nothing to choose"
    assert cores_near([unknown], two_sockets) is cores_near([""], two_sockets) is cores_near([], two_sockets) is None
    assert cores_near(handle.bus_id for handle in (DeviceHandle(name="0"),)) is None
