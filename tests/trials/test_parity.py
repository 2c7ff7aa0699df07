"""Whatever the knobs, a trial trains like one process in fp32.

Every legal pair of knob values is tried in at least one trial, on at most eight ranks. The loss alone is blind to
gradients of the wrong size under AdamW, so the global gradient norm is compared too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trials.gang import Result, differences, run_gang
from tests.trials.pairwise import Covering, Pair, Row, pairs_of
from tests.trials.tiny import SHAPE, tiny_spec
from tests.trials.tiny import WORKLOAD as TWO_LAYERS
from trials.legality import violations
from trials.spec import (
    Counts,
    Kernels,
    Layout,
    Loader,
    LossScale,
    Precision,
    Protocol,
    Recompute,
    SelectiveRecompute,
    TrialSpec,
)

MAX_RANKS = 8
MAX_RANKS_COMPILED = 4
"""Every rank traces for itself, which takes long; each pair with a graph mode needs no more ranks."""
WORKLOAD = dataclasses.replace(TWO_LAYERS, model=dataclasses.replace(SHAPE, num_layers=4))
THREE_STEPS = Protocol(min_warmup_steps=1, max_warmup_steps=1, num_steps=2, max_steps=2)

PIPELINES: dict[str, dict[str, Any]] = {
    "flat": {},
    "gpipe": {"schedule": "gpipe", "stage_layers": ((2, 2),)},
    "gpipe-looped": {"schedule": "gpipe", "stage_layers": ((1, 2), (1, 0))},
    "1f1b": {"schedule": "1f1b", "stage_layers": ((3, 1),)},
    "interleaved": {"schedule": "interleaved", "stage_layers": ((2, 1), (0, 1))},
    "zbv": {"schedule": "zbv", "stage_layers": ((2, 0), (1, 1))},
}
DATA_PARALLEL: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {"dp_replicate": 2},
    "replicate": {"dp_replicate": 2, "replicate_with": "fsdp2"},
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
}
TENSOR_PARALLEL: dict[str, dict[str, Any]] = {
    "whole": {},
    "tp": {"tp": 2},
    "tp-sp": {"tp": 2, "sequence_parallel": True},
    "local": {"tp": 2, "tp_engine": "local"},
    "local-sp": {"tp": 2, "tp_engine": "local", "sequence_parallel": True},
    "local-sp-copies": {"tp": 2, "tp_engine": "local", "sequence_parallel": True, "num_copies": 2},
}
CONTEXT_PARALLEL: dict[str, dict[str, Any]] = {
    "sequence": {},
    "all-gather": {"cp": 2, "cp_method": "all_gather"},
    "ulysses": {"cp": 2, "cp_method": "ulysses"},
}
EMBEDDING: dict[str, dict[str, Any]] = {"embedding": {}, "sharded-embedding": {"shard_embedding": True}}
NUM_MICROBATCHES = {"m1": 1, "m2": 2, "m4": 4}
LAYOUT_FAMILIES = (PIPELINES, DATA_PARALLEL, TENSOR_PARALLEL, CONTEXT_PARALLEL, EMBEDDING)


def up_to(limit: int, layout: Layout) -> Counts:
    """The first ``limit`` layers of every chunk and stage."""
    present = layout.stage_layers or ((WORKLOAD.num_layers,),)
    return tuple(tuple(min(limit, n) for n in row) for row in present)


def selective(layout: Layout) -> tuple[SelectiveRecompute, ...]:
    patterns = (r"feed_forward\.mul", r".*norm\..*")
    return tuple(SelectiveRecompute(pattern=pattern, num_layers=up_to(2, layout)) for pattern in patterns)


RECOMPUTES: dict[str, Callable[[Layout], Recompute]] = {
    "keep": lambda _: Recompute(),
    "full": lambda layout: Recompute(full=up_to(1, layout)),
    "selective": lambda layout: Recompute(selective=selective(layout)),
    "communication": lambda layout: Recompute(communication=up_to(1, layout)),
    "mixed": lambda layout: Recompute(full=up_to(1, layout), selective=selective(layout)),
}
PRECISIONS = {
    "O0": Precision(),
    "O1-bf16": Precision(level="O1", dtype="bfloat16"),
    "O1-fp16": Precision(level="O1", dtype="float16", loss_scale=LossScale()),
    "O1-lists": Precision(level="O1", dtype="bfloat16", white=("silu",), black=("linear",)),
    "O2-bf16": Precision(level="O2", dtype="bfloat16"),
    "O2-fp16": Precision(level="O2", dtype="float16", loss_scale=LossScale()),
}
GRAPHS = {
    "eager": Kernels(),
    "block": Kernels(compile="block", backend="aot_eager"),
    "model": Kernels(compile="model", backend="eager"),
}
"""``aot_eager`` traces the backward pass too, as real backends do, but takes twice as long."""
OTHERS = {"recompute": RECOMPUTES, "precision": PRECISIONS, "graph": GRAPHS}


def layout_of(row: Row) -> Layout:
    options: dict[str, Any] = {}
    for family, values in zip(("pp", "dp", "tp", "cp", "embedding"), LAYOUT_FAMILIES, strict=True):
        options |= values[row[family]]
    counts = options.get("stage_layers", ((),))
    return Layout(pp=max(1, len(counts[0])), num_virtual_stages=len(counts), **options)


def spec_of(row: Row) -> TrialSpec:
    layout = layout_of(row)
    spec = tiny_spec(
        layout,
        workload=WORKLOAD,
        num_microbatches=NUM_MICROBATCHES[row["batches"]],
        recompute=RECOMPUTES[row["recompute"]](layout),
        precision=PRECISIONS[row["precision"]],
        kernels=GRAPHS[row["graph"]],
    )
    return dataclasses.replace(spec, protocol=THREE_STEPS)


def is_legal(row: Row, max_ranks_compiled: int = MAX_RANKS_COMPILED) -> bool:
    if row["graph"] != "eager" and layout_of(row).world_size > max_ranks_compiled:
        return False
    rows_per_rank = WORKLOAD.global_batch_size // layout_of(row).dp
    if rows_per_rank % NUM_MICROBATCHES[row["batches"]]:
        return False
    return next(violations(WORKLOAD, spec_of(row).candidate), None) is None


def cost(row: Row) -> float:
    """Roughly the seconds of a trial on two cores."""
    world_size = layout_of(row).world_size
    step_s = 0.02 * NUM_MICROBATCHES[row["batches"]] * (6.0 if row["tp"] in ("tp", "tp-sp") else 1.0)
    compile_s = {"eager": 0.0, "block": 2.0, "model": 2.0}[row["graph"]]
    return 0.1 + 0.5 * world_size**1.2 * (0.1 + 3.0 * step_s + compile_s)


@functools.cache
def covering(max_ranks_compiled: int = MAX_RANKS_COMPILED) -> Covering:
    neutral = {family: next(iter(values)) for family, values in OTHERS.items()}
    names = ("pp", "dp", "tp", "cp", "embedding", "batches")
    cores = []
    for values in itertools.product(*LAYOUT_FAMILIES, NUM_MICROBATCHES):
        core = dict(zip(names, values, strict=True))
        if layout_of(core).world_size <= MAX_RANKS and is_legal({**core, **neutral}):
            cores.append(core)
    return Covering(cores, OTHERS, functools.partial(is_legal, max_ranks_compiled=max_ranks_compiled), cost)


ROWS = covering().rows(seed=3, draws=30)
"""One of the cheapest sets among those of a few seeds."""


def name_of(row: Row) -> str:
    """The values that say something."""
    silent = {"flat", "one", "whole", "sequence", "embedding", "keep", "eager"}
    return "/".join(value for value in row.values() if value not in silent)


MORE_LAYOUTS = {
    "zero1-2x2": Layout(dp_replicate=2, dp_shard=2, zero_stage=1),
    "hsdp2-2x2": Layout(dp_replicate=2, dp_shard=2, zero_stage=2),
    "zero3x4": Layout(dp_shard=4, zero_stage=3),
    "1f1b-no-layer": Layout(pp=4, stage_layers=((2, 0, 2, 0),)),
    "zbv-no-layer": Layout(pp=4, schedule="zbv", num_virtual_stages=2, stage_layers=((1, 0, 1, 0), (1, 0, 0, 1))),
}
"""Layouts that are like others of the families; tried once each."""

NEUTRAL = {
    "pp": "flat",
    "dp": "one",
    "tp": "whole",
    "cp": "sequence",
    "embedding": "embedding",
    "batches": "m1",
    "recompute": "keep",
    "precision": "O0",
    "graph": "eager",
}


def changed(spec: TrialSpec, **knobs: Any) -> TrialSpec:
    return dataclasses.replace(spec, candidate=dataclasses.replace(spec.candidate, **knobs))


def matrix() -> dict[str, TrialSpec]:
    """The covering set, and a few trials to compare others with bit by bit."""
    rows = [*ROWS, NEUTRAL, {**NEUTRAL, "batches": "m2"}, {**NEUTRAL, "batches": "m2", "recompute": "full"}]
    rows.append({**NEUTRAL, "batches": "m2", "dp": "ddp"})
    specs = {name_of(row): spec_of(row) for row in rows}
    for layout_name in ("ddp", "zero3"):
        spec = spec_of({**NEUTRAL, "dp": layout_name, "batches": "m2"})
        specs[f"{layout_name}/m2/O0/model-aot"] = changed(spec, kernels=Kernels(compile="model", backend="aot_eager"))
    for name, layout in MORE_LAYOUTS.items():
        spec = tiny_spec(layout, workload=WORKLOAD, num_microbatches=max(2, layout.pp))
        specs[name] = dataclasses.replace(spec, protocol=THREE_STEPS)
    knobs: dict[str, dict[str, Any]] = {
        "full-batch": {"loader": Loader(full_batch=True)},
        "math": {"kernels": Kernels(attention="math")},
        "high": {"kernels": Kernels(matmul_precision="high")},
    }
    specs |= {f"ddp/m2/O0/{name}": changed(specs["ddp/m2/O0"], **knob) for name, knob in knobs.items()}
    specs["ddp/m2/O0/workers"] = changed(specs["ddp/m2/O0"], loader=Loader(num_workers=1, prefetch_factor=2))
    return specs


MATRIX = matrix()
PART_SIZE = 10
"""Trials per gang: parts of the matrix run beside each other when the tests do."""

Part = tuple[int, int]
"""World size, and a number that counts the parts of that size."""


def parts() -> dict[str, Part]:
    """The part that each trial of the matrix belongs to."""
    found: dict[str, Part] = {}
    for world_size, names in itertools.groupby(sorted(MATRIX, key=world_size_of), world_size_of):
        found |= {name: (world_size, i // PART_SIZE) for i, name in enumerate(names)}
    return found


def world_size_of(name: str) -> int:
    return MATRIX[name].candidate.layout.world_size


PARTS = parts()


def in_group(name: str, *values: Any) -> Any:
    """Parameters of a test, to be run by the worker that runs the trial's part."""
    return pytest.param(name, *values, marks=pytest.mark.xdist_group("parity-{}-{}".format(*PARTS[name])))


@functools.cache
def results(part: Part) -> dict[str, Result]:
    """Run every trial of this part, in one gang as long as all goes well."""
    return run_all([name for name in MATRIX if PARTS[name] == part])


def run_all(names: list[str]) -> dict[str, Result]:
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(names, run_gang([MATRIX[name] for name in names], Path(folder)), strict=True))


@functools.cache
def baseline() -> Result:
    """One process, fp32."""
    return run_all(["m1/O0"])["m1/O0"]


def tolerances(precision: Precision) -> tuple[float, float]:
    """Absolute on the loss, relative on the gradient norm."""
    return (1e-5, 1e-5) if precision.level == "O0" else (2e-3, 2e-2)


def test_every_legal_pair_is_tried() -> None:
    tried: set[Pair] = set()
    for row in ROWS:
        assert is_legal(row), name_of(row)
        tried |= pairs_of(row)
    assert tried == covering().witnesses.keys() == covering(MAX_RANKS).witnesses.keys()


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [in_group(name) for name in sorted(MATRIX, key=world_size_of, reverse=True)])
def test_trains_like_a_single_process(name: str) -> None:
    loss, norm = differences(results(PARTS[name])[name], baseline())
    loss_limit, norm_limit = tolerances(MATRIX[name].candidate.precision)
    assert loss <= loss_limit and norm <= norm_limit, (loss, norm)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        in_group("m2/full/O0", "m2/O0"),
        in_group("ddp/m2/O0/workers", "ddp/m2/O0"),
        in_group("ddp/m2/O0/full-batch", "ddp/m2/O0"),
    ],
)
def test_same_arithmetic_is_bit_exact(name: str, reference: str) -> None:
    result, expected = (results(PARTS[one])[one] for one in (name, reference))
    assert differences(result, expected) == (0.0, 0.0)
