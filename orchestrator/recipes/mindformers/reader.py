"""What the YAML of the user's own says to MindFormers: layout, recompute, number formats, batch."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.recipes.arguments import read_text
from orchestrator.recipes.mindformers.given import (
    BATCH_SIZE,
    MODEL,
    SCRIPT,
    document,
    is_on,
    of_model,
    whole,
)
from orchestrator.recipes.mindformers.layout import (
    ACCUMULATED,
    BATCH,
    CHUNKS,
    COPIES,
    CP,
    CP_METHOD,
    CP_METHODS,
    DP,
    LEVEL,
    MICRO_BATCHES,
    OFFSET,
    PP,
    SCHEDULER,
    SCHEDULERS,
    SHARD_SIZE,
    SHARDS,
    TP,
)
from orchestrator.recipes.mindformers.recompute import COMMUNICATION, FULL, GATHERS, PATTERNS, SELECT
from orchestrator.recipes.mindformers.run import COMPUTE, FLASH, PREFETCH, RESIDUAL, SCALE, WORKERS, read_loss_scale
from orchestrator.recipes.overlays.edit import Edit, EditedFile
from orchestrator.recipes.overlays.findings import ReadingDraft, all_of, without_pipeline
from orchestrator.recipes.training import Reading, Run
from trials.spec import Counts, LlamaModel, SelectiveRecompute

_DTYPES = {"float16": "float16", "fp16": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32"}


def read(run: Run) -> Reading:
    """A command in our words, MindFormers' defaults included."""
    return read_edit(Edit.of_run(run))


def read_edit(edit: Edit) -> Reading:
    found, config = ReadingDraft(), document(edit)
    if not config.exists:
        found.refuse("workload", f"no YAML found: write {SCRIPT} --config FILE, each word by itself")
        return Reading(values={}, notes=tuple(found.notes))
    layers = found.whole("workload", "num_layers", of_model(config, "num_layers"))
    _read_degrees(config, found)
    held = _read_pipeline(config, found, layers)
    _read_recompute(config, found, held)
    _read_precision(config, found)
    total, number = _read_batch(edit, config, found)
    _read_run(config, found)
    return Reading(
        values=found.values,
        shape=_shape(config, found),
        num_layers=layers,
        seq_length=found.whole("workload", "seq_length", of_model(config, "seq_length")),
        global_batch_size=total,
        num_microbatches=number,
        seed=whole(config, found, "workload", "seed", 1),
        notes=tuple(found.notes),
    )


# ---- layout, batch ----


def _read_degrees(config: EditedFile, found: ReadingDraft) -> None:
    degrees = {name: whole(config, found, f"layout.{name}", key, 1) for name, key in _DEGREES.items()}
    found.say({f"layout.{name}": degrees[name] for name in ("tp", "cp")})
    found.say({"layout.sequence_parallel": is_on(config, "parallel_config.use_seq_parallel")})
    methods = {theirs: ours for ours, theirs in CP_METHODS.items()}
    said = config.get(CP_METHOD, "colossalai_cp")
    if said in methods:
        found.say({"layout.cp_method": methods[said]})
    elif degrees["cp"] != 1:
        found.unread("layout.cp_method", f"{CP_METHOD}: {said}")
    dp, cp = degrees["dp"], degrees["cp"]
    if dp is None or cp is None:
        return
    stage = int(str(config.get(LEVEL, "level1")).removeprefix("level")) if is_on(config, SHARDS) else 0
    size = whole(config, found, "layout.dp_shard", SHARD_SIZE, -1) or -1
    shards = 1 if stage == 0 else dp if size <= 0 else max(1, size // cp)
    if dp % shards:
        found.unread("layout.dp_shard", f"{SHARD_SIZE}: {size} with {dp} data-parallel ranks")
        return
    found.say({"layout.dp_replicate": dp // shards, "layout.dp_shard": shards, "layout.zero_stage": stage})


_DEGREES = {"dp": DP, "tp": TP, "pp": PP, "cp": CP}


def _read_pipeline(config: EditedFile, found: ReadingDraft, layers: int | None) -> Counts | None:
    pp = whole(config, found, "layout.pp", PP, 1)
    if pp == 1:
        found.say(without_pipeline())
        return ((layers or 1,),)
    chunks = whole(config, found, "layout.num_virtual_stages", CHUNKS, 1)
    found.say({"layout.pp": pp, "layout.num_virtual_stages": chunks})
    theirs = config.get(SCHEDULER, "1f1b")
    ours = {"zero_bubble_v": "zbv", "gpipe": "gpipe", "1f1b": "interleaved" if chunks and chunks > 1 else "1f1b"}
    if theirs in SCHEDULERS.values():
        found.say({"layout.schedule": ours[theirs]})
    else:
        found.unread("layout.schedule", f"{SCHEDULER}: {theirs}")
    if not (pp and chunks and layers):
        return None
    held = _held(config.get(OFFSET, 0), layers, pp, chunks)
    if held is None:
        found.unread("layout.stage_layers", f"{OFFSET}: {config.get(OFFSET)} for {layers} layers, pp {pp}")
        return None
    found.say({"layout.stage_layers": held})
    return held


def _held(offset: Any, layers: int, pp: int, chunks: int) -> Counts | None:
    """Layers of every chunk and stage: the whole share and what ``offset`` adds to it."""
    share = layers // (pp * chunks)
    rows = [[0] * pp] * chunks if offset in (0, None, []) else offset
    rows = rows if isinstance(rows, list) and isinstance(rows[0], list) else [rows]
    if any(not isinstance(row, list) or len(row) != pp for row in rows):
        return None
    held = tuple(tuple(share + number for number in row) for row in rows)
    return held if sum(map(sum, held)) == layers and len(held) == chunks else None


def _read_batch(edit: Edit, config: EditedFile, found: ReadingDraft) -> tuple[int | None, int | None]:
    """The global batch and the micro-batches in it; either None where it is not known."""
    copies = whole(config, found, "layout.num_copies", COPIES, 1)
    given = read_text(edit.argv, BATCH_SIZE)
    size = found.whole("micro_batch_size", BATCH, given or config.get(BATCH), 1)
    key = MICRO_BATCHES if found.values.get("layout.pp", 1) > 1 else ACCUMULATED
    number = whole(config, found, "micro_batch_size", key, 1)
    if not (copies and size and number):
        return None, None
    found.say({"layout.num_copies": copies, "micro_batch_size": size * copies})
    replicas, shards = (found.values.get(f"layout.{name}") for name in ("dp_replicate", "dp_shard"))
    total = size * copies * number * replicas * shards if replicas and shards else None
    return total, number


# ---- recompute, number formats ----


def _read_recompute(config: EditedFile, found: ReadingDraft, held: Counts | None) -> None:
    if held is None:
        found.unread("recompute", "layers of stages that are not known")
        return
    full = _counts(config.get(FULL, False), held)
    if full is None:
        found.unread("recompute.full", f"{FULL}: {config.get(FULL)}")
    found.say({"recompute.full": full})
    select = _patterns(config.get(SELECT, False), held, found)
    if select is not None:
        known = {theirs: ours for ours, theirs in PATTERNS.items()}
        parts = {known[name]: counts for name, counts in select.items() if name in known}
        for name in set(select) - set(known):
            found.unread("recompute.selective", f"{SELECT}: {name}")
        if set(select) <= set(known):
            parts_of = tuple(SelectiveRecompute(pattern=p, num_layers=n) for p, n in sorted(parts.items()))
            found.say({"recompute.selective": parts_of})
    gathers = _patterns(config.get(COMMUNICATION, False), held, found)
    if gathers is not None and set(gathers) <= {GATHERS}:
        found.say({"recompute.communication": gathers.get(GATHERS, ())})
    elif gathers is not None:
        found.unread("recompute.communication", f"{COMMUNICATION}: {', '.join(gathers)}")


def _counts(said: Any, held: Counts) -> Counts | None:
    """Layers per chunk and stage of true, false, numbers per stage, or lists of them per chunk."""
    if isinstance(said, bool):
        return all_of(held) if said else ()
    if not isinstance(said, list) or not said:
        return None
    rows = said if isinstance(said[0], list) else [said]
    shape = [len(row) for row in held]
    if [len(row) if isinstance(row, list) else -1 for row in rows] != shape:
        return None
    numbers = [[(n if k else 0) if isinstance(k, bool) else k for k, n in zip(row, most, strict=True)]
               for row, most in zip(rows, held, strict=True)]  # fmt: skip
    counts = tuple(tuple(min(k, n) for k, n in zip(row, most, strict=True)) for row, most in
                   zip(numbers, held, strict=True))  # fmt: skip
    return counts if any(map(any, counts)) else ()


def _patterns(said: Any, held: Counts, found: ReadingDraft) -> dict[str, Counts] | None:
    """Numbers of layers by pattern; of a plain list of patterns, all layers."""
    if said in (False, None, {}, []):
        return {}
    pairs = dict.fromkeys(said, True) if isinstance(said, list) else said
    if not isinstance(pairs, dict):
        found.unread("recompute.selective", f"recompute: {said}")
        return None
    made = {str(name): _counts(value, held) for name, value in pairs.items()}
    if any(counts is None for counts in made.values()):
        found.unread("recompute.selective", f"recompute: {said}")
        return None
    return {name: counts for name, counts in made.items() if counts}


def _read_precision(config: EditedFile, found: ReadingDraft) -> None:
    dtype = _DTYPES.get(str(config.get(COMPUTE, "float16")))
    if dtype is None:
        found.unread("precision.dtype", f"{COMPUTE}: {config.get(COMPUTE)}")
        return
    residual = _DTYPES.get(str(config.get(RESIDUAL, dtype)))
    level = "O0" if dtype == "float32" else "O2" if residual == dtype else "O1"
    found.say({"precision.dtype": dtype, "precision.level": level, "precision.white": (), "precision.black": ()})
    if dtype != "float16":
        return
    try:
        scale = dataclasses.asdict(read_loss_scale(config.get(SCALE, 1.0)))
    except (KeyError, TypeError, ValueError):
        found.unread("precision.loss_scale", f"{SCALE}: {config.get(SCALE)}")
        return
    found.say({f"precision.loss_scale.{name}": value for name, value in scale.items()})


def _read_run(config: EditedFile, found: ReadingDraft) -> None:
    workers = whole(config, found, "loader.num_workers", WORKERS)
    found.say({"loader.num_workers": workers})
    if workers:
        found.say({"loader.prefetch_factor": whole(config, found, "loader.prefetch_factor", PREFETCH)})
        found.say({"loader.persistent_workers": True})
    found.say({"loader.full_batch": is_on(config, "parallel.full_batch", default=True)})
    if config.has(FLASH):
        found.say({"kernels.attention": "flash" if is_on(config, FLASH) else "math"})


def _shape(config: EditedFile, found: ReadingDraft) -> LlamaModel | None:
    """The decoder, where the model's section gives all its dimensions."""
    keys = ("num_layers", "hidden_size", "num_heads", "ffn_hidden_size", "vocab_size")
    numbers = {key: found.whole("workload.model", key, of_model(config, key)) for key in keys}
    missing = [key for key, number in numbers.items() if number is None]
    heads, size = numbers["num_heads"], config.get(f"{MODEL}.head_dim")
    if missing or heads is None:
        found.warn("workload.model", f"not in {MODEL}: {', '.join(missing)}; without it nothing is predicted")
        return None
    if config.has("moe_config.expert_num") and config.get("moe_config.expert_num", 1) > 1:
        found.warn("workload.model", "moe_config: no plain decoder; nothing is predicted")
        return None
    if size is not None and size * heads != numbers["hidden_size"]:
        found.warn("workload.model", f"head_dim {size}: attention is wider than the model; predictions leave that out")
    return LlamaModel(
        **{key: int(number or 0) for key, number in numbers.items()},
        num_kv_heads=found.whole("workload.model", "n_kv_heads", of_model(config, "num_kv_heads")) or heads,
        rope_theta=float(of_model(config, "rope_theta") or 10000.0),
        norm_eps=float(of_model(config, "norm_eps") or 1e-6),
    )
