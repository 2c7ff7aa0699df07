"""Turns a row of published measurements into inputs of the cost model, and fills in what the source does not say.

A blank means that the source does not say; each rule for it is written at its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.published.experts import NotModelledError, Numbers, expert_fields, is_mixture, mixture_shape
from benchmarks.published.texts import (
    FORMATS,
    is_fused_attention,
    network_bytes_per_s,
    norms,
    overlaps,
    silent_format,
    stated_format,
)
from cluster.cost.inputs import BUCKET_BYTES, CP_METHODS, SCHEDULES, even_layers
from cluster.hardware.topology import Accelerator, CatalogueError, find_accelerator, outruns_flash_attention_2

MINDSPORE = ("mindspore", "mindformers")

SHORT_GRADIENTS = ("paddle", "nemo", "bridge", "internevo", *MINDSPORE)
"""Frameworks that reduce gradients in 16 bits; NeMo's and Megatron-Bridge's performance recipes do."""

DEEPSPEED_BUCKET_BYTES = 2 * 5e8
"""ZeRO's ``reduce_bucket_size`` by default, elements of 16 bits."""

MASTERS_APART = ("deepspeed", "internevo")
"""Frameworks whose ZeRO-3 shards 16-bit weights and leaves the fp32 ones to the optimiser; others shard fp32."""

FUSED_LOSS = ("composer", "bridge")
"""Frameworks whose loss is one kernel by default: llm-foundry's ``fused_crossentropy``, Megatron-Bridge's recipes."""

JAX = ("jax", "paxml", "maxtext")
"""Frameworks whose compiler places collectives; they shard weights."""


_LAYERS_OF_STAGES = re.compile(r"layers[- ]per[- ]stage:?\s*(\d+(?:[,/]\s*\d+)+)", re.IGNORECASE)
_LOCAL_BATCH = re.compile(r"\blocal[- _]batch(?:[- _]size)?\s*[=:]?\s*(\d+)", re.IGNORECASE)
_MASTERS_REUSED = re.compile(r"\breuse[-_]fp32[-_]param", re.IGNORECASE)

LABELS = 0.95, 1.1
"""Usable bytes relative to a device's label; others mean another variant."""
USABLE_OF_LABEL = 1.062e9
"""Usable bytes per GB of a label: GiB, less what the driver keeps."""

ATTENTION_AGAIN = (0.3, 0.08)
"""Shares of kept activations dropped and of the forward pass repeated where core attention is recomputed."""
EVERY_OTHER_MATMUL = (0.6, 0.5)
"""The same where every other matmul is recomputed, and all between them (torchtitan's selective recompute by operators:
outputs of attention and of half of the matmuls stay)."""
OWN_ATTENTION = ("nemo", "bridge", "megatron-core", "primus", "jax", "paxml", "maxtext", "transformerengine")
"""Frameworks whose fused attention is the vendor's (cuDNN, Composable Kernel) and not FlashAttention-2."""
KEPT_OPERANDS = ("nemo", "bridge", "megatron", "mind")
"""Frameworks that write 8-bit operands where they are made, in the kernels of norms and activations."""


def published_inputs(f: Mapping[str, str], n: Numbers) -> dict[str, Any]:
    """One row for ``inputs.from_rows``, from a row's texts ``f`` and numbers ``n`` (None where blank).

    Raises:
        NotModelledError: the model cannot say anything about the row.
    """
    try:
        accelerator = find_accelerator(f["gpu"])
    except CatalogueError as error:
        raise NotModelledError(str(error)) from None
    f = _with_format(f, accelerator)
    model = _model(f, n)
    if is_mixture(f):
        model = {**model, **mixture_shape(f, n, model)}
        model = {**model, **expert_fields(f, n, model)}
    layout = _layout(f, n, model)
    precision = _precision(f, accelerator, layout)
    recompute = _recompute(f, layout)
    return {
        **model,
        **layout,
        **precision,
        **recompute,
        **_hardware(f, n, accelerator),
        **overlaps(f),
        "loose_norms": float(f.get("norms", norms(f)) == "loose"),
        "aged_attention": float(
            outruns_flash_attention_2(accelerator.name)
            and not any(word in f["framework"].lower() for word in OWN_ATTENTION)
        ),
        "flash": _flash(f, accelerator, model["head_dim"]),
        "compiled": float(f["compile"] == "yes"),
        "num_copies": 1,
        "shard_embedding": 0.0,
        "data_wait_s": 0.0,
        "num_reads": 0.0,
        "reads_ahead": 1.0,
    }


def _model(f: Mapping[str, str], n: Numbers) -> dict[str, Any]:
    layers, hidden = n["layers"], n["hidden"]
    if not layers or not hidden:
        layers, hidden = _typical_shape(n["n_params"])
    heads = n["heads"] or max(1.0, hidden // 128)
    kv_heads = n["kv_heads"] or heads
    vocab = n["vocab"] or 50304
    head_dim = hidden / heads
    if stated := re.search(r"head.dim (\d+)", f["moe"] + " " + f["notes"]):
        head_dim = float(stated[1])
    ffn = n["ffn"] or 4 * hidden
    attention = layers * hidden * head_dim * (2 * heads + 2 * kv_heads)
    gated, tied = _closest_variant(f, n["n_params"], attention, layers * hidden * ffn, vocab * hidden)
    return {
        "num_layers": layers,
        "hidden": hidden,
        "ffn": ffn,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": vocab,
        "seq_length": n["seq_len"] or (4096 if gated else 512 if "bert" in f["model"].lower() else 1024),
        "gated": gated,
        "tied": tied,
        "fused": 1.0,
        # Dropout went out of use in pretraining about when SwiGLU and bfloat16 came in.
        "dropout": float(not gated and f["precision"] in ("fp16", "fp32")),
        "trained_share": 0.01 if f["workload"].startswith("lora") else 1.0,
    }


def _typical_shape(num_params: float | None) -> tuple[float, float]:
    """Layers and hidden size of a dense decoder of that size, at the usual hidden = 128 layers (N = 12 L h^2)."""
    if not num_params:
        raise NotModelledError("neither the architecture nor the number of parameters is stated")
    layers = float(max(2, round((num_params / (12 * 128**2)) ** (1 / 3))))
    return layers, 128 * max(1.0, round((num_params / (12 * layers)) ** 0.5 / 128))


def _closest_variant(
    f: Mapping[str, str], num_params: float | None, attention: float, ffn: float, table: float
) -> tuple[float, float]:
    """SwiGLU or not, tied embeddings or not: whichever gives the stated number of parameters."""
    if not num_params:
        return float(bool(re.search("llama|qwen|mistral|baichuan|glm|intern|yi", f["model"].lower()))), 0.0
    variants = [(attention + (2 + g) * ffn + (2 - t) * table, g, t) for g in (0.0, 1.0) for t in (0.0, 1.0)]
    _, gated, tied = min(variants, key=lambda variant: abs(variant[0] - num_params))
    return gated, tied


def _layout(f: Mapping[str, str], n: Numbers, model: Mapping[str, Any]) -> dict[str, Any]:
    devices = n["n_gpus"] or 8.0
    tp, pp, cp = n["tp"] or 1.0, n["pp"] or 1.0, n["cp"] or 1.0
    dp = n["dp"] or devices / (tp * pp * cp)
    if n["dp"] and n["n_gpus"] and dp * tp * pp * cp != devices:
        raise NotModelledError(f"dp {dp:g} x tp {tp:g} x pp {pp:g} x cp {cp:g} are not {devices:g} devices")
    if dp < 1 or dp % 1:
        raise NotModelledError(f"{devices:g} devices do not split into tp {tp:g}, pp {pp:g}, cp {cp:g}")
    if pp > model["num_layers"]:
        raise NotModelledError(f"pp {pp:g} exceeds the {model['num_layers']:g} layers")
    stage = _zero_stage(f, n, dp * cp)
    shard = min(n["shard_group"] or dp, dp) if stage else 1.0
    chunks = n["vpp"] or 1.0
    framework = f["framework"].lower()
    micro, num = _local_batch(f, pp) or _batch(n, dp, pp)
    megatron = "megatron" in framework
    # Sequence parallelism came to Megatron in 2022, when bfloat16 had become usual.
    sequence_parallel = f["sp"] == "true" or (f["sp"] == "" and megatron and FORMATS[f["precision"]] != "float16")
    return {
        "pp": pp,
        "dp_replicate": dp / shard,
        "dp_shard": shard,
        "cp": cp,
        # Megatron's default --cp-comm-type; no row states it.
        "cp_method": CP_METHODS.index("ring"),
        "tp": tp,
        "zero_stage": stage if shard * cp > 1 else 0.0,
        **_sharded_accumulation(framework, pp),
        "sequence_parallel": float(sequence_parallel and tp > 1),
        "schedule": SCHEDULES.index("interleaved" if chunks > 1 else "1f1b"),
        "num_virtual_stages": chunks if pp > 1 else 1.0,
        "micro_batch_size": micro,
        "num_microbatches": num,
        "stage_layers": _stage_layers(f, int(model["num_layers"]), int(pp)),
    }


def _stage_layers(f: Mapping[str, str], num_layers: int, pp: int) -> list[int]:
    """Layers of each pipeline rank as listed (``layers per stage 7,8,9``), else as even as possible."""
    if found := _LAYERS_OF_STAGES.search(f["other_flags"]):
        listed = [int(count) for count in re.findall(r"\d+", found[1])]
        if len(listed) == pp and sum(listed) == num_layers:
            return listed
    return even_layers(num_layers, pp)


def _local_batch(f: Mapping[str, str], pp: float) -> tuple[float, float] | None:
    """Micro-batch size and number of micro-batches of a row that states only a rank's batch: in a pipeline, as many
    micro-batches as stages (torchtitan's default)."""
    found = _LOCAL_BATCH.search(f["other_flags"])
    if found is None or f["micro_batch"] or f["n_micro_batches"]:
        return None
    num = min(pp, float(found[1]))
    return float(found[1]) / num, num


def _sharded_accumulation(framework: str, pp: float) -> dict[str, float]:
    """When ZeRO gathers weights and reduces gradients of a step's micro-batches.

    MindSpore gathers once per step (``MicroStepAllGather``) and adds up whole gradients unless
    ``gradient_accumulation_shard`` is set. So does FSDP in PyTorch's pipelines: torchtitan frees no weights after the
    forward pass there (``fsdp_reshard_after_forward``), torch's stages none after the backward pass, and gradients are
    reduced after the last (``PipelineStage.backward_maybe_with_nosync``). XLA's pipelines gather for every pass, like
    all without pipelines.
    """
    jax = any(word in framework for word in JAX)
    once = float(any(word in framework for word in MINDSPORE) or (pp > 1 and not jax))
    return {"gathers_once": once, "reduces_last": once}


def _zero_stage(f: Mapping[str, str], n: Numbers, num_peers: float) -> float:
    """The ZeRO stage as stated; else from the description of the optimizer; else the framework's default, mostly 1."""
    if num_peers == 1:
        return 0.0
    if n["zero_stage"] is not None:
        return n["zero_stage"]
    framework = f["framework"].lower()
    if "weight+state sharding" in f["other_flags"] or any(word in framework for word in JAX):
        return 3.0
    # MindSpore's optimizer parallelism shards gradients too, and gathers weights once per step.
    return 2.0 if any(word in framework for word in MINDSPORE) else 1.0


def _batch(n: Numbers, dp: float, pp: float) -> tuple[float, float]:
    """Micro-batch size and number of micro-batches; one sequence per micro-batch when not stated.

    Pipelines of which no batch is stated are fed with four micro-batches per stage, from which on their bubble is
    negligible (GPipe, Huang et al., arXiv 1811.06965, section 2.3).
    """
    micro, num, batch = n["micro_batch"], n["n_micro_batches"], n["global_batch"]
    if micro and num:
        return micro, num
    if batch:
        micro = micro or max(1.0, batch / (dp * num) if num else 1.0)
        return micro, num or max(1.0, batch / (dp * micro))
    return micro or 1.0, num or (4 * pp if pp > 1 else 1.0)


def _with_format(f: Mapping[str, str], accelerator: Accelerator) -> Mapping[str, str]:
    """The row with a number format, whether or not ``precision`` says it."""
    word = f["precision"] or stated_format(f) or silent_format(f, "bfloat16" in accelerator.peak_flops_per_s)
    if word not in FORMATS:
        raise NotModelledError(f"unknown precision {word!r}")
    return {**f, "precision": word}


def _precision(f: Mapping[str, str], accelerator: Accelerator, layout: Mapping[str, Any]) -> dict[str, float]:
    """Bytes per parameter by framework; Megatron and DeepSpeed keep gradients (fp32 with bf16) in lasting buffers."""
    name = FORMATS[f["precision"]]
    peak, base = accelerator.peak(name), accelerator.peak("float32" if name == "float32" else "bfloat16")
    if peak is None or base is None:
        raise NotModelledError(f"{accelerator.name} has no peak for {name}")
    framework = f["framework"].lower()
    masters_apart = any(word in framework for word in MASTERS_APART)
    if name == "float32":
        sizes = (4.0, 4.0, 8.0, 4.0)
    elif "pure" in f["other_flags"].lower():
        # Composer's word: FSDP keeps fp32 shards and reduces gradients in 16 bits.
        sizes = (4.0, 2.0, 8.0, 2.0)
    elif layout["zero_stage"] == 3 and not masters_apart:
        sizes = (4.0, 4.0, 8.0, 2.0)
    elif name == "float16" or layout["zero_stage"] == 3 or any(word in framework for word in SHORT_GRADIENTS):
        sizes = (2.0, 2.0, 12.0, 2.0)
    else:
        sizes = (2.0, 4.0, 12.0, 2.0)
    if _MASTERS_REUSED.search(f["other_flags"]):
        # MindSpeed's 16-bit weights are halves of the fp32 ones.
        sizes = (sizes[0], sizes[1], min(sizes[2], 10.0), sizes[3])
    loss_bytes = 0.0 if any(word in framework for word in FUSED_LOSS) else 8.0
    return {
        "compute_bytes": sizes[3],
        "loss_bytes": loss_bytes,
        "loss_traffic": 3 * (sizes[3] + loss_bytes),
        "loss_chunks": 1.0,
        "hides_sums": 0.0,
        "weight_bytes": sizes[0],
        "gradient_bytes": sizes[1],
        "optimizer_bytes": sizes[2],
        "cast_bytes": 0.0,
        "bucket_bytes": DEEPSPEED_BUCKET_BYTES if "deepspeed" in framework and layout["zero_stage"] else BUCKET_BYTES,
        "keeps_gradients": float(layout["zero_stage"] < 3 or masters_apart),
        "workspace_limit_bytes": float("inf"),
        "casts_operands": float(peak > base and not any(word in framework for word in KEPT_OPERANDS)),
        "peak_flops_per_s": max(peak, base),
        "base_flops_per_s": base,
    }


def _recompute(f: Mapping[str, str], layout: Mapping[str, Any]) -> dict[str, Any]:
    """Layers recomputed in full per stage. Not stated: none."""
    layers, detail = layout["stage_layers"], f["recompute_detail"].lower()
    full = list(layers) if f["recompute"] == "full" else [0] * len(layers)
    if alike := re.search(r"(\d+)[- ]layers?[- ]per[- ]stage", detail):
        full = [min(int(alike[1]), count) for count in layers]
    elif f["recompute"] == "per-stage":
        stated = [int(count) for count in re.findall(r"\d+(?=[/ ,]|$)", f["recompute_detail"])]
        stated = stated[-len(layers) :] if len(stated) >= len(layers) else []
        full = [min(a, b) for a, b in zip(stated, layers, strict=True)] if stated else [0] * len(layers)
    dropped, repeated = 0.0, 0.0
    if f["recompute"] == "selective":
        dropped, repeated = ATTENTION_AGAIN
        if re.search(r"\bper-?op\b|\bsac\b", detail):
            dropped, repeated = EVERY_OTHER_MATMUL
        elif re.search(r"\bper-?layer|every (?:other|second) layer", detail):
            full = [count // 2 for count in layers]
            dropped = repeated = 0.0
    return {
        "stage_full": full,
        "stage_dropped": [dropped] * len(layers),
        "stage_repeated": [repeated] * len(layers),
        "recompute_communication": 0.0,
        "keeps_gathered": 0.0,
    }


def _flash(f: Mapping[str, str], accelerator: Accelerator, head_dim: float) -> float:
    """1 with fused attention. Not stated: wherever bfloat16 exists and is used, that is after 2022, and heads have a
    multiple of 8 elements, without which fused kernels take none (Transformer Engine's ``get_attention_backend``)."""
    if f["flash_attn"]:
        return float(is_fused_attention(f["flash_attn"]))
    late = "bfloat16" in accelerator.peak_flops_per_s and FORMATS[f["precision"]] != "float16"
    return float(late and head_dim % 8 == 0)


def _usable_bytes(label: float | None, accelerator: Accelerator) -> float:
    """Usable memory, of the variant with that label if it is another one than the catalogue's (H100 with 96 GB)."""
    least, most = LABELS
    if label is None or least <= accelerator.usable_memory_bytes / (label * 1e9) <= most:
        return accelerator.usable_memory_bytes
    return label * USABLE_OF_LABEL


def _hardware(f: Mapping[str, str], n: Numbers, accelerator: Accelerator) -> dict[str, float]:
    per_node = n["gpus_per_node"] or accelerator.devices_per_node
    return {
        "memory_bytes": _usable_bytes(n["gpu_mem_GB"], accelerator),
        "memory_bytes_per_s": accelerator.memory_bytes_per_s,
        "host_bytes_per_s": accelerator.host_bytes_per_s,
        "node_size": per_node,
        "offload_activations": 0.0,
        "offload_optimizer": 0.0,
        "link_bytes_per_s": accelerator.link_bytes_per_s,
        "network_bytes_per_s": network_bytes_per_s(f["interconnect"], per_node) or accelerator.network_bytes_per_s,
        "domain_size": max(per_node, accelerator.domain_size),
    }
