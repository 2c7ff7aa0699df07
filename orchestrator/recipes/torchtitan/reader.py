"""What a command of the user's own says to torchtitan 0.3: degrees, batch, recompute, number formats."""

from __future__ import annotations

from typing import Any

from orchestrator.recipes.arguments import is_given
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.overlays.findings import ReadingDraft, all_of, in_rows, without_pipeline
from orchestrator.recipes.torchtitan.config_text import ACTIVATION_CHECKPOINT, MODEL, UNKNOWN
from orchestrator.recipes.torchtitan.given import MODULE, OLD, PARTS, TitanArguments
from orchestrator.recipes.torchtitan.layout import SCHEDULES
from orchestrator.recipes.training import Reading, Run
from trials.spec import Counts, LlamaModel

_LLAMA3 = {
    "1B": (2048, 16, 32, 8, 8192),
    "3B": (3072, 28, 24, 8, 8192),
    "8B": (4096, 32, 32, 8, 14336),
    "70B": (8192, 80, 64, 8, 28672),
    "405B": (16384, 126, 128, 8, 53248),
}
"""Hidden size, layers, heads, key-value heads, width of the feed-forward part of ``torchtitan.models.llama3``."""
_DEGREES = {"tp": "tensor", "cp": "context", "pp": "pipeline"}


def read(run: Run) -> Reading:
    """A command in our words, torchtitan's defaults included as far as the configuration function could be read."""
    return read_edit(Edit.of_run(run))


def read_edit(edit: Edit) -> Reading:
    found, given = ReadingDraft(), TitanArguments(edit)
    if is_given(edit.argv, OLD):
        found.refuse("workload", "--job.config_file: torchtitan before 0.3 has other names; only 0.3 is known here")
    elif given.config is None:
        found.warn("workload", "the configuration function was not found or not understood: only arguments are read")
    shape = _shape(edit, given)
    _read_degrees(given, found)
    held = _read_pipeline(given, found, shape)
    total, number = _read_batch(given, found)
    _read_recompute(given, found, held)
    _read_precision(given, found)
    _read_run(given, found)
    return Reading(
        values=found.values,
        shape=shape,
        num_layers=shape.num_layers if shape else None,
        seq_length=given.whole(found, "workload", "training.seq_len"),
        global_batch_size=total,
        num_microbatches=number,
        seed=given.whole(found, "workload", "debug.seed"),
        notes=tuple(found.notes),
    )


def _shape(edit: Edit, given: TitanArguments) -> LlamaModel | None:
    flavor = given.get(MODEL)
    is_llama = any(word.rpartition("=")[2] in ("llama3", "torchtitan.models.llama3") for word in edit.argv)
    if not (is_given(edit.argv, MODULE) and is_llama and flavor in _LLAMA3):
        return None
    hidden, layers, heads, groups, width = _LLAMA3[flavor]
    return LlamaModel(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=groups,
        ffn_hidden_size=width,
        vocab_size=128256,
        rope_theta=500000.0,
    )


# ---- layout, batch ----


def _read_degrees(given: TitanArguments, found: ReadingDraft) -> None:
    for knob, name in _DEGREES.items():
        degree = given.whole(found, f"layout.{knob}", f"parallelism.{name}_parallel_degree")
        found.say({f"layout.{knob}": degree})
    if isinstance(sequence := given.get("parallelism.enable_sequence_parallel"), bool):
        found.say({"layout.sequence_parallel": sequence})
    found.say({"layout.cp_method": "all_gather", "layout.num_copies": 1})
    replicas = given.whole(found, "layout.dp_replicate", "parallelism.data_parallel_replicate_degree")
    shards = given.whole(found, "layout.dp_shard", "parallelism.data_parallel_shard_degree")
    found.say({"layout.dp_replicate": replicas, "layout.dp_shard": None if shards == -1 else shards})
    policy = given.get("parallelism.fsdp_reshard_after_forward")
    again = {"always": True, "never": False, "default": found.values.get("layout.pp") == 1}.get(policy)
    if policy == UNKNOWN or (policy == "default" and "layout.pp" not in found.values):
        found.warn("layout.zero_stage", "fsdp_reshard_after_forward is not known: taken for the default, stage 3")
        again = True
    if again is not None:
        found.say({"layout.zero_stage": 0 if shards == 1 else 3 if again else 2})
    if given.get("parallelism.expert_parallel_degree") not in (1, "1", UNKNOWN):
        found.unread("layout", "--parallelism.expert_parallel_degree")


def _read_pipeline(given: TitanArguments, found: ReadingDraft, shape: LlamaModel | None) -> Counts | None:
    pp = found.values.get("layout.pp")
    if pp == 1:
        found.say(without_pipeline())
        return ((shape.num_layers if shape else 1,),)
    named = given.get("parallelism.pipeline_parallel_schedule")
    schedule = next((ours for ours, theirs in SCHEDULES.items() if theirs == named), None)
    schedule = "gpipe" if named == "LoopedBFS" else schedule
    if schedule is None:
        if pp is not None:
            found.unread("layout.schedule", f"--parallelism.pipeline_parallel_schedule {named}")
        return None
    found.say({"layout.schedule": schedule})
    parts = given.get(PARTS)
    if parts in (None, UNKNOWN) or pp is None:
        found.unread("layout.stage_layers", f"stages as torchtitan makes them; --{PARTS} names them")
        return None
    flat = [sum(name.strip().startswith("layers.") for name in _names(part)) for part in parts]
    if len(flat) % pp:
        found.unread("layout.stage_layers", f"{len(flat)} parts for {pp} stages")
        return None
    held = in_rows(flat, pp)
    if schedule == "zbv":
        held = (held[0], *(tuple(reversed(row)) for row in held[1:]))
    found.say({"layout.num_virtual_stages": len(held), "layout.stage_layers": held})
    return held


def _names(part: Any) -> list[str]:
    return part.split(",") if isinstance(part, str) else list(part)


def _read_batch(given: TitanArguments, found: ReadingDraft) -> tuple[int | None, int | None]:
    """The global batch, or the micro-batches in a step where it is one batch of each rank."""
    knob = "micro_batch_size"
    local = given.whole(found, knob, "training.local_batch_size")
    total = given.whole(found, knob, "training.global_batch_size")
    pp = found.values.get("layout.pp")
    micro = local if pp == 1 else given.whole(found, knob, "parallelism.pipeline_parallel_microbatch_size")
    found.say({knob: micro if pp is not None else None})
    if total is not None and total > 0:
        return total, None
    if total == -1 and local and micro and pp is not None:
        return None, local // micro
    return None, None


# ---- recompute, number formats, data ----


def _read_recompute(given: TitanArguments, found: ReadingDraft, held: Counts | None) -> None:
    policy = given.get(ACTIVATION_CHECKPOINT)
    if policy == "none":
        found.say({"recompute.full": (), "recompute.selective": ()})
    elif policy == "full" and held is not None:
        found.say({"recompute.full": all_of(held), "recompute.selective": ()})
    elif policy != UNKNOWN:
        found.unread("recompute", f"activation-checkpoint:{policy}")


def _read_precision(given: TitanArguments, found: ReadingDraft) -> None:
    weights, compute = given.get("training.dtype"), given.get("training.mixed_precision_param")
    if weights == "float32" and compute in ("float32", "bfloat16"):
        half = compute == "bfloat16"
        found.say({"precision.dtype": compute, "precision.level": "O2" if half else "O0"})
        found.say({"precision.white": (), "precision.black": ()})
    elif UNKNOWN not in (weights, compute):
        found.unread("precision", f"--training.dtype {weights}, --training.mixed_precision_param {compute}")


def _read_run(given: TitanArguments, found: ReadingDraft) -> None:
    enabled, components = given.get("compile.enable"), given.get("compile.components")
    if isinstance(enabled, bool) and components != UNKNOWN:
        found.say({"kernels.compile": "block" if enabled and "model" in components else "off"})
        if enabled:
            found.say({"kernels.backend": given.get("compile.backend"), "kernels.compile_mode": "default"})
    if given.get("training.enable_cpu_offload") is True:
        found.unread("offload.optimizer", "training.enable_cpu_offload, of weights too")
    workers = given.whole(found, "loader.num_workers", "dataloader.num_workers")
    found.say({"loader.num_workers": workers})
    for name in ("pin_memory", "persistent_workers"):
        value = given.get(f"dataloader.{name}")
        found.say({f"loader.{name}": value if isinstance(value, bool) else None})
    if workers is not None:
        ahead = given.whole(found, "loader.prefetch_factor", "dataloader.prefetch_factor")
        found.say({"loader.prefetch_factor": 0 if workers == 0 else ahead or 2, "loader.full_batch": False})
