"""Memory of a device beside its allocator, on the interface that torch.cuda, torch.xpu and torch.npu share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trials.accelerator import device as accelerator
from trials.reports import DeviceMemory, worst_memory
from trials.training import measure as device_memory
from trials.training.measure import DEFAULT_SETTINGS, MemoryLimit, set_up_allocator

DEVICE = torch.device("meta")
GIB = 1 << 30


class Memory(SimpleNamespace):
    """80 GiB, of which somebody has 1 GiB and the allocator 30; what it may take is kept in ``allowed``."""

    free, reserved, total = 49 * GIB, 30 * GIB, 80 * GIB
    allowed: float = 0.0

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        return self.free, self.total

    def memory_reserved(self, _device: torch.device) -> int:
        return self.reserved

    def memory_stats(self, _device: torch.device) -> dict[str, int]:
        return {"num_alloc_retries": 3, "num_ooms": 1}

    def get_device_properties(self, _device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=self.total)

    def set_per_process_memory_fraction(self, fraction: float, _device: torch.device) -> None:
        self.allowed = fraction * self.total


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory()
    for module in (accelerator, device_memory):
        monkeypatch.setattr(module, "module_of", lambda _: found)
    return found


def test_what_lies_outside_the_allocator_is_told(memory: Memory) -> None:
    del memory
    assert device_memory.device_memory(DEVICE, "x:y") == DeviceMemory(
        total_bytes=80 * GIB, outside_bytes=GIB, num_retries=3, num_ooms=1, settings="x:y"
    )
    assert device_memory.device_memory(torch.device("cpu"), "") is None


def test_a_limit_counts_what_lies_outside_the_allocator(memory: Memory) -> None:
    """Also what communicators took in the first step."""
    limit = MemoryLimit(DEVICE, 40 * GIB)
    assert memory.allowed == pytest.approx(39 * GIB)
    limit.before_step(1)
    memory.free -= 2 * GIB
    limit.before_step(2)
    assert memory.allowed == pytest.approx(37 * GIB)


def test_segments_grow_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(device_memory, "_configure", told.append)
    assert set_up_allocator(torch.device("cpu"), {}) == "" and not told
    monkeypatch.setattr(device_memory, "kind_of", lambda _: "cuda")
    assert set_up_allocator(DEVICE, {}) == DEFAULT_SETTINGS
    own = "max_split_size_mb:128"
    assert set_up_allocator(DEVICE, {"PYTORCH_ALLOC_CONF": own}) == own
    other = "backend:cudaMallocAsync"
    assert set_up_allocator(DEVICE, {"PYTORCH_CUDA_ALLOC_CONF": other}) == other
    assert told == [DEFAULT_SETTINGS, own]  # the backend was chosen when torch was imported

    def refuse(*_args: object, **_options: object) -> None:
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(torch, "empty", refuse)
    assert set_up_allocator(DEVICE, {}) == ""
    assert told[-1] == "expandable_segments:False"


def test_a_gang_is_told_by_its_worst_rank() -> None:
    one = DeviceMemory(total_bytes=9, outside_bytes=2, num_retries=0, settings="s")
    other = DeviceMemory(total_bytes=8, outside_bytes=1, num_retries=4)
    assert worst_memory([None, one, other]) == DeviceMemory(total_bytes=8, outside_bytes=2, num_retries=4, settings="s")
    assert worst_memory([None]) is None
