"""What is found on hosts whose vendors' tools print what they document; none of it ran on such hardware."""

from dataclasses import replace

import pytest

from cluster.hardware import discovery
from cluster.hardware.discovery import DeviceError, discover_node
from cluster.node.load_watch import DeviceUse, device_uses
from orchestrator import doctor
from orchestrator.doctor import TroubleError
from tests.cluster.hardware import vendors
from trials.accelerator.kinds import FAMILIES, without_devices

MIB = 1 << 20


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Makes this host one with these tools, and with drivers only where a test says so."""
    discovery._tell.cache_clear()
    for kind, source in list(discovery._MAKERS.items()):
        monkeypatch.setitem(discovery._MAKERS, kind, replace(source, driver_files=()))
    return lambda **programs: vendors.install(tmp_path, monkeypatch, **programs)


def _facts(node):
    return node.device_kind, node.num_devices, node.device_name, node.device_memory_bytes


def test_whole_gpus(host, monkeypatch):
    host(nvidia_smi=vendors.nvidia())
    node = discover_node()
    assert _facts(node) == ("cuda", 2, "NVIDIA H100 80GB HBM3", 81559 * MIB)
    assert [(one.name, one.uuid, one.bus_id) for one in node.handles] == [
        ("0", "GPU-0000", "0000:17:00.0"),
        ("1", "GPU-1111", "0000:9a:00.0"),
    ]
    assert discover_node(device="cpu").device_kind == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-11")
    assert [one.name for one in discover_node().handles] == ["1"], "those that the environment names, not the first"
    with pytest.raises(DeviceError, match=r"has 1 GPU\(s\)"):
        discover_node(num_devices=2)


def test_slices_are_devices_of_their_own_with_their_own_memory(host):
    host(nvidia_smi=vendors.nvidia("Enabled", "Enabled"))
    node = discover_node()
    assert node.device_name == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    assert [one.name for one in node.handles] == ["MIG-aaaa", "MIG-bbbb", "MIG-cccc"]
    assert [one.gpu_uuid for one in node.handles] == ["GPU-0000", "GPU-0000", "GPU-1111"]
    assert [one.memory_bytes for one in node.handles] == [40448 * MIB, 40448 * MIB, 40 * 10**9]
    assert node.device_memory_bytes == 40 * 10**9, "what the name of the profile promises where no figure is printed"
    uses = device_uses("cuda", node.handles)
    assert [(use.handle.name, use.is_busy) for use in uses] == [("MIG-aaaa", False), ("MIG-bbbb", True)]


def test_a_gpu_that_is_divided_is_no_whole_one(host, monkeypatch):
    host(nvidia_smi=vendors.nvidia("Enabled", "Disabled"))
    assert [one.name for one in discover_node().handles] == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-bbbb")
    assert [one.name for one in discover_node().handles] == ["MIG-bbbb"]


def test_slices_that_differ_are_refused(host):
    host(nvidia_smi=vendors.nvidia("Enabled", "Enabled", "1g.10gb"))
    with pytest.raises(DeviceError, match=r"2 x .* MIG 3g.40gb, 1 x .* MIG 1g.10gb.*CUDA_VISIBLE_DEVICES"):
        discover_node()


@pytest.mark.parametrize(
    ("programs", "expected", "names"),
    [
        (
            {"rocm_smi": vendors.plain(vendors.ROCM)},
            ("rocm", 2, "AMD Instinct MI300X", 206141652992),
            ["0000:0c:00.0", "0000:26:00.0"],
        ),
        ({"amd_smi": vendors.plain(vendors.AMD)}, ("rocm", 1, "AMD Instinct MI300X", 196592 * MIB), ["0000:0c:00.0"]),
        (
            {"xpu_smi": vendors.intel(tiles=1)},
            ("xpu", 2, "Intel(R) Data Center GPU Max 1550", 137438953472),
            ["0000:29:00.0", "0000:3a:00.0"],
        ),
        (
            {"xpu_smi": vendors.intel(tiles=2)},
            ("xpu", 4, "Intel(R) Data Center GPU Max 1550", 137438953472 // 2),
            ["0000:29:00.0", "0000:29:00.0", "0000:3a:00.0", "0000:3a:00.0"],
        ),
        ({"npu_smi": vendors.ASCEND}, ("npu", 2, "Ascend910B2", 65536 * MIB), ["0000:c1:00.0", "0000:01:00.0"]),
        ({"npu_smi": vendors.ASCEND_TWO_CHIPS}, ("npu", 2, "Ascend910", 65536 * MIB), ["0000:9d:00.0", "0000:9f:00.0"]),
    ],
    ids=["rocm", "amd", "xpu", "xpu-two-tiles", "npu", "npu-two-chips"],
)
def test_other_makers_devices_are_found_under_auto(host, programs, expected, names):
    host(**programs)
    node = discover_node()
    assert _facts(node) == expected
    assert [one.bus_id for one in node.handles] == names
    assert [one.name for one in node.handles] == [str(i) for i in range(node.num_devices)]
    assert discover_node(device=expected[0]).handles == node.handles


def test_devices_that_hip_would_count_otherwise_are_refused(host, monkeypatch):
    """Slurm sets the variable; a rank told device 1 by the tool's numbers would find another one, or none."""
    host(rocm_smi=vendors.plain(vendors.ROCM))
    num_devices = discover_node().num_devices
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", ",".join(map(str, range(num_devices))))
    assert discover_node().num_devices == num_devices
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    with pytest.raises(DeviceError, match=r"ROCR_VISIBLE_DEVICES=1 numbers .* unset it, .* HIP_VISIBLE_DEVICES"):
        discover_node()


def test_tiles_are_numbered_as_ranks_are_told_to_see_them(host, monkeypatch):
    """A mask that numbers cards would give a rank other tiles than were listed, or tiles of one card for two cards."""
    host(xpu_smi=vendors.intel(tiles=2))
    assert FAMILIES["xpu"].order_variables == {"ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1,2")
    assert [(one.name, one.bus_id) for one in discover_node().handles] == [("1", "0000:29:00.0"), ("2", "0000:3a:00.0")]
    assert device_uses("xpu", discover_node().handles) == [], "memory in use is told of whole cards"
    monkeypatch.setenv("ZE_FLAT_DEVICE_HIERARCHY", "COMPOSITE")
    with pytest.raises(DeviceError, match=r"ZE_AFFINITY_MASK=1,2 numbers cards under .*=COMPOSITE.*unset the latter"):
        discover_node()
    monkeypatch.setenv("ZE_AFFINITY_MASK", "")
    assert discover_node().num_devices == 4, "an empty mask hides nothing"


def test_an_empty_limit_hides_nothing_from_hip_and_that_is_said(host, monkeypatch, caplog):
    host(rocm_smi=vendors.plain(vendors.ROCM))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert _facts(discover_node())[:2] == ("rocm", 2)
    assert "HIP_VISIBLE_DEVICES is empty, which hides no device of kind rocm; say device: cpu" in caplog.text
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert discover_node().num_devices == 2
    assert "CUDA_VISIBLE_DEVICES is empty, which hides no device of kind rocm" in caplog.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [one.name for one in discover_node().handles] == ["1"], "HIP asks the other variable"
    for name, value in without_devices({}).items():
        monkeypatch.setenv(name, value)
    assert discover_node().device_kind == "cpu"


@pytest.mark.parametrize(
    ("tool", "variable", "value"),
    [("nvidia_smi", "CUDA_VISIBLE_DEVICES", ""), ("rocm_smi", "HIP_VISIBLE_DEVICES", "-1")],
)
def test_the_doctor_says_what_hides_all_devices(host, monkeypatch, tool, variable, value):
    host(**{tool: vendors.nvidia() if tool == "nvidia_smi" else vendors.plain(vendors.ROCM)})
    monkeypatch.setenv(variable, value)
    with pytest.raises(TroubleError, match=f"{variable}={value!r} hides all devices of kind .*: trials run on cores"):
        doctor.found_devices()


def test_a_limit_in_cudas_variable_holds_for_hip_too(host, monkeypatch):
    host(rocm_smi=vendors.plain(vendors.ROCM))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [one.name for one in discover_node().handles] == ["1"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    assert [one.name for one in discover_node().handles] == ["0"], "HIP's own comes first"
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(DeviceError, match=r"lists 0, 1, of which CUDA_VISIBLE_DEVICES=7 names none"):
        discover_node(device="rocm")


GONE = "Unable to determine the device handle for GPU0000:9A:00.0: Unknown Error"
DIVIDED = {"mode": "Enabled", "other": "Enabled"}


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (vendors.nvidia(rows=vendors.UNIFIED), r"0 \(NVIDIA GB10\) is of no use: .*no memory of its own \(\[N/A\]\)"),
        (vendors.nvidia(**DIVIDED, has_slices=False), r"0 \(.*MIG mode without slices.*; 1 \(.*without slices"),
        (vendors.nvidia(rows=vendors.RESET), r"1 \(GPU\) is of no use: nvidia-smi says"),
        (vendors.nvidia(rows=GONE), r"\? \(GPU\) is of no use: Unable to determine"),
    ],
    ids=["unified", "undivided", "reset", "gone"],
)
def test_gpus_that_cannot_be_used_are_never_traded_for_cores(host, monkeypatch, tool, words):
    host(nvidia_smi=tool)
    with pytest.raises(DeviceError, match=f"kind cuda that cannot be used: {words}.*device: cpu"):
        discover_node()
    with pytest.raises(DeviceError, match=f"device: cuda, but {words}"):
        discover_node(device="cuda")
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert discover_node().device_kind == "cpu"


def test_a_driver_whose_tool_lists_nothing_is_no_host_of_cores(host, monkeypatch, tmp_path, caplog):
    host(nvidia_smi=vendors.nvidia(rows="No devices were found"))
    assert discover_node().device_kind == "cpu"
    assert "nvidia-smi lists no device here" in caplog.text, "without its driver: said, no more"
    source = replace(discovery._MAKERS["cuda"], driver_files=(str(tmp_path),))
    monkeypatch.setitem(discovery._MAKERS, "cuda", source)
    with pytest.raises(DeviceError, match=r"nvidia-smi lists no device here.*device: cpu"):
        discover_node()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert discover_node().device_kind == "cpu"


@pytest.mark.parametrize(
    ("tool", "names", "words"),
    [
        (
            vendors.nvidia(rows=f"{vendors.NVIDIA_ROWS.splitlines()[0]}\n{vendors.RESET}"),
            ["0"],
            "1 GPU(s) used, for 1 (GPU) is of no use: nvidia-smi says [GPU requires reset]",
        ),
        (vendors.nvidia("Enabled"), ["1"], "0 (NVIDIA H100 80GB HBM3) is of no use: it is divided (MIG)"),
    ],
    ids=["reset", "divided"],
)
def test_a_gpu_that_is_left_out_is_told(host, monkeypatch, caplog, tool, names, words):
    host(nvidia_smi=tool)
    assert [one.name for one in discover_node().handles] == names
    discover_node()
    assert caplog.text.count(words) == 1
    with pytest.raises(DeviceError, match=r"devices_per_node is 2, but this host has 1 GPU\(s\), for . .* of no use"):
        discover_node(num_devices=2)
    caplog.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names[0])
    assert discover_node().num_devices == 1 and not caplog.text, "the others are not asked for"


def test_an_idle_npu_shows_memory_in_use_and_one_that_is_used_more(host):
    host(npu_smi=vendors.ASCEND)
    assert [use.is_busy for use in device_uses("npu", discover_node().handles)] == [False, True]
    assert DeviceUse(handle=discover_node().handles[0], used_bytes=3600 * MIB).is_busy is False


def test_a_tool_that_fails_beside_its_driver_is_no_host_of_cores(host, monkeypatch, tmp_path, caplog):
    host(rocm_smi="#!/bin/sh\necho 'Driver not initialized (amdgpu not found in modules)'; exit 1\n")
    assert discover_node().device_kind == "cpu"
    assert "rocm-smi failed with code 1: Driver not initialized" in caplog.text, "without its driver: said, no more"
    source = replace(discovery._MAKERS["rocm"], driver_files=(str(tmp_path),))
    monkeypatch.setitem(discovery._MAKERS, "rocm", source)
    with pytest.raises(DeviceError, match=r"kind rocm that cannot be used: rocm-smi failed.*device: cpu"):
        discover_node()
    with pytest.raises(DeviceError, match=r"device: rocm, but rocm-smi failed"):
        discover_node(device="rocm")


def test_a_driver_without_its_tool_is_told(host, monkeypatch, tmp_path, caplog):
    host()
    source = replace(discovery._MAKERS["rocm"], driver_files=(str(tmp_path),))
    monkeypatch.setitem(discovery._MAKERS, "rocm", source)
    assert discover_node().device_kind == "cpu"
    assert "no rocm-smi or amd-smi to list devices of kind rocm" in caplog.text
    with pytest.raises(DeviceError, match=r"none of nvidia-smi.*lists a device"):
        discover_node(may_be_cpu=False)
