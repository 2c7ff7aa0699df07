"""Trials by the commands that run them in production: one device, all devices, cold compilers, the probe."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu import cases
from benchmarks.gpu.cases import Case
from benchmarks.gpu.parts import Setting
from benchmarks.gpu.ranks import GIB, Run, caches, figures, run_ranks, run_trial
from cluster.base import Deadlines
from trials.failure import InfeasibleSpec
from trials.files import from_json
from trials.legality import check
from trials.reports import RankRates, Rate
from trials.spec import Kernels


def device_peaks() -> Callable[[str, str], float | None] | None:
    """The catalogue's peaks; None where it cannot be read, as it needs a package for YAML."""
    try:
        from cluster.hardware.topology import dense_peak

        dense_peak("NVIDIA H100 80GB HBM3", "bfloat16")
    except ImportError:
        return None
    return dense_peak


def matrix(setting: Setting) -> None:
    _measure_all(setting, cases.matrix(setting))


def knobs(setting: Setting) -> None:
    _measure_all(setting, cases.knobs(setting))


def layouts(setting: Setting) -> None:
    _measure_all(setting, cases.layouts(setting))


def _measure_all(setting: Setting, wanted: Iterable[Case]) -> None:
    """Tell a row for each trial: its figures, or how it failed, or why it was not tried."""
    peaks = device_peaks()
    for case in wanted:
        row = {"trial": case.name}
        if why := impossible(case):
            setting.tell({**row, "not here": why})
        elif not setting.lacks_time(row):
            run = run_trial(setting, case.spec, env=case.env)
            columns = run.failure() if run.report is None else figures(run.report, peaks)
            setting.tell({**row, **columns, "took s": round(run.took_s, 1)})


def impossible(case: Case) -> str:
    """Why a trial cannot run on so many devices or with these packages; empty where it can."""
    if case.spec.candidate.precision.is_fp8 and importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    try:
        check(case.spec)
    except InfeasibleSpec as error:
        return str(error).partition(";")[0]
    return ""


def cold_compile(setting: Setting) -> None:
    """Every mode with an empty cache of its own, then with the cache it has filled."""
    modes = {
        "block": Kernels(compile="block"),
        "block, max-autotune": Kernels(compile="block", compile_mode="max-autotune"),
        "model": Kernels(compile="model"),
    }
    if setting.quick:
        modes = {"block, aot_eager": Kernels(compile="block", backend="aot_eager")}
    for state in ("empty", "filled"):
        for number, (name, kernels) in enumerate(modes.items()):
            row = {"compiled": name, "cache": state}
            if not setting.lacks_time(row):
                spec = cases.trial(setting, precision=cases.O2, kernels=kernels, micro_batch_size=1)
                run = run_trial(setting, spec, env=caches(Path(setting.folder, f"compiled-{number}")))
                setting.tell({**row, **_compile_columns(run), "took s": round(run.took_s, 1)})


def _compile_columns(run: Run) -> dict[str, Any]:
    if run.report is None:
        return run.failure()
    compile_s, graph = run.report["compile_s"], run.report["findings"]["graph"]
    return {
        "hits": graph["cache_hits"],
        "misses": graph["cache_misses"],
        "compile s": round(compile_s, 1),
        "within deadlines.compile_s": compile_s < Deadlines().compile_s,
        "step ms": figures(run.report)["step ms"],
    }


def probe(setting: Setting) -> None:
    world_size = setting.num_devices
    run = run_ranks(setting, "trials.probe", ["--device", setting.device], world_size=world_size)
    if run.report is None:
        setting.tell(run.failure())
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
