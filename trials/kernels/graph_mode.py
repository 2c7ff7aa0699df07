"""Graph mode: compiles the model, and tells what torch.compile did in this process and how long it took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch._dynamo
from torch import nn
from torch._dynamo import utils
from torch._dynamo.callback import callback_handler

from trials.models.base import TrainModel
from trials.reports.findings import GraphReport
from trials.spec import Kernels

_MAX_REASONS = 8
_MAX_REASON_CHARS = 200
_MAX_COMPILATIONS = 4096
_HITS, _MISSES = "fxgraph_cache_hit", ("fxgraph_cache_miss", "fxgraph_cache_bypass")
"""Names in torch's counters of what inductor's cache on disk had, and had not or could not have."""


def apply_compile(model: TrainModel, kernels: Kernels) -> None:
    """Compile in place every layer, equal ones sharing the code, or the model as a whole.

    A layer of ours must be one graph; the whole model may break into several, as it does at FSDP's hooks. Shapes are
    fixed within a trial, so every shape gets a graph of its own instead of one for all.
    """
    if kernels.compile == "off":
        return
    mode = None if kernels.compile_mode == "default" else kernels.compile_mode
    targets: list[nn.Module] = [model] if kernels.compile == "model" else list(model.layers.values())
    for target in targets:
        whole = kernels.compile == "block" and not model.is_own
        target.compile(backend=kernels.backend, mode=mode, dynamic=False, fullgraph=whole)


@dataclass(frozen=True, slots=True)
class Compilation:
    """One entry of torch's log: a forward graph, or the backward of one compiled at its first use."""

    is_forward: bool
    time_s: float
    reason: str | None
    """Why code compiled before had to be compiled again."""


def forget_compilations() -> None:
    """Drop everything compiled so far, so that each trial of a process compiles and counts for itself; whoever listens
    to compilations goes on listening."""
    begins, ends = list(callback_handler.start_callbacks), list(callback_handler.end_callbacks)
    torch._dynamo.reset()
    callback_handler.start_callbacks[:], callback_handler.end_callbacks[:] = begins, ends
    utils.set_compilation_metrics_limit(_MAX_COMPILATIONS)
    utils.clear_compilation_metrics()
    for name in (_HITS, *_MISSES):
        utils.counters["inductor"].pop(name, None)


def compilations() -> list[Compilation]:
    """The log since :func:`forget_compilations`. The one place that reads torch's private metrics."""
    return [
        Compilation(bool(entry.is_forward), (entry.duration_us or 0) / 1e6, entry.recompile_reason or None)
        for entry in utils.get_compilation_metrics()
        if entry.fail_type is None
    ]


def graph_report(log: Iterable[Compilation]) -> GraphReport:
    """Sum up a log of compilations, and what inductor's cache had of them since :func:`forget_compilations`."""
    entries = list(log)
    forward = [entry for entry in entries if entry.is_forward]
    reasons = [entry.reason for entry in forward if entry.reason]
    shown = dict.fromkeys(_shortened(reason) for reason in reasons)
    return GraphReport(
        num_graphs=len(forward),
        num_recompilations=len(reasons),
        compile_s=sum(entry.time_s for entry in entries),
        reasons=tuple(shown)[:_MAX_REASONS],
        cache_hits=utils.counters["inductor"][_HITS],
        cache_misses=sum(utils.counters["inductor"][name] for name in _MISSES),
    )


def _shortened(reason: str) -> str:
    """The first failed guard; more guards of the same recompilation follow on further lines."""
    return reason.strip().splitlines()[0][:_MAX_REASON_CHARS]
