"""The knobs whose legal pairs test_parity tries, and the trials in which they all occur.

The trials are kept in parity_rows.txt, since finding few of them takes minutes. After a change of knobs or of what is
legal, ``python -m tests.trials.parity_knobs`` finds them again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from pathlib import Path

from tests.trials.pairwise import Covering
from tests.trials.tiny import SHAPE, tiny_spec
from tests.trials.tiny import WORKLOAD as TWO_LAYERS
from trials.legality import violations
from trials.spec import (
    AdamW,
    Kernels,
    Layout,
    LossScale,
    Offload,
    Precision,
    Protocol,
    Recompute,
    SelectiveRecompute,
    gather_pattern,
)

ROWS_FILE = Path(__file__).with_name("parity_rows.txt")

MAX_RANKS = 4
"""Of trials for pairs: no pair of common values needs more."""
WORKLOAD = dataclasses.replace(TWO_LAYERS, model=dataclasses.replace(SHAPE, num_layers=3))
WIDE = dataclasses.replace(WORKLOAD, model=dataclasses.replace(SHAPE, num_layers=3, hidden_size=64, ffn_hidden_size=96))
"""What 8-bit floats train: all sizes divide by 16, also on each of two tensor-parallel ranks."""
THREE_STEPS = Protocol(min_warmup_steps=1, max_warmup_steps=1, num_steps=2, max_steps=2)

PIPELINES = {
    "flat": {},
    "gpipe": {"schedule": "gpipe", "stage_layers": ((1, 2),)},
    "gpipe-looped": {"schedule": "gpipe", "stage_layers": ((1, 1), (1, 0))},
    "1f1b": {"schedule": "1f1b", "stage_layers": ((2, 1),)},
    "interleaved": {"schedule": "interleaved", "stage_layers": ((1, 1), (0, 1))},
    "zbv": {"schedule": "zbv", "stage_layers": ((1, 0), (1, 1))},
}
DATA_PARALLEL = {
    "one": {},
    "ddp": {"dp_replicate": 2},
    "replicate": {"dp_replicate": 2, "replicate_with": "fsdp2"},
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero2-last": {"dp_shard": 2, "zero_stage": 2, "gradient_reduction": "last"},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
    "zero3-last": {"dp_shard": 2, "zero_stage": 3, "gradient_reduction": "last"},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
}
TENSOR_PARALLEL = {
    "whole": {},
    "tp": {"tp": 2},
    "tp-sp": {"tp": 2, "sequence_parallel": True},
    "local": {"tp": 2, "tp_engine": "local"},
    "local-sp": {"tp": 2, "tp_engine": "local", "sequence_parallel": True},
    "local-sp-copies": {"tp": 2, "tp_engine": "local", "sequence_parallel": True, "num_copies": 2},
}
CONTEXT_PARALLEL = {
    "sequence": {},
    "all-gather": {"cp": 2, "cp_method": "all_gather"},
    "ulysses": {"cp": 2, "cp_method": "ulysses"},
    "ring": {"cp": 2, "cp_method": "ring"},
}
EMBEDDING = {"embedding": {}, "sharded-embedding": {"shard_embedding": True}}
NUM_MICROBATCHES = {"m1": 1, "m2": 2, "m4": 4}
LAYOUT_FAMILIES = {
    "pp": PIPELINES,
    "dp": DATA_PARALLEL,
    "tp": TENSOR_PARALLEL,
    "cp": CONTEXT_PARALLEL,
    "embedding": EMBEDDING,
}


def up_to(limit, layout):
    """The first ``limit`` layers of every chunk and stage."""
    present = layout.stage_layers or ((WORKLOAD.num_layers,),)
    return tuple(tuple(min(limit, n) for n in row) for row in present)


def selective(layout):
    patterns = (r"feed_forward\.mul", r".*norm\..*")
    return tuple(SelectiveRecompute(pattern=pattern, num_layers=up_to(2, layout)) for pattern in patterns)


def feed_forward_gathers(layout):
    """In the second layer too, where attention keeps what it gathers."""
    return (SelectiveRecompute(pattern=gather_pattern("feed_forward"), num_layers=up_to(2, layout)),)


RECOMPUTES = {
    "keep": lambda _: Recompute(),
    "full": lambda layout: Recompute(full=up_to(1, layout)),
    "selective": lambda layout: Recompute(selective=selective(layout)),
    "communication": lambda layout: Recompute(communication=up_to(1, layout), selective=feed_forward_gathers(layout)),
    "mixed": lambda layout: Recompute(full=up_to(1, layout), selective=selective(layout)),
}
PRECISIONS = {
    "O0": Precision(),
    "O1-bf16": Precision(level="O1", dtype="bfloat16"),
    "O1-fp16": Precision(level="O1", dtype="float16", loss_scale=LossScale()),
    "O1-lists": Precision(level="O1", dtype="bfloat16", white=("silu",), black=("linear",)),
    "O1-fp8": Precision(level="O1-fp8", dtype="bfloat16"),
    "O2-bf16": Precision(level="O2", dtype="bfloat16"),
    "O2-fp16": Precision(level="O2", dtype="float16", loss_scale=LossScale()),
}
GRAPHS = {
    "eager": Kernels(),
    "block": Kernels(compile="block", backend="aot_eager"),
}
"""``aot_eager`` traces the backward pass too, as real backends do."""
LOSSES = {"loss": 1, "chunked-loss": 3}
"""Chunks of head and loss; three do not divide the positions of a micro-batch."""
OFFLOADS = {
    "device": Offload(),
    "host-activations": Offload(activations=True),
    "host-optimizer": Offload(optimizer=True),
    "host-both": Offload(activations=True, optimizer=True),
}
CLIPPED = AdamW(lr=0.05, eps=1.0, clip_norm=0.5)
"""With this ``eps`` an update is proportional to the clipped gradient: AdamW otherwise hides a factor."""
CLIPS = {"unclipped": WORKLOAD.optimizer, "clipped": CLIPPED}
OTHERS = {
    "recompute": RECOMPUTES, "precision": PRECISIONS, "graph": GRAPHS, "loss": LOSSES, "offload": OFFLOADS,
    "clip": CLIPS,
}  # fmt: skip
RARE = {
    "pp": ("gpipe",),
    "dp": ("replicate", "zero2-last", "hsdp"),
    "tp": ("local",),
    "recompute": ("mixed",),
    "precision": ("O1-fp16", "O1-lists"),
    "offload": ("host-both",),
}
"""Values whose code others run too: they are tried in a few trials of their own, not with every value."""


def common(families):
    """Their values that are tried in pairs."""
    return {
        family: {name: value for name, value in values.items() if name not in RARE.get(family, ())}
        for family, values in families.items()
    }


def layout_of(row):
    options = {}
    for family, values in LAYOUT_FAMILIES.items():
        options |= values[row[family]]
    counts = options.get("stage_layers", ((),))
    return Layout(pp=max(1, len(counts[0])), num_virtual_stages=len(counts), **options)


def workload_of(precision):
    return WIDE if precision.is_fp8 else WORKLOAD


def kernels_of(row):
    return dataclasses.replace(GRAPHS[row["graph"]], loss_chunks=LOSSES[row["loss"]])


def spec_of(row):
    layout, precision = layout_of(row), PRECISIONS[row["precision"]]
    spec = tiny_spec(
        layout,
        workload=dataclasses.replace(workload_of(precision), optimizer=CLIPS[row["clip"]]),
        num_microbatches=NUM_MICROBATCHES[row["batches"]],
        recompute=RECOMPUTES[row["recompute"]](layout),
        precision=precision,
        kernels=kernels_of(row),
        offload=OFFLOADS[row["offload"]],
    )
    return dataclasses.replace(spec, protocol=THREE_STEPS)


def is_legal(row):
    rows_per_rank = WORKLOAD.global_batch_size // layout_of(row).dp
    if rows_per_rank % NUM_MICROBATCHES[row["batches"]]:
        return False
    spec = spec_of(row)
    return next(violations(spec.workload, spec.candidate), None) is None


def cost(row):
    """Roughly the CPU seconds of a trial."""
    is_split = row["tp"] != "whole"
    compile_s = 0.0 if row["graph"] == "eager" else 2.5 if is_split else 1.0
    tp_factor = {"whole": 1.0, "local-sp-copies": 2.0, "tp": 2.5, "tp-sp": 2.5}.get(row["tp"], 1.3)
    recompute_factor = 1.4 if row["recompute"] in ("full", "mixed") else 1.0
    steps_s = 0.15 * NUM_MICROBATCHES[row["batches"]] ** 0.5 * tp_factor * recompute_factor
    return layout_of(row).world_size * (0.05 + steps_s + compile_s)


@functools.cache
def covering():
    others = common(OTHERS)
    neutral = {family: next(iter(values)) for family, values in others.items()}
    cores = []
    for values in itertools.product(*common(LAYOUT_FAMILIES).values(), NUM_MICROBATCHES):
        core = dict(zip((*LAYOUT_FAMILIES, "batches"), values, strict=True))
        if layout_of(core).world_size <= MAX_RANKS and is_legal({**core, **neutral}):
            cores.append(core)
    return Covering(cores, others, is_legal, cost)


FAMILIES = (*LAYOUT_FAMILIES, "batches", *OTHERS)


def read_rows():
    return [dict(zip(FAMILIES, line.split(), strict=True)) for line in ROWS_FILE.read_text("utf-8").splitlines()]


def main(seconds):
    rows = covering().search(seed=0, seconds=seconds)
    # Trials that are compiled come together, and so in few gangs: what is compiled first in a process takes longer.
    rows.sort(key=lambda row: [row[family] for family in reversed(FAMILIES)])
    lines = [" ".join(row[family] for family in FAMILIES) for row in rows]
    ROWS_FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(rows)} trials, {sum(map(cost, rows)):.0f} CPU s")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 300.0)
