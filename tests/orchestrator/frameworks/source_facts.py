"""What settings frameworks have that are read from their sources, where importing them takes another machine.

``python -m tests.orchestrator.frameworks.source_facts mindformers FOLDER`` writes ``data/mindformers.json`` to standard
output; FOLDER holds the unpacked wheel, or for Megatron-LM, whose parser runs, the repository.
"""

import argparse
import ast
import contextlib
import sys
import typing
from pathlib import Path

from orchestrator.frameworks.catalog import recipe
from tests.orchestrator.frameworks.facts import write

PACKAGES = ("megatron-0.16", "megatron-0.19", "mindformers", "paddlenlp")
ANY = {"types": None, "choices": None}
SECTIONS = ("parallel_config", "recompute_config", "runner_config", "parallel", "context", "optimizer", "lr_schedule")
SECTIONS += ("runner_wrapper", "trainer", "train_dataset_task", "moe_config")
_PIPELINE, _OPTIMIZER = "parallel.pipeline_config", "parallel.parallel_optimizer_config"
_SCHEDULERS = ["gpipe", "1f1b", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v"]
MINDSPORE = {
    f"{_PIPELINE}.pipeline_interleave": {"types": ["bool"], "choices": None},
    f"{_PIPELINE}.pipeline_scheduler": {"types": None, "choices": _SCHEDULERS},
    f"{_OPTIMIZER}.gradient_accumulation_shard": {"types": ["bool"], "choices": None},
    f"{_OPTIMIZER}.optimizer_level": {"types": None, "choices": ["level1", "level2", "level3"]},
    f"{_OPTIMIZER}.optimizer_weight_shard_size": {"types": ["int"], "choices": None},
    "parallel.dataset_strategy": ANY,
}
"""Read by MindSpore itself: documented with ``mindspore.set_auto_parallel_context``, 2.7."""
DATA_PIPELINE = ("data_loader.type", "data_loader.dataset_dir", "data_loader.shuffle", "input_columns")
DATA_PIPELINE += ("drop_remainder", "num_parallel_workers", "prefetch_size")
"""Of MindFormers' ``train_dataset``, which takes any names; these stand in its own configurations."""
RUN_PRETRAIN = ("model_name_or_path", "tokenizer_name_or_path", "input_dir", "split", "max_seq_length")
"""Added by PaddleNLP's ``llm/run_pretrain.py``, which is not in the wheel."""
ANY_MODEL = ("model:architectures", "model:model_type", "model:hidden_act")
"""Of every model's configuration file."""


def collect(package, folder):
    """``package`` may end in a version, which is then the one that the folder must hold."""
    found = {"megatron": _megatron, "mindformers": _mindformers, "paddlenlp": _paddlenlp}[package.partition("-")[0]](
        Path(folder)
    )
    version, settings = found
    assert version.startswith(package.partition("-")[2])
    return {"package": package, "version": version, "settings": dict(sorted(settings.items()))}


# ---- Megatron-LM ----


def _megatron(folder):
    """From the real parser, which has many hundred: only those that exports may write."""
    sys.path.insert(0, str(folder))
    if not hasattr(typing, "override"):  # Python 3.12
        typing.override = lambda function: function
    from megatron.core import package_info
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {name: _argument(action) for action in parser._actions for name in action.option_strings}
    declared = {name for setting in recipe("megatron").settings for name in setting.names}
    found = {name: fact for name, fact in known.items() if name in declared}
    return package_info.__version__, found


def _argument(action):
    if action.nargs == 0:
        return {"types": ["bool"], "choices": None}
    kind = {int: "int", float: "float"}.get(action.type, "str")
    choices = list(action.choices) if action.choices else None
    return {
        "types": None if choices else [kind],
        "choices": [getattr(choice, "name", str(choice)) for choice in choices] if choices else None,
    }


# ---- sources ----


def classes(path):
    return {node.name: node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}


def parameters(cls):
    """Arguments of ``__init__``."""
    (made,) = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return [argument.arg for argument in made.args.args if argument.arg != "self"]


def _version(folder, package):
    (metadata,) = folder.glob(f"{package}-*.dist-info/METADATA")
    return next(line.split()[1] for line in metadata.read_text().splitlines() if line.startswith("Version: "))


def _literal(node):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


_KINDS = {bool: ["bool"], int: ["int"], float: ["float"], str: ["str"]}


def _mindformers(folder):
    """Sections of the template that checks every YAML, arguments of the model's configuration, and a few choices."""
    root = folder / "mindformers"
    template = classes(root / "tools" / "register" / "template.py")
    owners = {_section(node): node for node in template.values() if _section(node)}
    found = {}
    for name in ("general_config", *SECTIONS):
        prefix = "" if name == "general_config" else f"{name}."
        found |= {f"{prefix}{key}": fact for key, fact in _template_keys(owners[name]).items()}
    model = classes(root / "models" / "llama" / "llama_config.py")["LlamaConfig"]
    found |= {f"model.model_config.{name}": ANY for name in parameters(model)}
    found["model.model_config.type"] = {"types": None, "choices": ["LlamaConfig"]}
    found["model.arch.type"] = {"types": None, "choices": _registered(root / "models" / "llama" / "llama.py")}
    found["parallel_config.context_parallel_algo"] = {"types": None, "choices": _algorithms(root)}
    found["lr_schedule.type"] = {"types": None, "choices": sorted(classes(root / "core" / "lr" / "lr_schedule.py"))}
    found["optimizer.type"] = {"types": None, "choices": sorted(classes(root / "core" / "optim" / "adamw.py"))}
    found["runner_wrapper.type"] = {"types": None, "choices": sorted(classes(root / "wrapper" / "wrapper.py"))}
    found["trainer.model_name"] = ANY
    found |= {f"train_dataset.{name}": ANY for name in DATA_PIPELINE}
    return _version(folder, "mindformers"), found | MINDSPORE


def _section(node):
    for line in node.body:
        if isinstance(line, ast.Assign) and line.targets[0].id == "_name":
            return _literal(line.value)
    return None


def _template_keys(node):
    values = {line.targets[0].id: _literal(line.value) for line in node.body if isinstance(line, ast.Assign)}
    kinds = {key: _KINDS.get(type(value)) for key, value in values.items() if not key.startswith("_")}
    if "recompute_config" in (values.get("_name"),):  # truth, or a list per stage
        kinds |= {key: None for key in kinds if "recompute" in key}
    kinds |= dict.fromkeys(values.get("_required_keys") or ())
    return {key: {"types": types, "choices": None} for key, types in kinds.items()}


def _registered(path):
    return sorted(name for name, node in classes(path).items() if node.decorator_list)


def _algorithms(root):
    node = classes(root / "modules" / "transformer" / "transformer.py")["ContextParallelAlgo"]
    return sorted(_literal(line.value) for line in node.body if isinstance(line, ast.Assign))


def _paddlenlp(folder):
    """Fields of the training arguments, the arguments every large model takes, and the model's configuration."""
    root = folder / "paddlenlp"
    arguments = classes(root / "trainer" / "training_args.py")["TrainingArguments"]
    fields = {
        line.target.id: ast.unparse(line.annotation) for line in arguments.body if isinstance(line, ast.AnnAssign)
    }
    for line in classes(root / "transformers" / "configuration_utils.py")["LlmMetaConfig"].body:
        if isinstance(line, ast.Assign):
            fields |= {_literal(entry.elts[0]): ast.unparse(entry.elts[1]) for entry in line.value.elts}
    found = {name: {"types": _annotated(text), "choices": None} for name, text in fields.items()}
    model = classes(root / "transformers" / "llama" / "configuration.py")["LlamaConfig"]
    mixtral = classes(root / "transformers" / "mixtral" / "configuration.py")["MixtralConfig"]
    found |= {f"model:{name}": ANY for name in (*parameters(model), *parameters(mixtral))}
    found |= dict.fromkeys(RUN_PRETRAIN, ANY) | dict.fromkeys(ANY_MODEL, ANY)
    found["recompute_granularity"] = {"types": None, "choices": ["full", "core_attn", "full_attn"]}
    return _version(folder, "paddlenlp"), found


def _annotated(text):
    inner = text.removeprefix("Optional[").removesuffix("]") if text.startswith("Optional[") else text
    kind = {"bool": "bool", "int": "int", "float": "float", "str": "str"}.get(inner)
    return [kind] if kind else ["list"] if inner.startswith("List") else None


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        facts = collect(*sys.argv[1:])
    sys.stdout.write(write(facts))
