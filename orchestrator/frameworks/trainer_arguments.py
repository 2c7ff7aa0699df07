"""Programs on the Trainer of transformers and on Accelerate: their arguments, from words, from a YAML or JSON file, or
both; the variables of ``accelerate launch``; and the engine (DDP, DeepSpeed, FSDP) that both select.

Names and defaults of the launcher are those of Accelerate 1.15 (``commands/launch.py``, ``utils/launch.py``). Without
an accelerator it starts only one process, and with FSDP several that never rendezvous, so tune-cluster starts the ranks
itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

from orchestrator.frameworks import documents
from orchestrator.frameworks.arguments import Argument, Words, as_truth, either_dash, read, remove, write
from orchestrator.frameworks.documents import ABSENT
from orchestrator.frameworks.edit import Edit, EditedFile
from orchestrator.frameworks.launchers import Launched, program_of, without_launcher
from orchestrator.frameworks.spelling import Note

ARGS, DEEPSPEED, FSDP = "args", "deepspeed", "fsdp_config"
"""Placeholders of the file of arguments, and of the configuration files that arguments refer to."""
SWITCHES = frozenset(
    [
        "activation_checkpointing",
        "auto_find_batch_size",
        "bf16",
        "bf16_full_eval",
        "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "disable_gradient_checkpointing",
        "disable_tqdm",
        "do_eval",
        "do_predict",
        "eval_on_start",
        "fp16",
        "fp16_full_eval",
        "gradient_checkpointing",
        "load_best_model_at_end",
        "logging_first_step",
        "logging_nan_inf_filter",
        "plot_loss",
        "push_to_hub",
        "tf32",
        "torch_compile",
        "use_cpu",
        "no_cuda",
        "use_reentrant_gc",
        "add_version",
        "pure_bf16",
    ]
)
"""Boolean arguments."""
_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How the arguments of a framework on the Trainer differ from the Trainer's own."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of missing arguments that differ from the Trainer's; None: unknown."""
    overrides: Literal["argument", "assignment"] = "argument"
    """Spelling of arguments outside a file of arguments: ``--lr 1``, or ``lr=1`` as in OmegaConf."""
    attention: tuple[str, Mapping[str, str]] | None = None
    """Name of the argument for the attention kernel, and our names of its values; the first known one is written. None
    if only some programs have such an argument, like transformers' examples."""
    recompute: str = "gradient_checkpointing"
    """Name of the argument for recomputing activations."""
    presets: bool = False
    """Whether ``deepspeed`` may name a stage: ``zero2``."""


class FileSection:
    """The part of a configuration file below a key; all of it without a key."""

    def __init__(self, document: EditedFile, key: str = "") -> None:
        self._document = document
        self._head = f"{key}." if key else ""

    def get(self, key: str, default: Any = None) -> Any:
        return self._document.get(self._head + key, default)

    def has(self, key: str) -> bool:
        return self._document.has(self._head + key)

    def put(self, changes: Mapping[str, Any]) -> None:
        self._document.put({self._head + key: value for key, value in changes.items()})


class TrainerArguments:
    """Settings of a command being edited, by name: the Trainer's arguments, and those of the engine."""

    def __init__(self, edit: Edit, dialect: Dialect) -> None:
        self.edit = edit
        self.dialect = dialect
        self.engine = ShardingEngine(edit, self)
        self._program = program_of(edit.argv)
        placed = [_placeholder(word) for word in file_words(self._program.arguments)]
        self.file = next((name for name in placed if name in edit.files), None)
        """Placeholder of the file of arguments, if the command has one."""
        self._document = EditedFile(edit, self.file or "")
        for name in (DEEPSPEED, FSDP):
            self._place(name)

    def _place(self, name: str) -> None:
        """Give an inline configuration a file of its own, in place of its path. One referred to by a file of arguments
        is put inline instead of its path, because a copy cannot be named there."""
        given = self.current(name)
        if not isinstance(given, str):
            return
        is_in_command = read(self.words, self._argument(name)) is not None
        if is_in_command and given.lstrip().startswith("{") and _placeholder(given) == given:
            self.edit.files[name], self.edit.names[name] = given, f"{name}.json"
            self.put({name: f"{{{name}}}"})
        elif not is_in_command and name in self.edit.files and PurePath(given).name == self.edit.names.get(name):
            self._document.put({name: documents.load(self.edit.files[name], given)})

    # ---- places of arguments ----

    @property
    def words(self) -> Words:
        return self.edit.argv[len(self._program.head) :]

    @words.setter
    def words(self, words: Words) -> None:
        self.edit.argv = (*self._program.head, *words)

    # ---- reading ----

    def current(self, name: str) -> Any:
        """An argument as given, or :data:`ABSENT`."""
        configured = read(self.words, self._argument(name))
        return self._document.get(name, ABSENT) if configured is None else configured

    def get(self, name: str, default: Any = None) -> Any:
        """A setting as given; ``default`` if missing."""
        if is_of_engine(name):
            return self.engine.get(name, default)
        given = self.current(name)
        return default if given is ABSENT or given in (None, "None", "null", "") else given

    def is_on(self, name: str) -> bool:
        return truth(self.get(name)) is True

    def section(self, name: str) -> FileSection | None:
        """The mapping of an argument, in the file of arguments or in a separate one; None if there is none."""
        given = self.current(name)
        if isinstance(given, Mapping):
            return FileSection(self._document, name)
        placed = _placeholder(given) if isinstance(given, str) else ""
        return FileSection(EditedFile(self.edit, placed)) if placed in self.edit.files else None

    # ---- writing ----

    def put(self, values: Mapping[str, Any]) -> None:
        """Set arguments where they are given now; new ones go into the file, or after the words."""
        for name, value in values.items():
            argument = self._argument(name)
            if is_of_engine(name):
                self.engine.put(name, value)
            elif self._is_in_file(name):
                self._document.put({name: value})
            elif isinstance(value, bool) and argument.takes == "switch":
                self.words = write(self.words, argument, value)
            else:
                text = json.dumps(value) if isinstance(value, Mapping) else str(value)
                self.words = write(self.words, argument, text.lower() if isinstance(value, bool) else text)

    def make_section(self, name: str, content: Mapping[str, Any], placeholder: str) -> None:
        """Set an argument to a mapping: in the file of arguments, or in a separate file under ``placeholder``."""
        if self._is_in_file(name):
            self._document.put({name: dict(content)})
            return
        file = f"{placeholder}.json"
        self.edit.files[placeholder], self.edit.names[placeholder] = documents.dumped(dict(content), file), file
        self.put({name: f"{{{placeholder}}}"})

    def drop(self, *names: str) -> None:
        """Remove arguments."""
        self.words = remove(self.words, *(self._argument(name) for name in names))
        self._document.drop(*names)

    def _is_in_file(self, name: str) -> bool:
        """Whether an argument is in the file of arguments, or belongs there: a program with only a file takes no
        further words."""
        if self.file is None or read(self.words, self._argument(name)) is not None:
            return False
        is_alone = len(self.words) == 1 or self.dialect.overrides == "assignment"
        return is_alone or self._document.has(name)

    def _argument(self, name: str) -> Argument:
        if self.dialect.overrides == "assignment" and self.file is not None:
            return Argument(name=name, takes="assignment")
        if name in SWITCHES:
            return either_dash(f"--{name}", "switch", negative=(f"--no_{name}",))
        return either_dash(f"--{name}")


def file_words(words: Words) -> Words:
    """Words that name a file of arguments: a single word, the first one before assignments, that of ``--config``."""
    config = read(words, Argument(name="--config"))
    if isinstance(config, str) and config:
        return (config,)
    firsts = words[1:2] if words[:1] == ("train",) else words[:1]
    rest = words[words.index(firsts[0]) + 1 :] if firsts else ()
    is_alone = all("=" in word and not word.startswith("-") for word in rest)
    return firsts if is_alone and firsts and not firsts[0].startswith("-") else ()


def find_files(argv: Words, cwd: str, *, names: Iterable[str] = (DEEPSPEED, FSDP)) -> dict[str, str]:
    """Path by placeholder of the file of arguments, and of the files that arguments in it or outside it refer to."""
    words, found = program_of(argv).arguments, {}
    content: Any = {}
    for word in file_words(words):
        path = Path(cwd, word)
        if word.endswith(_SUFFIXES) and path.is_file():
            found[ARGS] = str(path)
            content = documents.load(path.read_text(encoding="utf-8"), word)
    for name in names:
        given = read(words, either_dash(f"--{name}")) or read(words, Argument(name=name, takes="assignment"))
        given = given or (content.get(name) if isinstance(content, Mapping) else None)
        if isinstance(given, str) and given.endswith(_SUFFIXES) and Path(cwd, given).is_file():
            found[name] = str(Path(cwd, given))
    return found


def _placeholder(word: str) -> str:
    """The name in ``{name}``; otherwise the word itself."""
    return word[1:-1] if word.startswith("{") and word.endswith("}") and word[1:-1].isidentifier() else word


def truth(given: Any) -> bool | None:
    """Truth of a value from words or a file; None if it has none."""
    return None if given is None else as_truth(given if isinstance(given, bool) else str(given))


MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
USE_DEEPSPEED, USE_FSDP = "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
DEEPSPEED_FILE, DEEPSPEED_STAGE = "ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_ZERO_STAGE"
MADE = "deepspeed_made"
"""Placeholder of a DeepSpeed configuration that the command did not have."""
_PRESETS = {f"zero{stage}{offload}": stage for stage in range(4) for offload in ("", "_offload")}
_STRATEGIES = {"FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2}
"""Stages by the strategy of FSDP's version 1, given by its name or number."""
_NEW: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
"""A DeepSpeed configuration that leaves everything but ZeRO to the Trainer's arguments."""
ENGINE, STAGE = "engine:kind", "engine:stage"
"""Settings of the engine: ``ddp``, ``deepspeed`` or ``fsdp``, and ZeRO's stage, which selects another engine if
necessary. Others are ``deepspeed:KEY`` of its configuration, ``fsdp:KEY``, and ``env:NAME`` of the launcher's
variables."""
CONFIGURATION, RANKS = "engine:configuration", "engine:ranks"
"""Read-only settings: DeepSpeed's :class:`FileSection`, if it is the engine, and the number of started ranks."""


def is_of_engine(name: str) -> bool:
    return ":" in name


class ShardingEngine:
    """The engine of a command being edited; ``arguments`` are the Trainer's, if the program has them."""

    def __init__(self, edit: Edit, arguments: TrainerArguments | None) -> None:
        self.edit = edit
        self._arguments = arguments

    # ---- by name of setting ----

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a setting; ``default`` if missing."""
        owner, _, key = name.partition(":")
        config = self.config if self.kind == "deepspeed" else None
        own = {ENGINE: self.kind, CONFIGURATION: config, RANKS: self.edit.world_size}
        if name == STAGE:
            found: Any = self.stage
        elif owner == "deepspeed":
            found = config.get(key) if config is not None else None
        elif owner == "env":
            found = self.variable(key)
        else:
            found = own[name] if owner == "engine" else self.fsdp(key)
        return default if found is None else found

    def put(self, name: str, value: Any) -> None:
        owner, _, key = name.partition(":")
        if name == STAGE:
            self._put_stage(value)
        elif owner == "deepspeed":
            self.put_config({key: value})
        elif owner == "env":
            self.edit.env[key] = value
        else:
            self.put_fsdp(key, value)

    def _put_stage(self, stage: int) -> None:
        """Shard with the command's engine; with DeepSpeed if it has none."""
        if self.kind == "fsdp" and stage == 0:
            self.leave()
        elif self.kind == "fsdp" and self._has_strategy:
            if stage != self.stage:
                self.put_fsdp("sharding_strategy", "FULL_SHARD" if stage == 3 else "SHARD_GRAD_OP")
        elif self.kind == "fsdp":
            self.put_fsdp("reshard_after_forward", stage == 3)
        elif self.kind == "deepspeed" and self.preset is not None:
            self.put_preset(stage)
        elif self.kind == "deepspeed" or stage:
            self.put_config({"zero_optimization.stage": stage})

    def variable(self, name: str) -> str | None:
        return self.edit.env.get(name, self.edit.command_env.get(name))

    def is_set(self, name: str) -> bool:
        return as_truth(self.variable(name)) is True

    # ---- selection of the engine ----

    @property
    def by_arguments(self) -> Literal["deepspeed", "fsdp"] | None:
        """The engine that the Trainer's arguments select."""
        if self._arguments is None:
            return None
        if self._is_specified("deepspeed"):
            return "deepspeed"
        return "fsdp" if self._is_specified("fsdp") else None

    @property
    def kind(self) -> Literal["ddp", "deepspeed", "fsdp"]:
        if (requested := self.by_arguments) is not None:
            return requested
        if self.is_set(USE_DEEPSPEED):
            return "deepspeed"
        return "fsdp" if self.is_set(USE_FSDP) else "ddp"

    @property
    def is_on_cpu(self) -> bool:
        """Whether the command selects the CPU."""
        requested = self._arguments is not None and (
            self._arguments.is_on("use_cpu") or self._arguments.is_on("no_cuda")
        )
        return requested or self.is_set("ACCELERATE_USE_CPU")

    def _is_specified(self, name: str) -> bool:
        assert self._arguments is not None
        given = self._arguments.current(name)
        if name == "fsdp" and given == "":
            return True  # --fsdp without a value
        return given not in (ABSENT, None, "", "None", "null", "no", [], {}) and as_truth(_plain(given)) is not False

    # ---- DeepSpeed ----

    @property
    def config(self) -> FileSection | None:
        """DeepSpeed's configuration; None if there is no readable one."""
        if self.by_arguments == "deepspeed" and self._arguments is not None:
            return self._arguments.section("deepspeed")
        placed = (self.variable(DEEPSPEED_FILE) or "").strip("{}")
        return FileSection(EditedFile(self.edit, placed)) if placed in self.edit.files else None

    @property
    def preset(self) -> int | None:
        """The stage of a configuration that is given by one of ms-swift's names."""
        if self._arguments is None or not self._arguments.dialect.presets:
            return None
        return _PRESETS.get(str(self._arguments.current("deepspeed")))

    @property
    def stage(self) -> int | None:
        """ZeRO's stage under DeepSpeed or FSDP; 0 under DDP; None if it cannot be understood."""
        if self.kind == "ddp":
            return 0
        if self.kind == "fsdp":
            return self._fsdp_stage()
        if self.preset is not None:
            return self.preset
        given: Any = self.variable(DEEPSPEED_STAGE) or 2
        if self.config is not None:
            given = self.config.get("zero_optimization.stage", 0)
        elif self.by_arguments == "deepspeed" or self.variable(DEEPSPEED_FILE) not in (None, "none"):
            return None
        return int(given) if str(given) in ("0", "1", "2", "3") else None

    def put_config(self, changes: Mapping[str, Any]) -> None:
        """Change keys of DeepSpeed's configuration; create it if missing."""
        is_by_variables = self._arguments is None or (self.kind == "deepspeed" and self.by_arguments is None)
        if is_by_variables:
            self.edit.env[USE_DEEPSPEED] = "true"
        elif self.kind != "deepspeed" and self._arguments is not None:
            self._arguments.make_section("deepspeed", _NEW, MADE)
        if self.config is not None:
            self.config.put(changes)
        elif is_by_variables and "zero_optimization.stage" in changes:
            self.edit.env[DEEPSPEED_STAGE] = str(changes["zero_optimization.stage"])

    def put_preset(self, stage: int) -> None:
        """Use ms-swift's name of the configuration for a stage; keeps offloading."""
        assert self._arguments is not None
        offload = "_offload" if str(self._arguments.current("deepspeed")).endswith("_offload") and stage > 1 else ""
        self._arguments.put({"deepspeed": f"zero{stage}{offload}"})

    # ---- FSDP ----

    def fsdp(self, key: str) -> Any:
        """A setting of FSDP by its name without ``fsdp_``; None if missing."""
        if self.by_arguments != "fsdp" or self._arguments is None:
            return self.variable(f"FSDP_{key.upper()}")
        section = self._arguments.section(FSDP)
        return None if section is None else section.get(key, section.get(f"fsdp_{key}"))

    def put_fsdp(self, key: str, value: bool | str) -> None:
        """Change a setting of FSDP in place, or add it."""
        if self.by_arguments != "fsdp" or self._arguments is None:
            self.edit.env[f"FSDP_{key.upper()}"] = str(value).lower() if isinstance(value, bool) else value
            return
        if (section := self._arguments.section(FSDP)) is None:
            self._arguments.make_section(FSDP, {key: value}, FSDP)
        else:
            section.put({f"fsdp_{key}" if section.has(f"fsdp_{key}") else key: value})

    @property
    def _has_strategy(self) -> bool:
        """Whether a strategy shards: version 1 by the launcher's variables, where Accelerate ignores
        ``reshard_after_forward``."""
        return self.by_arguments is None and str(self.fsdp("version") or 1) == "1"

    def _fsdp_stage(self) -> int | None:
        """3 if weights are freed after the forward pass, else 2."""
        if self._has_strategy:
            return _STRATEGIES.get(str(self.fsdp("sharding_strategy") or "FULL_SHARD").upper())
        words = str(self._arguments.current("fsdp")) if self.by_arguments and self._arguments is not None else ""
        if "shard_grad_op" in words:
            return 2
        if "hybrid" in words or "no_shard" in words:
            return None
        given = (self.fsdp("reshard_after_forward"), self.fsdp("sharding_strategy"), True)
        configured = str(next(value for value in given if value not in (None, "None"))).lower()
        stages = {"true": 3, "1": 3, "full_shard": 3, "false": 2, "0": 2, "shard_grad_op": 2}
        return stages.get(configured)

    def leave(self) -> None:
        """Turn off DeepSpeed or FSDP, which leaves DDP."""
        if self._arguments is not None and self.by_arguments is not None:
            names = ("deepspeed",) if self.by_arguments == "deepspeed" else ("fsdp", FSDP)
            self._arguments.drop(*names)
        for name in (USE_DEEPSPEED, USE_FSDP):
            if self.is_set(name):
                self.edit.env[name] = "false"


def _plain(given: Any) -> Any:
    return given if isinstance(given, bool | str) else None


CONFIG, DEEPSPEED_CONFIG = "accelerate", "accelerate_deepspeed"
"""Placeholders of the launcher's YAML, and of the DeepSpeed configuration that it refers to."""
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
"""Case-sensitive settings of FSDP."""
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
    """Path by placeholder of the launcher's YAML, including the user's default one, and of DeepSpeed's JSON."""
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
    """Where ``accelerate config`` saves its file."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home, "accelerate", "default_config.yaml").expanduser()


def environment(options: Words, edit: Edit) -> dict[str, str]:
    """Variables for the ranks, from the launcher's words and its YAML; notes what is not understood."""
    config = _config(edit)
    kind = _kind(options, config)
    if kind in ("MEGATRON_LM", "XLA", "TPU"):
        edit.notes.append(
            Note(knob="layout", message=f"accelerate launch with {kind} is not supported", severity="error")
        )
    env = {"ACCELERATE_MIXED_PRECISION": str(_configured(options, config, "mixed_precision", "no")).lower()}
    if as_truth(_configured(options, config, "cpu", False)) or as_truth(config.get("use_cpu", False)):
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
    """Number of ranks that it would start, by its words or its YAML."""
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
    """The distributed type; options override the file."""
    names = {"deepspeed": "DEEPSPEED", "fsdp": "FSDP", "megatron-lm": "MEGATRON_LM"}
    requested = [kind for name, kind in names.items() if read(options, either_dash(f"--use-{name}", "flag"))]
    return requested[0] if requested else str(config.get("distributed_type", "NO"))


def _configured(options: Words, config: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of an option, or else the value in the file."""
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
