"""Our step time against a plain PyTorch loop of the same model: one process, DDP and FSDP2 on two gloo ranks.

Both loops live in the same processes and take turns, a few steps each, so that a noisy moment hits both; the ratio is
the median over the turns. The plain loop is what one writes by hand: batch, forward, loss, backward, optimiser,
``loss.item()``. Ours also times phases and reduces loss and gradient norm over the gang; of that the plain loop only
computes the norm, and only with ``--grad-norm``.

    python -m benchmarks.runner.trial_speed --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.runner.gang import RankError, gang, receive
from trials.outcome import ignore_progress
from trials.spec import Candidate, Layout, LlamaModel, Protocol, TextData, TrialSpec, Workload

MODEL = LlamaModel(hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_hidden_size=704, vocab_size=1024)
LAYOUTS = {
    "single": Layout(),
    "ddp": Layout(dp_replicate=2),
    "fsdp2": Layout(dp_shard=2, zero_stage=3),
}
GOAL = 1.03
GANG_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Plan:
    turns: int
    steps: int
    """Steps per turn and loop."""
    grad_norm: bool
    """Whether the plain loop clips gradients, which needs their global norm."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--turns", type=int, default=15, help="turns of each loop; medians are reported")
    parser.add_argument("--steps", type=int, default=4, help="steps per turn")
    parser.add_argument("--grad-norm", action="store_true", help="let the plain loop clip gradients too")
    args = parser.parse_args()
    plan = Plan(args.turns, args.steps, args.grad_norm)
    rows = {}
    for name, layout in LAYOUTS.items():
        rows[name] = compare(layout, plan)
        print(f"{name}: ratio {rows[name]['ratio']:.3f}", file=sys.stderr, flush=True)
    result = {"step_time_ratio": rows, "goal": GOAL, "plain_loop_clips_gradients": plan.grad_norm}
    print(json.dumps(result, indent=None if args.json else 2))


def compare(layout: Layout, plan: Plan) -> dict[str, float]:
    """Run both loops in one gang; rank 0's figures."""
    with (
        tempfile.TemporaryDirectory() as folder,
        gang(_take_turns, layout.world_size, Path(folder, "rendezvous"), layout, plan) as pipes,
    ):
        try:
            return _summary(receive(pipes[0], GANG_TIMEOUT_S))
        except RankError as error:
            raise SystemExit(f"{error}; its error stands above") from None


def _summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    ratios = [mine / plain for mine, plain in pairs]
    first, median, third = statistics.quantiles(ratios, n=4)
    return {
        "ratio": median,
        "ratio_first_quartile": first,
        "ratio_third_quartile": third,
        "ours_s": statistics.median(mine for mine, _ in pairs),
        "plain_s": statistics.median(plain for _, plain in pairs),
    }


def _take_turns(pipe: Connection, layout: Layout, plan: Plan) -> None:
    import torch

    from trials.parallel.mesh import RankIdentity, process_group

    warnings.simplefilter("ignore")
    identity = RankIdentity.from_env()
    with process_group(identity, torch.device("cpu")):
        spec = _spec(layout, plan)
        mine, plain = _our_turns(spec, identity.rank), _plain_turns(spec, identity.rank, plan)
        next(mine), next(plain)  # warm up
        pairs = [_pair(mine, plain, swap=turn % 2 == 1) for turn in range(plan.turns)]
    pipe.send(pairs)


def _pair(mine: Iterator[float], plain: Iterator[float], *, swap: bool) -> tuple[float, float]:
    if swap:
        plain_s = next(plain)
        return next(mine), plain_s
    return next(mine), next(plain)


def _spec(layout: Layout, plan: Plan) -> TrialSpec:
    workload = Workload(model=MODEL, data=TextData(), seq_length=128, global_batch_size=8)
    protocol = Protocol(
        min_warmup_steps=0, max_warmup_steps=0, num_steps=plan.steps, max_steps=plan.steps, max_relative_spread=1e9
    )
    candidate = Candidate(layout=layout, micro_batch_size=8 // layout.dp)
    return TrialSpec(workload=workload, candidate=candidate, protocol=protocol)


def _batches(spec: TrialSpec, rank: int) -> Iterator[Any]:
    from trials.datasets.loader import stream_batches
    from trials.worker import open_dataset

    return stream_batches(open_dataset(spec, rank), spec.candidate.loader, pin_memory=False)


def _our_turns(spec: TrialSpec, rank: int) -> Iterator[float]:
    """Mean seconds per step of one turn, as the runner measures them."""
    import torch

    from trials.parallel.mesh import build_mesh
    from trials.stages import coordinates
    from trials.training.measure import Measurer
    from trials.training.step import Trainer

    device = torch.device("cpu")
    layout = spec.candidate.layout
    trainer = Trainer(spec, build_mesh(layout, device), device, place=coordinates(layout, rank))
    batches = _batches(spec, rank)
    while True:
        recording = Measurer(trainer, batches, ignore_progress).run(spec.protocol)
        yield statistics.fmean(recording.step_times_s)


def _plain_turns(spec: TrialSpec, rank: int, plan: Plan) -> Iterator[float]:
    """Mean seconds per step of one turn of the loop one writes by hand."""
    import torch

    from trials.training.step import max_over_ranks

    step = _plain_loop(spec, _batches(spec, rank), plan)
    while True:
        times_s = []
        for _ in range(plan.steps):
            start = time.perf_counter()
            step()
            times_s.append(time.perf_counter() - start)
            # Ours lets the ranks meet between steps, outside the time; so it must be here.
            max_over_ranks(times_s[-1], torch.device("cpu"))
        yield statistics.fmean(times_s)


def _plain_loop(spec: TrialSpec, batches: Iterator[Any], plan: Plan) -> Callable[[], float]:
    import torch
    import torch.nn.functional as F

    model = _plain_model(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> float:
        inputs, targets = next(batches)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        if plan.grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _plain_model(spec: TrialSpec) -> Any:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from trials.models.llama import Llama
    from trials.stages import all_chunks

    layout = spec.candidate.layout
    model = Llama(MODEL, spec.workload.seq_length, all_chunks(Layout(), MODEL.num_layers)[0])
    model.materialize(torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if layout.zero_stage == 3:
        for layer in model.layers.values():
            fully_shard(layer)
        return fully_shard(model)
    return DistributedDataParallel(model) if layout.dp > 1 else model


if __name__ == "__main__":
    main()
