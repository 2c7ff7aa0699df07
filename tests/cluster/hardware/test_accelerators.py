"""The catalogue is complete and finds devices by the names drivers and data sets use."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.hardware import topology
from cluster.hardware.topology import CatalogueError, catalogue, dense_peak, find_accelerator, load_cluster
from configs import CONFIGS

WANTED = ("v100-32", "a100-40", "a100-80", "h100", "h200", "b200", "gb200", "mi300x", "ascend-910b", "cpu")


@pytest.mark.parametrize("name", WANTED)
def test_figures_are_plausible(name: str) -> None:
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
def test_finds_devices_by_name(text: str, name: str) -> None:
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
        ("NVIDIA H800 PCIe", "bfloat16", None),  # a form with a peak of its own
        ("NVIDIA RTX A1000", "bfloat16", None),
        ("NVIDIA H20", "bfloat16", None),
        ("NVIDIA GeForce RTX 3090", "float16", 71.0e12),  # accumulated in float32, as torch does
        ("NVIDIA GeForce RTX 3090 Ti", "float16", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA RTX 6000 Ada Generation Max-Q", "bfloat16", None),
        ("Intel(R) Xeon(R) CPU Max 9480", "float32", 8.0e10),  # "Max" alone tells no other form
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
        ("AMD Instinct MI355X", "tf32", None),  # torch asks for it, and has it emulated at a rate that nobody states
        ("Ascend910B2", "bfloat16", 353.9e12),
        ("Ascend910B", "bfloat16", None),  # was also a name of the generation before
        ("Ascend910B3", "bfloat16", None),
        ("Ascend910_9391", "bfloat16", None),
    ],
)
def test_peaks_are_those_of_device_and_format_or_unknown(name: str, number_format: str, peak: float | None) -> None:
    assert dense_peak(name, number_format) == (None if peak is None else pytest.approx(peak))


def test_a_slice_has_its_share_of_the_whole() -> None:
    whole, share = find_accelerator("NVIDIA H100 80GB HBM3"), find_accelerator("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert share.usable_memory_bytes == 10 * 2**30
    assert share.memory_bytes_per_s == whole.memory_bytes_per_s / 8
    assert share.peak("bfloat16") == whole.peak_flops_per_s["bfloat16"] * 16 / 132
    unknown = find_accelerator("NVIDIA H200 MIG 1g.18gb")
    assert unknown.peak("bfloat16") == pytest.approx(989.4e12 / 7)
    instance = find_accelerator("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb")
    assert instance.peak("bfloat16") == pytest.approx(312.0e12 / 7) and instance.memory_bytes == 20 * 2**30


@pytest.mark.parametrize("name", sorted({*catalogue()} - {"cpu"}))
def test_figures_of_slices_and_links_fit_together(name: str) -> None:
    device = catalogue()[name]
    assert all(0 < number <= device.multiprocessors["whole"] for number in device.multiprocessors.values())
    assert device.network_bytes_per_s <= device.link_bytes_per_s <= device.memory_bytes_per_s
    if "pcie" in name:
        assert device.link_bytes_per_s <= 1.05 * device.host_bytes_per_s, "NVLink is another form's"


def test_missing_formats_run_as_wider_ones_or_are_unknown() -> None:
    assert find_accelerator("A100").peak("float8") == find_accelerator("A100").peak("bfloat16")
    assert find_accelerator("H100").peak("float8") == pytest.approx(1978.9e12)


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(CatalogueError, match="h100"):
        find_accelerator("Quadro 4000")
    with pytest.raises(CatalogueError, match="dgx-h100"):
        load_cluster("dgx-z9")


def test_clusters_load() -> None:
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
def test_incomplete_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (CONFIGS / "accelerators" / "h100.yaml").read_text(encoding="utf-8")
    path = tmp_path / "h100.yaml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(CatalogueError, match=message):
        topology._accelerator(path)
