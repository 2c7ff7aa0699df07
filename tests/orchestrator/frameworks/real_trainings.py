"""What the real packages make of commands that candidates were laid over:
``python -m tests.orchestrator.frameworks.real_trainings FILE``.

In a separate process, because importing these packages changes the environment, the log and the warnings. FILE holds
a list of commands, each an object with ``kind``, ``words`` and ``env``; printed is what each package understood.
"""

import contextlib
import json
import os
import sys
from pathlib import Path


def main(file):
    commands = json.loads(Path(file).read_text())
    with contextlib.redirect_stdout(sys.stderr):
        found = [_CHECKS[command["kind"]](command) for command in commands]
    print(json.dumps(found))


@contextlib.contextmanager
def environment(env):
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- the Trainer's arguments ----


def _trainer(command):
    """``TrainingArguments`` of a host without a GPU, DeepSpeed's configuration apart."""
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(TrainingArguments)
    with environment(command["env"]):
        words = command["words"]
        if words[0].endswith(".yaml"):
            import yaml

            content = yaml.safe_load(Path(words[0]).read_text())
            (parsed,) = parser.parse_dict({**content, "deepspeed": None, "use_cpu": True})
            written = content.get("deepspeed")
        else:
            at = words.index("--deepspeed") if "--deepspeed" in words else len(words)
            written = json.loads(Path(words[at + 1]).read_text()) if at < len(words) else None
            (parsed,) = parser.parse_args_into_dataclasses([*words[:at], *words[at + 2 :], "--use_cpu"])
    names = (
        *("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "activation_checkpointing"),
        *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers", "torch_compile"),
        *("save_strategy", "eval_strategy", "report_to", "push_to_hub", "load_best_model_at_end", "output_dir"),
        *("logging_strategy", "logging_steps", "logging_nan_inf_filter", "disable_tqdm", "max_steps"),
        *("fsdp_plugin_args", "learning_rate"),
    )
    return {name: getattr(parsed, name) for name in names} | {"deepspeed": written}


# ---- Accelerate ----


def _launch(command):
    """The environment that ``accelerate launch`` itself makes, of the variables that are ours."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command["words"]))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        _, env = launch.prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.multi_gpu:
        env = launch.prepare_multi_gpu_env(args)
    else:
        _, env = launch.prepare_simple_launcher_cmd_env(args)
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    return {name: value for name, value in env.items() if name.startswith(prefixes)}


def _plugin(command):
    """What Accelerate's own configuration classes read from the variables of a rank."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    with environment(command["env"]):
        plugin = FullyShardedDataParallelPlugin()
        return {
            "version": plugin.fsdp_version,
            "reshard_after_forward": plugin.reshard_after_forward,
            "activation_checkpointing": plugin.activation_checkpointing,
        }


# ---- DeepSpeed ----


class _Ranks:
    """What DeepSpeed queries of a model-parallel unit: how many ranks split the batch."""

    def get_data_parallel_world_size(self):
        return 2


def _deepspeed(command):
    import deepspeed

    deepspeed.comm.get_rank = lambda: 0
    config = deepspeed.DeepSpeedConfig(command["words"][-1], mpu=_Ranks())
    return {
        "micro_batch_size": config.train_micro_batch_size_per_gpu,
        "num_microbatches": config.gradient_accumulation_steps,
        "global_batch_size": config.train_batch_size,
        "zero_stage": int(config.zero_optimization_stage),
        "bf16": config.bfloat16_config.enabled,
        "autocast": config.torch_autocast_enabled,
        "steps_per_print": config.steps_per_print,
        "tensorboard": config.monitor_config.tensorboard.enabled,
    }


_CHECKS = {"trainer": _trainer, "launch": _launch, "plugin": _plugin, "deepspeed": _deepspeed}

if __name__ == "__main__":
    main(*sys.argv[1:])
