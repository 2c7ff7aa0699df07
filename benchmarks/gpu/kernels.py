"""A/B measurements that need torch alone: ways to update by AdamW, and what waiting after every step costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.gpu import cases
from benchmarks.gpu.parts import Setting
from benchmarks.gpu.ranks import GIB
from trials.accelerator.device import open_device, synchronize
from trials.models import build_model
from trials.sizes import all_chunks
from trials.spec import Layout
from trials.training.optimizer import has_fused_adamw


def optimizer(setting: Setting) -> None:
    device = open_device(setting.device, 0)
    for way in ("fused", "foreach", "single"):
        options = {"fused": way == "fused", "foreach": way == "foreach"}
        try:
            row = _update(setting, device, options)
        except RuntimeError as error:
            row = {"failed": str(error).splitlines()[0]}
        setting.tell({"AdamW": way, **row})


def _update(setting: Setting, device: torch.device, options: dict[str, bool]) -> dict[str, Any]:
    workload = cases.workload(setting)
    (chunk,) = all_chunks(Layout(), workload.num_layers)
    with torch.device("meta"):
        model = build_model(workload, chunk)
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.full_like(parameter, 1e-3)
    adamw = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]
    adamw.step()
    before, _ = _memory(device)
    row = {"ms": round(1e3 * _median_s(adamw.step, device, 3 if setting.quick else 10), 3)}
    if before is not None:
        row["temporaries GiB"] = round((_memory(device)[1] - before) / GIB, 3)
    return row


def _memory(device: torch.device) -> tuple[Any, Any]:
    """Bytes allocated now and at most; starts the account of the most again."""
    if device.type == "cpu":
        return None, None
    module = torch.get_device_module(device)
    found = module.memory_allocated(device), module.max_memory_allocated(device)
    module.reset_peak_memory_stats(device)
    return found


def _median_s(function: Callable[[], Any], device: torch.device, times: int) -> float:
    seconds = []
    for _ in range(times):
        synchronize(device)
        start_s = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)


def synchronisation(setting: Setting) -> None:
    """Steps bound by the host, of many small kernels, and steps bound by the device."""
    device = open_device(setting.device, 0)
    sizes = {"small layers": (64, 8), "large layers": (256, 64) if setting.is_small else (4096, 8192)}
    for name, (width, rows) in sizes.items():
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
        model = nn.Sequential(*layers).to(device)
        adamw = torch.optim.AdamW(model.parameters(), fused=has_fused_adamw(device.type))
        inputs = torch.randn(rows, width, device=device)
        steps = 5 if setting.quick else 50

        def step(model: Any = model, adamw: Any = adamw, inputs: Any = inputs) -> None:
            model(inputs).square().mean().backward()
            adamw.step()
            adamw.zero_grad()

        waits, runs = _loop(step, device, steps, every=True), _loop(step, device, steps, every=False)
        row = {"loop": name, "waits ms": round(waits * 1e3, 3), "never waits ms": round(runs * 1e3, 3)}
        setting.tell(row | {"costs %": round(100 * (waits / runs - 1), 1)})


def _loop(step: Callable[[], None], device: torch.device, steps: int, *, every: bool) -> float:
    """Seconds per step of a loop that waits for the device after every step, or at its end alone."""
    for _ in range(3):
        step()
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(steps):
        step()
        if every:
            synchronize(device)
    synchronize(device)
    return (time.perf_counter() - start_s) / steps
