"""What a command of the user's own says to Megatron-LM: layout, recompute, number formats, batch."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from orchestrator.recipes.layers import first_layers
from orchestrator.recipes.megatron.decoder import read_decoder
from orchestrator.recipes.megatron.given import options
from orchestrator.recipes.megatron.recompute import MODULE_PATTERNS
from orchestrator.recipes.overlays.edit import Edit, Options
from orchestrator.recipes.overlays.findings import ReadingDraft, all_of, in_rows, without_pipeline
from orchestrator.recipes.training import Reading, Run
from trials.spec import Counts, LossScale, SelectiveRecompute

ATTENTION = {"auto": "auto", "flash": "flash", "fused": "cudnn", "unfused": "math"}
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_UNEVEN = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_EXTRA = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


def read(run: Run) -> Reading:
    """A command in our words, Megatron-LM's defaults included."""
    return read_edit(Edit.of_run(run))


def read_edit(edit: Edit) -> Reading:
    given, found = options(edit), ReadingDraft()
    if given.text("--yaml-cfg"):
        found.refuse("workload", "--yaml-cfg: configuration in YAML is not read; give the same as arguments")
    num_layers = _number(given, found, "workload", "--num-layers", None) or _number(
        given, found, "workload", "--encoder-num-layers", None
    )
    _read_degrees(given, found)
    _read_data_parallel(given, found)
    held = _read_pipeline(given, found, num_layers)
    _read_recompute(given, found, held)
    _read_precision(given, found)
    _read_run(given, found)
    total = _number(given, found, "micro_batch_size", "--global-batch-size", None)
    return Reading(
        values=found.values,
        shape=read_decoder(given, found),
        num_layers=num_layers,
        seq_length=_number(given, found, "workload", "--seq-length", None)
        or _number(given, found, "workload", "--encoder-seq-length", None),
        global_batch_size=total,
        num_microbatches=1 if given.text("--global-batch-size") is None else None,
        seed=_number(given, found, "workload", "--seed", 1234),
        notes=tuple(found.notes),
    )


def _number(given: Options, found: ReadingDraft, knob: str, name: str, default: int | None) -> int | None:
    return found.whole(knob, name, given.text(name), default)


# ---- layout ----


def _read_degrees(given: Options, found: ReadingDraft) -> None:
    for knob, name in (("tp", "tensor-model"), ("pp", "pipeline-model"), ("cp", "context")):
        path = f"layout.{knob}"
        found.say({path: _number(given, found, path, f"--{name}-parallel-size", 1)})
    found.say({"layout.sequence_parallel": given.is_on("--sequence-parallel")})
    methods = {"all_gather": "all_gather", "allgather": "all_gather", "a2a": "ulysses", "p2p": "ring"}
    said = given.text("--cp-comm-type") or "p2p"
    if said in methods:
        found.say({"layout.cp_method": methods[said]})
    elif found.values.get("layout.cp", 1) > 1:
        found.unread("layout.cp_method", f"--cp-comm-type {said}")
    experts = given.text("--expert-model-parallel-size")
    if experts not in (None, "1"):
        found.unread("layout", f"--expert-model-parallel-size {experts}: experts share the data-parallel ranks")


def _read_data_parallel(given: Options, found: ReadingDraft) -> None:
    """Read what data-parallel ranks share; how many there are is what the other degrees leave over."""
    if given.is_on("--use-torch-fsdp2"):
        found.unread("layout.zero_stage", "--use-torch-fsdp2")
        return
    stage = 1 if given.is_on("--use-distributed-optimizer") else 0
    if given.is_on("--use-megatron-fsdp"):
        strategy = given.text("--data-parallel-sharding-strategy") or "optim_grads_params"
        if strategy not in _STRATEGIES:
            found.unread("layout.zero_stage", f"--data-parallel-sharding-strategy {strategy}")
            return
        stage = _STRATEGIES[strategy]
    found.say({"layout.zero_stage": stage})
    if stage == 0:
        found.say({"layout.dp_shard": 1})
    else:
        name = "--num-distributed-optimizer-instances"
        found.say({"layout.dp_replicate": _number(given, found, "layout.dp_replicate", name, 1)})


def _read_pipeline(given: Options, found: ReadingDraft, num_layers: int | None) -> Counts | None:
    """Read stages and schedule; the layers of every chunk and stage, None where they are not known."""
    pp = found.values.get("layout.pp")
    if pp == 1:
        found.say(without_pipeline())
        return ((num_layers or 1,),)
    counts = _stages(given, found, num_layers, pp) if pp else None
    if counts is None or pp is None:
        return None
    held = in_rows(counts, pp)
    found.say(
        {
            "layout.schedule": "interleaved" if len(held) > 1 else "1f1b",
            "layout.num_virtual_stages": len(held),
            "layout.stage_layers": held,
        }
    )
    return held


def _stages(given: Options, found: ReadingDraft, num_layers: int | None, pp: int) -> list[int] | None:
    """Layers of every virtual stage in the order of the model."""
    text = given.text("--pipeline-model-parallel-layout")
    if text is not None:
        counts = stages_of(text)
        if counts is None or len(counts) % pp or (num_layers and sum(counts) != num_layers):
            found.unread("layout.stage_layers", f"--pipeline-model-parallel-layout {text}")
            return None
        return counts
    if num_layers is None:
        found.unread("layout.stage_layers", "stages of a model whose number of layers is not among the arguments")
        return None
    chunks = _chunks(given, found, num_layers, pp)
    if chunks is None:
        return None
    if any(given.is_on(name) for name in _EXTRA):
        return _padded(given, found, num_layers, pp * chunks)
    if any(given.text(name) for name in _UNEVEN):
        return _uneven(given, found, num_layers, pp, chunks)
    if num_layers % (pp * chunks):
        found.refuse("layout.pp", f"{num_layers} layers do not divide into {pp * chunks} stages")
        return None
    return [num_layers // (pp * chunks)] * (pp * chunks)


def _chunks(given: Options, found: ReadingDraft, num_layers: int, pp: int) -> int | None:
    """Chunks of layers per rank, by either way to ask for them."""
    knob, name = "layout.num_virtual_stages", "--num-layers-per-virtual-pipeline-stage"
    size = _number(given, found, knob, name, 0)
    if size:
        layers = num_layers + sum(given.is_on(extra) for extra in _EXTRA)
        if layers % (pp * size):
            found.refuse(knob, f"{name} {size} does not divide {layers} layers on {pp} stages")
            return None
        return layers // (pp * size)
    return _number(given, found, knob, "--num-virtual-stages-per-pipeline-rank", 1)


def _padded(given: Options, found: ReadingDraft, num_layers: int, stages: int) -> list[int] | None:
    """Even stages of which the first counts the embedding as a layer, the last the head."""
    first, last = (int(given.is_on(name)) for name in _EXTRA)
    share, left = divmod(num_layers + first + last, stages)
    if left:
        found.refuse("layout.pp", f"{num_layers} layers, embedding and head as asked, do not divide into {stages}")
        return None
    counts = [share] * stages
    counts[0] -= first
    counts[-1] -= last
    return counts


def _uneven(given: Options, found: ReadingDraft, num_layers: int, pp: int, chunks: int) -> list[int] | None:
    """Stages where the first or last rank holds a number of layers of its own, spread over its chunks."""
    first, last = (_number(given, found, "layout.stage_layers", name, 0) for name in _UNEVEN)
    if first is None or last is None:
        return None
    middle = pp - bool(first) - bool(last)
    rest = num_layers - first - last
    if middle < 0 or rest < 0 or (middle and rest % (middle * chunks)) or first % chunks or last % chunks:
        found.refuse("layout.stage_layers", f"{' and '.join(_UNEVEN)}: {num_layers} layers do not divide so")
        return None
    share = rest // middle if middle else 0
    row = ([first] if first else []) + [share] * middle + ([last] if last else [])
    return [count // chunks for count in row] * chunks


def stages_of(text: str) -> list[int] | None:
    """Decoder layers of every stage of a layout like ``E|(t|)*3,m|m||L`` or ``Et*3|t*4|t*4|t*3L``."""
    plain = text.replace(",", "").replace(" ", "")
    while found := re.search(r"\(([^()]*)\)(?:\*(\d+))?", plain):
        plain = plain[: found.start()] + found[1] * int(found[2] or 1) + plain[found.end() :]
    plain = re.sub(r"([EtmL|])\*(\d+)", lambda match: match[1] * int(match[2]), plain)
    return [stage.count("t") for stage in plain.split("|")] if re.fullmatch(r"[EtmL|]+", plain) else None


# ---- recompute ----


def _read_recompute(given: Options, found: ReadingDraft, held: Counts | None) -> None:
    granularity = given.text("--recompute-granularity")
    if granularity is None and given.is_on("--recompute-activations"):
        granularity = "selective"
    if granularity is None:
        found.say({"recompute.full": (), "recompute.selective": ()})
    elif granularity == "selective":
        _read_selective(given, found, held)
    elif granularity == "full":
        _read_full(given, found, held)
    else:
        found.unread("recompute", f"--recompute-granularity {granularity}")


def _read_full(given: Options, found: ReadingDraft, held: Counts | None) -> None:
    method = given.text("--recompute-method")
    number = _number(given, found, "recompute.full", "--recompute-num-layers", None)
    if method not in ("uniform", "block") or number is None:
        found.unread("recompute.full", f"--recompute-method {method} --recompute-num-layers {number}")
    elif held is None:
        found.unread("recompute.full", "layers of stages that are not known")
    else:
        full = all_of(held) if method == "uniform" else first_layers(number, held)
        found.say({"recompute.full": full, "recompute.selective": ()})


def _read_selective(given: Options, found: ReadingDraft, held: Counts | None) -> None:
    modules = given.get("--recompute-modules") or ("core_attn",)
    unknown = [module for module in modules if module not in MODULE_PATTERNS] if isinstance(modules, tuple) else []
    if unknown or held is None or not isinstance(modules, tuple):
        found.unread("recompute.selective", f"--recompute-modules {' '.join(unknown) or 'of unknown stages'}")
        found.say({"recompute.full": ()})
        return
    patterns = sorted({pattern for module in modules for pattern in MODULE_PATTERNS[module]})
    parts = tuple(SelectiveRecompute(pattern=pattern, num_layers=all_of(held)) for pattern in patterns)
    found.say({"recompute.full": (), "recompute.selective": parts})


# ---- number formats, batches, data ----


def _read_precision(given: Options, found: ReadingDraft) -> None:
    dtype = "bfloat16" if given.is_on("--bf16") else "float16" if given.is_on("--fp16") else "float32"
    found.say({"precision.dtype": dtype, "precision.level": "O0" if dtype == "float32" else "O2"})
    found.say({"precision.white": (), "precision.black": ()})
    if dtype == "float16":
        scale = dataclasses.asdict(_loss_scale(given))
        found.say({f"precision.loss_scale.{name}": value for name, value in scale.items()})
    for name in ("--fp8-format", "--fp4-format"):
        if text := given.text(name):
            found.unread("precision", f"{name} {text}; all else is in {dtype}")


def _loss_scale(given: Options) -> LossScale:
    fixed = given.text("--loss-scale")
    if fixed:
        return LossScale(dynamic=False, initial=float(fixed))
    return LossScale(
        initial=float(given.text("--initial-loss-scale") or 2.0**32),
        growth_interval=int(float(given.text("--loss-scale-window") or 1000)),
        backoff_interval=int(given.text("--hysteresis") or 2),
    )


def _read_run(given: Options, found: ReadingDraft) -> None:
    """Read the batch, the reading of data, attention; and what Megatron-LM always does."""
    if given.text("--micro-batch-size") is None:
        found.refuse("micro_batch_size", "--micro-batch-size is missing, which Megatron-LM requires")
    found.say({"micro_batch_size": _number(given, found, "micro_batch_size", "--micro-batch-size", None)})
    workers = _number(given, found, "loader.num_workers", "--num-workers", 2)
    if workers is not None:
        found.say({"loader.num_workers": workers, "loader.prefetch_factor": 2 if workers else 0})
        found.say({"loader.persistent_workers": workers > 0})
    backend = given.text("--attention-backend") or "auto"
    if backend in ATTENTION:
        found.say({"kernels.attention": ATTENTION[backend]})
    elif "{" not in backend:
        found.unread("kernels.attention", f"--attention-backend {backend}")
    if given.is_on("--optimizer-cpu-offload"):
        found.unread("offload.optimizer", "--optimizer-cpu-offload, of another optimiser")
    if (given.text("--cpu-offloading-num-layers") or "0") != "0":
        found.unread("offload.activations", "--cpu-offloading-num-layers, of some of what layers keep")
    found.say(_ALWAYS)


_ALWAYS: dict[str, Any] = {
    "layout.num_copies": 1,
    "loader.pin_memory": True,
    "loader.full_batch": False,
    "kernels.compile": "off",
}
"""What no argument changes."""
