"""Whatever the knobs, a trial trains like one process in fp32.

Every legal pair of knob values, the rare ones aside, is tried in at least one trial, on up to four ranks, and some
combinations on eight. The loss alone is blind to gradients of the wrong size under AdamW, so the global gradient norm
is compared too. Before, every rank finds its initial weights bit for bit in those of the whole model.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.trials.gang import differences, run_gang
from tests.trials.initial import check_all
from tests.trials.pairwise import pairs_of
from tests.trials.parity_knobs import (
    CLIPPED,
    RARE,
    THREE_STEPS,
    WIDE,
    WORKLOAD,
    cost,
    covering,
    is_legal,
    read_rows,
    spec_of,
)
from tests.trials.ranks import planted
from tests.trials.tiny import tiny_spec
from trials.spec import Kernels, Layout, Loader, Precision, Recompute, SelectiveRecompute

ROWS = read_rows()


def name_of(row):
    """The row's values, without those that leave a knob off."""
    silent = {"flat", "one", "whole", "sequence", "embedding", "keep", "eager", "loss", "device", "unclipped"}
    return "/".join(value for value in row.values() if value not in silent)


HYBRID = {"cp": 4, "cp_method": "hybrid", "ulysses_degree": 2}
MORE_LAYOUTS = {
    "zero1-2x2": Layout(dp_replicate=2, dp_shard=2, zero_stage=1),
    "hsdp2-2x2": Layout(dp_replicate=2, dp_shard=2, zero_stage=2),
    "hsdp2-2x2-last": Layout(dp_replicate=2, dp_shard=2, zero_stage=2, gradient_reduction="last"),
    "zero3x4": Layout(dp_shard=4, zero_stage=3),
    "all-gather4/zero3": Layout(cp=4, cp_method="all_gather", dp_shard=2, zero_stage=3),
    "ring4/local-sp": Layout(cp=4, cp_method="ring", tp=2, tp_engine="local", sequence_parallel=True),
    "ring4/1f1b": Layout(cp=4, cp_method="ring", pp=2, stage_layers=((2, 1),)),
    "hybrid4/zero3": Layout(dp_shard=2, zero_stage=3, **HYBRID),
    "hybrid4/zero1": Layout(dp_shard=2, zero_stage=1, **HYBRID),
    "1f1b-no-layer": Layout(pp=4, stage_layers=((1, 0, 2, 0),)),
    "zbv-no-layer": Layout(pp=4, schedule="zbv", num_virtual_stages=2, stage_layers=((1, 0, 1, 0), (0, 0, 0, 1))),
}
"""Layouts that are like others of the families; tried once each."""
SHORT_FP8 = {
    "zero3": Layout(dp_shard=2, zero_stage=3),
    "zero1": Layout(dp_shard=2, zero_stage=1),
    "tp-sp": Layout(tp=2, sequence_parallel=True),
    "local-sp": Layout(tp=2, sequence_parallel=True, tp_engine="local"),
    "1f1b": Layout(pp=2, stage_layers=((2, 1),)),
}
"""Layouts of O2-fp8, whose number formats are those of O2 and whose matmuls are those of O1-fp8."""
GATHERED_FP8 = {
    "zero3": (Layout(dp_shard=2, zero_stage=3), "O2-fp8"),
    "zero2-1f1b": (Layout(pp=2, stage_layers=((2, 1),), dp_shard=2, zero_stage=2), "O1-fp8"),
    "zero3-ring": (Layout(cp=2, cp_method="ring", dp_shard=2, zero_stage=3), "O1-fp8"),
}
"""Layouts whose weights FSDP gathers in 8-bit floats, and their precision."""
KEPT = {
    "ddp": Layout(dp_replicate=2),
    "zero1": Layout(dp_shard=2, zero_stage=1),
    "zero2-embedding": Layout(dp_shard=2, zero_stage=2, shard_embedding=True),
    "zero3": Layout(dp_shard=2, zero_stage=3),
    "1f1b": Layout(pp=2, stage_layers=((2, 1),)),
}
"""Layouts of O2 with the first layer, all norms and the head in fp32."""

COPIES = {"tp": 2, "tp_engine": "local", "num_copies": 2}
SINGLE = {
    "copies/positions": (Layout(**COPIES), 8, {}),
    "zero3/sp-copies/positions": (Layout(dp_shard=2, zero_stage=3, sequence_parallel=True, **COPIES), 4, {}),
    "zero1/sp-copies/O1/selective/positions": (
        Layout(dp_shard=2, zero_stage=1, sequence_parallel=True, **COPIES),
        4,
        {
            "precision": Precision(level="O1", dtype="bfloat16"),
            "recompute": Recompute(
                selective=(SelectiveRecompute(pattern=r"attention\.scaled_dot_product_attention", num_layers=((2,),)),)
            ),
        },
    ),
    "1f1b/sp-copies/block/full/positions": (
        Layout(pp=2, stage_layers=((2, 1),), sequence_parallel=True, **COPIES),
        8,
        {"kernels": Kernels(compile="block", backend="aot_eager"), "recompute": Recompute(full=((1, 1),))},
    ),
    "sp-copies/communication/positions": (
        Layout(sequence_parallel=True, **COPIES), 8, {"recompute": Recompute(communication=((2,),))}
    ),
    "hybrid4/block/full": (
        Layout(**HYBRID), 2,
        {"kernels": Kernels(compile="block", backend="aot_eager"), "recompute": Recompute(full=((2,),))},
    ),
    "hybrid4/1f1b/O1/chunked-loss": (
        Layout(pp=2, stage_layers=((2, 1),), **HYBRID), 4,
        {"precision": Precision(level="O1", dtype="bfloat16"), "kernels": Kernels(loss_chunks=3)},
    ),
}  # fmt: skip
"""Layouts, micro-batches and other knobs. With single sequences as micro-batches, copies split the positions."""

NEUTRAL = {
    "pp": "flat", "dp": "one", "tp": "whole", "cp": "sequence", "embedding": "embedding", "batches": "m1",
    "recompute": "keep", "precision": "O0", "graph": "eager", "loss": "loss", "offload": "device",
    "clip": "unclipped",
}  # fmt: skip


RARE_TRIALS = (
    {"pp": "gpipe", "dp": "zero2-last", "precision": "O1-fp16", "batches": "m2"},
    {"pp": "gpipe", "tp": "local", "recompute": "mixed", "batches": "m2"},
    {"dp": "replicate", "pp": "1f1b", "precision": "O1-fp16", "batches": "m4", "clip": "clipped"},
    {"dp": "replicate", "tp": "local", "loss": "chunked-loss", "offload": "host-both"},
    {"dp": "replicate", "precision": "O1-lists", "recompute": "full"},
    {"dp": "zero2-last", "cp": "ring", "recompute": "mixed", "embedding": "sharded-embedding", "precision": "O2-bf16"},
    {"dp": "zero2-last", "offload": "host-both", "graph": "block", "batches": "m2"},
    {"tp": "local", "precision": "O1-fp16", "graph": "block", "clip": "clipped"},
    {"tp": "local", "cp": "all-gather", "precision": "O1-lists", "recompute": "full", "batches": "m2"},
    {"dp": "replicate", "precision": "O2-bf16", "graph": "block", "loss": "chunked-loss"},
    {"dp": "hsdp", "tp": "tp-sp", "precision": "O2-fp16", "clip": "clipped"},
    {"dp": "hsdp", "cp": "ring", "embedding": "sharded-embedding", "recompute": "full"},
    {"dp": "hsdp", "pp": "1f1b", "batches": "m2", "offload": "host-optimizer", "loss": "chunked-loss"},
    {"dp": "hsdp", "recompute": "selective", "graph": "block", "precision": "O1-bf16"},
)
"""Knobs of trials with values that are not tried in pairs: each with several others."""
THREE_DIMENSIONS = (
    {"pp": "1f1b", "dp": "zero1", "tp": "local-sp", "batches": "m2", "precision": "O2-bf16"},
    {"pp": "interleaved", "dp": "zero3", "tp": "tp-sp", "batches": "m2", "precision": "O1-bf16", "clip": "clipped"},
    {"pp": "zbv", "dp": "zero3", "tp": "local-sp", "batches": "m2", "recompute": "full"},
    {"pp": "1f1b", "dp": "ddp", "cp": "ring", "batches": "m2", "recompute": "selective"},
    {"pp": "1f1b", "tp": "local", "cp": "all-gather", "batches": "m2", "loss": "chunked-loss"},
    {"dp": "zero2", "tp": "local-sp", "cp": "ring", "precision": "O1-fp8", "clip": "clipped"},
    {"dp": "zero3", "tp": "local-sp-copies", "cp": "all-gather", "embedding": "sharded-embedding"},
)
"""Knobs of trials on eight ranks, in three dimensions of two each."""
WHOLE_GRAPHS = (
    {"pp": "gpipe-looped", "recompute": "mixed", "precision": "O1-fp16", "loss": "chunked-loss"},
    {"pp": "1f1b", "dp": "ddp", "precision": "O2-fp16", "offload": "host-optimizer"},
    {"dp": "zero1", "loss": "chunked-loss"},
    {"dp": "zero3-last", "cp": "all-gather", "embedding": "sharded-embedding", "precision": "O2-bf16"},
    {"tp": "tp", "precision": "O2-fp16"},
    {"tp": "local-sp-copies"},
)
"""Knobs of trials that compile the whole model at once, instead of its blocks."""


BASELINES = {
    dataclasses.replace(workload, optimizer=optimizer): "/".join(filter(None, (size, clip)))
    for workload, size in ((WORKLOAD, "m1/O0"), (WIDE, "wide"))
    for optimizer, clip in ((WORKLOAD.optimizer, ""), (CLIPPED, "clipped"))
}
"""Names of the trials in one process, in fp32, that others are compared with, by workload."""


def changed(spec, **knobs):
    return dataclasses.replace(spec, candidate=dataclasses.replace(spec.candidate, **knobs))


def matrix():
    """The covering set, and a few trials to compare others with bit by bit."""
    rows = [*ROWS, NEUTRAL, {**NEUTRAL, "batches": "m2"}, {**NEUTRAL, "batches": "m2", "recompute": "full"}]
    rows.append({**NEUTRAL, "batches": "m2", "dp": "ddp"})
    rows += [NEUTRAL | knobs for knobs in (*RARE_TRIALS, *THREE_DIMENSIONS)]
    specs = {name_of(row): spec_of(row) for row in rows}
    for layout_name in ("ddp", "zero3"):
        spec = spec_of({**NEUTRAL, "dp": layout_name, "batches": "m2"})
        specs[f"{layout_name}/m2/O0/model-aot"] = changed(spec, kernels=Kernels(compile="model", backend="aot_eager"))
    for knobs in WHOLE_GRAPHS:
        row = {**NEUTRAL, "batches": "m2", **knobs}
        # Without AOTAutograd, torch does not let a chosen operator (rms_norm) write in place.
        backend = "aot_eager" if row["recompute"] == "mixed" else "eager"
        kernels = dataclasses.replace(spec_of(row).candidate.kernels, compile="model", backend=backend)
        specs[f"{name_of(row)}/model"] = changed(spec_of(row), kernels=kernels)
    for name, (layout, level) in GATHERED_FP8.items():
        precision = Precision(level=level, dtype="bfloat16", fp8_gather=True)
        spec = tiny_spec(layout, workload=WIDE, num_microbatches=2, precision=precision)
        specs[f"{name}/{level}-gather"] = dataclasses.replace(spec, protocol=THREE_STEPS)
    for name, layout in SHORT_FP8.items():
        spec = tiny_spec(
            layout, workload=WIDE, num_microbatches=2, precision=Precision(level="O2-fp8", dtype="bfloat16")
        )
        specs[f"{name}/O2-fp8"] = dataclasses.replace(spec, protocol=THREE_STEPS)
    wide = Precision(level="O2", dtype="bfloat16", keep_fp32=(r"layers\.0", "RMSNorm", "output"))
    for name, layout in KEPT.items():
        spec = tiny_spec(layout, workload=WORKLOAD, num_microbatches=2, precision=wide)
        specs[f"{name}/keep-fp32"] = dataclasses.replace(spec, protocol=THREE_STEPS)
    for name, layout in MORE_LAYOUTS.items():
        spec = tiny_spec(layout, workload=WORKLOAD, num_microbatches=max(2, layout.pp))
        specs[name] = dataclasses.replace(spec, protocol=THREE_STEPS)
    for name, (layout, number, knobs) in SINGLE.items():
        spec = tiny_spec(layout, workload=WORKLOAD, num_microbatches=number, **knobs)
        specs[name] = dataclasses.replace(spec, protocol=THREE_STEPS)
    knobs = {
        "full-batch": {"loader": Loader(full_batch=True)},
        "math": {"kernels": Kernels(attention="math")},
        "high": {"kernels": Kernels(matmul_precision="high")},
    }
    specs |= {f"ddp/m2/O0/{name}": changed(specs["ddp/m2/O0"], **knob) for name, knob in knobs.items()}
    for workload, name in BASELINES.items():
        specs[name] = dataclasses.replace(specs["m1/O0"], workload=workload)
    specs["ddp/m2/O0/workers"] = changed(specs["ddp/m2/O0"], loader=Loader(num_workers=1, prefetch_factor=2))
    return specs


MATRIX = matrix()
PART_SIZE = 20
"""Trials per gang: one that dies takes no others with it."""
MAX_REPRESENTATIVE_RANKS = 4


def representatives():
    """Few and cheap trials of the matrix, on few ranks, in which each knob value that so few ranks can have occurs."""
    rows = [row for row in ROWS if world_size_of(name_of(row)) <= MAX_REPRESENTATIVE_RANKS]
    missing = {value for row in rows for value in row.items()}
    chosen = []
    while missing:
        # The root lets many values count more than little work.
        chosen.append(max(rows, key=lambda row: len(missing & row.items()) / cost(row) ** 0.25))
        missing -= chosen[-1].items()
    return frozenset(
        {
            *map(name_of, chosen),
            name_of(NEUTRAL | RARE_TRIALS[4]),
            "zero3/O2-fp8",
            "zero3/O2-fp8-gather",
            "zero3/keep-fp32",
            "zero1/m2/O0/chunked-loss/model",
            "copies/positions",
            "hybrid4/block/full",
        }
    )


Part = tuple[int, bool, int]
"""World size, whether its trials are representatives, and a number that counts the parts of that kind."""


def parts():
    """The part that each trial of the matrix belongs to."""
    found = {}
    for (world_size, few), names in itertools.groupby(sorted(MATRIX, key=kind_of), kind_of):
        found |= {name: (world_size, few, i // PART_SIZE) for i, name in enumerate(names)}
    return found


def kind_of(name):
    return world_size_of(name), name in REPRESENTATIVES


def world_size_of(name):
    return MATRIX[name].candidate.layout.world_size


REPRESENTATIVES = representatives()
PARTS = parts()


@functools.cache
def results(part):
    """Run every trial of this part, in one gang as long as all goes well; ranks check the weights they start from."""
    return run_all([name for name in MATRIX if PARTS[name] == part])


def run_all(names):
    with tempfile.TemporaryDirectory() as folder:
        results = run_gang([MATRIX[name] for name in names], Path(folder), before=check_all)
        return dict(zip(names, results, strict=True))


@functools.cache
def baselines():
    """Trials in one process, in fp32."""
    return run_all(list(BASELINES.values()))


def tolerances(precision):
    """Absolute tolerance of the loss, and relative one of the gradient norm."""
    if precision.is_fp8:
        return 5e-3, 5e-2
    return (1e-5, 1e-5) if precision.level == "O0" else (2e-3, 2e-2)


def test_every_legal_pair_is_tried():
    tried = set()
    for row in ROWS:
        assert is_legal(row), name_of(row)
        tried |= pairs_of(row)
    assert tried == covering().pairs


def test_rare_values_are_tried_twice():
    for row in (NEUTRAL | knobs for knobs in (*RARE_TRIALS, *THREE_DIMENSIONS)):
        assert is_legal(row), name_of(row)
    tried = Counter(value for knobs in RARE_TRIALS for value in knobs.items())
    assert all(tried[family, value] >= 2 for family, values in RARE.items() for value in values)


def test_representatives_are_few_and_show_every_value():
    assert len(REPRESENTATIVES) <= len(MATRIX) // 4
    shown = {value for row in ROWS if name_of(row) in REPRESENTATIVES for value in row.items()}
    assert shown == {value for row in ROWS for value in row.items()}


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.timeout(600)
@pytest.mark.representative(*sorted(REPRESENTATIVES))
@pytest.mark.parametrize("name", sorted(MATRIX, key=world_size_of, reverse=True))
def test_trains_like_a_single_process(name):
    loss, norm = differences(results(PARTS[name])[name], baselines()[BASELINES[MATRIX[name].workload]])
    loss_limit, norm_limit = tolerances(MATRIX[name].candidate.precision)
    assert loss <= loss_limit and norm <= norm_limit, (loss, norm)


def no_fault(original):
    return original


def in_the_order_of_ranks(_in_order):
    return lambda parts: parts.movedim(0, -3).flatten(-3, -2)


def ring_inside_of_the_groups(sequence_mesh):
    return lambda mesh: {"ring": sequence_mesh(mesh)["ulysses"], "ulysses": sequence_mesh(mesh)["ring"]}


CONTEXT = "trials.parallel.context"
HYBRID_FAULTS = {
    "none": (CONTEXT, "in_order", no_fault),
    "order of positions": (CONTEXT, "in_order", in_the_order_of_ranks),
    "wrong group": (CONTEXT, "sequence_mesh", ring_inside_of_the_groups),
}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_faults_of_hybrid_context_parallelism_show(tmp_path):
    spec = dataclasses.replace(tiny_spec(Layout(**HYBRID), workload=WORKLOAD), protocol=THREE_STEPS)
    around = [functools.partial(planted, *fault) for fault in HYBRID_FAULTS.values()]
    found = run_gang([spec] * len(around), tmp_path, around=around)
    shown = [max(differences(result, baselines()[BASELINES[WORKLOAD]])) > 1e-5 for result in found]
    assert dict(zip(HYBRID_FAULTS, shown, strict=True)) == {name: name != "none" for name in HYBRID_FAULTS}


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.representative("m2/full/O0-m2/O0")
@pytest.mark.parametrize(
    ("name", "reference"),
    [("m2/full/O0", "m2/O0"), ("ddp/m2/O0/workers", "ddp/m2/O0"), ("ddp/m2/O0/full-batch", "ddp/m2/O0")],
)
def test_same_arithmetic_is_bit_exact(name, reference):
    result, expected = (results(PARTS[one])[one] for one in (name, reference))
    assert differences(result, expected) == (0.0, 0.0)
