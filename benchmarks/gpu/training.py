"""Trials by the commands that run them in production: one device, all devices, cold compilers, the probe."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu import cases
from benchmarks.gpu.parts import Setting
from benchmarks.gpu.ranks import GIB, Run, figures, run_ranks, run_trial
from trials.codec import from_json, to_json
from trials.reports.rates import RankRates, Rate
from trials.spec import Kernels, TrialSpec

STALL_S = 120.0
"""Deadline for the time between two signs of life of a rank (``deadlines.stall_s``)."""


def device_peaks() -> Callable[[str, str], float | None] | None:
    """The catalogue's peaks; None where it cannot be read, as it needs a package for YAML."""
    try:
        from cluster.hardware.accelerators import dense_peak

        dense_peak("NVIDIA H100 80GB HBM3", "bfloat16")
    except ImportError:
        return None
    return dense_peak


def matrix(setting: Setting) -> None:
    for name, spec in cases.matrix(setting):
        _measure(setting, name, spec)


def knobs(setting: Setting) -> None:
    for name, spec, env in cases.knobs(setting):
        _measure(setting, name, spec, env)


def layouts(setting: Setting) -> None:
    for name, spec in cases.layouts(setting):
        _measure(setting, name, spec)


def _measure(setting: Setting, name: str, spec: TrialSpec, env: Mapping[str, str] | None = None) -> None:
    """Run a trial and tell its row; the dry run looks at it later."""
    run = run_trial(setting, spec, env=env)
    setting.tell({"trial": name, **_columns(run), "took s": round(run.took_s, 1)})
    if run.report is not None and not env:
        peak_bytes = run.report["peak_allocated_bytes"]
        setting.note("trials", name=name, spec=to_json(spec), peak_bytes=peak_bytes)


def _columns(run: Run) -> dict[str, Any]:
    return {"failed": run.why} if run.report is None else figures(run.report, device_peaks())


def cold_compile(setting: Setting) -> None:
    """Every mode with an empty cache of its own, then with the cache it has filled."""
    modes = {
        "block": Kernels(compile="block"),
        "block, max-autotune": Kernels(compile="block", compile_mode="max-autotune"),
        "model": Kernels(compile="model"),
    }
    if setting.quick:
        modes = {"block, aot_eager": Kernels(compile="block", backend="aot_eager")}
    for name, kernels in modes.items():
        spec = cases.trial(setting, precision=cases.O2, kernels=kernels, micro_batch_size=2)
        with tempfile.TemporaryDirectory(dir=setting.folder) as cache:
            env = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            for state in ("empty", "filled"):
                run = run_trial(setting, spec, env=env)
                setting.tell({"compiled": name, "cache": state, **_compile_columns(run)})


def _compile_columns(run: Run) -> dict[str, Any]:
    if run.report is None:
        return {"failed": run.why, "took s": round(run.took_s, 1)}
    compile_s, graph = run.report["compile_s"], run.report["findings"]["graph"]
    return {
        "hits": graph["cache_hits"],
        "misses": graph["cache_misses"],
        "compile s": round(compile_s, 1),
        "within the stall deadline": compile_s < STALL_S,
        "step ms": figures(run.report)["step ms"],
        "took s": round(run.took_s, 1),
    }


def probe(setting: Setting) -> None:
    world_size = setting.num_devices
    run = run_ranks(setting, "trials.probe.worker", ["--device", setting.device], world_size=world_size)
    if run.report is None:
        setting.tell({"failed": run.why})
        return
    for one in run.report:
        rates = from_json(RankRates, one)
        for name, matmul in rates.matmul_flops_per_s.items():
            _tell_rate(setting, rates.rank, f"matmul {name}, {matmul.size}", matmul, 1e12, "TFLOP/s")
        for name, copy in rates.copy_bytes_per_s.items():
            _tell_rate(setting, rates.rank, f"copy {name}", copy, GIB, "GiB/s")
        link = rates.node_all_reduce
        if link is not None:
            setting.tell(
                {"rank": rates.rank, "rate": "all-reduce, bus", "value": link.bus_bytes_per_s / GIB, "unit": "GiB/s"}
            )


def _tell_rate(setting: Setting, rank: int, what: str, rate: Rate, scale: float, unit: str) -> None:
    spread = round(100 * rate.log_spread, 1)
    setting.tell({"rank": rank, "rate": what, "value": rate.per_s / scale, "unit": unit, "spread %": spread})
