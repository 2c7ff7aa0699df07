"""The environment that ``accelerate launch`` makes for the ranks it starts: we start them ourselves, and set it.

Names and defaults are those of Accelerate 1.15 (``commands/launch.py``, ``utils/launch.py``). Its launcher starts one
process only where there is no accelerator, and several that never meet with FSDP; ranks with torchrun's variables meet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.recipes import documents
from orchestrator.recipes.arguments import Argument, Words, as_truth, either_dash, read
from orchestrator.recipes.base import Note
from orchestrator.recipes.launchers import Launched, without_launcher
from orchestrator.recipes.overlays.edit import Edit

CONFIG, DEEPSPEED_CONFIG = "accelerate", "accelerate_deepspeed"
"""Placeholders of the launcher's YAML, and of DeepSpeed's configuration that it points to."""
_FSDP_DEFAULTS: Mapping[str, Any] = {
    "version": 1,
    "sharding_strategy": "FULL_SHARD",
    "reshard_after_forward": "true",
    "offload_params": "false",
    "min_num_params": 100_000_000,
    "auto_wrap_policy": None,
    "transformer_layer_cls_to_wrap": None,
    "backward_prefetch": None,
    "state_dict_type": None,
    "forward_prefetch": "false",
    "use_orig_params": "true",
    "cpu_ram_efficient_loading": "true",
    "sync_module_states": "true",
    "activation_checkpointing": "false",
    "activation_checkpointing_offload": "false",
}
_FSDP_VARIABLES = {"transformer_layer_cls_to_wrap": "TRANSFORMER_CLS_TO_WRAP"}
_KEPT = ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "backward_prefetch", "state_dict_type")
"""Settings of FSDP whose capitals matter."""
_DEEPSPEED: Mapping[str, str] = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_DYNAMO = ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "sp_size", "sp_backend")


def find_launch_files(argv: Words, cwd: str) -> dict[str, str]:
    """Path by placeholder of the launcher's YAML, the user's own default one included, and of DeepSpeed's JSON."""
    launched = without_launcher(argv)
    if launched.launcher != "accelerate":
        return {}
    given = read(launched.options, either_dash("--config-file"))
    path = Path(cwd, given) if isinstance(given, str) and given else default_config()
    if not path.is_file():
        return {}
    found = {CONFIG: str(path)}
    content = documents.load(path.read_text(encoding="utf-8"), str(path))
    section = content.get("deepspeed_config") if isinstance(content, Mapping) else None
    named = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    named = read(launched.options, either_dash("--deepspeed-config-file")) or named
    if isinstance(named, str) and Path(cwd, named).is_file():
        found[DEEPSPEED_CONFIG] = str(Path(cwd, named))
    return found


def default_config() -> Path:
    """Where ``accelerate config`` puts its file."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home, "accelerate", "default_config.yaml").expanduser()


def environment(options: Words, edit: Edit) -> dict[str, str]:
    """Variables for the ranks, from the launcher's words and its YAML; what is not understood is noted."""
    config = _config(edit)
    kind = _kind(options, config)
    if kind in ("MEGATRON_LM", "XLA", "TPU"):
        edit.notes.append(
            Note(knob="layout", message=f"accelerate launch with {kind} is not supported", severity="error")
        )
    env = {"ACCELERATE_MIXED_PRECISION": str(_said(options, config, "mixed_precision", "no")).lower()}
    if as_truth(_said(options, config, "cpu", False)) or as_truth(config.get("use_cpu", False)):
        env["ACCELERATE_USE_CPU"] = "true"
    env |= dict(_dynamo(options, config))
    if kind == "FSDP":
        env |= _fsdp(options, _section(config, "fsdp_config"))
    if kind == "DEEPSPEED":
        env |= dict(_deepspeed(options, _section(config, "deepspeed_config"), edit))
    if sizes := _section(config, "parallelism_config"):
        env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        names = {name: sizes.get(f"parallelism_config_{name}", sizes.get(name)) for name in _SIZES}
        env |= {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in names.items() if size is not None}
    return env


def world_size(launched: Launched, edit: Edit) -> int | None:
    """Ranks that it would start, by its words or its YAML."""
    given = _config(edit).get("num_processes")
    return launched.world_size or (given if isinstance(given, int) and given > 0 else None)


# ---- parts ----


def _config(edit: Edit) -> Mapping[str, Any]:
    content = documents.load(edit.files[CONFIG], edit.names.get(CONFIG, CONFIG)) if CONFIG in edit.files else {}
    return content if isinstance(content, Mapping) else {}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _kind(options: Words, config: Mapping[str, Any]) -> str:
    """The distributed type, whose options win over the file."""
    names = {"deepspeed": "DEEPSPEED", "fsdp": "FSDP", "megatron-lm": "MEGATRON_LM"}
    asked = [kind for name, kind in names.items() if read(options, either_dash(f"--use-{name}", "flag"))]
    return asked[0] if asked else str(config.get("distributed_type", "NO"))


def _said(options: Words, config: Mapping[str, Any], name: str, default: Any) -> Any:
    """What an option says, else the file."""
    flag = name in ("cpu", "use_fullgraph")
    given = read(options, either_dash(f"--{name}", "flag" if flag else "value"))
    return config.get(name, default) if given is None else given


def _dynamo(options: Words, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    section = _section(config, "dynamo_config")
    for name in _DYNAMO:
        argument = either_dash(f"--dynamo-{name}", "flag" if name.startswith("use_") else "value")
        given = read(options, argument)
        given = section.get(f"dynamo_{name}", section.get(name)) if given is None else given
        if given is not None:
            yield f"ACCELERATE_DYNAMO_{name.upper()}", str(given).upper() if name == "backend" else str(given)


def _fsdp(options: Words, section: Mapping[str, Any]) -> dict[str, str]:
    env = {"ACCELERATE_USE_FSDP": "true"}
    for name, default in _FSDP_DEFAULTS.items():
        given = read(options, either_dash(f"--fsdp-{name}"))
        given = section.get(f"fsdp_{name}", section.get(name, default)) if given is None else given
        if given is not None:
            variable = _FSDP_VARIABLES.get(name, name.upper())
            env[f"FSDP_{variable}"] = str(given) if name in (*_KEPT, "sharding_strategy") else str(given).lower()
    return env


def _deepspeed(options: Words, section: Mapping[str, Any], edit: Edit) -> Iterator[tuple[str, str]]:
    yield "ACCELERATE_USE_DEEPSPEED", "true"
    for name, variable in _DEEPSPEED.items():
        given = read(options, Argument(name=f"--{name}", aliases=(f"--{name.replace('_', '-')}",)))
        given = section.get(name) if given is None else given
        if name == "deepspeed_config_file" and DEEPSPEED_CONFIG in edit.files:
            given = f"{{{DEEPSPEED_CONFIG}}}"
        if given is not None:
            yield variable, str(given).lower() if isinstance(given, bool) else str(given)
