"""Sweep files for the tests of the planner."""

import copy

import yaml

from cluster.topology import Node, Topology

FULL = {
    "name": "full",
    "workload": {
        "model": {
            "kind": "llama",
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 8,
            "num_kv_heads": 4,
            "ffn_hidden_size": 96,
            "vocab_size": 256,
            "rope_theta": 10000.0,
            "norm_eps": 1e-5,
        },
        "data": {"kind": "text", "path": "text.txt", "pattern": "*.txt"},
        "seq_length": 32,
        "global_batch_size": 16,
        "optimizer": {"kind": "adamw", "lr": 0.01, "beta1": 0.8, "beta2": 0.9, "eps": 1e-7, "weight_decay": 0.0},
        "seed": 3,
    },
    "cluster": {
        "kind": "ray",
        "address": "127.0.0.1:6379",
        "num_nodes": 2,
        "devices_per_node": 4,
        "device": "cpu",
        "device_memory": "2GiB",
        "isolation": "device",
    },
    "space": {
        "world_size": [1, 2, 4],
        "dp_replicate": [1, 2],
        "dp_shard": [1, 2],
        "zero_stage": [1, 3],
        "tp": [1, 2],
        "sequence_parallel": [False, True],
        "replicate_with": ["auto"],
        "micro_batch_size": [1, 2],
        "recompute": ["none", {"full": 2}, "full"],
        "precision": ["O0", {"level": "O1", "dtype": "float16", "loss_scale": {"initial": 8.0, "dynamic": False}}],
        "num_workers": [0, 2],
        "prefetch_factor": [2, 4],
        "compile": ["off", "block"],
        "forbid": [{"tp": 2, "micro_batch_size": [1, 2]}],
        "require": [{"world_size": [1, 2, 4]}],
    },
    "baseline": {
        "dp_replicate": 2,
        "dp_shard": 1,
        "zero_stage": 0,
        "tp": 1,
        "sequence_parallel": False,
        "replicate_with": "ddp",
        "micro_batch_size": 1,
        "recompute": {"full": 3},
        "precision": {
            "level": "O1",
            "dtype": "float16",
            "loss_scale": {
                "initial": 1024.0,
                "growth_factor": 2.0,
                "growth_interval": 100,
                "backoff_factor": 0.5,
                "backoff_interval": 1,
                "dynamic": True,
            },
        },
        "num_workers": 1,
        "prefetch_factor": 3,
        "compile": "off",
    },
    "search": {"sampler": "random", "seed": 1, "max_concurrent": 2},
    "measure": {
        "min_warmup_steps": 1,
        "max_warmup_steps": 2,
        "warmup_tolerance": 0.5,
        "num_steps": 3,
        "max_steps": 4,
        "max_relative_spread": 0.2,
    },
    "budget": {"max_trials": 9, "device_hours": 0.5, "wall_time": "90s", "consecutive_failures": 2},
    "deadlines": {"starting_s": 10.0, "warmup_s": 20.0, "measuring_s": 30.0, "stall_s": 5.0},
    "runner": "trials.worker:run_rank",
    "tracking": {"uri": "http://127.0.0.1:5000", "experiment": "mine"},
}
"""Every key a file may hold, none at its default where that can be helped."""

SMALL = {
    "name": "small",
    "workload": {"model": FULL["workload"]["model"], "seq_length": 32, "global_batch_size": 16},
    "space": {"micro_batch_size": [1, 2]},
}


def write(folder, content):
    """Write ``content`` (a mapping, text or bytes) and the training text it names; returns the path of the file."""
    (folder / "text.txt").write_text("x" * 100)
    path = folder / "sweep.yaml"
    text = content if isinstance(content, str | bytes) else yaml.safe_dump(content, sort_keys=False, width=10**6)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def changed(content, path, value):
    """A copy of ``content`` with the value at ``path`` replaced."""
    content = copy.deepcopy(content)
    node = content
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    return content


def with_sections(content, **sections):
    return {**content, **sections}


def topology(*num_devices, kind="cpu", name="some CPU"):
    """Nodes with that many devices each."""
    return Topology(
        nodes=tuple(
            Node(
                name=f"node{i}",
                address="127.0.0.1",
                num_devices=count,
                device_kind=kind,
                device_name=name,
                device_memory_bytes=2**30,
                threads_per_device=1,
            )
            for i, count in enumerate(num_devices)
        )
    )
