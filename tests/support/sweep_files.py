"""Sweep files for the tests of the planner."""

import copy

import yaml

from cluster.hardware.topology import Node, Topology

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
        "min_nodes": 1,
        "max_wait": "30m",
        "queue": "nightly",
        "priority": 5,
        "devices_per_node": 4,
        "device": "cpu",
        "device_memory": "2GiB",
        "isolation": "device",
        "price_per_device_hour": 2.5,
        "exclude_nodes": ["node-7"],
        "exclude_slow_nodes": True,
    },
    "space": {
        "world_size": [1, 2, 4],
        "balance": True,
        "pp": [1, 2],
        "schedule": ["gpipe"],
        "num_virtual_stages": [1],
        "stage_layers": ["even", {"counts": [3, 1]}, {"offset": [-1, 1]}],
        "cp": [1],
        "cp_method": ["ulysses"],
        "tp_engine": ["auto"],
        "num_copies": [1],
        "shard_embedding": [False],
        "gradient_reduction": ["each", "last"],
        "offload_activations": [False, True],
        "offload_optimizer": [False],
        "loss_chunks": [1, 4],
        "dp_replicate": [1, 2],
        "dp_shard": [1, 2],
        "zero_stage": [1, 3],
        "tp": [1, 2],
        "sequence_parallel": [False, True],
        "replicate_with": ["auto"],
        "micro_batch_size": [1, 2],
        "recompute": ["none", {"full": 2}, "full", {"select": {"feed_forward\\.mul": [2, 1]}}],
        "precision": ["O0", {"level": "O1", "dtype": "float16", "loss_scale": {"initial": 8.0, "dynamic": False}}],
        "dataloader": ["manual", {"tuning_steps": 9, "max_workers": 2}],
        "num_workers": [0, 2],
        "prefetch_factor": [2, 4],
        "pin_memory": [False],
        "persistent_workers": [True],
        "full_batch": [False],
        "compile": ["off", "block"],
        "compile_mode": ["default"],
        "attention": ["auto", "math"],
        "matmul_precision": ["high"],
        "cudnn_benchmark": ["off", {"first": 1, "last": 4}],
        "memory_format": ["nchw", "auto"],
        "forbid": [{"tp": 2, "micro_batch_size": [1, 2]}],
        "require": [{"world_size": [1, 2, 4]}],
    },
    "baseline": {
        "pp": 2,
        "schedule": "interleaved",
        "num_virtual_stages": 2,
        "stage_layers": {"counts": [[2, 0], [1, 1]]},
        "cp": 1,
        "cp_method": "all_gather",
        "tp_engine": "auto",
        "num_copies": 1,
        "shard_embedding": False,
        "gradient_reduction": "each",
        "offload_activations": False,
        "offload_optimizer": False,
        "loss_chunks": 1,
        "dp_replicate": 1,
        "dp_shard": 1,
        "zero_stage": 0,
        "tp": 1,
        "sequence_parallel": False,
        "replicate_with": "auto",
        "micro_batch_size": 1,
        "recompute": {"full": [[1, 0], [1, 1]], "select": {"feed_forward\\.mul": 2}, "communication": 0},
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
            "white": ["softmax"],
            "black": ["linear"],
        },
        "dataloader": {"tuning_steps": 100, "max_workers": 4},
        "num_workers": 1,
        "prefetch_factor": 3,
        "pin_memory": True,
        "persistent_workers": True,
        "full_batch": True,
        "compile": "off",
        "compile_mode": "max-autotune",
        "attention": "efficient",
        "matmul_precision": "high",
        "cudnn_benchmark": {"first": 1, "last": 10},
        "memory_format": "nhwc",
    },
    "objective": "device_cost",
    "search": {"sampler": "guided", "seed": 1, "max_concurrent": 2, "stop_when_converged": True}
    | {"patience": 5, "transfer": False, "early_stop": 2.0},
    "measure": {
        "min_warmup_steps": 1,
        "max_warmup_steps": 2,
        "warmup_tolerance": 0.5,
        "num_steps": 3,
        "max_steps": 4,
        "max_relative_spread": 0.2,
    },
    "budget": {
        "max_trials": 9,
        "device_hours": 0.5,
        "wall_time": "90s",
        "consecutive_failures": 2,
        "strikes_per_node": 2,
    },
    "confirm": {"finalists": 2, "min_rounds": 2, "max_rounds": 5, "budget_share": 0.5, "soak": "90s", "always": True},
    "gate": {
        "num_steps": 7,
        "loss_tolerance": 0.5,
        "grad_norm_tolerance": 0.25,
        "command": ["/bin/cat", "{facts}"],
        "command_timeout": "90s",
    },
    "profile": {
        "trials": ["winner", "baseline"],
        "start_step": 4,
        "stop_step": 6,
        "ranks": [0, 1],
        "memory": True,
        "stack": True,
        "communication": False,
        "output": "traces",
    },
    "deadlines": {"starting_s": 10.0, "warmup_s": 20.0, "measuring_s": 30.0, "stall_s": 5.0, "compile_s": 60.0}
    | {"placing_s": 60.0},
    "notify": {
        "webhook_env": "TEAM_WEBHOOK",
        "webhook_file": None,
        "command": ["/bin/cat", "-"],
        "on": ["finished", "failed"],
        "after_failures": 2,
    },
    "runner": "trials.worker:run_rank",
    "tracking": {"uri": "http://127.0.0.1:5000", "experiment": "mine", "report": False},
}
"""Every key a file with a llama model may hold, none at its default where that can be helped."""

SMALL = {
    "name": "small",
    "workload": {"model": FULL["workload"]["model"], "seq_length": 32, "global_batch_size": 16},
    "space": {"micro_batch_size": [1, 2], "world_size": 1},
}

RESNET = {
    "name": "resnet",
    "workload": {
        "model": {"kind": "resnet", "depth": 18, "num_classes": 10, "image_size": 32, "width": 8},
        "data": {"kind": "image_folder", "path": "images"},
        "global_batch_size": 16,
    },
    "space": {"memory_format": ["nchw", "nhwc", "auto"], "cudnn_benchmark": ["off", {"first": 1, "last": 4}]},
}
LINEAR = {
    "name": "linear",
    "workload": {
        "model": {"kind": "linear", "num_layers": 3, "size": 64},
        "data": {"kind": "random"},
        "global_batch_size": 16,
    },
    "space": {"precision": ["O0", "O1", "O2"]},
}
TOKENS = {
    **SMALL,
    "workload": {**SMALL["workload"], "data": {"kind": "token_file", "path": "tokens.bin", "dtype": "uint16"}},
}
SIMULATED = {
    **SMALL,
    "name": "simulated",
    "cluster": {
        "kind": "simulated",
        "num_nodes": 2,
        "devices_per_node": 2,
        "simulation": {
            "accelerator": "a100-80",
            "noise": 0.01,
            "deviation": 1.0,
            "slow_nodes": {"node0001": 1.2},
            "node_losses": {"node0001": 1e6},
            "faults": {"crash": 0.01},
            "seed": 3,
        },
    },
}
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""Hundreds of files are written, and libyaml is several times faster."""


SCRIPT = {
    "name": "script",
    "workload": {
        "recipe": "custom",
        "run": ["python", "train.py", "--bs", "{micro_batch_size}"],
        "cwd": ".",
        "env": {"MODE": "fast"},
        "env_pass": ["HF_TOKEN"],
        "files": {"settings": "settings.json"},
        "launcher": "own",
        "metrics": {"log": r"step (?P<step>\d+)", "files": ["{out}/*.log"], "hook": False},
        "tokens_per_step": 512,
        "global_batch_size": 32,
        "num_layers": 2,
        "model": "model.json",
        "seed": 1,
    },
    "cluster": {"kind": "local", "devices_per_node": 2},
    "baseline": {"micro_batch_size": 4, "own": {"--fused": True}},
    "space": {
        "own": {
            "--fused": True,
            "--dtype": {"values": ["a", "b"], "memory": "falls", "flag": None, "when": {"--fused": True}},
        },
        "forbid": [{"own": {"--dtype": "a"}}],
    },
}
OWN_MODULE = {
    "workload": {
        "kind": "python",
        "cwd": ".",
        "loss": "mine:loss",
        "layers": "blocks",
        "before": ["embed"],
        "after": ["head"],
        "tensor_parallel": {},
        "counted": {
            "shape": [],
            "num_parameters": 1,
            "num_kernels": 1,
            "flops_per_sample": 1,
            "activation_elements": 1,
            "has_batch_norm": False,
            "has_convolutions": False,
            "no_pipeline": "why",
            "no_tensor_parallel": "why",
            "head": "lm_head",
        },
        "model": {"kind": "huggingface", "config": "config.json"},
    }
}
"""Keys of modules of the user's; by itself no whole file."""


def write(folder, content):
    """Write ``content`` (a mapping, text or bytes) and the training data it may name; returns the path of the file."""
    (folder / "text.txt").write_text("x" * 100)
    (folder / "tokens.bin").write_bytes(bytes(100))
    (folder / "images" / "cat").mkdir(parents=True, exist_ok=True)
    (folder / "images" / "cat" / "1.JPEG").write_bytes(b"not looked at")
    path = folder / "sweep.yaml"
    if not isinstance(content, str | bytes):
        content = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=10**6)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
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
