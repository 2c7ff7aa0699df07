"""The catalogue is complete and finds devices by the names drivers and data sets use."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.hardware import accelerators
from cluster.hardware.accelerators import CatalogueError, catalogue, find_accelerator, load_cluster
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
        ("Ascend 910B (Atlas 800T A2)", "ascend-910b"),
        ("Ascend 910A (Atlas 800)", "ascend-910a"),
    ],
)
def test_finds_devices_by_name(text: str, name: str) -> None:
    assert find_accelerator(text).name == name


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
    ],
)
def test_incomplete_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (CONFIGS / "accelerators" / "h100.yaml").read_text(encoding="utf-8")
    path = tmp_path / "h100.yaml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(CatalogueError, match=message):
        accelerators._accelerator(path)
