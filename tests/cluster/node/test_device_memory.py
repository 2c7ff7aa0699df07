"""Devices that are not free, before a gang and after it. There is a real ``nvidia-smi`` on the path, which answers from
files: its figures are the test's, everything that calls it is real."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.base import Deadlines
from cluster.gang.messages import NodeLaunch, RankSlot
from cluster.hardware import discovery
from cluster.hardware.discovery import DeviceQueryError, discover_node
from cluster.hardware.topology import DeviceHandle
from cluster.local import LocalCluster
from cluster.node.load_watch import DeviceUse, device_names, device_uses, wait_until_free
from tests.cluster import scripts
from tests.cluster.gangs import PRELOAD, end_of, launch, living, run, wait_for_pids
from tests.cluster.vendors import RESET
from trials.outcome import GangLost, Measured

SCRIPT = """#!/bin/sh
echo "$1" >> {folder}/queries
case "$1" in
--query-gpu=index,uuid,clocks*) echo '1, GPU-0001-abcd, 0x4, 1, 1, 30, 7000, 90, 300.0' ;;
--query-gpu=index,*) . {folder}/gpus ;;
--query-compute-apps=*) . {folder}/apps ;;
esac
"""


def _row(index, used):
    return f"{index}, GPU-{index:04d}-abcd, NVIDIA H200, 143771, {used}, 00000000:{index:02X}:00.0, Disabled"


def handle(index, idle=4):
    return DeviceHandle(name=str(index), memory_bytes=143771 << 20, idle_bytes=idle << 20, uuid=f"GPU-{index:04d}-abcd")


class Smi:
    """A false nvidia-smi, whose answers are the output of the shell scripts ``gpus`` and ``apps``."""

    def __init__(self, folder):
        self.folder = folder
        program = folder / "nvidia-smi"
        program.write_text(SCRIPT.format(folder=folder))
        program.chmod(0o755)
        (folder / "queries").write_text("")
        self.uses(4, 4)
        self.answers("apps", "")

    def answers(self, name, script):
        """Replace the answer atomically: it may be read at any time."""
        new = self.folder / f"{name}.new"
        new.write_text(script)
        new.replace(self.folder / name)

    def uses(self, *mebibytes):
        lines = [f"echo '{_row(i, used)}'" for i, used in enumerate(mebibytes)]
        self.answers("gpus", "\n".join(lines) + "\n")

    @property
    def queries(self):
        return (self.folder / "queries").read_text().splitlines()


@pytest.fixture(scope="module")
def smi_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("smi")


@pytest.fixture
def smi(smi_folder, monkeypatch):
    monkeypatch.setenv("PATH", str(smi_folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Smi(smi_folder)


def test_free_means_up_to_an_allowance(smi):
    smi.uses(300, 30000)
    smi.answers("apps", "echo 'GPU-0001-abcd, 4711, 29500'\necho 'GPU-0000-abcd, 1, 290'\n")
    assert wait_until_free("cuda", [handle(0)], 0.0) is None
    problem = wait_until_free("cuda", [handle(0), handle(1)], 0.0)
    assert problem == "GPU 1 (GPU-0001-abcd) has 30000 MiB in use by pid 4711 (29500 MiB)"
    smi.uses("[N/A]")
    assert wait_until_free("cuda", [handle(0)], 0.0) is None, "a device without a figure counts as free"
    smi.answers("gpus", f"echo '{_row(0, 4)}'\necho '{RESET}'")
    assert wait_until_free("cuda", [handle(0)], 0.0) is None
    problem = wait_until_free("cuda", [handle(0), handle(1)], 0.0)
    assert problem == "device 1 became unusable: nvidia-smi reports [GPU requires reset]"


@pytest.mark.parametrize(
    ("gibibytes", "idle_mib", "used_mib", "is_busy"),
    [
        (96, 4, 700, False),  # a GH200's driver keeps more than 512 MiB
        (64, 3412, 3600, False),  # an idle Ascend 910B
        (64, 3412, 9000, True),
        (80, 70000, 70000, True),  # in use when the node was looked at: that is not idle
        (16, 4, 600, True),
    ],
)
def test_the_idle_memory_allowance_depends_on_the_device(gibibytes, idle_mib, used_mib, is_busy):
    known = DeviceHandle(name="0", memory_bytes=gibibytes << 30, idle_bytes=idle_mib << 20)
    assert DeviceUse(handle=known, used_bytes=used_mib << 20).is_busy == is_busy


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("echo 'GPU is lost'; exit 15", "failed with code 15: GPU is lost"),
        ("exec sleep 60", "did not respond within 0.2 s; without persistence mode .* nvidia-smi -pm 1"),
    ],
)
def test_a_failing_or_hanging_driver_is_reported(smi, monkeypatch, answer, message):
    monkeypatch.setattr(discovery, "QUERY_TIMEOUT_S", 0.2)
    smi.answers("gpus", answer)
    with pytest.raises(DeviceQueryError, match=message):
        device_uses("cuda", [handle(0)])


def test_a_gang_sees_its_own_share_of_what_the_node_has():
    slots = (RankSlot(rank=4, local_rank=0, index=1), RankSlot(rank=5, local_rank=1, index=0))
    order = NodeLaunch(
        attempt_id="x", token="t", runner="m:f", spec={}, node="n", directory="/", slots=slots, world_size=6,
        deadlines=Deadlines(), device_kind="cuda",
    )  # fmt: skip
    assert device_names(order) == ("1", "0")
    named = replace(order, handles=(DeviceHandle(name="GPU-a"), DeviceHandle(name="GPU-b")))
    assert device_names(named) == ("GPU-b", "GPU-a")
    assert device_names(replace(named, device_kind="cpu")) == ()


@pytest.fixture(scope="module")
def cluster(smi_folder, tmp_path_factory):
    """Two "GPUs" whose ranks use none: the answers of the driver are under test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(smi_folder), prepend=":")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        Smi(smi_folder)
        node = discover_node(name="gpu-node", device="cuda")
        with LocalCluster(tmp_path_factory.mktemp("work"), node, preload=PRELOAD) as cluster:
            yield cluster


@pytest.mark.slow
def test_a_gang_on_free_devices_is_measured(cluster, smi):
    end = run(cluster, "ok")
    assert isinstance(end.outcome, Measured), end.outcome
    assert end.outcome.measurement.places == ("gpu-node/0", "gpu-node/1")
    queries = [query for query in smi.queries if "compute-apps" in query]
    assert len(queries) <= 1, "one query before and one after suffice, shared with the watch for strangers"


@pytest.mark.slow
def test_unreported_memory_is_the_memory_in_use_on_the_device(cluster, smi, tmp_path):
    spec = scripts.spec(scripts.write(tmp_path / "own", f"{scripts.STEPS}train()\ntime.sleep(1.5)\n"))
    end = run(cluster, scripts.RUNNER, spec=spec)
    assert isinstance(end.outcome, Measured), end.outcome
    assert end.outcome.measurement.peak_allocated_bytes == (0, 7000 << 20)
    assert end.outcome.measurement.peak_reserved_bytes == (), "the allocator's own word is not known"


@pytest.mark.slow
def test_nothing_starts_on_a_device_in_use_by_another_process(cluster, smi, pids):
    smi.uses(4, 70000)
    smi.answers("apps", "echo 'GPU-0001-abcd, 4711, 69000'\n")
    end = run(cluster, "hangs_at_start", spec={"pids": pids})
    assert isinstance(end.outcome, GangLost)
    assert (end.outcome.cause, end.outcome.evidence.node) == ("infrastructure", "gpu-node")
    assert (
        "gpu-node is not free: GPU 1 (GPU-0001-abcd) has 70000 MiB in use by pid 4711" in end.outcome.evidence.message
    )
    assert list(Path(pids).iterdir()) == [], "no rank was forked"
    one = run(cluster, "noop", world_size=1, devices=cluster.topology.devices[:1])
    assert isinstance(one.outcome, Measured), "the other device can be used"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("later", "note"),
    [
        ("echo '0, GPU-0000-abcd, NVIDIA H200, 143771, 4, 00000000:00:00.0, Disabled'", None),
        (
            "echo 'GPU is lost'; exit 15",
            "gpu-node is not free after the gang: nvidia-smi failed with code 15: GPU is lost",
        ),
    ],
)
def test_the_gang_is_over_when_its_devices_are_free_again(cluster, smi, pids, later, note):
    """The driver shows memory in use at the first look after the gang; at the second none, or it fails."""
    gang = launch(cluster, "hangs_at_start", spec={"pids": pids})
    wait_for_pids(pids, 2)
    smi.answers("later", later)
    smi.answers("gpus", f"echo '{_row(0, 9000)}'; mv {smi.folder}/later {smi.folder}/gpus")
    before = len(smi.queries)
    os.kill(living(pids)[0], signal.SIGKILL)
    end = end_of(cluster, gang)
    assert isinstance(end.outcome, GangLost) and end.outcome.cause == "killed", "what it died of, not what came later"
    assert len(smi.queries) == before + 2
    notes = [text for text in end.outcome.evidence.collateral if "device_busy" in text]
    assert notes == ([] if note is None else [f"gpu-node: device_busy: {note}"])
