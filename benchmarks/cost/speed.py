"""Time and memory of ranking many candidates with the cost model.

    python -m benchmarks.cost.speed [--candidates 100000] [--json]

Every candidate of a large Llama on 1,024 devices, no two of which have the same inputs, is estimated with all its
terms, from the products of knobs to figures. Peak memory is that of this process; what was there before the candidates
is taken off. A whole plan: ``benchmarks.scale.planning``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import time

import numpy as np

from cluster.candidate_table import CandidateTable
from cluster.cost.cost_model import cost_model, inputs_of_table
from cluster.hardware.topology import load_cluster
from orchestrator.space.file_types import even_split
from orchestrator.space.space import Frame, Space
from trials.spec import Kernels, Layout, LlamaModel, Loader, Offload, Precision, Recompute, TextData, Workload

WORLD_SIZE = 1024
MODEL = LlamaModel(
    vocab_size=32000, hidden_size=8192, ffn_hidden_size=28672, num_layers=80, num_heads=64, num_kv_heads=8
)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=4096, global_batch_size=1024)


def knob_products() -> Space:
    """A million candidates, all of which the cost model tells apart; whether they are legal does not matter here."""
    frames = []
    for pp, tp, chunks, zero in itertools.product((2, 4, 8, 16), (1, 2, 4, 8), (1, 2), (0, 1, 2, 3)):
        layers = even_split(80, pp, chunks, "interleaved" if chunks > 1 else "1f1b")
        shards = WORLD_SIZE // pp // tp if zero else 1
        layout = Layout(
            pp=pp,
            tp=tp,
            dp_shard=shards,
            dp_replicate=WORLD_SIZE // pp // tp // shards,
            zero_stage=zero,
            sequence_parallel=tp > 1,
            schedule="interleaved" if chunks > 1 else "1f1b",
            num_virtual_stages=chunks,
            stage_layers=layers,
        )
        kept = range(min(map(min, layers)) + 1)
        policies = tuple(Recompute(full=tuple(tuple(min(n, count) for n in row) for row in layers)) for count in kept)
        frames += [Frame(layout=layout, micro_batch_size=size, recomputes=policies) for size in (1, 2, 4, 8, 16)]
    parts = {
        "precision": tuple(Precision(level=level, dtype="bfloat16") for level in ("O1", "O2")),
        "offload": tuple(Offload(activations=one, optimizer=other) for one in (False, True) for other in (False, True)),
        "loader": (Loader(), Loader(num_workers=2, prefetch_factor=2)),
        "kernels": tuple(
            Kernels(compile=compiled, loss_chunks=chunks)
            for compiled in ("off", "block")
            for chunks in (1, 2, 3, 4, 5, 6, 8)
        ),
        "own": ((),),
    }
    return Space(frames=tuple(frames), parts=parts, product_size=0)


def peak_rss_bytes() -> int:
    """The largest resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Meter:
    """Seconds and CPU-seconds from one asking to the next, and the peak memory added since the beginning."""

    def __init__(self) -> None:
        self._before = peak_rss_bytes()
        self._at = time.perf_counter(), time.process_time()

    def read(self, name: str) -> dict[str, float]:
        last, self._at = self._at, (time.perf_counter(), time.process_time())
        return {f"{name}_s": self._at[0] - last[0], f"{name}_cpu_s": self._at[1] - last[1]}

    def memory(self) -> dict[str, float]:
        """Bytes at most, and those above what there was at the beginning."""
        return {"added_bytes": peak_rss_bytes() - self._before, "peak_bytes": peak_rss_bytes()}


def measure(num_candidates: int) -> dict[str, float]:
    """Seconds of turning products of knobs into columns and of estimating them."""
    space, cluster, model = knob_products(), load_cluster("dgx-a100"), cost_model()
    if num_candidates > len(space):
        sys.exit(f"there are only {len(space):,} candidates")
    meter = Meter()
    table = _some(space, num_candidates)
    columns = inputs_of_table(WORKLOAD, table, cluster)
    found = meter.read("columns")
    estimates = model.estimate(columns)
    found |= meter.read("estimates")
    assert len(estimates) == num_candidates == len(columns.distinct()[0])
    return {"num_candidates": num_candidates, **found, **meter.memory()}


def _some(space: Space, num: int) -> CandidateTable:
    rows = np.arange(num) * (len(space) // num)
    return space.rows_of(space.policies(), rows // space.num_choices, rows % space.num_choices)


def text(found: dict[str, float]) -> str:
    """One figure per line."""
    return "\n".join(f"{name:20}{value:18,.2f}" for name, value in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.candidates)
    if arguments.json:
        print(json.dumps(found))
    else:
        print(text(found))


if __name__ == "__main__":
    main()
