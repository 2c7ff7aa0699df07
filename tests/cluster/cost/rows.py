"""Rows of cost model inputs for tests: a mid-size decoder on A100s, with whatever a test changes."""

from __future__ import annotations

import numpy as np

from cluster.cost.inputs import even_layers, from_rows

BASE = {
    "num_layers": 32, "hidden": 4096, "ffn": 11008, "num_heads": 32, "num_kv_heads": 32, "head_dim": 128,
    "vocab": 32000, "seq_length": 2048, "gated": 1, "fused": 1, "dropout": 0, "tied": 0, "trained_share": 1, "pp": 1,
    "dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 1, "zero_stage": 1, "reduces_last": 0, "sequence_parallel": 0,
    "num_copies": 1, "shard_embedding": 0, "cp_method": 2, "schedule": 1, "num_virtual_stages": 1,
    "micro_batch_size": 1, "num_microbatches": 8, "stage_full": [0], "recompute_communication": 0,
    "keeps_gathered": 0, "compute_bytes": 2, "loss_bytes": 8, "loss_traffic": 30, "loss_chunks": 1, "hides_sums": 0,
    "weight_bytes": 2, "gradient_bytes": 4, "optimizer_bytes": 12, "cast_bytes": 0, "bucket_bytes": 50e6,
    "keeps_gradients": 1, "workspace_limit_bytes": float("inf"), "flash": 1, "compiled": 0,
    "peak_flops_per_s": 312e12, "base_flops_per_s": 312e12, "memory_bytes": 85e9, "memory_bytes_per_s": 2039e9,
    "host_bytes_per_s": 32e9, "node_size": 8, "casts_operands": 0, "offload_activations": 0, "offload_optimizer": 0,
    "link_bytes_per_s": 300e9, "network_bytes_per_s": 25e9, "domain_size": 8, "data_wait_s": 0, "num_reads": 0,
    "reads_ahead": 1,
}  # fmt: skip


def row(**changes):
    """One candidate; layers are split evenly over the stages unless given, selective recompute is the same on all."""
    values = {**BASE, **changes}
    values.setdefault("stage_layers", even_layers(int(values["num_layers"]), int(values["pp"])))
    if values.pop("recompute", None) == "full":
        values["stage_full"] = values["stage_layers"]
    for name, stage_name in (("selective_share", "stage_dropped"), ("selective_cost", "stage_repeated")):
        values.setdefault(stage_name, [values.pop(name, 0.0)] * len(values["stage_layers"]))
    return values


def inputs(*rows):
    return from_rows(rows)


def varied(num_rows, seed=0):
    """Random legal-looking candidates of many shapes and layouts."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        pp = int(rng.choice([1, 2, 4, 8]))
        chunks = int(rng.choice([1, 2])) if pp > 1 else 1
        tp, cp = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2]))
        rows.append(
            row(
                pp=pp,
                tp=tp,
                cp=cp,
                num_virtual_stages=chunks,
                schedule=int(rng.choice([0, 1])) if chunks == 1 else 2,
                sequence_parallel=float(tp > 1),
                dp_shard=int(rng.choice([1, 2, 8])),
                zero_stage=int(rng.choice([1, 2, 3])),
                micro_batch_size=int(rng.choice([1, 2, 4])),
                num_microbatches=int(rng.choice([8, 16, 64])),
                hidden=int(rng.choice([1024, 4096, 8192])),
                seq_length=int(rng.choice([1024, 4096])),
                recompute=str(rng.choice(["none", "full"])),
                gated=int(rng.choice([0, 1])),
                flash=int(rng.choice([0, 1])),
                expert_share=float(rng.choice([0.0, 0.5])),
                num_experts=8,
                experts_per_token=2,
                expert_ffn=4096,
                ep=int(rng.choice([1, 2])),
            )
        )
    return from_rows(rows)
