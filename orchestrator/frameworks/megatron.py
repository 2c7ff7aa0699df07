"""Megatron-LM: ``pretrain_gpt.py`` and similar scripts with arguments; an export is a shell script with them.

Names, defaults and rules are those of ``megatron/training/arguments.py`` in releases 0.15 to 0.20, which accept neither
abbreviations nor underscores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from orchestrator.frameworks import arguments, megatron_experts, megatron_precision, shell
from orchestrator.frameworks.arguments import Argument, ArgumentValue
from orchestrator.frameworks.edit import Edit, FrameworkTable, Overlay, OverlayRequest, Run, Training
from orchestrator.frameworks.gaps import (
    NO_FLOAT8_GATHER,
    NO_FP32_MODULES,
    NO_LATENT,
    OWN_KERNELS,
    REDUCES_EACH,
    VARYING_LENGTHS,
    all_of,
    first_layers,
    gathered_again,
    in_every_layer,
    in_model_order,
    in_rows,
    is_first_layers_everywhere,
    is_uniform,
    memory_savers,
    most,
    num_microbatches,
    own_collectives,
    present,
    refuse_stages,
    sharded_from,
    two_batches_ahead,
    weight_decay_but_norms,
    without_pipeline,
)
from orchestrator.frameworks.megatron_stages import CHUNK_LAYERS, CHUNKS, EXTRA, STAGES, UNEVEN, stage_layers
from orchestrator.frameworks.shell import WORLD_SIZE
from orchestrator.frameworks.spelling import (
    Found,
    Recipe,
    Setting,
    Settings,
    SettingsBuilder,
    custom,
    lacking,
    option,
    row,
)
from trials.script.command import Expected, LogFormat
from trials.spec import Experts, LlamaModel, Recompute, SelectiveRecompute

FILE = "megatron.sh"
TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
OPTIMIZER, INSTANCES = "--use-distributed-optimizer", "--num-distributed-optimizer-instances"
FSDP, STRATEGY = "--use-megatron-fsdp", "--data-parallel-sharding-strategy"
SEQUENCE, CP_METHOD = "--sequence-parallel", "--cp-comm-type"
GRANULARITY, METHOD = "--recompute-granularity", "--recompute-method"
NUMBER, MODULES = "--recompute-num-layers", "--recompute-modules"
MICRO, GLOBAL, WORKERS = "--micro-batch-size", "--global-batch-size", "--num-workers"
ATTENTION = "--attention-backend"
MICRO_PATH = "micro_batch_size"
LLAMA = "workload.model.llama"
METHODS = {"all_gather": "all_gather", "ulysses": "a2a", "ring": "p2p", "hybrid": "a2a+p2p"}
CP_SIZES = "--hierarchical-context-parallel-sizes"
STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
PATTERNS = {
    "core_attn": (r"attention\.scaled_dot_product_attention",),
    "layernorm": ("attention_norm", "feed_forward_norm"),
    "mlp": ("feed_forward",),
}
"""Megatron-LM's modules, and the patterns that drop the same activations."""
BACKENDS = {"auto": "auto", "flash": "flash", "cudnn": "fused", "math": "unfused"}
_FLAGS = (
    *("--sequence-parallel", "--use-distributed-optimizer", "--use-megatron-fsdp", "--use-torch-fsdp2"),
    *("--optimizer-cpu-offload", "--overlap-param-gather"),
    *("--overlap-param-gather-with-optimizer-step", "--account-for-embedding-in-pipeline-split"),
    *("--account-for-loss-in-pipeline-split", "--group-query-attention", "--multi-latent-attention"),
    *("--swiglu", "--untie-embeddings-and-output-weights", "--recompute-activations"),
    *("--distribute-saved-activations", "--bf16", "--fp16", "--grad-reduce-in-bf16"),
    *("--no-gradient-accumulation-fusion", "--tp-comm-overlap", "--log-throughput", "--log-progress"),
    *("--async-save", "--profile", "--use-pytorch-profiler", "--record-memory-history"),
    *("--full-validation", "--use-checkpoint-args", "--exit-on-missing-checkpoint"),
    *("--auto-detect-ckpt-format", "--enable-one-logger"),
    *megatron_experts.FLAGS,
)
"""Arguments without a value, of those read or written in commands."""
_LISTS = (MODULES, CP_METHOD, CP_SIZES, "--rampup-batch-size")


def _text(value: Any) -> str | None:
    return " ".join(value) if isinstance(value, list | tuple) else value


# The model and the run.

_ARCHITECTURE = {
    "--group-query-attention": True,
    "--normalization": "RMSNorm",
    "--position-embedding-type": "rope",
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
    "--attention-dropout": 0.0,
    "--hidden-dropout": 0.0,
    "--init-method-std": 0.02,
    "--tokenizer-type": "NullTokenizer",
}
"""Arguments that turn Megatron-LM's decoder into a Llama with the runner's initial weights."""
_FRAME = {
    "--optimizer": "adam",
    "--lr-decay-style": "constant",
    "--split": "1,0,0",
    "--eval-iters": 0,
}
"""Arguments for the runner's constant learning rate, without evaluation."""


def _write_kind(builder: SettingsBuilder) -> None:
    builder.settings |= _FRAME
    if isinstance(builder.workload.model, LlamaModel):
        builder.settings |= _ARCHITECTURE
        builder.settings["--max-position-embeddings"] = builder.workload.seq_length
    else:
        builder.refuse(
            "workload.model", f"pretrain_gpt.py trains decoders, not models of kind {builder.workload.model.kind}"
        )


def _read_kind(found: Found) -> dict[str, Any]:
    found.num_layers = int(found.get("--num-layers", 0))
    return {"workload.model.kind": "llama"} if "--swiglu" in found else {}


def _write_vocab(builder: SettingsBuilder) -> None:
    """Write the padded size, which determines the vocabulary: versions differ in whether the tokenizer adds an id to
    the other one."""
    if isinstance(builder.workload.model, LlamaModel):
        size = builder.workload.model.vocab_size
        builder.settings |= {"--vocab-size": size - 1, "--padded-vocab-size": size}


def _read_vocab(found: Found) -> dict[str, Any]:
    name = "--padded-vocab-size"
    return {f"{LLAMA}.vocab_size": int(found[name])} if name in found else {}


def _write_rope(builder: SettingsBuilder) -> None:
    if isinstance(builder.workload.model, LlamaModel):
        base = builder.workload.model.rope_theta
        builder.settings["--rotary-base"] = int(base)
        if base != int(base):
            builder.refuse(f"{LLAMA}.rope_theta", "--rotary-base accepts integers only")


def _read_rope(found: Found) -> dict[str, Any]:
    return {f"{LLAMA}.rope_theta": float(found["--rotary-base"])} if "--rotary-base" in found else {}


def _write_length(builder: SettingsBuilder) -> None:
    builder.settings["--seq-length"] = builder.workload.seq_length


def _read_length(found: Found) -> dict[str, Any]:
    length = found.whole("workload", "--seq-length") or found.whole("workload", "--encoder-seq-length")
    return {"workload.seq_length": length}


def _write_batch(builder: SettingsBuilder) -> None:
    builder.settings[GLOBAL] = builder.workload.global_batch_size


def _read_batch(found: Found) -> dict[str, Any]:
    found.num_microbatches = 1 if GLOBAL not in found else None
    return {"workload.global_batch_size": found.whole(MICRO_PATH, GLOBAL)}


def _write_micro_batch(builder: SettingsBuilder) -> None:
    builder.settings[MICRO] = builder.candidate.micro_batch_size


def _read_micro_batch(found: Found) -> dict[str, Any]:
    if MICRO not in found:
        found.refuse(MICRO_PATH, f"{MICRO} is missing, which Megatron-LM requires")
    return {MICRO_PATH: found.whole(MICRO_PATH, MICRO)}


def _write_seed(builder: SettingsBuilder) -> None:
    builder.settings["--seed"] = builder.values["workload.seed"]


def _read_seed(found: Found) -> dict[str, Any]:
    return {"workload.seed": found.whole("workload", "--seed", 1234)}


def _write_data(builder: SettingsBuilder) -> None:
    builder.warn("workload.data", "convert your tokens with tools/preprocess_data.py and set DATA_PATH to the result")


def _note_unread(found: Found) -> dict[str, Any]:
    """Note arguments of commands that stay unchanged and that no field describes."""
    if found.is_on("--optimizer-cpu-offload"):
        found.unread("offload.optimizer", "--optimizer-cpu-offload, with another optimiser")
    if (found.get("--cpu-offloading-num-layers") or "0") != "0":
        found.unread("offload.activations", "--cpu-offloading-num-layers, for a part of the activations")
    return {}


# The layout.


def _degree(path: str, name: str) -> Setting:
    def write(builder: SettingsBuilder) -> None:
        builder.settings[name] = builder.values[path]

    return row(path, name, write, lambda found: {path: found.whole(path, name, 1)})


def _write_data_parallel(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    stage = layout.zero_stage
    if builder.is_export and layout.dp * layout.cp > 1:
        builder.settings["--overlap-grad-reduce"] = True
    is_new = builder.changed("layout.zero_stage")
    if is_new:
        builder.drop(FSDP, STRATEGY)
    if is_new and stage == 0:
        builder.drop(OPTIMIZER, INSTANCES, "--overlap-param-gather", "--overlap-param-gather-with-optimizer-step")
    elif is_new:
        builder.settings[OPTIMIZER] = True
    if stage and builder.is_export:
        builder.settings["--overlap-param-gather"] = True
    if stage and (builder.is_export or str(builder.current(INSTANCES) or "1") != str(layout.dp_replicate)):
        builder.settings[INSTANCES] = layout.dp_replicate
    if is_new and stage >= 2:
        builder.settings |= {FSDP: True, STRATEGY: STRATEGIES[stage]}
        builder.settings |= {"--no-gradient-accumulation-fusion": True, "--ckpt-format": "fsdp_dtensor"}


def _read_data_parallel(found: Found) -> dict[str, Any]:
    """Read what data-parallel ranks share; their number follows from the other degrees."""
    if found.is_on("--use-torch-fsdp2"):
        found.unread("layout.zero_stage", "--use-torch-fsdp2")
        return {}
    stage: int | None = 1 if found.is_on(OPTIMIZER) else 0
    if found.is_on(FSDP):
        strategy = found.get(STRATEGY) or "no_shard"
        stages = {"no_shard": 0, "optim": 1, **{theirs: ours for ours, theirs in STRATEGIES.items()}}
        stage = stages.get(strategy)
        if stage is None:
            found.unread("layout.zero_stage", f"{STRATEGY} {strategy}")
            return {}
    replicas = found.whole("layout.dp_replicate", INSTANCES, 1) if stage else None
    values = {"layout.zero_stage": stage, "layout.dp_replicate": replicas, "layout.dp_shard": None if stage else 1}
    if found.is_export:
        total = int(found[WORLD_SIZE]) // math.prod(int(found.get(name, 1)) for name in (TP, PP, CP))
        values["layout.dp_replicate"] = replicas or total
        values["layout.dp_shard"] = total // replicas if replicas else 1
    return values


def _write_sequence_parallel(builder: SettingsBuilder) -> None:
    if builder.candidate.layout.sequence_parallel:
        builder.settings[SEQUENCE] = True
    else:
        builder.drop(SEQUENCE, "--tp-comm-overlap")


def _write_cp_method(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    builder.drop(CP_SIZES)
    if layout.cp > 1:
        builder.settings[CP_METHOD] = METHODS[layout.cp_method]
    if layout.cp_method == "hybrid":
        degree = layout.ulysses_degree
        builder.settings[CP_SIZES] = [str(degree), str(layout.cp // degree)]


def _read_cp_method(found: Found) -> dict[str, Any]:
    if found.is_export and CP_METHOD not in found:
        return {}
    configured = _text(found.get(CP_METHOD)) or "p2p"
    names = {"allgather": "all_gather", **{theirs: ours for ours, theirs in METHODS.items()}}
    if configured not in names and found.fields.get("layout.cp", 1) > 1:
        found.unread("layout.cp_method", f"{CP_METHOD} {configured}")
    method = names.get(configured)
    if method != "hybrid":
        return {"layout.cp_method": method, "layout.ulysses_degree": 1}
    sizes = found.get(CP_SIZES)
    if not sizes:
        found.unread("layout.cp_method", f"{CP_METHOD} {configured} without {CP_SIZES}")
        return {"layout.cp_method": None, "layout.ulysses_degree": None}
    return {
        "layout.cp_method": method,
        "layout.ulysses_degree": found.number("layout.ulysses_degree", CP_SIZES, sizes[0]),
    }


def _write_pipeline(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    if not builder.is_export and builder.changed("layout.pp"):
        builder.settings[PP] = layout.pp
    builder.drop(CHUNK_LAYERS, CHUNKS, STAGES, *UNEVEN, *EXTRA)
    if layout.pp == 1:
        return
    if layout.schedule == "zbv":
        builder.refuse("layout.schedule", "Megatron-LM has no zero-bubble schedule")
        refuse_stages(builder, "V-shaped stages require the zero-bubble schedule")
    elif layout.schedule == "gpipe":
        kind = "interleaved 1F1B" if layout.num_virtual_stages > 1 else "1F1B"
        builder.warn("layout.schedule", f"Megatron-LM uses {kind}: same bubble, fewer activations in flight")
    if layout.schedule == "gpipe" and not builder.is_export:
        builder.refuse("layout.schedule", "Megatron-LM supports 1f1b and interleaved only")
    number = num_microbatches(builder)
    if layout.num_virtual_stages > 1 and number % layout.pp:
        builder.refuse("layout.num_virtual_stages", f"{number} micro-batches are not a multiple of pp {layout.pp}")
    if not is_uniform(layout.stage_layers):
        stages = [f"t*{count}" if count else "" for count in in_model_order(layout, builder.workload.num_layers)]
        builder.settings[STAGES] = "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])
    elif layout.num_virtual_stages > 1:
        builder.settings[CHUNKS] = layout.num_virtual_stages


def _read_pipeline(found: Found) -> dict[str, Any]:
    pp = found.whole("layout.pp", PP, 1)
    if pp == 1:
        found.held = ((1 if found.num_layers is None else found.num_layers,),)
        return {} if found.is_export else without_pipeline()
    counts = stage_layers(found, pp) if pp else None
    if counts is None or pp is None:
        return {"layout.pp": pp}
    held = found.held = in_rows(counts, pp)
    return {
        "layout.pp": pp,
        "layout.schedule": "interleaved" if len(held) > 1 else "1f1b",
        "layout.num_virtual_stages": len(held),
        "layout.stage_layers": held,
    }


# Recompute.


def _write_recompute(builder: SettingsBuilder) -> None:
    recompute, held = builder.candidate.recompute, present(builder)
    builder.drop(GRANULARITY, METHOD, NUMBER, MODULES, "--recompute-activations")
    if recompute.full:
        number = most(recompute.full)
        builder.settings |= {GRANULARITY: "full", METHOD: "block", NUMBER: number}
        if not is_first_layers_everywhere(recompute.full, held):
            builder.warn(
                "recompute.full", f"one number applies to all stages: the first {number} layers of each, which fits"
            )
    else:
        builder.drop("--distribute-saved-activations")
    if recompute.selective:
        _write_selective(builder)
    configured = Recompute(full=first_layers(most(recompute.full), held))
    always = gathered_again(configured, held) if builder.candidate.layout.sequence_parallel else ()
    if recompute.communication != always:
        builder.warn("recompute.communication", "Megatron-LM always gathers sequence shards again in every layer")


def _write_selective(builder: SettingsBuilder) -> None:
    recompute, held = builder.candidate.recompute, present(builder)
    if recompute.full:
        builder.refuse("recompute.selective", "Megatron-LM recomputes either full layers, or modules in all layers")
        return
    everywhere = {part.pattern for part in recompute.selective if in_every_layer(part.num_layers, recompute, held)}
    modules = [module for module, patterns in PATTERNS.items() if everywhere.issuperset(patterns)]
    configured = {pattern for module in modules for pattern in PATTERNS[module]}
    if modules:
        builder.settings |= {GRANULARITY: "selective", MODULES: modules}
    left = [part.pattern for part in recompute.selective if part.pattern not in configured]
    if left:
        known = ", ".join(pattern for patterns in PATTERNS.values() for pattern in patterns)
        builder.refuse(
            "recompute.selective", f"{', '.join(left)}: only {known} (both norms), in all layers of all stages"
        )


def _read_recompute(found: Found) -> dict[str, Any]:
    granularity = found.get(GRANULARITY) or ("selective" if found.is_on("--recompute-activations") else None)
    values: dict[str, Any] = {}
    if granularity is None:
        values = {"recompute.full": (), "recompute.selective": ()}
    elif granularity == "selective":
        values = _read_selective(found)
    elif granularity == "full":
        values = _read_full(found)
    else:
        found.unread("recompute", f"{GRANULARITY} {granularity}")
    if found.is_export and found.held is not None:
        again = gathered_again(Recompute(full=values["recompute.full"]), found.held)
        values["recompute.communication"] = again if found.is_on(SEQUENCE) else ()
    return values


def _read_full(found: Found) -> dict[str, Any]:
    method, number = found.get(METHOD), found.whole("recompute.full", NUMBER)
    if method not in ("uniform", "block") or number is None:
        found.unread("recompute.full", f"{METHOD} {method} {NUMBER} {number}")
    elif found.held is None:
        found.unread("recompute.full", "layers of unknown stages")
    else:
        full = all_of(found.held) if method == "uniform" else first_layers(number, found.held)
        return {"recompute.full": full, "recompute.selective": ()}
    return {}


def _read_selective(found: Found) -> dict[str, Any]:
    given = found.get(MODULES) or ("core_attn",)
    modules = (given,) if isinstance(given, str) else given
    unknown = [module for module in modules if module not in PATTERNS]
    if unknown or found.held is None:
        found.unread("recompute.selective", f"{MODULES} {' '.join(unknown) or 'of unknown stages'}")
        return {"recompute.full": ()}
    patterns = sorted({pattern for module in modules for pattern in PATTERNS[module]})
    parts = tuple(SelectiveRecompute(pattern=pattern, num_layers=all_of(found.held)) for pattern in patterns)
    return {"recompute.full": (), "recompute.selective": parts}


# Data loading, kernels.


def _write_workers(builder: SettingsBuilder) -> None:
    if builder.candidate.loader.tuning is None or not builder.is_export:
        builder.settings[WORKERS] = builder.candidate.loader.num_workers


def _read_workers(found: Found) -> dict[str, Any]:
    return {"loader.num_workers": found.whole("loader.num_workers", WORKERS, 0 if found.is_export else 2)}


def _note_persistent(builder: SettingsBuilder) -> None:
    loader = builder.candidate.loader
    if not loader.persistent_workers and (loader.num_workers or loader.tuning):
        builder.warn("loader.persistent_workers", "workers are always kept between epochs")
    elif loader.persistent_workers and loader.tuning:
        builder.warn("loader.persistent_workers", "workers are kept between epochs if --num-workers is set")


def _read_persistent(found: Found) -> dict[str, Any]:
    workers = found.fields.get("loader.num_workers")
    return {} if workers is None else {"loader.persistent_workers": workers > 0}


def _write_attention(builder: SettingsBuilder) -> None:
    wanted = builder.candidate.kernels.attention
    if wanted in BACKENDS:
        builder.settings[ATTENTION] = BACKENDS[wanted]
    elif builder.is_export:
        builder.warn("kernels.attention", f"no {wanted} attention; Transformer Engine selects the kernel")
    else:
        builder.refuse("kernels.attention", f"no {wanted} attention")


def _read_attention(found: Found) -> dict[str, Any]:
    backend = found.get(ATTENTION) or "auto"
    ours = {theirs: name for name, theirs in BACKENDS.items()}.get(backend)
    if ours is None and "{" not in backend:
        found.unread("kernels.attention", f"{ATTENTION} {backend}")
    return {"kernels.attention": ours}


_NO_COMPILE = "Megatron-LM does not use torch.compile"
_NO_LISTS = "Megatron-LM does not support operator lists"

ROWS: tuple[Setting, ...] = (
    custom(
        ("workload.model.kind", "workload.model.resnet", "workload.model.linear"),
        (*_ARCHITECTURE, *_FRAME, "--max-position-embeddings"),
        _write_kind,
        _read_kind,
    ),
    option(f"{LLAMA}.num_layers", "--num-layers", of=int),
    option(f"{LLAMA}.hidden_size", "--hidden-size", of=int),
    option(f"{LLAMA}.ffn_hidden_size", "--ffn-hidden-size", of=int),
    option(f"{LLAMA}.num_heads", "--num-attention-heads", of=int),
    option(f"{LLAMA}.num_kv_heads", "--num-query-groups", of=int),
    option(f"{LLAMA}.norm_eps", "--norm-epsilon", of=float),
    megatron_experts.ROW,
    megatron_experts.PARALLEL,
    NO_LATENT,
    custom((f"{LLAMA}.rope_theta",), ("--rotary-base",), _write_rope, _read_rope),
    custom((f"{LLAMA}.vocab_size",), ("--vocab-size", "--padded-vocab-size"), _write_vocab, _read_vocab),
    custom(("workload.seq_length",), ("--seq-length",), _write_length, _read_length, overlay="read"),
    row("workload.global_batch_size", GLOBAL, _write_batch, _read_batch),
    row(MICRO_PATH, MICRO, _write_micro_batch, _read_micro_batch),
    option("workload.optimizer.lr", "--lr", of=float),
    option("workload.optimizer.beta1", "--adam-beta1", of=float),
    option("workload.optimizer.beta2", "--adam-beta2", of=float),
    option("workload.optimizer.eps", "--adam-eps", of=float),
    option("workload.optimizer.clip_norm", "--clip-grad", of=float),
    weight_decay_but_norms("--weight-decay"),
    row("workload.seed", "--seed", _write_seed, _read_seed),
    custom(("workload.data",), (), _write_data),
    custom((), (), lambda _: None, _note_unread, overlay="read"),
    _degree("layout.tp", TP),
    option("layout.pp", PP, of=int),
    _degree("layout.cp", CP),
    shell.world_size(),
    row(
        ("layout.dp_replicate", "layout.dp_shard", "layout.zero_stage"),
        (
            "--overlap-grad-reduce",
            "--overlap-param-gather",
            OPTIMIZER,
            INSTANCES,
            FSDP,
            STRATEGY,
            "--no-gradient-accumulation-fusion",
            "--ckpt-format",
        ),
        _write_data_parallel,
        _read_data_parallel,
        matters=lambda candidate: candidate.layout.dp * candidate.layout.cp > 1,
    ),
    lacking("layout.replicate_with", "Megatron-LM replicates with its own bucketed all-reduce, like ddp"),
    sharded_from(
        3,
        refused="embedding and head are sharded with zero_stage 3 only",
        warned="zero_stage 3 shards embedding and head, as parts of larger units",
    ),
    row(
        "layout.sequence_parallel",
        SEQUENCE,
        _write_sequence_parallel,
        lambda found: {"layout.sequence_parallel": found.is_on(SEQUENCE)},
        matters=lambda candidate: candidate.layout.tp > 1,
    ),
    own_collectives(
        "Megatron-LM always uses explicit collectives, like tp_engine local",
        lambda found: int(found.get(TP, 1)),
    ),
    lacking(
        "layout.num_copies",
        "micro-batches are not split; --tp-comm-overlap, which overlaps inside operators, is not set",
        in_overlays=True,
    ),
    row(
        ("layout.cp_method", "layout.ulysses_degree"),
        (CP_METHOD, CP_SIZES),
        _write_cp_method,
        _read_cp_method,
        matters=lambda candidate: candidate.layout.cp > 1,
    ),
    row(
        ("layout.pp", "layout.schedule", "layout.num_virtual_stages", "layout.stage_layers"),
        (CHUNKS, STAGES),
        _write_pipeline,
        _read_pipeline,
    ),
    row(
        ("recompute.full", "recompute.selective", "recompute.communication"),
        (GRANULARITY, METHOD, NUMBER, MODULES),
        _write_recompute,
        _read_recompute,
    ),
    megatron_precision.ROW,
    lacking("precision.white", _NO_LISTS, severity="error", in_overlays=True),
    lacking("precision.black", _NO_LISTS, severity="error", in_overlays=True),
    NO_FP32_MODULES,
    NO_FLOAT8_GATHER,
    row("loader.num_workers", WORKERS, _write_workers, _read_workers),
    two_batches_ahead(lambda found: found.fields.get("loader.num_workers"), in_overlays=True),
    custom(("loader.persistent_workers",), (), _note_persistent, _read_persistent, overlay="read"),
    lacking("loader.pin_memory", "host memory is always page-locked", means=True, in_overlays=True),
    lacking("loader.tuning", "the number of workers is not tuned automatically; set --num-workers to the number found"),
    lacking("loader.full_batch", "every rank reads only its own rows", in_overlays=True),
    row("kernels.attention", ATTENTION, _write_attention, _read_attention),
    lacking("kernels.compile", f"{_NO_COMPILE}; it has its own fused kernels", in_overlays=True),
    lacking("kernels.backend", _NO_COMPILE),
    lacking("kernels.compile_mode", _NO_COMPILE),
    lacking("kernels.matmul_precision", "call torch.set_float32_matmul_precision before training"),
    *OWN_KERNELS,
    *VARYING_LENGTHS,
    *memory_savers(
        activations="--cpu-offloading-num-layers moves only the activations of Transformer Engine operators, "
        "and does not work with pipelines or recompute",
        optimizer="--optimizer-cpu-offload requires another optimiser, --use-precision-aware-optimizer, which "
        "was not measured",
    ),
    REDUCES_EACH,
)


# Exports.

_START = """torchrun --nnodes "$NUM_NODES" --nproc-per-node "$PROCESSES_PER_NODE" \\
  --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \\
  pretrain_gpt.py "${ARGS[@]}" \\
  --train-iters "${TRAIN_ITERS:?number of optimiser steps}" \\
  --data-path "${DATA_PATH:?prefix of a data set made by tools/preprocess_data.py}" "$@\""""
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def _render(builder: SettingsBuilder) -> dict[str, str]:
    """A single hardware queue runs collectives of tp and cp before the kernels that they overlap with; Megatron-FSDP
    needs several queues."""
    layout = builder.candidate.layout
    needs_one = layout.zero_stage < 2 and layout.tp * layout.cp > 1
    return {FILE: shell.script(builder, exports={_QUEUES: "1"} if needs_one else {}, start=_START)}


def _load(files: Mapping[str, str]) -> Settings:
    return shell.load(files[FILE])


RECIPE = Recipe(
    name="megatron",
    title="Megatron-LM",
    settings=ROWS,
    render=_render,
    load=_load,
    command=lambda _: f"TRAIN_ITERS=100 DATA_PATH=data/text_document bash {FILE}",
)


# Commands.

_MARKS = (MICRO, TP, "--num-layers", "--seq-length", "--hidden-size")
_SCRIPTS = ("pretrain_gpt.py", "pretrain_mamba.py", "pretrain_hybrid.py", "pretrain_vlm.py", "pretrain_t5.py")


class MegatronArguments:
    """Arguments of a command by name."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def get(self, name: str, /, default: Any = None) -> Any:
        given = arguments.read(self._edit.argv, _argument(name))
        return default if given is None else given

    def put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            given: ArgumentValue = value if isinstance(value, bool) else str(value)
            if name in _LISTS:
                given = (value,) if isinstance(value, str) else tuple(value)
            self._edit.argv = arguments.write(self._edit.argv, _argument(name), given)

    def drop(self, *names: str) -> None:
        self._edit.argv = arguments.remove(self._edit.argv, *map(_argument, names))


def _argument(name: str) -> Argument:
    return Argument(name=name, takes="flag" if name in _FLAGS else "list" if name in _LISTS else "value")


def recognises(run: Run) -> bool:
    """By the script's name, or by arguments that no other framework has."""
    names = {PurePath(word).name for word in run.argv}
    given = MegatronArguments(Edit(run.argv))
    return bool(names & set(_SCRIPTS)) or sum(given.get(name) is not None for name in _MARKS) >= 3


def _model(_: Edit, found: Found) -> LlamaModel | None:
    """The decoder for the cost model; None, with a note, if the arguments do not define one."""
    if found.get("--yaml-cfg"):
        found.refuse("workload", "--yaml-cfg: YAML configuration is not read; pass the same settings as arguments")
    found.num_layers = found.whole("workload", "--num-layers") or found.whole("workload", "--encoder-num-layers")
    knob, required = "workload.model", ("--num-layers", "--hidden-size", "--num-attention-heads")
    other = [name for name in ("--hybrid-layer-pattern",) if found.get(name)]
    other += ["--multi-latent-attention"] if found.is_on("--multi-latent-attention") else []
    if other:
        found.warn(knob, f"{', '.join(other)}: not a plain decoder; without its dimensions there are no predictions")
        return None
    numbers = {name: found.whole(knob, name) for name in required}
    vocab = _vocab(found, found.whole("layout.tp", TP, 1) or 1)
    missing = [name for name, number in numbers.items() if number is None]
    if missing or vocab is None:
        absent = ", ".join([*missing, *(["the size of the vocabulary"] if vocab is None else [])])
        found.warn(knob, f"missing from the arguments: {absent}; without it there are no predictions")
        return None
    layers, hidden, heads = (int(numbers[name] or 0) for name in required)
    if hidden % heads or found.get("--kv-channels", str(hidden // heads)) != str(hidden // heads):
        found.warn(knob, "--kv-channels differs from hidden size / heads: no predictions")
        return None
    has_groups = found.is_on("--group-query-attention")
    try:
        experts = megatron_experts.read_experts(found)
    except (KeyError, ValueError) as error:
        found.warn(knob, f"experts: {error}; without them there are no predictions")
        return None
    return LlamaModel(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=(found.whole(knob, "--num-query-groups", 1) if has_groups else None) or heads,
        ffn_hidden_size=_width(found, hidden),
        vocab_size=vocab,
        rope_theta=float(found.get("--rotary-base") or 10000),
        norm_eps=float(found.get("--norm-epsilon") or 1e-5),
        experts=None if experts is None else Experts(**experts),
    )


def _width(found: Found, hidden: int) -> int:
    """Width of the feed-forward part; for one with two matrices, that of an equally large one with three."""
    gated = found.is_on("--swiglu")
    default = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    width = found.whole("workload.model", "--ffn-hidden-size", default) or default
    if not gated:
        found.warn(
            "workload.model", "predicted as a Llama with the same number of weights: the feed-forward part has no gate"
        )
    return width if gated else 2 * width // 3


def _vocab(found: Found, tp: int) -> int | None:
    """Rows of the embedding, padded as in Megatron-LM."""
    knob = "workload.model"
    padded = found.whole(knob, "--padded-vocab-size")
    if padded:
        return padded
    size = found.whole(knob, "--vocab-size")
    if size is None and found.get("--tokenizer-type") in (None, "GPT2BPETokenizer"):
        size = 50257
    if size is None:
        return None
    multiple = (found.whole(knob, "--make-vocab-size-divisible-by", 128) or 128) * tp
    return math.ceil(size / multiple) * multiple


def _check(edit: Edit, request: OverlayRequest) -> None:
    """Note what Megatron-LM itself would reject, and set the variables it needs."""
    found = Found(MegatronArguments(edit), is_export=False)
    layout, shape = request.candidate.layout, request.reading.shape
    length = request.reading.seq_length
    rows = _vocab(found, layout.tp)
    if shape is not None and rows not in (None, shape.vocab_size):
        edit.warn(
            "layout.tp",
            f"the vocabulary is padded to {rows} rows instead of {shape.vocab_size}: losses differ slightly",
        )
    if length and layout.cp > 1 and length % (2 * layout.cp):
        edit.refuse(
            "layout.cp", f"a sequence of length {length} is not divisible into {2 * layout.cp} parts, 2 per rank"
        )
    if request.global_batch_size % (request.candidate.micro_batch_size * layout.dp):
        edit.refuse("micro_batch_size", "the global batch is not a multiple of micro-batch x data-parallel ranks")
    if layout.zero_stage == 0 and layout.cp > 1 and (found.is_on(OPTIMIZER) or found.is_on(FSDP)):
        edit.warn(
            "layout.zero_stage",
            f"Megatron-LM shards over the {layout.cp} ranks of cp; the configuration has replicas",
        )
    if problem := megatron_experts.parallel_problem(layout):
        edit.refuse("layout.ep", problem)
    if shape is not None and layout.tp > 1:
        _check_dimensions(edit, found, request, shape)
    _check_queues(edit, found, request)


def _check_dimensions(edit: Edit, found: Found, request: OverlayRequest, shape: LlamaModel) -> None:
    layout, length = request.candidate.layout, request.reading.seq_length
    configured = found.get("--ffn-hidden-size", "")
    width = int(configured) if configured.isdigit() else shape.ffn_hidden_size
    for what, count in (("heads", shape.num_heads), ("width of the feed-forward part", width)):
        if count % layout.tp:
            edit.refuse("layout.tp", f"{what} {count} is not a multiple of tp {layout.tp}")
    groups = shape.num_kv_heads
    if groups % layout.tp and layout.tp % groups:
        edit.refuse("layout.tp", f"{groups} query groups are not divisible by tp {layout.tp}")
    if layout.sequence_parallel and length and length % (layout.tp * layout.cp):
        edit.refuse("layout.sequence_parallel", f"a sequence of length {length} is not divisible by tp x cp")


def _check_queues(edit: Edit, found: Found, request: OverlayRequest) -> None:
    """A single hardware queue runs collectives of tp and cp before the kernels that they overlap with; FSDP needs
    several."""
    layout = request.candidate.layout
    configured = edit.command_env.get(_QUEUES, os.environ.get(_QUEUES))
    shards = found.is_on(FSDP) or found.is_on("--use-torch-fsdp2")
    if shards and configured == "1":
        edit.refuse("layout.zero_stage", f"FSDP requires {_QUEUES} above 1 or unset, but env sets 1")
    elif not shards and layout.tp * layout.cp > 1 and configured is None:
        edit.env[_QUEUES] = "1"
    elif not shards and layout.tp * layout.cp > 1 and configured != "1":
        edit.warn("layout.tp", f"{_QUEUES} is {configured}: before Blackwell, tp and cp require 1")
    if layout.zero_stage >= 2 and layout.tp * layout.cp > 1:
        edit.warn("layout.zero_stage", "FSDP with tp or cp: Megatron-LM advises against it before Blackwell")


TABLE = FrameworkTable(rows=ROWS, command=MegatronArguments, defaults={}, model=_model, check=_check)


# Trials.

_GROWTH = ("--rampup-batch-size", "--step-batch-size-schedule")
_OFF = (
    *("--save", "--load", "--save-interval", "--non-persistent-save-interval", "--pretrained-checkpoint"),
    *("--use-checkpoint-args", "--exit-on-missing-checkpoint", "--auto-detect-ckpt-format", "--async-save"),
    *("--tensorboard-dir", "--wandb-project", "--wandb-exp-name", "--wandb-save-dir", "--wandb-entity"),
    *("--enable-one-logger", "--save-config-filepath", "--log-progress", "--profile", "--use-pytorch-profiler"),
    *("--record-memory-history", "--full-validation", "--exit-duration-in-mins", *_GROWTH),
)
"""Arguments that a trial omits: checkpoints, trackers, profilers, growing batches."""


def trial_mode(made: Overlay, last_step: int) -> Overlay:
    """The trial without checkpoints, evaluation and trackers; ``--exit-interval`` ends it without changing the
    learning-rate schedule. Non-finite losses and gradients end a run, as by default, unless the command turns that off;
    then the log counts such iterations.

    Losses and gradients that are not finite end a run, as by default, unless the command turns that off; then the
    count of such iterations in the log shows them.
    """
    edit = Edit.of_overlay(made)
    given = MegatronArguments(edit)
    if any(given.get(name) for name in _GROWTH):
        edit.warn("micro_batch_size", f"ignored: {' and '.join(_GROWTH)}; trials use the full batch from the start")
    given.drop(*_OFF)
    given.put({"--eval-iters": 0, "--log-interval": 1, "--log-memory-interval": 1, "--exit-interval": last_step})
    given.put({"--log-throughput": True})
    return edit.overlay()


def expected(request: OverlayRequest) -> Expected:
    """Forward passes of a pipeline cannot be counted, and linear layers of Transformer Engine are not torch's."""
    candidate, layout = request.candidate, request.candidate.layout
    spread = layout.tp * layout.pp * (layout.dp_shard if layout.zero_stage == 3 else 1)
    return Expected(
        world_size=request.world_size,
        micro_batch_size=candidate.micro_batch_size,
        num_microbatches=None if layout.pp > 1 else request.num_microbatches,
        recomputes=True if candidate.recompute.full else None,
        expert_parallel=layout.ep if "layout.ep" in request.reading.values else None,
        parameter_shards=spread if spread > 1 else None,
    )


TRAINING = Training(
    name="megatron",
    title="Megatron-LM",
    package="megatron-core",
    releases=">=0.15,<0.21",
    log=LogFormat(name="megatron"),
    recognises=recognises,
    read=TABLE.read,
    overlay=TABLE.overlay,
    trial_mode=trial_mode,
    expected=expected,
)
