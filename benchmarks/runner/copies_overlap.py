"""How much of tensor-parallel communication computation hides, with the micro-batch whole and in two copies.

A gang of gloo ranks trains a model under the local tensor-parallel engine; torch's profiler records its steps, and
:mod:`trials.profiling.traces` separates the time with a collective in flight from the time with an operator at work.

    python -m benchmarks.runner.copies_overlap --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.runner.gang import RankError, gang, receive
from trials.spec import Candidate, Layout, LlamaModel, TextData, TrialSpec, Workload

MODEL = LlamaModel(hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=8, ffn_hidden_size=688, vocab_size=1024)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=256, global_batch_size=4)
GANG_TIMEOUT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--tp", type=int, default=2, help="ranks")
    parser.add_argument("--steps", type=int, default=10, help="profiled steps")
    args = parser.parse_args()
    rows = {}
    for num_copies in (1, 2):
        layout = Layout(tp=args.tp, tp_engine="local", sequence_parallel=True, num_copies=num_copies)
        rows[f"num_copies={num_copies}"] = row = profile(layout, args.steps)
        print(f"num_copies {num_copies}: {row['overlap']:.1%} of communication overlapped", file=sys.stderr, flush=True)
    print(json.dumps({"copies_overlap": rows}, indent=None if args.json else 2))


def profile(layout: Layout, num_steps: int) -> dict[str, float]:
    """Medians over the steps of rank 0."""
    with (
        tempfile.TemporaryDirectory() as folder,
        gang(_profile_rank, layout.world_size, Path(folder, "rendezvous"), layout, num_steps, folder) as pipes,
    ):
        try:
            steps: list[dict[str, float]] = receive(pipes[0], GANG_TIMEOUT_S)
        except RankError as error:
            raise SystemExit(f"{error}; its error stands above") from None
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def _profile_rank(pipe: Connection, layout: Layout, num_steps: int, folder: str) -> None:
    import torch

    from trials.parallel.mesh import RankIdentity, build_mesh, process_group
    from trials.sizes import coordinates
    from trials.training.loop import SilentMarker, Trainer
    from trials.worker import open_dataset

    identity, device = RankIdentity.from_env(), torch.device("cpu")
    spec = TrialSpec(workload=WORKLOAD, candidate=Candidate(layout=layout, micro_batch_size=WORKLOAD.global_batch_size))
    trace = Path(folder, f"{identity.rank}.json")
    with process_group(identity, device):
        trainer = Trainer(spec, build_mesh(layout, device), device, place=coordinates(layout, identity.rank))
        inputs, targets = open_dataset(spec, identity.rank)[0]
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=2, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
        ) as profiler:
            for _ in range(num_steps + 3):
                trainer.step(inputs, targets, SilentMarker())
                profiler.step()
    pipe.send(_step_times(trace))


def _step_times(trace: Path) -> list[dict[str, Any]]:
    from trials.profiling.traces import lasting, load_trace, step_times

    return [{**asdict(times), "overlap": times.overlap} for times in step_times(lasting(load_trace(trace)))]


if __name__ == "__main__":
    main()
