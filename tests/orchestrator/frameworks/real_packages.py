"""What real packages understand of exported files: ``python -m tests.orchestrator.frameworks.real_packages deepspeed
FOLDER``.

In a separate process, because importing these packages changes the environment, the log and the warnings. Each folder
in FOLDER holds one export; printed is, per folder, what the package made of it, as values by path, and the package's
facts as in ``tests.orchestrator.frameworks.facts``.
"""

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

from tests.orchestrator.frameworks import facts

FACTS = {"accelerate": ("accelerate", "transformers"), "deepspeed": ("deepspeed",), "torchtitan": ("torchtitan",)}
"""The packages that read a format."""


def main(format_, folder):
    check = {"accelerate": _accelerate, "deepspeed": _deepspeed, "torchtitan": _torchtitan}[format_]
    with contextlib.redirect_stdout(sys.stderr):
        values = {path.name: check(path) for path in sorted(Path(folder).iterdir())}
        found = {package: facts.collect(package) for package in FACTS[format_]}
    print(json.dumps({"values": values, "facts": found}))


# ---- the model ----


def _llama(folder):
    """The model is built, without memory, so that its parameters can be counted."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    file = folder / "model.json"
    config = LlamaConfig.from_json_file(str(file))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "workload.model.llama.rope_theta": config.rope_parameters["rope_theta"],
        "workload.model.llama.norm_eps": model.model.norm.variance_epsilon,
        "workload.model.llama.num_heads": config.num_attention_heads,
        "workload.seq_length": config.max_position_embeddings,
    }


# ---- Accelerate and the Trainer ----


def _accelerate(folder):
    """The file as ``accelerate launch`` takes it, in the environment that it starts ranks with."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    parser = launch_command_parser()
    args, _, _ = _validate_launch_command(
        parser.parse_args(["--config_file", str(folder / "accelerate.yaml"), "train.py"])
    )
    env = launch.prepare_multi_gpu_env(args) if args.multi_gpu or args.use_fsdp else None
    if env is None:
        _, env = launch.prepare_simple_launcher_cmd_env(args)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    try:
        values = _sharding(args) | _arguments(folder)
    finally:
        os.environ.clear()
        os.environ.update(before)
    values["kernels.compile"] = _compiled(env)
    return values | _llama(folder)


def _sharding(args):
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig

    if not args.use_fsdp:
        return {"layout.dp_replicate": args.num_processes, "mixed_precision": args.mixed_precision}
    plugin, sizes = FullyShardedDataParallelPlugin(), ParallelismConfig()
    assert plugin.fsdp_version == 2
    assert sizes.total_size == args.num_processes
    assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
    stage = 0 if sizes.dp_shard_size == 1 else 3 if plugin.reshard_after_forward else 2
    return {
        "layout.dp_replicate": sizes.dp_replicate_size,
        "layout.dp_shard": sizes.dp_shard_size,
        "layout.cp": sizes.cp_size,
        "layout.tp": sizes.tp_size,
        "layout.zero_stage": stage,
        "recomputes": plugin.activation_checkpointing,
        "mixed_precision": args.mixed_precision,
    }


def _arguments(folder):
    """``TrainingArguments`` of a host without a GPU, which therefore cannot request TF32."""
    from transformers import HfArgumentParser, TrainingArguments

    written = json.loads((folder / "training_args.json").read_text())
    here = {**written, "use_cpu": True, "tf32": False, "output_dir": str(folder / "output")}
    (parsed,) = HfArgumentParser(TrainingArguments).parse_dict(here)
    if parsed.fsdp:
        assert parsed.fsdp_plugin_args["fsdp_version"] == 2
        assert parsed.fsdp_plugin_args["reshard_after_forward"] is written["fsdp_config"]["reshard_after_forward"]
    return {
        "micro_batch_size": parsed.per_device_train_batch_size,
        "gradient_accumulation_steps": parsed.gradient_accumulation_steps,
        "workload.optimizer.lr": parsed.learning_rate,
        "workload.optimizer.beta2": parsed.adam_beta2,
        "workload.seed": parsed.seed,
        "loader.num_workers": parsed.dataloader_num_workers,
        "precision.dtype": "bfloat16" if parsed.bf16 else "float16" if parsed.fp16 else "float32",
    }


def _compiled(env):
    if env["ACCELERATE_DYNAMO_BACKEND"] == "NO":
        return "off"
    return "block" if env["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] == "True" else "model"


# ---- DeepSpeed ----


class _Ranks:
    """What DeepSpeed queries of a model-parallel unit: how many ranks split the batch."""

    def __init__(self, dp):
        self._dp = dp

    def get_data_parallel_world_size(self):
        return self._dp


def _deepspeed(folder):
    """There are no other ranks: a process group of DeepSpeed's would compile C++ first."""
    import deepspeed

    written = json.loads((folder / "deepspeed.json").read_text())
    micro, accumulation = written["train_micro_batch_size_per_gpu"], written["gradient_accumulation_steps"]
    dp = written["train_batch_size"] // (micro * accumulation)
    deepspeed.comm.get_rank = lambda: 0
    config = deepspeed.DeepSpeedConfig(str(folder / "deepspeed.json"), mpu=_Ranks(dp))
    assert config.world_size == dp
    fp16, bf16 = config.float16_config, config.bfloat16_config
    level = "O1" if config.torch_autocast_enabled else "O2" if fp16.enabled or bf16.enabled else "O0"
    values = {
        "workload.global_batch_size": config.train_batch_size,
        "micro_batch_size": config.train_micro_batch_size_per_gpu,
        "layout.zero_stage": int(config.zero_optimization_stage),
        "layout.tp": max(1, config.tensor_parallel_config.autotp_size),
        "layout.cp": written.get("sequence_parallel_size", 1),
        "precision.level": level,
        "offload.optimizer": config.zero_config.offload_optimizer is not None,
        "workload.optimizer.lr": config.optimizer_params["lr"],
    }
    assert config.optimizer_name == "adamw"
    if fp16.enabled and not fp16.loss_scale:
        values["precision.loss_scale.initial"] = float(fp16.initial_dynamic_scale())
        values["precision.loss_scale.backoff_interval"] = fp16.hysteresis
    return values


# ---- torchtitan ----


def _torchtitan(folder):
    import torch
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    sys.path.insert(0, str(folder))
    sys.modules.pop("tune_cluster_recipe", None)
    importlib.invalidate_caches()
    try:
        config = ConfigManager().parse_args(["--module", "tune_cluster_recipe", "--config", "train"])
    finally:
        sys.path.remove(str(folder))
    layout = config.parallelism
    dims = (layout.data_parallel_replicate_degree, layout.data_parallel_shard_degree, layout.context_parallel_degree)
    degrees = (*dims, layout.tensor_parallel_degree, layout.pipeline_parallel_degree)
    ParallelDims.from_config(layout, torch.Size(degrees).numel())
    with torch.device("meta"):
        config.model_spec.model.update_from_config(config=config)
        model = config.model_spec.model.build()
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "workload.global_batch_size": config.training.global_batch_size,
        "workload.seq_length": config.training.seq_len,
        "layout.dp_replicate": degrees[0],
        "layout.dp_shard": degrees[1],
        "layout.cp": degrees[2],
        "layout.tp": degrees[3],
        "layout.pp": degrees[4],
        "layout.sequence_parallel": layout.enable_sequence_parallel,
        "recomputes": config.activation_checkpoint is not None,
        "loader.num_workers": config.dataloader.num_workers,
        "workload.optimizer.lr": config.optimizer.param_groups[0].optimizer_kwargs["lr"],
        "workload.seed": config.debug.seed,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
