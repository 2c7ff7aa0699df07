"""The yardstick: a training loop written by hand over the same model, against the trial of the part ``training``."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu import cases
from benchmarks.gpu.parts import Setting
from benchmarks.gpu.ranks import ALLOCATED, MIB
from trials.accelerator.device import open_device, synchronize
from trials.models.built_in import Llama
from trials.sizes import all_chunks
from trials.spec import Layout, LlamaModel

WARMUP_STEPS, STEPS = 2, 3


def loops(setting: Setting) -> None:
    """Autocast over fp32 weights (O1), eager and with every block compiled, with the batches of the trial."""
    device = open_device(setting.device, 0)
    trials = {row["trial"]: row for row in setting.rows_of("training")}
    for case in cases.matrix(setting):
        candidate = case.spec.candidate
        row: dict[str, Any] = {"trial": case.name}
        if candidate.precision == cases.O1 and not setting.lacks_time(row):
            is_compiled = candidate.kernels.compile != "off"
            found = step_times_s(setting, device, candidate.micro_batch_size, is_compiled=is_compiled)
            step_ms = round(statistics.median(found) * 1e3, 2)
            measured = trials.get(case.name, {}).get("step ms")
            setting.tell(
                row
                | {"plain loop ms": step_ms, "trial ms": measured}
                | {"trial / loop": round(measured / step_ms, 3) if measured else None}
                | {f"loop, {ALLOCATED}": _peak_mib(device)}
            )


def step_times_s(setting: Setting, device: torch.device, size: int, *, is_compiled: bool) -> list[float]:
    """Seconds of each step of the loop, with micro-batches of ``size``."""
    workload = cases.workload(setting)
    shape, batch = workload.model, (workload.global_batch_size, workload.seq_length)
    assert isinstance(shape, LlamaModel)
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
    with device:
        model = Llama(shape, workload.seq_length, all_chunks(Layout(), shape.num_layers)[0])
    model.materialize(device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    for layer in model.layers.values() if is_compiled else ():
        layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(shape.vocab_size, batch, device=device)
    times_s = []
    for _ in range(WARMUP_STEPS + STEPS):
        synchronize(device)
        start_s = time.perf_counter()
        for rows in tokens.split(size):
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(rows)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), rows.flatten())
            torch.autograd.backward(loss * (size / batch[0]))
        nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    return times_s[WARMUP_STEPS:]


def _peak_mib(device: torch.device) -> float | None:
    if device.type == "cpu":
        return None
    return round(torch.get_device_module(device).max_memory_allocated(device) / MIB, 1)
