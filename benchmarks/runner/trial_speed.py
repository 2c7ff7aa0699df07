"""Step time of the built-in runner compared with hand-written PyTorch loops for each layout, on gloo ranks.

All loops of a case live in the same processes and take turns, a few steps each, in an order that changes from round to
round, so that a noisy moment hits all of them; a ratio is the median over the rounds, with its 95% interval. The loops
by hand are in ``benchmarks/runner/peers.py``: batch, forward, loss, backward, optimiser, ``loss.item()``. Ours also
times phases and reduces loss and gradient norm over the gang; of that the others only compute the norm, and only with
``--grad-norm`` (never in pipelines).

    python -m benchmarks.runner.trial_speed
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runner.gang import RankError, gang, receive
from cluster.hardware.topology import cpu_model
from orchestrator.units import count
from trials.files import write_atomically
from trials.outcome import ignore_progress
from trials.spec import Candidate, Layout, LlamaModel, Protocol, TextData, TrialSpec, Workload

if TYPE_CHECKING:
    from benchmarks.runner.peers import PeerName

MODEL = LlamaModel(hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_hidden_size=704, vocab_size=1024)
SMALL = LlamaModel(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_size=128, vocab_size=256)
OUT = Path(__file__).parents[2] / "docs" / "measured" / "trial-speed.md"
GANG_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Plan:
    turns: int
    steps: int
    """Steps per turn and loop."""
    grad_norm: bool
    """Whether the loops by hand clip gradients, which needs their global norm."""
    model: LlamaModel = MODEL
    seq_length: int = 128


@dataclass(frozen=True)
class Case:
    """Ways of ours to run one layout, and what they are compared with."""

    ours: dict[str, Layout]
    peers: dict[PeerName, str]
    """Loops by hand, and what they are called in the table."""
    against: dict[str, PeerName] = field(default_factory=dict)
    """The peer of each of ours; without an entry it is the first."""
    num_micro_batches: int = 1
    """Per step and data-parallel rank."""


def _pipeline(num_layers: int) -> Layout:
    return Layout(pp=2, stage_layers=((num_layers // 2, num_layers // 2),))


def _accumulating(zero_stage: Any) -> Case:
    layout = Layout(dp_shard=2, zero_stage=zero_stage)
    sync = "set_requires_gradient_sync"
    return Case(
        ours={"each": layout, "last": replace(layout, gradient_reduction="last")},
        peers={"each": "FSDP2", "last": f"FSDP2 with {sync}(False) except for the last"},
        against={"each": "each", "last": "last"},
        num_micro_batches=4,
    )


def cases(model: LlamaModel) -> dict[str, Case]:
    """All cases by name."""
    context = Layout(cp=2)
    return {
        "single": Case({"one process": Layout()}, {"plain": "plain loop"}),
        "ddp": Case({"ddp": Layout(dp_replicate=2)}, {"ddp": "DistributedDataParallel"}),
        "fsdp2": Case({"zero 3": Layout(dp_shard=2, zero_stage=3)}, {"fsdp2": "FSDP2"}),
        "zero1": Case({"zero 1": Layout(dp_shard=2, zero_stage=1)}, {"zero1": "ZeroRedundancyOptimizer and DDP"}),
        "tp": Case(
            {"local": Layout(tp=2, tp_engine="local"), "dtensor": Layout(tp=2, tp_engine="dtensor")},
            {"tensor": "parallelize_module, loss_parallel"},
        ),
        "zero2-accumulating": _accumulating(2),
        "zero3-accumulating": _accumulating(3),
        "cp": Case(
            {
                "all_gather": context,
                "ulysses": replace(context, cp_method="ulysses"),
                "ring": replace(context, cp_method="ring"),
            },
            {"context": "context_parallel (experimental) and FSDP2"},
        ),
        "pipeline": Case(
            {"1f1b": _pipeline(model.num_layers)}, {"pipeline": "Schedule1F1B, PipelineStage"}, num_micro_batches=4
        ),
    }


@dataclass(frozen=True)
class Ratio:
    """Ours over the peer's: below 1 is faster, or takes less."""

    value: float
    low: float
    high: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--turns", type=int, default=15, help="rounds, in each of which every loop has a turn")
    parser.add_argument("--steps", type=int, default=4, help="steps per turn")
    parser.add_argument("--grad-norm", action="store_true", help="let the loops by hand clip gradients too")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds: shows that it runs, no more")
    parser.add_argument("--case", action="append", default=[], choices=list(cases(MODEL)), help="only this one")
    parser.add_argument(
        "--out", type=Path, help=f"file for the table (default: {OUT.name} in docs/measured, if all ran)"
    )
    args = parser.parse_args(arguments)
    plan = Plan(args.turns, args.steps, args.grad_norm)
    if args.quick:
        plan = Plan(2, 1, args.grad_norm, SMALL, seq_length=32)
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, case in cases(plan.model).items():
        if not args.case or name in args.case:
            found, why_not = compare(name, case, plan)
            print("\n".join(map(_line, found)), file=sys.stderr, flush=True)
            rows += found
            notes += why_not
    result = {"machine": _machine(load), "plan": _plan_words(plan), "ratios": rows, "notes": notes}
    text = markdown(result)
    print(json.dumps(result, indent=2) if args.json else text)
    is_whole = not (args.quick or args.case)
    if (out := args.out or (OUT if is_whole else None)) is not None:
        write_atomically(out, [text.encode()])


def compare(name: str, case: Case, plan: Plan) -> tuple[list[dict[str, Any]], list[str]]:
    """Run all loops of the case in one gang: one row for each of ours, and what does not run here.

    Where no loop by hand runs, the others of ours are compared with the first.
    """
    world_size = next(iter(case.ours.values())).world_size
    with (
        tempfile.TemporaryDirectory() as folder,
        gang(_take_turns, world_size, Path(folder, "rendezvous"), case, plan) as pipes,
    ):
        try:
            found: _Found = receive(pipes[0], GANG_TIMEOUT_S)
        except RankError as error:
            raise SystemExit(f"{name}: {error}; its error stands above") from None
    return rows_of(name, case, found)


def rows_of(name: str, case: Case, found: _Found) -> tuple[list[dict[str, Any]], list[str]]:
    """What was found, as :func:`compare` gives it."""
    rows = [_row(name, case, way, found) for way in case.ours]
    notes = [f"{name}: {case.peers[peer]} does not run here: {why}" for peer, why in found.refused.items()]
    return [row for row in rows if row["peer"] != _ours(row["ours"])], notes


@dataclass
class _Found:
    """What rank 0 saw of the loops of a case, by their names."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Mean seconds per step, by turn."""
    step_bytes: dict[str, int] = field(default_factory=dict)
    """Most bytes that a step held beyond what it began with."""
    refused: dict[PeerName, str] = field(default_factory=dict)
    """Why a loop by hand does not run here."""


def _row(name: str, case: Case, way: str, found: _Found) -> dict[str, Any]:
    peer = case.against.get(way, next(iter(case.peers)))
    mine, reference, against = _ours(way), str(peer), case.peers[peer]
    if peer in found.refused:
        first = next(iter(case.ours))
        reference = against = _ours(first)
    times = list(zip(found.seconds[mine], found.seconds[reference], strict=True))
    return {
        "case": name,
        "ours": way,
        "peer": against,
        "step_time": _ratio([ours_s / peer_s for ours_s, peer_s in times]).__dict__,
        "step_bytes": found.step_bytes[mine] / found.step_bytes[reference],
        "ours_s": statistics.median(found.seconds[mine]),
        "peer_s": statistics.median(found.seconds[reference]),
        "turns_ours_s": found.seconds[mine],
        "turns_peer_s": found.seconds[reference],
    }


def _ours(way: str) -> str:
    return f"built-in runner, {way}"


def _ratio(ratios: Sequence[float]) -> Ratio:
    """The median, and the order statistics that hold the true median with at least 95% where there are enough of them
    (by the binomial distribution with p = 1/2); else the least and the greatest."""
    ordered, num = sorted(ratios), len(ratios)
    outside, rank = 0.0, 0
    while rank < num // 2 and (outside := outside + math.comb(num, rank) / 2**num) <= 0.025:
        rank += 1
    first = max(0, rank - 1)
    return Ratio(statistics.median(ordered), ordered[first], ordered[num - 1 - first])


def _line(row: dict[str, Any]) -> str:
    time_ratio = row["step_time"]
    bounds = f"{time_ratio['low']:.3f} to {time_ratio['high']:.3f}"
    return (
        f"| {row['case']} | {row['ours']} | {row['peer']} | {time_ratio['value']:.3f} | {bounds} "
        f"| {row['step_bytes']:.2f} |"
    )


def markdown(result: dict[str, Any]) -> str:
    """The page that the command writes."""
    about = (
        "All loops of a case ran in the same processes and took turns, in an order that changed from round to round. "
        "Ratios are the built-in runner's step time over the other loop's, so below 1 the runner is faster. They are "
        "medians over the rounds, with the 95% interval of the median, or the range for fewer than six rounds. Memory "
        "is the ratio of what one step adds at its peak to the memory of rank 0. Small models on CPUs show the "
        "overhead of the runner; it is untested on accelerators."
    )
    lines = [
        "# Step time compared with hand-written loops",
        "",
        "    python -m benchmarks.runner.trial_speed",
        "",
        _wrapped(f"{result['machine']} {result['plan']}"),
        "",
        _wrapped(about),
        "",
        "| case | built-in runner | compared with | step time | interval | memory |",
        "|---|---|---|---|---|---|",
        *map(_line, result["ratios"]),
        "",
        *(f"{_wrapped(note)}\n" for note in result["notes"]),
    ]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 125, break_long_words=False, break_on_hyphens=False)


def _machine(load: float) -> str:
    import torch

    cores = len(os.sched_getaffinity(0))
    busy = f"the load average at the start was {load:.1f}"
    if load > cores / 2:
        busy += ", so the ratios only show that every case runs"
    return f"Measured on {cores} cores of {cpu_model()}, torch {torch.__version__}, gloo; {busy}."


def _plan_words(plan: Plan) -> str:
    norm = "clip gradients" if plan.grad_norm else "do not compute the gradient norm, which the runner does"
    return (
        f"{count(plan.turns, 'round')} of {count(plan.steps, 'step')}; a decoder of {plan.model.num_layers} layers, "
        f"width {plan.model.hidden_size}, 8 sequences of {plan.seq_length} tokens; the hand-written loops {norm}."
    )


def _take_turns(pipe: Connection, case: Case, plan: Plan) -> None:
    import torch

    from benchmarks.runner.peers import allocations
    from trials.parallel.mesh import RankIdentity, process_group

    warnings.simplefilter("ignore")
    identity = RankIdentity.from_env()
    with process_group(identity, torch.device("cpu")):
        found = _Found()
        loops = _loops(case, plan, identity.rank, found)
        names = list(loops)
        for turn in range(plan.turns):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                found.seconds.setdefault(name, []).append(loops[name](plan.steps))
        for name, loop in loops.items():
            with allocations() as held:
                loop(1)
            (found.step_bytes[name],) = held
    pipe.send(found)


Loop = Callable[[int], float]
"""Takes so many steps; gives the mean seconds of one."""


def _loops(case: Case, plan: Plan, rank: int, found: _Found) -> dict[str, Loop]:
    """All loops of the case that run here, warmed up; ``found`` records why others do not."""
    loops: dict[str, Loop] = {}
    for way, layout in case.ours.items():
        loops[_ours(way)] = _our_loop(_spec(case, layout, plan), rank)
    layout = next(iter(case.ours.values()))
    for peer in case.peers:
        try:
            loops[peer] = _peer_loop(peer, _spec(case, layout, plan), rank, plan)
            loops[peer](1)
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            loops.pop(peer, None)
            found.refused[peer] = str(error).strip().splitlines()[0][:120]
    for loop in loops.values():
        loop(plan.steps)
    return loops


def _spec(case: Case, layout: Layout, plan: Plan) -> TrialSpec:
    workload = Workload(model=plan.model, data=TextData(), seq_length=plan.seq_length, global_batch_size=8)
    candidate = Candidate(layout=layout, micro_batch_size=8 // layout.dp // case.num_micro_batches)
    return TrialSpec(workload=workload, candidate=candidate)


def _batches(spec: TrialSpec, rank: int) -> Iterator[Any]:
    from trials.datasets import stream_batches
    from trials.worker import open_dataset

    return stream_batches(open_dataset(spec, rank), spec.candidate.loader, pin_memory=False)


def _our_loop(spec: TrialSpec, rank: int) -> Loop:
    """The steps as the runner measures them."""
    import torch

    from trials.parallel.mesh import build_mesh
    from trials.sizes import coordinates
    from trials.training.loop import Trainer
    from trials.training.measure import Measurer

    device = torch.device("cpu")
    layout = spec.candidate.layout
    trainer = Trainer(spec, build_mesh(layout, device), device, place=coordinates(layout, rank))
    batches = _batches(spec, rank)

    def take(num_steps: int) -> float:
        protocol = Protocol(
            min_warmup_steps=0, max_warmup_steps=0, num_steps=num_steps, max_steps=num_steps, max_relative_spread=1e9
        )
        return statistics.fmean(Measurer(trainer, batches, ignore_progress).run(protocol).step_times_s)

    return take


def _peer_loop(peer: PeerName, spec: TrialSpec, rank: int, plan: Plan) -> Loop:
    import torch

    from benchmarks.runner.peers import peer_step
    from trials.training.loop import max_over_ranks

    step = peer_step(peer, spec, _batches(spec, rank), clips=plan.grad_norm)

    def take(num_steps: int) -> float:
        times_s = []
        for _ in range(num_steps):
            start = time.perf_counter()
            step()
            times_s.append(time.perf_counter() - start)
            # Ours lets the ranks meet between steps, outside the time; so it must be here.
            max_over_ranks(times_s[-1], torch.device("cpu"))
        return statistics.fmean(times_s)

    return take


if __name__ == "__main__":
    main()
