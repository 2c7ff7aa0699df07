"""Measures rates of one device, those of matmuls and copies; also how calls are timed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from trials.accelerator.device import capability, is_host, synchronize
from trials.precision.mixed import MIN_CAPABILITY, matmul_precision
from trials.reports.rates import MatmulRate, ProbeSpec, Rate

FORMATS = {
    "float32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "highest"),
    "float16": (torch.float16, "highest"),
}
"""Type of the matrices, and torch's precision of float32 matmuls, by number format."""
MIN_MATMUL_SIZE = 256
MAX_CALLS = 1000


def matmul_rates(spec: ProbeSpec, device: torch.device) -> dict[str, MatmulRate]:
    """FLOP/s of square matmuls, by number format the device has units for."""
    rates = {}
    for name, (dtype, precision) in FORMATS.items():
        if not _supports(name, device):
            continue
        with matmul_precision(precision):
            size, call = _large_matmul(dtype, spec, device)
            rate = _rate(2.0 * size**3, _samples(call, spec, device))
            rates[name] = MatmulRate(per_s=rate.per_s, log_spread=rate.log_spread, size=size)
    return rates


def _large_matmul(dtype: torch.dtype, spec: ProbeSpec, device: torch.device) -> tuple[int, Callable[[], object]]:
    """Side of the matrices, and the call: the smallest power of two that fills ``sample_s``, or the largest allowed."""
    size = MIN_MATMUL_SIZE
    while True:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))  # constants draw less power
        out = torch.empty_like(a)
        call = partial(torch.mm, a, b, out=out)
        call()
        if 2 * size > spec.max_matmul_size or seconds_per_call(call, 1, device) >= spec.sample_s:
            return size, call
        size *= 2


def _supports(name: str, device: torch.device) -> bool:
    if (have := capability(device)) is not None:
        return have >= MIN_CAPABILITY.get(name, (0, 0))
    return name != "tf32"


def copy_rates(spec: ProbeSpec, device: torch.device) -> dict[str, Rate]:
    """Bytes per second of a copy inside the device, read and write counted, and to and from a GPU over its bus."""
    here = torch.zeros(spec.copy_bytes, dtype=torch.uint8, device=device)
    there = torch.zeros_like(here)
    rates = {"device": _rate(2.0 * spec.copy_bytes, _samples(partial(there.copy_, here), spec, device))}
    if not is_host(device):
        host = torch.zeros(spec.copy_bytes, dtype=torch.uint8, pin_memory=True)
        to_device, from_device = partial(here.copy_, host, non_blocking=True), partial(host.copy_, here)
        rates["to_device"] = _rate(float(spec.copy_bytes), _samples(to_device, spec, device))
        rates["from_device"] = _rate(float(spec.copy_bytes), _samples(from_device, spec, device))
    return rates


def _samples(call: Callable[[], object], spec: ProbeSpec, device: torch.device) -> list[float]:
    """Seconds per call, sample by sample, after one call to warm up."""
    call()
    once_s = seconds_per_call(call, 1, device)
    num_calls = min(MAX_CALLS, max(1, math.ceil(spec.sample_s / max(once_s, 1e-9))))
    return [seconds_per_call(call, num_calls, device) for _ in range(spec.num_samples)]


def seconds_per_call(call: Callable[[], object], num_calls: int, device: torch.device) -> float:
    """Mean seconds of a call, when so many follow one another."""
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(num_calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start_s) / num_calls


def _rate(work: float, samples_s: Sequence[float]) -> Rate:
    low, middle, high = statistics.quantiles(samples_s, n=4)
    return Rate(per_s=work / middle, log_spread=math.log(high / low) / 2)
