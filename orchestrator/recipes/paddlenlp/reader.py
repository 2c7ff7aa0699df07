"""What the arguments of the user's own say to PaddleNLP: layout, recompute, number formats, batch."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.recipes.overlays.edit import Edit, EditedFile
from orchestrator.recipes.overlays.findings import ReadingDraft, all_of, without_pipeline
from orchestrator.recipes.paddlenlp.given import MODEL_CONFIG, PaddleArguments
from orchestrator.recipes.paddlenlp.layout import ACCUMULATED, BATCH, CHUNKS, PP, RING, SHARDING, SHARDS, TP, ULYSSES
from orchestrator.recipes.paddlenlp.recompute import GRANULARITY, KEPT, PATTERNS, RECOMPUTE
from orchestrator.recipes.paddlenlp.run import FLASH, WORKERS
from orchestrator.recipes.training import Reading, Run
from trials.spec import Counts, Layout, LlamaModel, LossScale, SelectiveRecompute
from trials.stages import all_chunks

_STAGES = {"": 0, "none": 0, "stage1": 1, "stage2": 2, "stage3": 3}


def read(run: Run) -> Reading:
    """A command in our words, PaddleNLP's defaults included."""
    return read_edit(Edit.of_run(run))


def read_edit(edit: Edit) -> Reading:
    given, found = PaddleArguments(edit), ReadingDraft()
    shape = _shape(edit, found)
    layers = given.whole(found, "workload", "num_hidden_layers", shape.num_layers if shape else None)
    shape = dataclasses.replace(shape, num_layers=layers) if shape and layers else shape
    _read_degrees(given, found)
    held = _read_pipeline(given, found, layers)
    _read_recompute(given, found, held)
    _read_precision(given, found)
    workers = given.whole(found, "loader.num_workers", WORKERS, 0)
    found.say({"loader.num_workers": workers, "loader.prefetch_factor": 2 if workers else 0})
    found.say({"loader.persistent_workers": False, "loader.full_batch": False, "kernels.compile": "off"})
    if given.get(FLASH) is not None:
        found.say({"kernels.attention": "flash" if given.is_on(FLASH) else "math"})
    found.say({"micro_batch_size": given.whole(found, "micro_batch_size", BATCH, 8), "layout.num_copies": 1})
    return Reading(
        values=found.values,
        shape=shape,
        num_layers=layers,
        seq_length=given.whole(found, "workload", "max_seq_length", None),
        num_microbatches=given.whole(found, "micro_batch_size", ACCUMULATED, 1),
        seed=given.whole(found, "workload", "seed", 42),
        notes=tuple(found.notes),
    )


def _read_degrees(given: PaddleArguments, found: ReadingDraft) -> None:
    found.say({"layout.tp": given.whole(found, "layout.tp", TP, 1)})
    ring, ulysses = (given.whole(found, "layout.cp", name, 1) for name in (RING, ULYSSES))
    if ring and ulysses and min(ring, ulysses) > 1:
        found.unread("layout.cp", f"{RING} {ring} beside {ULYSSES} {ulysses}")
    elif ring and ulysses:
        found.say({"layout.cp": max(ring, ulysses)})
        found.say({"layout.cp_method": "ulysses" if ulysses > 1 else "ring"})
    found.say({"layout.sequence_parallel": given.is_on("sequence_parallel")})
    words = str(given.get(SHARDING) or "").split()
    stage = _STAGES.get(words[0] if words else "")
    if stage is None or len(words) > 1:
        found.unread("layout.zero_stage", f"{SHARDING} {' '.join(words)}")
        return
    found.say({"layout.zero_stage": stage})
    shards = given.whole(found, "layout.dp_shard", SHARDS, None)
    if stage == 0:
        found.say({"layout.dp_shard": 1})
    elif shards:
        found.say({"layout.dp_shard": shards})
    else:
        found.say({"layout.dp_replicate": 1})


def _read_pipeline(given: PaddleArguments, found: ReadingDraft, layers: int | None) -> Counts | None:
    pp = given.whole(found, "layout.pp", PP, 1)
    if pp == 1:
        found.say(without_pipeline())
        return ((layers or 1,),)
    chunks = given.whole(found, "layout.num_virtual_stages", CHUNKS, 1)
    found.say({"layout.pp": pp, "layout.num_virtual_stages": chunks})
    if not (pp and chunks):
        return None
    found.say({"layout.schedule": "interleaved" if chunks > 1 else "1f1b"})
    if layers is None:
        found.unread("layout.stage_layers", "stages of a model whose number of layers is not known")
        return None
    if layers % (pp * chunks):
        found.refuse("layout.pp", f"{layers} layers do not divide into {pp * chunks} stages")
        return None
    held = ((layers // (pp * chunks),) * pp,) * chunks
    found.say({"layout.stage_layers": held})
    return held


# ---- recompute, number formats ----


def _read_recompute(given: PaddleArguments, found: ReadingDraft, held: Counts | None) -> None:
    if not given.is_on(RECOMPUTE):
        found.say({"recompute.full": (), "recompute.selective": ()})
        return
    granularity = given.get(GRANULARITY) or "full"
    counts = _recomputed(given.get(KEPT), held) if held else None
    if counts is None or granularity not in (*PATTERNS, "full"):
        found.unread("recompute", f"{GRANULARITY} {granularity}, {KEPT} {given.get(KEPT)}")
    elif granularity == "full":
        found.say({"recompute.full": counts, "recompute.selective": ()})
    else:
        part = SelectiveRecompute(pattern=PATTERNS[granularity], num_layers=counts)
        found.say({"recompute.full": (), "recompute.selective": (part,) if counts else ()})


def _recomputed(kept: Any, held: Counts) -> Counts | None:
    """Layers recomputed from the first on in every chunk and stage; None where others than the last are kept."""
    layers = [int(word) for word in str(kept).strip("[]").replace(",", " ").split()] if kept not in (None, "") else []
    if not layers:
        return all_of(held)
    layout = Layout(pp=len(held[0]), num_virtual_stages=len(held), stage_layers=held)
    counts = [[0] * layout.pp for _ in held]
    for chunk in all_chunks(layout, sum(map(sum, held))):
        again = [layer not in layers for layer in chunk.layer_ids]
        if again != sorted(again, reverse=True):
            return None
        counts[chunk.chunk][chunk.stage] = sum(again)
    return tuple(tuple(row) for row in counts) if any(map(any, counts)) else ()


def _read_precision(given: PaddleArguments, found: ReadingDraft) -> None:
    dtype = "bfloat16" if given.is_on("bf16") else "float16" if given.is_on("fp16") else "float32"
    level = str(given.get("fp16_opt_level") or "O1")
    if dtype != "float32" and level not in ("O1", "O2"):
        found.unread("precision.level", f"fp16_opt_level {level}")
        return
    found.say({"precision.dtype": dtype, "precision.level": "O0" if dtype == "float32" else level})
    lists = [name for name in ("amp_custom_white_list", "amp_custom_black_list") if given.get(name)]
    if lists:
        found.unread("precision", ", ".join(lists))
    else:
        found.say({"precision.white": (), "precision.black": ()})
    if dtype == "float16":
        scale = dataclasses.asdict(LossScale(initial=float(given.get("scale_loss") or 2.0**15)))
        found.say({f"precision.loss_scale.{name}": value for name, value in scale.items()})


def _shape(edit: Edit, found: ReadingDraft) -> LlamaModel | None:
    """The decoder, from the model's own file where it lies in a folder."""
    config = EditedFile(edit, MODEL_CONFIG)
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [key for key in keys if not isinstance(config.get(key), int)]
    if missing or config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts"):
        where = "its config.json" if config.exists else "no config.json found in model_name_or_path"
        found.warn("workload.model", f"{where}: dimensions of a plain decoder are not known; nothing is predicted")
        return None
    return LlamaModel(
        num_layers=config.get("num_hidden_layers"),
        hidden_size=config.get("hidden_size"),
        num_heads=config.get("num_attention_heads"),
        num_kv_heads=config.get("num_key_value_heads") or config.get("num_attention_heads"),
        ffn_hidden_size=config.get("intermediate_size"),
        vocab_size=config.get("vocab_size"),
        rope_theta=float(config.get("rope_theta") or 10000.0),
        norm_eps=float(config.get("rms_norm_eps") or 1e-6),
    )
