"""Devices that are not free, before a gang and after it. There is a real ``nvidia-smi`` on the path, which answers from
files: its figures are the test's, everything that asks it is as in use."""

import os
import signal
from pathlib import Path

import pytest

from cluster.base import Deadlines
from cluster.gang.messages import NodeLaunch, RankSlot
from cluster.hardware.topology import discover_node
from cluster.local import LocalCluster
from cluster.node import device_memory
from cluster.node.device_memory import DeviceQueryError, device_names, device_uses, wait_until_free
from tests.cluster import scripts
from tests.cluster.gangs import PRELOAD, end_of, launch, living, run, wait_for_pids
from trials.outcome import Crashed, GangLost, Measured

SCRIPT = """#!/bin/sh
echo "$1" >> {folder}/asked
case "$1" in
--query-gpu=name,*) printf 'NVIDIA H200, 143771\\nNVIDIA H200, 143771\\n' ;;
--query-gpu=index,uuid,clocks*) echo '1, GPU-0001-abcd, 0x4, 1, 1, 30, 7000' ;;
--query-gpu=index,*) . {folder}/gpus ;;
--query-compute-apps=*) . {folder}/apps ;;
esac
"""


class Smi:
    """A false nvidia-smi, whose answers are the output of the shell scripts ``gpus`` and ``apps``."""

    def __init__(self, folder):
        self.folder = folder
        program = folder / "nvidia-smi"
        program.write_text(SCRIPT.format(folder=folder))
        program.chmod(0o755)
        (folder / "asked").write_text("")
        self.uses(4, 4)
        self.says("apps", "")

    def says(self, name, script):
        """Replace the answer atomically: it may be read at any time."""
        beside = self.folder / f"{name}.new"
        beside.write_text(script)
        beside.replace(self.folder / name)

    def uses(self, *mebibytes):
        lines = [f"echo '{i}, GPU-{i:04d}-abcd, {used}'" for i, used in enumerate(mebibytes)]
        self.says("gpus", "\n".join(lines) + "\n")

    @property
    def asked(self):
        return (self.folder / "asked").read_text().splitlines()


@pytest.fixture(scope="module")
def smi_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("smi")


@pytest.fixture
def smi(smi_folder, monkeypatch):
    monkeypatch.setenv("PATH", str(smi_folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Smi(smi_folder)


def test_devices_are_known_by_index_and_by_uuid(smi):
    smi.uses(10, 2000)
    assert [use.used_bytes >> 20 for use in device_uses(["1"])] == [2000]
    assert [use.index for use in device_uses(["GPU-0000"])] == ["0"]
    assert device_uses(["MIG-1234", "7"]) == [], "what is not listed cannot be checked"


def test_free_means_up_to_an_allowance(smi):
    smi.uses(300, 30000)
    smi.says("apps", "echo 'GPU-0001-abcd, 4711, 29500'\necho 'GPU-0000-abcd, 1, 290'\n")
    assert wait_until_free(["0"], 0.0) is None
    problem = wait_until_free(["0", "1"], 0.0)
    assert problem == "GPU 1 (GPU-0001-abcd) has 30000 MiB in use by pid 4711 (29500 MiB)"
    smi.says("gpus", "echo '0, GPU-0000-abcd, [N/A]'\n")
    assert wait_until_free(["0"], 0.0) is None, "a device without a figure counts as free"


@pytest.mark.parametrize(
    ("answer", "message"),
    [("echo 'GPU is lost'; exit 15", "failed with code 15: GPU is lost"), ("exec sleep 60", "no answer within 0.2 s")],
)
def test_a_driver_that_fails_or_hangs_is_told(smi, monkeypatch, answer, message):
    monkeypatch.setattr(device_memory, "QUERY_TIMEOUT_S", 0.2)
    smi.says("gpus", answer)
    with pytest.raises(DeviceQueryError, match=message):
        device_uses(["0"])


def test_a_gang_sees_its_own_share_of_what_the_agent_sees(monkeypatch):
    slots = (RankSlot(rank=4, local_rank=0, index=1), RankSlot(rank=5, local_rank=1, index=0))
    order = NodeLaunch(
        attempt_id="x", token="t", runner="m:f", spec={}, node="n", directory="/", slots=slots, world_size=6,
        deadlines=Deadlines(), device_kind="cuda",
    )  # fmt: skip
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_names(order) == ("1", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert device_names(order) == ("GPU-b", "GPU-a")


@pytest.fixture(scope="module")
def cluster(smi_folder, tmp_path_factory):
    """Two "GPUs" whose ranks use none: what the driver says is under test."""
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
    asked = [query for query in smi.asked if "compute-apps" in query]
    assert len(asked) <= 1, "one question before and one after suffice, and that of the watch for strangers beside it"


@pytest.mark.slow
def test_memory_that_a_program_does_not_tell_is_what_was_in_use_on_its_device(cluster, smi, tmp_path):
    spec = scripts.spec(scripts.write(tmp_path / "own", f"{scripts.STEPS}train()\ntime.sleep(1.5)\n"))
    end = run(cluster, scripts.RUNNER, spec=spec)
    assert isinstance(end.outcome, Measured), end.outcome
    assert end.outcome.measurement.peak_allocated_bytes == (0, 7000 << 20)
    assert end.outcome.measurement.peak_reserved_bytes == (), "the allocator's own word is not known"


@pytest.mark.slow
def test_nothing_starts_on_a_device_that_somebody_else_uses(cluster, smi, pids):
    smi.uses(4, 70000)
    smi.says("apps", "echo 'GPU-0001-abcd, 4711, 69000'\n")
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
        ("echo '0, GPU-0000-abcd, 4'", None),
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
    smi.says("later", later)
    smi.says("gpus", f"echo '0, GPU-0000-abcd, 9000'; mv {smi.folder}/later {smi.folder}/gpus")
    before = len(smi.asked)
    os.kill(living(pids)[0], signal.SIGKILL)
    end = end_of(cluster, gang)
    assert isinstance(end.outcome, Crashed), "what it died of, not what came later"
    assert len(smi.asked) == before + 2
    notes = [text for text in end.outcome.evidence.collateral if "device_busy" in text]
    assert notes == ([] if note is None else [f"gpu-node: device_busy: {note}"])
