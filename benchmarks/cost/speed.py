"""Time and memory of ranking many candidates with the cost model.

    python -m benchmarks.cost.speed [--candidates 100000] [--json]

Every candidate of a large Llama on 1,024 devices is estimated with all its terms, from candidates to figures. Peak
memory is that of this process; what was there before the candidates is taken off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import time
from collections.abc import Iterator

from cluster.cost.candidates import inputs_of
from cluster.cost.estimate import cost_model
from cluster.cost.inputs import concatenate
from cluster.hardware.accelerators import load_cluster
from orchestrator.space.knobs.layer_choices import even_split
from trials.spec import Candidate, Layout, LlamaModel, Precision, Recompute, TextData, Workload

WORLD_SIZE = 1024
ROWS_AT_ONCE = 20_000
MODEL = LlamaModel(
    vocab_size=32000, hidden_size=8192, ffn_hidden_size=28672, num_layers=80, num_heads=64, num_kv_heads=8
)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=4096, global_batch_size=1024)


def candidates() -> Iterator[Candidate]:
    """So many distinct candidates; whether they are legal does not matter here."""
    for pp, tp, chunks in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4)):
        schedule = "interleaved" if chunks > 1 and pp > 1 else "1f1b"
        layers = even_split(80, pp, chunks, schedule) if pp > 1 else ((80,),)
        for zero, micro, full in itertools.product((0, 1, 2, 3), (1, 2, 4, 8, 16, 32), range(81)):
            shards = WORLD_SIZE // pp // tp if zero else 1
            layout = Layout(
                pp=pp,
                tp=tp,
                dp_shard=shards,
                dp_replicate=WORLD_SIZE // pp // tp // shards,
                zero_stage=zero,
                sequence_parallel=tp > 1,
                schedule=schedule,
                num_virtual_stages=chunks if pp > 1 else 1,
                stage_layers=layers if pp > 1 else (),
            )
            yield Candidate(
                layout=layout,
                micro_batch_size=micro,
                recompute=Recompute(full=tuple(tuple(min(full, n) for n in row) for row in layers)),
                precision=Precision(level="O2", dtype="bfloat16"),
            )


def peak_rss_bytes() -> int:
    """The largest resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(num_candidates: int) -> dict[str, float]:
    """Seconds of turning candidates into columns and of estimating them."""
    rows = [(WORKLOAD, candidate) for candidate in itertools.islice(candidates(), num_candidates)]
    cluster, model = load_cluster("dgx-a100"), cost_model()
    before, start_s, start_cpu_s = peak_rss_bytes(), time.perf_counter(), time.process_time()
    parts = [inputs_of(rows[i : i + ROWS_AT_ONCE], cluster) for i in range(0, len(rows), ROWS_AT_ONCE)]
    columns = concatenate(parts)
    columns_s = time.perf_counter()
    found = model.estimate(columns)
    end_s = time.perf_counter()
    assert len(found) == len(rows)
    return {
        "num_candidates": len(rows),
        "columns_s": columns_s - start_s,
        "estimates_s": end_s - columns_s,
        "total_s": end_s - start_s,
        "cpu_s": time.process_time() - start_cpu_s,
        "added_bytes": peak_rss_bytes() - before,
        "peak_bytes": peak_rss_bytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.candidates)
    if arguments.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['num_candidates']:,.0f} candidates: {found['columns_s']:.2f} s to columns, "
            f"{found['estimates_s']:.2f} s to estimate ({found['cpu_s']:.2f} CPU-seconds); "
            f"{found['added_bytes'] / 1e6:.0f} MB added, {found['peak_bytes'] / 1e6:.0f} MB at most"
        )


if __name__ == "__main__":
    main()
