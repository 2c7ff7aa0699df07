"""Estimates of dry runs on the terminal: memory and work of each stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.text import Text

from orchestrator import units
from orchestrator.commands.dry_run import DryRunVerdict
from orchestrator.planning.dryrun.simulation import Progress
from orchestrator.space.naming import short_name
from orchestrator.terminal.table import Column, FittedTable
from orchestrator.units import num_bytes
from trials.dryrun.estimate import DryRunEstimate, StageEstimate
from trials.dryrun.records import RunFailure

NEGLIGIBLE = 0.005
"""Shares of the peak below this are not shown."""


SAID_EVERY_S = 10.0
"""How often progress is said where it cannot be shown in place: in a pipe, in a log."""


class _SimulationProgress:
    """How far the simulations are, in words; empty before they begin."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self._started_s = time.monotonic()

    def __rich__(self) -> str:
        waited_s = time.monotonic() - self._started_s
        return f"dry run: {self.done} of {units.count(self.total, 'simulation')}, {waited_s:.0f} s"

    def say(self, console: Console, over: threading.Event) -> None:
        """Print a line now and then until it is over, also while a long simulation runs."""
        while not over.wait(SAID_EVERY_S):
            console.print(self)


@contextmanager
def progress() -> Iterator[Progress]:
    """A line on stderr about how far the simulations are, which take seconds, and minutes where they are exact."""
    console, state, over = Console(stderr=True), _SimulationProgress(), threading.Event()
    sayer = threading.Thread(target=state.say, args=(console, over), daemon=True)
    with console.status(state) as status:
        status.stop()

        def show(done: int, total: int) -> None:
            state.done, state.total = done, total
            if console.is_terminal:
                status.start()
            elif not sayer.is_alive() and not over.is_set():
                console.print(f"dry run: {units.count(total, 'simulation')}")
                sayer.start()

        try:
            yield show
        finally:
            over.set()


def render_dry_runs(verdicts: Sequence[DryRunVerdict], *, as_table: bool = False) -> RenderableType:
    """One block per trial: verdict, memory by stage, work by stage; or one line per trial."""
    if as_table:
        return _overview(verdicts)
    blocks: list[RenderableType] = []
    for verdict in verdicts:
        blocks += [*_block(verdict), Text("")]
    return Group(*blocks[:-1])


def _overview(verdicts: Sequence[DryRunVerdict]) -> FittedTable:
    columns = (
        Column(title="configuration", min_width=24),
        Column(title="ranks", priority=1, is_number=True),
        Column(title="peak", priority=5, is_number=True),
        Column(title="with margin", is_number=True),
        Column(title="", name="verdict", priority=90, min_width=12),
    )
    table = FittedTable(columns=columns)
    for verdict in verdicts:
        name, ranks, result = short_name(verdict.candidate), str(verdict.candidate.layout.world_size), verdict.result
        if isinstance(result, RunFailure):
            table.add_row(name, ranks, "", "", Text(f"no estimate: {result.message}", style="red"))
            continue
        needed = result.needed_bytes(verdict.fragmentation, verdict.context_bytes)
        sizes = num_bytes(result.peak_bytes), num_bytes(needed)
        table.add_row(name, ranks, *sizes, _word(needed, verdict.limit_bytes))
    return table


def _block(verdict: DryRunVerdict) -> Iterator[RenderableType]:
    world_size = verdict.candidate.layout.world_size
    ranks = units.count(world_size, "rank")
    yield Text.assemble((verdict.name, "bold"), f"  {short_name(verdict.candidate)}  {ranks}")
    result = verdict.result
    if isinstance(result, RunFailure):
        yield Text.assemble((f"no estimate ({result.reason}): ", "red"), result.message)
        return
    yield _judgement(verdict, result)
    yield _memory(verdict, result)
    if result.host_bytes:
        yield Text(f"offloaded: up to {num_bytes(result.host_bytes)} of host memory per rank")
    yield _work(result)
    how = "computed from smaller models" if result.extrapolated else "all layers simulated"
    yield Text(f"{how}; {result.cpu_s:.1f} CPU-seconds", style="dim")


def _judgement(verdict: DryRunVerdict, estimate: DryRunEstimate) -> Text:
    needed = num_bytes(estimate.needed_bytes(verdict.fragmentation, verdict.context_bytes))
    if verdict.limit_bytes is None:
        return Text(f"needs {needed} of device memory; name a limit with --max-device-memory")
    limit = num_bytes(verdict.limit_bytes)
    if verdict.fits:
        return Text.assemble(("fits", "bold green"), f": needs {needed} of {limit}")
    return Text.assemble(("does not fit", "bold red"), f": needs {needed} of {limit}")


def _memory(verdict: DryRunVerdict, estimate: DryRunEstimate) -> FittedTable:
    columns = (
        Column(title="stage", is_number=True),
        Column(title="rank", priority=5, is_number=True),
        Column(title="peak", is_number=True),
        Column(title="with margin", is_number=True),
        Column(title="in", priority=6),
        Column(title="", name="verdict", priority=90),
        Column(title="of which", priority=7, min_width=20),
    )
    table = FittedTable(title="memory at the peak", columns=columns)
    for stage in estimate.stages:
        needed = stage.needed_bytes(verdict.fragmentation, verdict.context_bytes)
        numbers = (str(stage.stage), str(stage.rank), num_bytes(stage.peak_bytes), num_bytes(needed))
        table.add_row(*numbers, stage.peak_phase, _word(needed, verdict.limit_bytes), _categories(stage))
    return table


def _categories(stage: StageEstimate) -> str:
    sizes = sorted(stage.peak_by_category.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {num_bytes(size)}" for name, size in sizes if size >= NEGLIGIBLE * stage.peak_bytes)


def _word(needed_bytes: int, limit_bytes: int | None) -> Text:
    if limit_bytes is None:
        return Text("")
    return Text("fits", style="green") if needed_bytes <= limit_bytes else Text("does not fit", style="red")


def _work(estimate: DryRunEstimate) -> FittedTable:
    columns = (
        Column(title="stage", is_number=True),
        Column(title="parameters", is_number=True),
        Column(title="FLOPs forward", is_number=True),
        Column(title="backward", priority=6, is_number=True),
        Column(title="recompute", priority=5, is_number=True),
        Column(title="collectives", priority=7, min_width=20),
    )
    table = FittedTable(title="work per step and rank", columns=columns)
    for stage in estimate.stages:
        work = [f"{stage.flops.get(name, 0):.3g}" for name in ("forward", "backward", "recompute")]
        table.add_row(str(stage.stage), f"{stage.num_parameters:,}", *work, _traffic(stage))
    return table


def _traffic(stage: StageEstimate) -> str:
    return ", ".join(
        f"{traffic.num_calls} {name} ({num_bytes(traffic.num_bytes)})" for name, traffic in stage.collectives.items()
    )
