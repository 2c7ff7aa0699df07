"""What settings the real packages have; ``python -m tests.orchestrator.frameworks.facts deepspeed`` writes
``data/deepspeed.json``.

Names are those of the recipes, so that the tests can look up every setting that an export writes.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import sys
import types
import typing
from pathlib import Path

DATA = Path(__file__).parent / "data"
PACKAGES = ("accelerate", "deepspeed", "torchtitan", "transformers")
_SCALARS = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null", list: "list", dict: "dict"}


def frozen(package):
    return json.loads((DATA / f"{package}.json").read_text())


def collect(package):
    """From the installed package."""
    settings = {"accelerate": _accelerate, "deepspeed": _deepspeed, "torchtitan": _torchtitan}.get(
        package, _transformers
    )()
    version = importlib.metadata.version(package)
    return {"package": package, "version": version, "settings": dict(sorted(settings.items()))}


def problems(facts, settings):
    """Settings that the package does not have, or whose value it does not take."""
    known = facts["settings"]
    for name, value in settings.items():
        if name not in known:
            yield f"no setting {name}"
            continue
        types_, choices = known[name]["types"], known[name]["choices"]
        if choices is not None and value not in choices:
            yield f"{name}: {value!r} is none of {choices}"
        elif types_ is not None and _kind(value) not in types_ and not (_kind(value) == "int" and "float" in types_):
            yield f"{name}: {value!r} is no {types_}"


def _kind(value):
    return _SCALARS.get(list if isinstance(value, tuple) else type(value))


def _fact(annotation=None, choices=None):
    """Without an annotation any value will do."""
    found, options = set(), choices
    for member in _members(annotation) if annotation is not None else ():
        if typing.get_origin(member) is typing.Literal:
            options = [*(options or []), *typing.get_args(member)]
        else:
            found.add(_SCALARS.get(typing.get_origin(member) or member, "any"))
    if annotation is None or "any" in found or options is not None:
        return {"types": None, "choices": [*options, *([None] if "null" in found else [])] if options else None}
    return {"types": sorted(found), "choices": None}


def _members(annotation):
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(annotation) for member in _members(part)]
    return (
        _members(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is typing.Annotated else [annotation]
    )


def _fields(prefix, cls):
    hints = typing.get_type_hints(cls)
    return {f"{prefix}{field.name}": _fact(hints[field.name]) for field in dataclasses.fields(cls)}


def _torchtitan():
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    parts = {
        "training": TrainingConfig,
        "parallelism": ParallelismConfig,
        "compile": CompileConfig,
        "dataloader": HuggingFaceTextDataLoader.Config,
        "lr_scheduler": LRSchedulersContainer.Config,
        "loss": CrossEntropyLoss.Config,
        "debug": DebugConfig,
    }
    found = {name: fact for part, cls in parts.items() for name, fact in _fields(f"{part}.", cls).items()}
    chunks = _fields("loss.", ChunkedLossWrapper.Config)["loss.num_chunks"]
    return found | {"loss.num_chunks": chunks, "dataloader.dataset": _fact(choices=sorted(DATASETS))}


def _deepspeed():
    from deepspeed.runtime import config, constants
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    file = "deepspeed.json:"
    models = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    models |= {"tensor_parallel": TPTrainingConfig}
    models |= {"zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig}
    found = {
        f"{file}{section}.{name}": _fact(field.annotation)
        for section, model in models.items()
        for name, field in model.model_fields.items()
    }
    found[f"{file}zero_optimization.stage"] = _fact(choices=[0, 1, 2, 3])
    found |= {f"{file}activation_checkpointing.{name}": _fact() for name in ACT_CHKPT_DEFAULT}
    for name in (
        constants.TRAIN_BATCH_SIZE,
        constants.TRAIN_MICRO_BATCH_SIZE_PER_GPU,
        constants.GRADIENT_ACCUMULATION_STEPS,
    ):
        found[f"{file}{name}"] = _fact(int)
    found[f"{file}{constants.GRADIENT_CLIPPING}"] = _fact(float)
    found[f"{file}{constants.DATALOADER_DROP_LAST}"] = _fact(bool)
    found[f"{file}{constants.COMMUNICATION_DATA_TYPE}"] = _fact(choices=["fp16", "bf16", "fp32"])
    found[f"{file}{constants.DATA_TYPES}.{constants.GRAD_ACCUM_DTYPE}"] = _fact(choices=["fp16", "bf16", "fp32"])
    autocast = f"{file}{constants.TORCH_AUTOCAST}."
    found[f"{autocast}{constants.TORCH_AUTOCAST_ENABLED}"] = _fact(bool)
    found[f"{autocast}{constants.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES}"] = _fact(list)
    found[f"{autocast}{constants.TORCH_AUTOCAST_DTYPE}"] = _fact(choices=["bfloat16", "float16"])
    found[f"{file}optimizer.type"] = _fact(choices=["AdamW"])
    assert config.ADAMW_OPTIMIZER == "adamw"
    for name in ("lr", "betas", "eps", "weight_decay", config.TORCH_ADAM_PARAM, config.ADAM_W_MODE):
        found[f"{file}optimizer.params.{name}"] = _fact()
    source = Path(importlib.import_module("deepspeed").__file__).read_text()
    for name in ("sequence_parallel_size", "data_parallel_size"):
        assert f'config["{name}"]' in source
        found[f"{file}{name}"] = _fact(int)
    return found


def _accelerate():
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DistributedType, DynamoBackend

    file = "accelerate.yaml:"
    found = _fields(file, ClusterConfig)
    for action in launch_command_parser()._actions:
        for section, prefix in (
            ("fsdp_config", "fsdp_"),
            ("parallelism_config", "parallelism_config_"),
            ("dynamo_config", "dynamo_"),
        ):
            if action.dest.startswith(prefix):
                # On the command line numbers are words; the file writes them as numbers.
                choices = [int(word) if word.isdigit() else word for word in action.choices or ()]
                found[f"{file}{section}.{action.dest}"] = _fact(choices=choices or None)
    found[f"{file}distributed_type"] = _fact(choices=[kind.value for kind in DistributedType])
    found[f"{file}compute_environment"] = _fact(choices=["LOCAL_MACHINE"])
    found[f"{file}mixed_precision"] = _fact(choices=["no", "fp16", "bf16", "fp8"])
    found[f"{file}dynamo_config.dynamo_backend"] = _fact(choices=[backend.value for backend in DynamoBackend])
    found[f"{file}parallelism_config.parallelism_config_cp_comm_strategy"] = _fact(choices=["allgather", "alltoall"])
    return found


def _transformers():
    from accelerate.utils import GradientAccumulationPlugin
    from transformers import LlamaConfig, TrainingArguments
    from transformers.training_args import OptimizerNames

    found = _fields("training_args.json:", TrainingArguments)
    found["training_args.json:fsdp"] = _fact(bool)
    found["training_args.json:optim"] = _fact(choices=[name.value for name in OptimizerNames])
    for line in TrainingArguments.__doc__.partition("fsdp_config (")[2].partition("> DeepSpeed")[0].splitlines():
        if line.strip().startswith("- ") and "(`" in line:
            found[f"training_args.json:fsdp_config.{line.split()[1]}"] = _fact()
    found |= _fields("training_args.json:accelerator_config.gradient_accumulation_kwargs.", GradientAccumulationPlugin)
    shape = LlamaConfig().to_dict()
    shape |= {f"rope_parameters.{name}": value for name, value in shape.pop("rope_parameters").items()}
    return found | {f"model.json:{name}": _fact() for name in shape} | {"model.json:architectures": _fact()}


def write(facts):
    """JSON with a line for every setting."""
    lines = [f"  {json.dumps(name)}: {json.dumps(fact)}" for name, fact in facts["settings"].items()]
    head = f' "package": "{facts["package"]}",\n "version": "{facts["version"]}",\n "settings": {{\n'
    return "{\n" + head + ",\n".join(lines) + "\n }\n}\n"


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = collect(sys.argv[1])
    sys.stdout.write(write(found))
