"""Accelerators, the discovery of devices by what vendors' tools print, and placement against brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.hardware import discovery, topology
from cluster.hardware.discovery import DeviceError, discover_node
from cluster.hardware.topology import (
    CatalogueError,
    Device,
    Node,
    Pool,
    Topology,
    catalogue,
    dense_peak,
    find_accelerator,
    load_cluster,
)
from cluster.node.load_watch import DeviceUse, device_uses
from configs import CONFIGS
from orchestrator import doctor
from orchestrator.doctor import TroubleError
from tests.cluster import vendors
from trials.accelerator.kinds import FAMILIES, without_devices

WANTED = ("v100-32", "a100-40", "a100-80", "h100", "h200", "b200", "gb200", "mi300x", "ascend-910b", "cpu")


@pytest.mark.parametrize("name", WANTED)
def test_figures_are_plausible(name):
    device = catalogue()[name]
    assert 0 < device.usable_memory_bytes <= device.memory_bytes < 1e12
    assert device.network_bytes_per_s <= device.link_bytes_per_s <= device.memory_bytes_per_s
    assert device.domain_size >= device.devices_per_node >= 1
    assert device.peak("float32") is not None
    assert all(source.strip() for source in device.sources.values())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("A100-80GB", "a100-80"),
        ("GB200", "gb200"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40"),
        ("NVIDIA A800 80GB PCIe", "a800-pcie-80"),
        ("NVIDIA A800-SXM4-40GB", "a800-40"),
        ("NVIDIA A800-SXM4-80GB", "a800-80"),
        ("Ascend 910B (Atlas 800T A2)", "ascend-910b"),
        ("Ascend910B3", "ascend-910b"),
        ("Ascend 910A (Atlas 800)", "ascend-910a"),
    ],
)
def test_finds_devices_by_name(text, name):
    assert find_accelerator(text).name == name


@pytest.mark.parametrize(
    ("name", "number_format", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA H200 NVL", "bfloat16", 835.5e12),
        ("NVIDIA H100 80GB HBM3", "float16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA H100 80GB HBM3", "float32", 66.9e12),
        ("NVIDIA H100 80GB HBM3", "float8", 1978.9e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0e12),
        ("NVIDIA H800", "bfloat16", 989.4e12),
        ("NVIDIA A800-SXM4-80GB", "bfloat16", 312.0e12),
        ("NVIDIA B200", "bfloat16", 2250.0e12),
        ("AMD Instinct MI300X", "bfloat16", 1307.4e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0e12),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5e12),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156.0e12),
        ("NVIDIA GH200 480GB", "bfloat16", 989.4e12),
        ("Tesla V100-SXM2-32GB", "float16", 125.0e12),
        ("Tesla V100-PCIE-16GB", "float16", 112.0e12),
        ("Tesla V100-SXM2-32GB", "tf32", 15.7e12),  # it has no such units: the products stay float32
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", 312.0e12 * 14 / 108),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "bfloat16", 989.4e12 * 16 / 132),
        ("NVIDIA H100 80GB HBM3 MIG 1g.20gb", "bfloat16", 989.4e12 * 26 / 132),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "tf32", 494.7e12 * 60 / 132),
        ("NVIDIA A30 MIG 2g.12gb", "bfloat16", 165.0e12 / 2),
        ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "bfloat16", None),  # a part of a slice, of no known size
        ("NVIDIA B200 MIG 3g.90gb", "bfloat16", None),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB", "float8", None),
        ("NVIDIA H800 PCIe", "bfloat16", None),  # a form with a different peak
        ("NVIDIA RTX A1000", "bfloat16", None),
        ("NVIDIA H20", "bfloat16", None),
        ("NVIDIA GeForce RTX 3090", "float16", 71.0e12),  # accumulated in float32, as torch does
        ("NVIDIA GeForce RTX 3090 Ti", "float16", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA RTX 6000 Ada Generation Max-Q", "bfloat16", None),
        ("Intel(R) Xeon(R) CPU Max 9480", "float32", 8.0e10),  # "Max" alone implies no other form
        ("NVIDIA GeForce RTX 5090", "bfloat16", 209.5e12),
        ("NVIDIA RTX 6000 Ada Generation", "float8", 728.5e12),
        ("Quadro RTX 6000", "float16", None),
        ("NVIDIA RTX A6000", "tf32", 77.4e12),
        ("NVIDIA L4", "float8", 242.5e12),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA L40S", "bfloat16", 362.05e12),
        ("NVIDIA A10", "bfloat16", 125.0e12),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA A800-SXM4-40GB", "bfloat16", 312.0e12),
        ("Tesla V100S-PCIE-32GB", "float16", None),
        ("AMD Instinct MI210", "bfloat16", 181.0e12),
        ("AMD Instinct MI210", "tf32", None),
        ("AMD Instinct MI250X", "bfloat16", None),
        ("AMD Instinct MI300X OAM", "tf32", 653.7e12),
        ("AMD Instinct MI355X", "tf32", None),  # torch requests it and has it emulated at an unpublished rate
        ("Ascend910B2", "bfloat16", 353.9e12),
        ("Ascend910B", "bfloat16", None),  # was also a name of the generation before
        ("Ascend910B3", "bfloat16", None),
        ("Ascend910_9391", "bfloat16", None),
    ],
)
def test_peaks_are_those_of_device_and_format_or_unknown(name, number_format, peak):
    assert dense_peak(name, number_format) == (None if peak is None else pytest.approx(peak))


def test_a_slice_has_its_share_of_the_whole():
    whole, share = find_accelerator("NVIDIA H100 80GB HBM3"), find_accelerator("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert share.usable_memory_bytes == 10 * 2**30
    assert share.memory_bytes_per_s == whole.memory_bytes_per_s / 8
    assert share.peak("bfloat16") == whole.peak_flops_per_s["bfloat16"] * 16 / 132
    unknown = find_accelerator("NVIDIA H200 MIG 1g.18gb")
    assert unknown.peak("bfloat16") == pytest.approx(989.4e12 / 7)
    instance = find_accelerator("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb")
    assert instance.peak("bfloat16") == pytest.approx(312.0e12 / 7) and instance.memory_bytes == 20 * 2**30


@pytest.mark.parametrize("name", sorted({*catalogue()} - {"cpu"}))
def test_figures_of_slices_and_links_fit_together(name):
    device = catalogue()[name]
    assert all(0 < number <= device.multiprocessors["whole"] for number in device.multiprocessors.values())
    assert device.network_bytes_per_s <= device.link_bytes_per_s <= device.memory_bytes_per_s
    if "pcie" in name:
        assert device.link_bytes_per_s <= 1.05 * device.host_bytes_per_s, "NVLink is another form's"


def test_missing_formats_run_as_wider_ones_or_are_unknown():
    assert find_accelerator("A100").peak("float8") == find_accelerator("A100").peak("bfloat16")
    assert find_accelerator("H100").peak("float8") == pytest.approx(1978.9e12)


def test_errors_about_unknown_names_list_the_known_ones():
    with pytest.raises(CatalogueError, match="h100"):
        find_accelerator("Quadro 4000")
    with pytest.raises(CatalogueError, match="dgx-h100"):
        load_cluster("dgx-z9")


def test_clusters_load():
    assert load_cluster("h100-1000x8").num_nodes == 1000
    assert load_cluster("ascend-910b-2x8").accelerator.name == "ascend-910b"
    assert load_cluster("dgx-a100").domain_size == 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes_per_s: 3", "memory_speed: 3", "missing memory_bytes_per_s"),
        ("domain_size: 8\n", "domain_size: 8\ncolour: green\n", "unknown key colour"),
        ("  usable_memory_bytes:", "  wrong:", "no source for usable_memory_bytes"),
        ("float8:", "float7:", "unknown number format float7"),
        ("{whole: 132, ", "{", "multiprocessors without those of the whole"),
        ("  multiprocessors: ", "  others: ", "no source for multiprocessors"),
    ],
)
def test_incomplete_files_are_refused(tmp_path, old, new, message):
    text = (CONFIGS / "accelerators" / "h100.yaml").read_text(encoding="utf-8")
    path = tmp_path / "h100.yaml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(CatalogueError, match=message):
        topology._accelerator(path)


MIB = 1 << 20


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Makes this host one with these tools, and with drivers only where a test requests them."""
    discovery._warn.cache_clear()
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


def test_slices_are_devices_with_separate_memory(host):
    host(nvidia_smi=vendors.nvidia("Enabled", "Enabled"))
    node = discover_node()
    assert node.device_name == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    assert [one.name for one in node.handles] == ["MIG-aaaa", "MIG-bbbb", "MIG-cccc"]
    assert [one.gpu_uuid for one in node.handles] == ["GPU-0000", "GPU-0000", "GPU-1111"]
    assert [one.memory_bytes for one in node.handles] == [40448 * MIB, 40448 * MIB, 40 * 10**9]
    assert node.device_memory_bytes == 40 * 10**9, "what the name of the profile promises where no figure is printed"
    uses = device_uses("cuda", node.handles)
    assert [(use.handle.name, use.is_busy) for use in uses] == [("MIG-aaaa", False), ("MIG-bbbb", True)]


def test_a_partitioned_gpu_is_not_a_whole_one(host, monkeypatch):
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
            {"rocm_smi": vendors.ROCM},
            ("rocm", 2, "AMD Instinct MI300X", 206141652992),
            ["0000:0c:00.0", "0000:26:00.0"],
        ),
        ({"amd_smi": vendors.AMD}, ("rocm", 1, "AMD Instinct MI300X", 196592 * MIB), ["0000:0c:00.0"]),
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
def test_devices_of_other_vendors_are_found_under_auto(host, programs, expected, names):
    host(**programs)
    node = discover_node()
    assert _facts(node) == expected
    assert [one.bus_id for one in node.handles] == names
    assert [one.name for one in node.handles] == [str(i) for i in range(node.num_devices)]
    assert discover_node(device=expected[0]).handles == node.handles


def test_devices_that_hip_would_count_otherwise_are_refused(host, monkeypatch):
    """Slurm sets the variable; a rank given device 1 by the tool's numbers would find another one, or none."""
    host(rocm_smi=vendors.ROCM)
    num_devices = discover_node().num_devices
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", ",".join(map(str, range(num_devices))))
    assert discover_node().num_devices == num_devices
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    with pytest.raises(DeviceError, match=r"ROCR_VISIBLE_DEVICES=1 numbers .* unset it, .* HIP_VISIBLE_DEVICES"):
        discover_node()


def test_tiles_are_numbered_as_ranks_see_them(host, monkeypatch):
    """A mask that numbers cards would give a rank other tiles than were listed, or tiles of one card for two cards."""
    host(xpu_smi=vendors.intel(tiles=2))
    assert FAMILIES["xpu"].order_variables == {"ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1,2")
    assert [(one.name, one.bus_id) for one in discover_node().handles] == [("1", "0000:29:00.0"), ("2", "0000:3a:00.0")]
    assert device_uses("xpu", discover_node().handles) == [], "memory in use is reported for whole cards"
    monkeypatch.setenv("ZE_FLAT_DEVICE_HIERARCHY", "COMPOSITE")
    with pytest.raises(DeviceError, match=r"ZE_AFFINITY_MASK=1,2 numbers cards under .*=COMPOSITE.*unset the latter"):
        discover_node()
    monkeypatch.setenv("ZE_AFFINITY_MASK", "")
    assert discover_node().num_devices == 4, "an empty mask hides nothing"


def test_an_empty_limit_hides_nothing_from_hip_and_is_logged(host, monkeypatch, caplog):
    host(rocm_smi=vendors.ROCM)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert _facts(discover_node())[:2] == ("rocm", 2)
    assert "HIP_VISIBLE_DEVICES is empty, which hides no device of kind rocm; set device: cpu" in caplog.text
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert discover_node().num_devices == 2
    assert "CUDA_VISIBLE_DEVICES is empty, which hides no device of kind rocm" in caplog.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [one.name for one in discover_node().handles] == ["1"], "HIP reads the other variable"
    for name, value in without_devices({}).items():
        monkeypatch.setenv(name, value)
    assert discover_node().device_kind == "cpu"


@pytest.mark.parametrize(
    ("tool", "variable", "value"),
    [("nvidia_smi", "CUDA_VISIBLE_DEVICES", ""), ("rocm_smi", "HIP_VISIBLE_DEVICES", "-1")],
)
def test_the_doctor_names_what_hides_all_devices(host, monkeypatch, tool, variable, value):
    host(**{tool: vendors.nvidia() if tool == "nvidia_smi" else vendors.ROCM})
    monkeypatch.setenv(variable, value)
    with pytest.raises(
        TroubleError, match=f"{variable}={value!r} hides all devices of kind .*: trials run on CPU cores"
    ):
        doctor.found_devices()


def test_a_limit_in_cudas_variable_holds_for_hip_too(host, monkeypatch):
    host(rocm_smi=vendors.ROCM)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [one.name for one in discover_node().handles] == ["1"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    assert [one.name for one in discover_node().handles] == ["0"], "HIP's own comes first"
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(DeviceError, match=r"lists 0, 1, none of which is in CUDA_VISIBLE_DEVICES=7"):
        discover_node(device="rocm")


GONE = "Unable to determine the device handle for GPU0000:9A:00.0: Unknown Error"
DIVIDED = {"mode": "Enabled", "other": "Enabled"}


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (vendors.nvidia(rows=vendors.UNIFIED), r"0 \(NVIDIA GB10\) is unusable: .*no dedicated memory \(\[N/A\]\)"),
        (vendors.nvidia(**DIVIDED, has_slices=False), r"0 \(.*MIG mode without slices.*; 1 \(.*without slices"),
        (vendors.nvidia(rows=vendors.RESET), r"1 \(GPU\) is unusable: nvidia-smi reports"),
        (vendors.nvidia(rows=GONE), r"\? \(GPU\) is unusable: Unable to determine"),
    ],
    ids=["unified", "undivided", "reset", "gone"],
)
def test_unusable_gpus_are_never_replaced_by_cores(host, monkeypatch, tool, words):
    host(nvidia_smi=tool)
    with pytest.raises(DeviceError, match=f"kind cuda that cannot be used: {words}.*device: cpu"):
        discover_node()
    with pytest.raises(DeviceError, match=f"device: cuda, but {words}"):
        discover_node(device="cuda")
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert discover_node().device_kind == "cpu"


def test_a_driver_whose_tool_lists_nothing_does_not_make_a_cpu_host(host, monkeypatch, tmp_path, caplog):
    host(nvidia_smi=vendors.nvidia(rows="No devices were found"))
    assert discover_node().device_kind == "cpu"
    assert "nvidia-smi lists no device" in caplog.text, "without its driver it is only logged"
    source = replace(discovery._MAKERS["cuda"], driver_files=(str(tmp_path),))
    monkeypatch.setitem(discovery._MAKERS, "cuda", source)
    with pytest.raises(DeviceError, match=r"nvidia-smi lists no device.*device: cpu"):
        discover_node()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert discover_node().device_kind == "cpu"


@pytest.mark.parametrize(
    ("tool", "names", "words"),
    [
        (
            vendors.nvidia(rows=f"{vendors.NVIDIA_ROWS.splitlines()[0]}\n{vendors.RESET}"),
            ["0"],
            "1 GPU(s) used, for 1 (GPU) is unusable: nvidia-smi reports [GPU requires reset]",
        ),
        (vendors.nvidia("Enabled"), ["1"], "0 (NVIDIA H100 80GB HBM3) is unusable: it is partitioned (MIG)"),
    ],
    ids=["reset", "divided"],
)
def test_an_omitted_gpu_is_logged(host, monkeypatch, caplog, tool, names, words):
    host(nvidia_smi=tool)
    assert [one.name for one in discover_node().handles] == names
    discover_node()
    assert caplog.text.count(words) == 1
    with pytest.raises(DeviceError, match=r"devices_per_node is 2, but this host has 1 GPU\(s\), for . .* unusable"):
        discover_node(num_devices=2)
    caplog.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names[0])
    assert discover_node().num_devices == 1 and not caplog.text, "the others are not requested"


def test_an_idle_npu_shows_memory_in_use_and_one_that_is_used_more(host):
    host(npu_smi=vendors.ASCEND)
    assert [use.is_busy for use in device_uses("npu", discover_node().handles)] == [False, True]
    assert DeviceUse(handle=discover_node().handles[0], used_bytes=3600 * MIB).is_busy is False


def test_a_failing_tool_with_its_driver_present_does_not_make_a_cpu_host(host, monkeypatch, tmp_path, caplog):
    host(rocm_smi="#!/bin/sh\necho 'Driver not initialized (amdgpu not found in modules)'; exit 1\n")
    assert discover_node().device_kind == "cpu"
    assert "rocm-smi failed with code 1: Driver not initialized" in caplog.text, "without its driver it is only logged"
    source = replace(discovery._MAKERS["rocm"], driver_files=(str(tmp_path),))
    monkeypatch.setitem(discovery._MAKERS, "rocm", source)
    with pytest.raises(DeviceError, match=r"kind rocm that cannot be used: rocm-smi failed.*device: cpu"):
        discover_node()
    with pytest.raises(DeviceError, match=r"device: rocm, but rocm-smi failed"):
        discover_node(device="rocm")


def test_a_driver_without_its_tool_is_logged(host, monkeypatch, tmp_path, caplog):
    host()
    source = replace(discovery._MAKERS["rocm"], driver_files=(str(tmp_path),))
    monkeypatch.setitem(discovery._MAKERS, "rocm", source)
    assert discover_node().device_kind == "cpu"
    assert "no rocm-smi or amd-smi to list devices of kind rocm" in caplog.text
    with pytest.raises(DeviceError, match=r"none of nvidia-smi.*lists a device"):
        discover_node(may_be_cpu=False)


def node(name, num_devices):
    return Node(
        name=name,
        address="127.0.0.1",
        num_devices=num_devices,
        device_kind="cpu",
        device_name="core",
        device_memory_bytes=1,
        threads_per_device=1,
    )


def topology_placement(*sizes):
    return Topology(nodes=tuple(node(f"n{i}", size) for i, size in enumerate(sizes)))


def place(cluster, free, **wanted):
    """Where a gang goes on a cluster of which only ``free`` is free."""
    pool = Pool(cluster)
    pool.take(device for device in cluster.devices if device not in free)
    return pool.place(**wanted)


def free_but(cluster, *taken):
    return frozenset(cluster.devices) - {Device(node=name, index=i) for name, i in taken}


@st.composite
def problems(draw):
    cluster = topology_placement(*draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    free = frozenset(device for device in cluster.devices if draw(st.booleans()))
    tp = draw(st.integers(1, 3))
    return (
        cluster,
        free,
        {"world_size": tp * draw(st.integers(1, 6)), "tp": tp, "isolation": draw(st.sampled_from(["node", "device"]))},
    )


def fewest_nodes(room, world_size):
    """By trying every set of nodes; None if not even all of them will do."""
    for count in range(1, len(room) + 1):
        if any(sum(chosen) >= world_size for chosen in itertools.combinations(room, count)):
            return count
    return None


@given(problems())
def test_what_is_placed_keeps_the_rules(problem):
    cluster, free, wanted = problem
    placement = place(cluster, free, **wanted)
    if placement is None:
        return
    assert len(placement.ranks) == len(set(placement.ranks)) == wanted["world_size"]
    assert set(placement.ranks) <= set(placement.reserved) <= free
    assert len(set(placement.reserved)) == len(placement.reserved)
    per_node = [name for name, _ in itertools.groupby(device.node for device in placement.ranks)]
    assert len(per_node) == len(set(per_node)), "ranks are consecutive on a node"
    for start in range(0, wanted["world_size"], wanted["tp"]):
        assert len({device.node for device in placement.ranks[start : start + wanted["tp"]]}) == 1
    if wanted["isolation"] == "node":
        whole = {device for name in placement.nodes for device in cluster.node(name).devices}
        assert set(placement.reserved) == whole
    else:
        assert placement.reserved == placement.ranks


@given(problems())
def test_a_gang_waits_exactly_when_it_must(problem):
    cluster, free, wanted = problem
    usable = {item: sum(device in free for device in item.devices) for item in cluster.nodes}
    if wanted["isolation"] == "node":
        usable = {item: count for item, count in usable.items() if count == item.num_devices}
    tp = wanted["tp"]
    now = fewest_nodes([count // tp * tp for count in usable.values()], wanted["world_size"])
    ever = fewest_nodes([item.num_devices // tp * tp for item in cluster.nodes], wanted["world_size"])
    placement = place(cluster, free, **wanted)
    assert (placement is not None) == (now is not None and now == ever)
    if placement is not None:
        assert len(placement.nodes) == now


def test_a_small_gang_takes_the_tightest_node():
    cluster = topology_placement(4, 4)
    placement = place(cluster, free_but(cluster, ("n1", 0), ("n1", 1)), world_size=2, tp=1, isolation="device")
    assert placement is not None
    assert placement.ranks == (Device(node="n1", index=2), Device(node="n1", index=3))


def test_a_gang_that_fits_a_node_waits_rather_than_span_two():
    cluster = topology_placement(2, 2)
    free = free_but(cluster, ("n0", 0), ("n1", 0))
    assert place(cluster, free, world_size=2, tp=1, isolation="device") is None


def test_a_whole_node_is_reserved_for_one_rank():
    placement = place(
        topology_placement(4), frozenset(topology_placement(4).devices), world_size=1, tp=1, isolation="node"
    )
    assert placement is not None
    assert (len(placement.ranks), len(placement.reserved)) == (1, 4)


def test_devices_in_a_row_are_preferred():
    cluster = topology_placement(4)
    placement = place(cluster, free_but(cluster, ("n0", 0)), world_size=2, tp=2, isolation="device")
    assert placement is not None
    assert [device.index for device in placement.ranks] == [2, 3]


@pytest.mark.parametrize("wrong", [{"tp": 2}, {"tp": 0}, {"world_size": 0}, {"isolation": "rack"}])
def test_invalid_requests_are_refused(wrong):
    cluster = topology_placement(4)
    with pytest.raises(ValueError, match=r"world_size|isolation"):
        place(cluster, frozenset(cluster.devices), **{"world_size": 3, "tp": 1, "isolation": "node", **wrong})


@given(problems(), st.randoms())
def test_a_pool_places_like_a_fresh_count(problem, rng):
    cluster, free, wanted = problem
    pool = Pool(cluster)
    taken = [device for device in cluster.devices if rng.random() < 0.5]
    pool.take(taken)
    lost = {cluster.nodes[0].name} if rng.random() < 0.5 else set()
    pool.set_nodes(cluster, lost)
    pool.give_back(taken)
    pool.take(device for device in cluster.devices if device not in free)
    assert pool.place(**wanted) == place(cluster, frozenset(d for d in free if d.node not in lost), **wanted)
