"""PaddleNLP: ``paddle.distributed.launch run_pretrain.py FILE.json``, or the same with arguments.

Exports are the file of arguments, the model's ``config.json``, and a script that starts both. Names, defaults and rules
are those of the sources of 2.8.1 and 3.0.0b4. Its successor PaddleFormers has other names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from orchestrator.frameworks import arguments, shell
from orchestrator.frameworks.arguments import Words, either_dash
from orchestrator.frameworks.edit import Edit, EditedFile, FrameworkTable, Overlay, OverlayRequest, Run, Training
from orchestrator.frameworks.gaps import (
    NO_FLOAT8_GATHER,
    NO_FP32_MODULES,
    NO_LATENT,
    OWN_FUSED,
    VARYING_LENGTHS,
    all_of,
    first_layers_of,
    is_uniform,
    layer_ids,
    memory_savers,
    num_microbatches,
    offloads_inputs,
    own_collectives,
    refuse_fp8,
    refuse_stages,
    sharded_from,
    two_batches_ahead,
    weight_decay_but_norms,
    without_pipeline,
)
from orchestrator.frameworks.mixtral import mixtral
from orchestrator.frameworks.shell import WORLD_SIZE
from orchestrator.frameworks.spelling import (
    Found,
    Recipe,
    Setting,
    Settings,
    SettingsBuilder,
    custom,
    lacking,
    number,
    option,
    row,
    switch,
)
from trials.files import read_regular
from trials.layout_rules import has_experts
from trials.script.command import Expected, LogFormat
from trials.spec import Counts, Experts, LlamaModel, LossScale, SelectiveRecompute

FILE, MODEL_FILE, SCRIPT = "paddlenlp.json", "model/config.json", "paddlenlp.sh"
MODEL = "model:"
"""Prefix of settings for the model's own file."""
TP, PP, CHUNKS = "tensor_parallel_degree", "pipeline_parallel_degree", "virtual_pp_degree"
RING, ULYSSES = "context_parallel_degree", "sep_parallel_degree"
SHARDING, SHARDS, EXPERTS = "sharding", "sharding_parallel_degree", "expert_parallel_degree"
BATCH, ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
RECOMPUTE, GRANULARITY, KEPT = "recompute", "recompute_granularity", "no_recompute_layers"
FLASH, WORKERS = "use_flash_attention", "dataloader_num_workers"
NUM_LAYERS = f"{MODEL}num_hidden_layers"
LLAMA = "workload.model.llama"
PATTERNS = {"core_attn": r"attention\.scaled_dot_product_attention", "full_attn": "attention"}
"""What each granularity other than full drops, as patterns of the runner."""
OPERATORS = {"linear": "matmul_v2", "softmax": "softmax"}
"""Paddle's names of operators that may be in the autocast lists of both sides."""
DEFAULTS = {
    **dict.fromkeys((TP, PP, CHUNKS, RING, ULYSSES, EXPERTS, ACCUMULATED), 1),
    BATCH: 8,
    WORKERS: 0,
    "seed": 42,
    "bf16": False,
    "fp16": False,
}
_STAGES = {"": 0, "none": 0, "stage1": 1, "stage2": 2, "stage3": 3}


# The model and the data.

_FRAME = {
    "model_name_or_path": "model",
    "tokenizer_name_or_path": "path/to/your/tokenizer",
    "input_dir": "path/to/your/data",
    "output_dir": "output",
    "split": "1,0,0",
    "do_train": True,
    "max_steps": 100,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
}
"""Arguments for the runner's constant learning rate; the user sets the paths."""
_ARCHITECTURE = {
    f"{MODEL}architectures": ["LlamaForCausalLM"],
    f"{MODEL}model_type": "llama",
    f"{MODEL}hidden_act": "silu",
    f"{MODEL}initializer_range": 0.02,
    f"{MODEL}tie_word_embeddings": False,
}
_DIMENSIONS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
"""Names of the dimensions of a decoder in its ``config.json``."""


def _write_kind(builder: SettingsBuilder) -> None:
    builder.settings |= _FRAME
    builder.settings["max_seq_length"] = builder.workload.seq_length
    if isinstance(builder.workload.model, LlamaModel):
        builder.settings |= _ARCHITECTURE
        builder.settings[f"{MODEL}max_position_embeddings"] = builder.workload.seq_length
    else:
        builder.refuse(
            "workload.model", f"run_pretrain.py trains decoders, not models of kind {builder.workload.model.kind}"
        )


def _read_kind(found: Found) -> dict[str, Any]:
    kind = {"workload.model.kind": "llama"} if f"{MODEL}model_type" in found else {}
    if found.is_export:
        found.num_layers = found.get(NUM_LAYERS, 0)
    return {**kind, "workload.seq_length": found.whole("workload", "max_seq_length")}


def _write_data(builder: SettingsBuilder) -> None:
    builder.warn("workload.data", "create a .bin and .idx data set with PaddleNLP's tools and set input_dir")
    if isinstance(builder.workload.model, LlamaModel):
        builder.warn(
            f"{LLAMA}.vocab_size", "run_pretrain.py rounds the vocabulary of the tokenizer up to a multiple of 128"
        )


# The layout and the batch.


def _cp(found: Settings) -> int:
    return int(max(found.get(RING, 1), found.get(ULYSSES, 1)))


def _data_parallel(found: Settings) -> int:
    """Data-parallel degree of an export, from the number of ranks and the other degrees."""
    return int(found[WORLD_SIZE] // (found[TP] * found[PP] * _cp(found)))


def _write_cp(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    builder.drop(RING, ULYSSES)
    if layout.cp > 1:
        builder.settings[ULYSSES if layout.cp_method == "ulysses" else RING] = layout.cp
    if builder.is_export and layout.cp > 1 and layout.cp_method == "all_gather":
        builder.warn("layout.cp_method", "keys and values are passed around a ring instead of being gathered at once")
    if layout.cp_method == "hybrid":
        for knob in ("layout.cp_method", "layout.ulysses_degree"):
            builder.refuse(knob, "ring and Ulysses are not combined; exported as ring")


def _read_cp(found: Found) -> dict[str, Any]:
    ring, ulysses = (found.whole("layout.cp", name, 1) for name in (RING, ULYSSES))
    if not (ring and ulysses):
        return {}
    if min(ring, ulysses) > 1:
        found.unread("layout.cp", f"{RING} {ring} together with {ULYSSES} {ulysses}")
        return {}
    method = "ulysses" if ulysses > 1 else "ring" if ring > 1 else "all_gather"
    return {"layout.cp": max(ring, ulysses), "layout.cp_method": method, "layout.ulysses_degree": 1}


def _write_data_parallel(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    if layout.zero_stage == 0:
        builder.drop(SHARDING, SHARDS)
        return
    if builder.changed("layout.zero_stage"):
        builder.settings[SHARDING] = f"stage{layout.zero_stage}"
    if builder.is_export or layout.dp_replicate > 1 or builder.current(SHARDS) is not None:
        builder.settings[SHARDS] = layout.dp_shard
    if layout.zero_stage > 1 and layout.pp > 1:
        builder.refuse("layout.zero_stage", "PaddleNLP supports only stage1 with pipeline stages")
    if builder.is_export and layout.cp > 1:
        builder.refuse("layout.dp_shard", "states are not also sharded over context-parallel ranks: more memory")


def _read_data_parallel(found: Found) -> dict[str, Any]:
    words = str(found.get(SHARDING) or "").split()
    stage = _STAGES.get(words[0] if words else "")
    if stage is None or len(words) > 1:
        found.unread("layout.zero_stage", f"{SHARDING} {' '.join(words)}")
        return {}
    shards = (found.whole("layout.dp_shard", SHARDS) or None) if stage else 1
    values = {"layout.zero_stage": stage, "layout.dp_shard": shards}
    if found.is_export:
        return {**values, "layout.dp_replicate": _data_parallel(found) // (shards or 1)}
    return values if shards else {**values, "layout.dp_replicate": 1}


def _write_pipeline(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    if layout.pp == 1 and builder.is_export:
        return
    builder.settings |= {PP: layout.pp, CHUNKS: layout.num_virtual_stages}
    if layout.pp == 1:
        return
    if layout.schedule == "zbv":
        builder.refuse("layout.schedule", "PaddleNLP has no such zero-bubble schedule")
        refuse_stages(builder, "V-shaped stages require the zero-bubble schedule")
    elif layout.schedule == "gpipe":
        kind = "interleaved 1F1B" if layout.num_virtual_stages > 1 else "1F1B"
        builder.warn("layout.schedule", f"Paddle uses {kind}: same bubble, fewer activations in flight")
    if layout.schedule == "gpipe" and not builder.is_export:
        builder.refuse("layout.schedule", "Paddle supports 1f1b and interleaved only")
    if layout.schedule != "zbv" and not is_uniform(layout.stage_layers):
        refuse_stages(builder, "all stages have the same number of layers")
    batches = num_microbatches(builder)
    if layout.num_virtual_stages > 1 and batches % layout.pp:
        builder.refuse("layout.num_virtual_stages", f"{batches} micro-batches are not a multiple of pp {layout.pp}")


def _read_pipeline(found: Found) -> dict[str, Any]:
    pp, layers = found.whole("layout.pp", PP), found.num_layers
    if pp == 1:
        found.held = ((layers or 1,),)
        return without_pipeline()
    chunks = found.whole("layout.num_virtual_stages", CHUNKS, 1)
    values: dict[str, Any] = {"layout.pp": pp, "layout.num_virtual_stages": chunks}
    if not (pp and chunks):
        return values
    values["layout.schedule"] = "interleaved" if chunks > 1 else "1f1b"
    if layers is None:
        found.unread("layout.stage_layers", "stages of a model with an unknown number of layers")
    elif layers % (pp * chunks):
        found.refuse("layout.pp", f"{layers} layers are not divisible into {pp * chunks} stages")
    else:
        found.held = values["layout.stage_layers"] = ((layers // (pp * chunks),) * pp,) * chunks
    return values


def _write_batch(builder: SettingsBuilder) -> None:
    builder.settings[ACCUMULATED] = num_microbatches(builder)


def _read_batch(found: Found) -> dict[str, Any]:
    found.num_microbatches = found.whole("micro_batch_size", ACCUMULATED)
    if not found.is_export:
        return {}
    return {"workload.global_batch_size": found[BATCH] * found[ACCUMULATED] * _data_parallel(found)}


def _note_experts(builder: SettingsBuilder) -> None:
    if not has_experts(builder.workload.model):
        return
    for degree, what in (("pp", "pipeline stages"), ("cp", "context parallelism")):
        if getattr(builder.candidate.layout, degree) > 1:
            builder.refuse(f"layout.{degree}", f"PaddleNLP's Mixtral has no {what}")


_WHOLE_EXPERTS = "PaddleNLP's Mixtral keeps all experts of its layers on every rank"


def _write_experts(builder: SettingsBuilder) -> None:
    if not builder.is_export:
        builder.settings[EXPERTS] = builder.candidate.layout.ep
    elif builder.candidate.layout.ep > 1:
        builder.refuse("layout.ep", _WHOLE_EXPERTS)


# Recompute.

_GATHERED = "gathered sequence shards are kept: more memory"


def _write_recompute(builder: SettingsBuilder) -> None:
    recompute = builder.candidate.recompute
    if recompute.full:
        _write_granularity(builder, "recompute.full", "full", recompute.full)
        if recompute.selective:
            builder.refuse("recompute.selective", "either full layers or attention are recomputed, not both")
    elif recompute.selective:
        granularities = {pattern: name for name, pattern in PATTERNS.items()}
        first, *others = recompute.selective
        if others or first.pattern not in granularities:
            builder.refuse("recompute.selective", f"only one of {', '.join(granularities)} can be recomputed")
        else:
            _write_granularity(builder, "recompute.selective", granularities[first.pattern], first.num_layers)
    if builder.is_export:
        return
    builder.settings.setdefault(RECOMPUTE, False)
    if recompute.communication:
        builder.refuse("recompute.communication", _GATHERED)


def _write_granularity(builder: SettingsBuilder, knob: str, granularity: str, counts: Counts) -> None:
    layout, num_layers = builder.candidate.layout, builder.workload.num_layers
    again = layer_ids(counts, layout, num_layers)
    kept = [layer for layer in range(num_layers) if layer not in again]
    if kept and granularity == "full" and layout.pp > 1:
        builder.warn(
            knob, "with pipeline stages either all layers are recomputed in full or none: exported as all, which fits"
        )
        kept = []
    builder.settings |= {RECOMPUTE: True, GRANULARITY: granularity}
    if kept or builder.is_export:
        builder.settings[KEPT] = kept
    else:
        builder.drop(KEPT)


def _read_recompute(found: Found) -> dict[str, Any]:
    if not found.is_on(RECOMPUTE):
        return {"recompute.full": (), "recompute.selective": ()}
    granularity = found.get(GRANULARITY) or "full"
    counts = _recomputed(found.get(KEPT), found.held) if found.held else None
    if counts is None or granularity not in (*PATTERNS, "full"):
        found.unread("recompute", f"{GRANULARITY} {granularity}, {KEPT} {found.get(KEPT)}")
        return {}
    if granularity == "full":
        return {"recompute.full": counts, "recompute.selective": ()}
    part = SelectiveRecompute(pattern=PATTERNS[granularity], num_layers=counts)
    return {"recompute.full": (), "recompute.selective": (part,) if counts else ()}


def _recomputed(kept: Any, held: Counts) -> Counts | None:
    """Number of first layers recomputed in every chunk and stage; None if other layers than the last are kept."""
    layers = [int(word) for word in str(kept or "").strip("[]").replace(",", " ").split()]
    if not layers:
        return all_of(held)
    return first_layers_of([layer for layer in range(sum(map(sum, held))) if layer not in layers], held)


# Number formats, data loading, kernels.

_LISTS = {"precision.white": "amp_custom_white_list", "precision.black": "amp_custom_black_list"}


def _write_precision(builder: SettingsBuilder) -> None:
    precision, layout = builder.candidate.precision, builder.candidate.layout
    builder.settings |= {
        "bf16": precision.dtype == "bfloat16",
        "fp16": precision.dtype == "float16",
        "fp16_opt_level": precision.base,
    }
    refuse_fp8(builder)
    if builder.is_export:
        reduces_fp32 = layout.zero_stage >= 2 or layout.replicate_with == "fsdp2"
        builder.settings["amp_master_grad"] = precision.base == "O2" and reduces_fp32
        _write_operators(builder)
    if precision.loss_scale is not None:
        builder.settings["scale_loss"] = precision.loss_scale.initial
    if precision.loss_scale is not None and builder.is_export:
        _note_loss_scale(builder, precision.loss_scale)


def _write_operators(builder: SettingsBuilder) -> None:
    for path, name in _LISTS.items():
        operators = builder.values[path]
        unknown = [operator for operator in operators if operator not in OPERATORS]
        if unknown:
            builder.refuse(path, f"no known Paddle operators for {', '.join(unknown)}")
        builder.settings[name] = [OPERATORS[known] for known in operators if known in OPERATORS]


def _note_loss_scale(builder: SettingsBuilder, scale: LossScale) -> None:
    if not scale.dynamic:
        builder.refuse("precision.loss_scale.dynamic", "the scale is always dynamic")
    for name in ("growth_factor", "backoff_factor"):
        if getattr(scale, name) != getattr(LossScale(), name):
            builder.refuse(f"precision.loss_scale.{name}", f"always {getattr(LossScale(), name)}")
    for name in ("growth_interval", "backoff_interval"):
        builder.warn(f"precision.loss_scale.{name}", "the default of your Paddle version applies")


def _read_precision(found: Found) -> dict[str, Any]:
    dtype = "bfloat16" if found.is_on("bf16") else "float16" if found.is_on("fp16") else "float32"
    level = str(found.get("fp16_opt_level") or "O1")
    if dtype != "float32" and level not in ("O1", "O2") and not found.is_export:
        found.unread("precision.level", f"fp16_opt_level {level}")
        return {}
    values = {"precision.dtype": dtype, "precision.level": "O0" if dtype == "float32" else level}
    if dtype == "float16":
        scale = dataclasses.asdict(LossScale(initial=float(found.get("scale_loss") or 2.0**15)))
        values |= {f"precision.loss_scale.{name}": value for name, value in scale.items()}
    lists = [name for name in _LISTS.values() if found.get(name)]
    if lists and not found.is_export:
        found.unread("precision", ", ".join(lists))
        return values
    names = {theirs: ours for ours, theirs in OPERATORS.items()}
    return values | {path: tuple(names[theirs] for theirs in found.get(name, ())) for path, name in _LISTS.items()}


def _write_workers(builder: SettingsBuilder) -> None:
    if builder.candidate.loader.tuning is None or not builder.is_export:
        builder.settings[WORKERS] = builder.candidate.loader.num_workers


def _write_attention(builder: SettingsBuilder) -> None:
    wanted = builder.candidate.kernels.attention
    builder.settings[FLASH] = wanted == "flash" or (builder.is_export and wanted != "math")
    if wanted not in ("flash", "math") and builder.is_export:
        builder.warn("kernels.attention", "flash attention, for the number formats it supports")
    elif wanted not in ("flash", "math"):
        builder.refuse("kernels.attention", "flash and math only")


def _read_attention(found: Found) -> dict[str, Any]:
    return {"kernels.attention": "flash" if found.is_on(FLASH) else "math"} if FLASH in found else {}


_NO_COMPILE = "Paddle does not use torch.compile"
_NO_CONVOLUTIONS = "no convolutions"

ROWS: tuple[Setting, ...] = (
    custom(
        ("workload.model.kind", "workload.model.resnet", "workload.model.linear", "workload.seq_length"),
        (*_FRAME, *_ARCHITECTURE, "max_seq_length", f"{MODEL}max_position_embeddings"),
        _write_kind,
        _read_kind,
        overlay="read",
    ),
    *(option(f"{LLAMA}.{ours}", f"{MODEL}{theirs}") for ours, theirs in _DIMENSIONS.items()),
    option("workload.optimizer.lr", "learning_rate"),
    option("workload.optimizer.beta1", "adam_beta1"),
    option("workload.optimizer.beta2", "adam_beta2"),
    option("workload.optimizer.eps", "adam_epsilon"),
    option("workload.optimizer.clip_norm", "max_grad_norm", of=float),
    weight_decay_but_norms("weight_decay"),
    number("workload.seed", "seed"),
    custom(("workload.data",), (), _write_data),
    number("layout.tp", TP),
    option("layout.pp", PP),
    row(("layout.cp", "layout.cp_method", "layout.ulysses_degree"), (RING, ULYSSES), _write_cp, _read_cp),
    shell.world_size(),
    row(
        ("layout.zero_stage", "layout.dp_replicate", "layout.dp_shard"),
        (SHARDING, SHARDS),
        _write_data_parallel,
        _read_data_parallel,
        matters=lambda candidate: candidate.layout.dp > 1,
    ),
    lacking("layout.replicate_with", "Paddle replicates with its own bucketed all-reduce, like ddp"),
    sharded_from(
        3,
        refused="embedding and head are sharded with stage3 only",
        warned="stage3 shards embedding and head like other weights",
    ),
    switch("layout.sequence_parallel", "sequence_parallel", matters=lambda candidate: candidate.layout.tp > 1),
    own_collectives("Paddle always uses explicit collectives, like tp_engine local", lambda found: found[TP]),
    mixtral(MODEL, "PaddleNLP"),
    custom((), (), _note_experts),
    row("layout.ep", (), _write_experts, lambda found: {"layout.ep": found.whole("layout.ep", EXPERTS, 1)}),
    NO_LATENT,
    lacking("layout.num_copies", "micro-batches are not split", in_overlays=True),
    row(
        ("layout.pp", "layout.schedule", "layout.num_virtual_stages", "layout.stage_layers"),
        (PP, CHUNKS),
        _write_pipeline,
        _read_pipeline,
    ),
    number("micro_batch_size", BATCH),
    row("workload.global_batch_size", ACCUMULATED, _write_batch, _read_batch),
    row(
        ("recompute.full", "recompute.selective"),
        (RECOMPUTE, GRANULARITY, KEPT),
        _write_recompute,
        _read_recompute,
    ),
    lacking("recompute.communication", _GATHERED, severity="error"),
    row(
        ("precision.level", "precision.dtype", *_LISTS, "precision.loss_scale"),
        ("bf16", "fp16", "fp16_opt_level", "amp_master_grad", *_LISTS.values(), "scale_loss"),
        _write_precision,
        _read_precision,
    ),
    NO_FP32_MODULES,
    NO_FLOAT8_GATHER,
    row(
        "loader.num_workers",
        WORKERS,
        _write_workers,
        lambda found: {"loader.num_workers": found.whole("loader.num_workers", WORKERS, 0)},
    ),
    two_batches_ahead(lambda found: found.fields.get("loader.num_workers"), in_overlays=True),
    lacking("loader.tuning", f"the number of workers is not tuned automatically; set {WORKERS} to the number found"),
    lacking("loader.pin_memory", "Paddle manages host memory itself"),
    lacking("loader.persistent_workers", "workers are restarted for every epoch", in_overlays=True),
    lacking("loader.full_batch", "every rank reads only its own rows", in_overlays=True),
    row("kernels.attention", FLASH, _write_attention, _read_attention),
    lacking("kernels.compile", "dynamic graph; to_static requires Paddle's automatic parallelism", in_overlays=True),
    lacking("kernels.backend", _NO_COMPILE),
    lacking("kernels.compile_mode", _NO_COMPILE),
    lacking("kernels.matmul_precision", "export NVIDIA_TF32_OVERRIDE before starting"),
    lacking("kernels.cudnn_tuning_range", _NO_CONVOLUTIONS),
    lacking("kernels.memory_format", _NO_CONVOLUTIONS),
    OWN_FUSED,
    *VARYING_LENGTHS,
    *memory_savers(
        activations=offloads_inputs("offload_recompute_inputs"),
        optimizer="offload_optim keeps states on the host, but moves them to the device for the update",
    ),
    lacking("layout.gradient_reduction", "no setting for when gradients are reduced"),
)


# Exports.

_START = """python -u -m paddle.distributed.launch --nnodes "$NUM_NODES" --nproc_per_node "$PROCESSES_PER_NODE" \\
  --master "${MASTER:-}" run_pretrain.py paddlenlp.json "$@\""""


def _render(builder: SettingsBuilder) -> dict[str, str]:
    model = {n.removeprefix(MODEL): value for n, value in builder.settings.items() if n.startswith(MODEL)}
    given = {n: value for n, value in builder.settings.items() if not n.startswith(MODEL) and n != WORLD_SIZE}
    script = dataclasses.replace(builder, settings={WORLD_SIZE: builder.settings[WORLD_SIZE]})
    return {
        FILE: json.dumps(given, indent=2) + "\n",
        MODEL_FILE: json.dumps(model, indent=2) + "\n",
        SCRIPT: shell.script(script, exports={}, start=_START),
    }


def _load(files: Mapping[str, str]) -> Settings:
    model = {f"{MODEL}{name}": value for name, value in json.loads(files[MODEL_FILE]).items()}
    return {**json.loads(files[FILE]), **model, **shell.load(files[SCRIPT])}


RECIPE = Recipe(
    name="paddlenlp",
    title="PaddleNLP",
    settings=ROWS,
    render=_render,
    load=_load,
    command=lambda _: f"bash {SCRIPT}",
)


# Commands.

_SCRIPTS = ("run_pretrain.py", "run_pretrain_auto.py", "run_finetune.py", "run_sft.py", "finetune_generation.py")
_LAUNCHERS = ("paddle.distributed.launch", "fleetrun")
_CONFIG = "model_config"
_SUFFIXES = (".json", ".yaml", ".yml")
_DEVICES = (either_dash("--gpus"), either_dash("--devices", aliases=("--xpus", "--npus")))
_PROCESSES, _NODES, _LOG_DIR = either_dash("--nproc_per_node"), either_dash("--nnodes"), either_dash("--log_dir")


def _script_at(argv: Words) -> int | None:
    """Position of the training script; earlier words belong to the launcher."""
    return next((index for index, word in enumerate(argv) if word.endswith(".py")), None)


def _first_argument(argv: Words) -> str:
    at = _script_at(argv)
    return argv[at + 1] if at is not None and at + 1 < len(argv) else ""


def _is_launched(argv: Words) -> bool:
    return any(word in _LAUNCHERS or PurePath(word).name in _LAUNCHERS for word in argv)


def recognises(run: Run) -> bool:
    return _is_launched(run.argv) or any(PurePath(word).name in _SCRIPTS for word in run.argv)


def find_files(argv: Words, cwd: str) -> Mapping[str, str]:
    """The file of arguments after the script, and the model's ``config.json`` if it is in a folder."""
    word, found = _first_argument(argv), dict[str, str]()
    if word.endswith(_SUFFIXES) and "{" not in word:
        found["arguments"] = str(Path(cwd, word))
    model = _model_folder(argv, found.get("arguments"))
    config = Path(cwd, model, "config.json") if model else None
    if config is not None and config.is_file():
        found[_CONFIG] = str(config)
    return found


def _model_folder(argv: Words, file: str | None) -> str | None:
    given = arguments.read_text(argv, either_dash("--model_name_or_path"))
    if given is not None or file is None:
        return given
    try:
        configured = json.loads(read_regular(Path(file))).get("model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return configured if isinstance(configured, str) else None


class PaddleArguments:
    """Arguments by name: in a JSON file, on the command line, or both; the latter take precedence."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        word = _first_argument(edit.argv)
        self._file = EditedFile(edit, word[1:-1] if word.startswith("{") else "")
        if self._file.exists and word[1:-1] not in edit.names:
            edit.names[word[1:-1]] = f"{word[1:-1]}.json"

    def get(self, name: str, /, default: Any = None) -> Any:
        """The value of an argument; -1 requests the default."""
        text = arguments.read_text(self._edit.argv, either_dash(f"--{name}"))
        value = text if text is not None else self._file.get(name)
        return default if value in (None, -1, "-1") else value

    def put(self, values: Mapping[str, Any]) -> None:
        """Write values where the command has them, else in its file, else as arguments."""
        for name, value in values.items():
            argument = either_dash(f"--{name}")
            if self._file.exists and not arguments.is_specified(self._edit.argv, argument):
                self._file.put({name: value})
            else:
                text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
                self._edit.argv = arguments.write(self._edit.argv, argument, text)

    def drop(self, *names: str) -> None:
        for name in names:
            self._edit.argv = arguments.remove(self._edit.argv, either_dash(f"--{name}"))
        self._file.drop(*names)


def _model(edit: Edit, found: Found) -> LlamaModel | None:
    """The decoder, from the model's own file if it is in a folder."""
    config = EditedFile(edit, _CONFIG)
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [key for key in needed if not isinstance(config.get(key), int)]
    shape = None
    experts = None
    if config.get("model_type") == "mixtral" and not missing:
        number, top_k = (int(config.get(name) or 0) for name in ("num_local_experts", "num_experts_per_tok"))
        experts = Experts(
            num_experts=number or 8,
            top_k=top_k or 2,
            ffn_hidden_size=int(config.get("intermediate_size") or 0),
            balance_rate=0.0,
        )
    is_other = any(config.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    if missing or (is_other and experts is None):
        where = "its config.json" if config.exists else "no config.json found in model_name_or_path"
        found.warn("workload.model", f"{where}: dimensions of the decoder are unknown; no predictions")
    else:
        given = {ours: config.get(theirs) for ours, theirs in _DIMENSIONS.items() if config.get(theirs)}
        usual = {"num_kv_heads": config.get("num_attention_heads"), "rope_theta": 10000.0, "norm_eps": 1e-6}
        dimensions = {**usual, **given}
        shape = LlamaModel(
            **{**dimensions, **{name: float(dimensions[name]) for name in ("rope_theta", "norm_eps")}},
            experts=experts,
        )
    found.num_layers = found.whole("workload", "num_hidden_layers", shape.num_layers if shape else None)
    return dataclasses.replace(shape, num_layers=found.num_layers) if shape and found.num_layers else shape


def _check(edit: Edit, request: OverlayRequest) -> None:
    """Note what PaddleNLP itself would reject, and write the launcher's devices."""
    layout, shape = request.candidate.layout, request.reading.shape
    if layout.zero_stage > 1 and layout.pp > 1:
        edit.refuse("layout.zero_stage", "PaddleNLP supports only stage1 with pipeline stages")
    if layout.num_virtual_stages > 1 and request.num_microbatches % layout.pp:
        edit.refuse(
            "layout.num_virtual_stages",
            f"{request.num_microbatches} micro-batches are not a multiple of the pipeline stages",
        )
    if layout.ep > 1 and shape is not None:
        edit.refuse("layout.ep", _WHOLE_EXPERTS)
    elif layout.ep > 1 and (layout.dp_replicate > 1 or layout.dp_shard % layout.ep):
        edit.refuse("layout.ep", f"{layout.ep} must divide sharding_parallel_degree, without replicas of the shards")
    if layout.sequence_parallel and layout.tp == 1:
        edit.refuse("layout.sequence_parallel", "sequence_parallel requires tensor_parallel_degree above 1")
    if shape is not None:
        for what, count in (("heads", shape.num_heads), ("key-value heads", shape.num_kv_heads)):
            if count % layout.tp:
                edit.refuse("layout.tp", f"{what} {count} is not a multiple of tensor_parallel_degree {layout.tp}")
    _write_devices(edit, request.world_size)


def _write_devices(edit: Edit, world_size: int) -> None:
    """Write the launcher's devices on one node: as many visible ones as the candidate needs."""
    at = _script_at(edit.argv)
    if at is None or not _is_launched(edit.argv):
        return
    head, rest = edit.argv[:at], edit.argv[at:]
    if arguments.read_text(head, _NODES) not in (None, "1"):
        return
    for argument in _DEVICES:
        configured = arguments.read_text(head, argument)
        if configured is not None and "{" not in configured and len(configured.split(",")) != world_size:
            head = arguments.write(head, argument, ",".join(map(str, range(world_size))))
    configured = arguments.read_text(head, _PROCESSES)
    if configured is not None and "{" not in configured and configured != str(world_size):
        head = arguments.write(head, _PROCESSES, str(world_size))
    edit.argv = (*head, *rest)


TABLE = FrameworkTable(rows=ROWS, command=PaddleArguments, defaults=DEFAULTS, model=_model, check=_check)


# Trials.

_OFF: dict[str, Any] = {
    "do_eval": False,
    "do_predict": False,
    "evaluation_strategy": "no",
    "save_strategy": "no",
    "logging_steps": 1,
    "logging_strategy": "steps",
    "report_to": "none",
    "disable_tqdm": True,
    "output_dir": "{out}/output",
}
_GONE = ("resume_from_checkpoint", "logging_dir", "push_to_hub", "load_best_model_at_end", "profiler_options")


def trial_mode(made: Overlay, last_step: int) -> Overlay:
    """The trial without evaluation, checkpoints and trackers; ``max_steps`` ends it, and ``decay_steps`` and
    ``warmup_steps`` keep the learning-rate schedule of the user's ``max_steps``. Logs go into the attempt's folder;
    ``test_ci_no_save_model`` keeps ``run_pretrain.py`` from saving at its end."""
    edit = Edit.of_overlay(made)
    given = PaddleArguments(edit)
    total = given.get("max_steps")
    steps = int(total) if str(total).isdigit() else None
    if steps and given.get("decay_steps") is None:
        given.put({"decay_steps": steps})
    ratio = float(given.get("warmup_ratio") or 0)
    if steps and ratio and not int(given.get("warmup_steps") or 0):
        given.put({"warmup_steps": int(ratio * steps), "warmup_ratio": 0.0})
    given.put({**_OFF, "max_steps": last_step})
    given.drop(*_GONE)
    edit.env["test_ci_no_save_model"] = "1"
    at = _script_at(edit.argv)
    if at is not None and _is_launched(edit.argv):
        edit.argv = (*arguments.write(edit.argv[:at], _LOG_DIR, "{out}/log"), *edit.argv[at:])
    return edit.overlay()


TRAINING = Training(
    name="paddlenlp",
    title="PaddleNLP",
    package="paddlenlp",
    releases=">=2.8,<3.1",
    launcher="own",
    log=LogFormat(name="paddlenlp", files=("{out}/log/workerlog.*",)),
    recognises=recognises,
    find_files=find_files,
    read=TABLE.read,
    overlay=TABLE.overlay,
    trial_mode=trial_mode,
    expected=lambda request: Expected(world_size=request.world_size),  # Paddle is not torch: there is no hook for it
)
