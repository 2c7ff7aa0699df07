"""A training script's source, read without running it: its options, its constants, and the line it logs per step."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from orchestrator.draft.accelerate_launch import AccelerateLaunch, read_launch
from orchestrator.draft.shell_script import ASSIGNMENT, command_in
from orchestrator.errors import ConfigError
from orchestrator.frameworks.arguments import Argument, either_dash, read_text
from orchestrator.frameworks.launchers import Launched, program_of, without_launcher
from trials.files import read_regular

MAX_BYTES = 1 << 20
"""Larger files are assumed to be generated."""
ROLES = {
    "micro_batch_size": "bs b batch batch_size batchsize micro_batch micro_batch_size mbs micro_bs train_batch_size "
    "per_device_batch_size per_device_train_batch_size device_batch_size batch_size_per_gpu batch_size_per_device "
    "train_micro_batch_size_per_gpu local_batch_size",
    "accumulation": "accum accumulation accumulate grad_accum gradient_accumulation gradient_accumulation_steps "
    "grad_accumulation grad_accum_steps accumulation_steps accum_steps accum_iter accumulate_grad_batches update_freq",
    "dtype": "dtype precision mixed_precision amp_dtype compute_dtype",
    "amp": "amp use_amp bf16 fp16 half autocast",
    "workers": "workers num_workers dataloader_num_workers data_workers nworkers j",
    "ep": "ep ep_size ep_degree expert_parallel expert_parallel_size expert_parallel_degree expert_parallelism "
    "expert_model_parallel_size moe_ep_size",
    "compile": "compile torch_compile use_compile torchcompile",
    "checkpointing": "checkpointing gradient_checkpointing grad_checkpointing grad_checkpoint activation_checkpointing "
    "gradient_checkpoint recompute use_checkpoint use_checkpointing remat",
    "seq_length": "seq_length seq_len sequence_length block_size context_length max_seq_len max_seq_length bptt",
    "steps": "steps max_steps num_steps train_steps total_steps iters max_iters num_iters iterations num_iterations "
    "train_iters max_iterations n_steps",
    "log_interval": "log_interval log_every log_freq log_steps logging_steps log_iter print_freq print_every "
    "print_interval print_steps log_every_n_steps",
    "out": "out out_dir output output_dir save_dir checkpoint_dir ckpt_dir save_path log_dir logdir work_dir "
    "result_dir results_dir",
}
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names.split()}
_EVALUATION = re.compile(r"(?:^|[._-])(?:val|valid|validation|eval|evaluation|test|predict)(?:[._-]|$)", re.IGNORECASE)
_TRAINER_ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")
_TRAINER_PARSERS = ("HfArgumentParser", "TrlParser")
_HYDRA, _ASSIGNED = "hydra", ("hydra", "omegaconf")
_BATCH_NORM = re.compile(r"\bBatchNorm[123]d\b|\bresnet(?:18|34|50|101|152)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOption:
    """An option that a script declares for its command line."""

    names: tuple[str, ...]
    """As declared, the first long one first: ``--batch-size``, ``-b``."""
    negative: tuple[str, ...] = ()
    """Spellings that switch a flag off: ``--no-amp``."""
    default: Any = None
    choices: tuple[Any, ...] = ()
    is_flag: bool = False
    """Whether it takes no value."""
    is_assignment: bool = False
    """Whether it is always written as one word: ``--name=value``, or ``name=value`` as in Hydra."""
    is_variable: bool = False
    """Whether it is an environment variable."""
    file: str | None = None
    """The argument of the command that names the configuration file in which it is a dotted key; None if it is not a
    key."""

    @property
    def role(self) -> str | None:
        """Its role by its usual names, a key of :data:`ROLES`; of a dotted name, the last part counts."""
        for name in self.names:
            plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-")).replace("-", "_").lower()
            if found := _ROLE_OF.get(plain.replace(".", "_")) or _ROLE_OF.get(plain.rpartition(".")[2]):
                return found
        return None

    @property
    def is_for_training(self) -> bool:
        """Whether the name does not belong to evaluation only."""
        return not any(_EVALUATION.search(name.lstrip("-")) for name in self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """What a script's source shows."""

    path: Path
    options: tuple[ScriptOption, ...] = ()
    modules: frozenset[str] = frozenset()
    """Top-level packages that it imports."""
    log_pattern: str | None = None
    """A regular expression for the line that it prints per step; None: no such line was found."""
    divides_accumulation: bool = False
    """Whether it divides its accumulation steps by the number of ranks, as nanoGPT does."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of transformers' Trainer that the script sets in code, or in a file it names itself, where the command
    line cannot change them."""
    has_batch_norm: bool = False
    """Whether the model normalises over the batch, so that another micro-batch changes the training."""
    names: frozenset[str] = frozenset()
    """Names and attributes that it uses."""
    loader_arguments: Mapping[str, Any] | None = None
    """Arguments of its first DataLoader, None if not literal. None: no DataLoader."""
    problem: str = ""
    """Why it could not be read; empty if it was."""


def find_script(argv: Sequence[str], cwd: Path) -> Path | None:
    """The Python file that a command runs; None if there is none."""
    program = program_of(tuple(argv))
    if program.module is not None:
        module = cwd.joinpath(*program.module.split("."))
        return next((path for path in (module.with_suffix(".py"), module / "__main__.py") if path.is_file()), None)
    return path if program.script is not None and (path := cwd / program.script).is_file() else None


def read_source(path: Path) -> SourceFile:
    """What the script's source shows; with the reason if it cannot be read."""
    from orchestrator.draft.command_draft import log_pattern

    try:
        text = read_regular(path)
        if len(text) > MAX_BYTES:
            return SourceFile(path=path, problem=f"{path.name} is larger than {MAX_BYTES >> 20} MiB")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        return SourceFile(path=path, problem=f"{path.name} cannot be read: {error}")
    modules = frozenset(_modules(tree))
    options = tuple(_options(tree)) or tuple(_assignments(tree, text)) or tuple(_keys(tree, modules, path.parent))
    return SourceFile(
        path=path,
        options=options,
        modules=modules,
        log_pattern=log_pattern(tree),
        divides_accumulation=any(map(_divides_accumulation, ast.walk(tree))),
        fixed=trainer_constants(tree, path.parent),
        has_batch_norm=_BATCH_NORM.search(text) is not None,
        names=frozenset(_names(tree)),
        loader_arguments=_loader_arguments(tree),
    )


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (name.name for name in node.names)


def _loader_arguments(tree: ast.AST) -> dict[str, Any] | None:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node)[1] == "DataLoader"]
    if not calls:
        return None
    found: dict[str, Any] = {}
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        found = {**{word.arg or "**": _constant(word.value) for word in call.keywords}, **found}
    return found


def _modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _options(tree: ast.AST) -> Iterator[ScriptOption]:
    """Options declared with argparse's ``add_argument`` or click's ``option``, in the order of the source."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if function not in ("add_argument", "option"):
            continue
        names = [name for name in map(_constant, call.args) if isinstance(name, str) and name.startswith("-")]
        if names:
            yield _option(sorted(names, key=lambda name: not name.startswith("--")), call)


def _assignments(tree: ast.Module, text: str) -> Iterator[ScriptOption]:
    """Variables of a script that runs a ``configurator.py``, as nanoGPT's do: ``--name=value`` sets each of them."""
    if "configurator.py" not in text:
        return
    for name, value in constants(tree).items():
        yield ScriptOption(names=(f"--{name}",), default=value, is_assignment=True)


def constants(tree: ast.Module) -> dict[str, Any]:
    """Values of the variables that a module gives a literal, at its top level."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _constant(node.value)
            if isinstance(value, str | int | float):
                found[node.targets[0].id] = value
    return found


def _keys(tree: ast.Module, modules: frozenset[str], folder: Path) -> Iterator[ScriptOption]:
    """Keys of the configuration file of a Hydra or OmegaConf program: ``data.batch_size=16`` sets each of them."""
    if not modules & set(_ASSIGNED):
        return
    for file in _config_files(tree, folder):
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        for name, value in leaves(content):
            yield ScriptOption(names=(name,), default=value, is_assignment=True)


def _config_files(tree: ast.Module, folder: Path) -> Iterator[Path]:
    """Files named by ``@hydra.main(config_path=..., config_name=...)`` and ``OmegaConf.load(...)``."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        owner, name = _called(call)
        given = {word.arg: _constant(word.value) for word in call.keywords}
        if name == "main" and isinstance(given.get("config_name"), str):
            stem = str(given["config_name"]).removesuffix(".yaml")
            yield folder / str(given.get("config_path") or ".") / f"{stem}.yaml"
        elif (owner, name) == ("OmegaConf", "load") and call.args and isinstance(path := _constant(call.args[0]), str):
            yield folder / path


def _called(call: ast.Call) -> tuple[str, str]:
    """Owner and name of what is called: ``hydra.main`` is ``("hydra", "main")``."""
    if isinstance(call.func, ast.Attribute):
        return getattr(call.func.value, "id", ""), call.func.attr
    return "", getattr(call.func, "id", "")


def leaves(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Scalars of nested mappings by dotted name."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix and not isinstance(content, list) and not prefix.startswith((f"{_HYDRA}.", "defaults")):
        yield prefix, content


def trainer_constants(tree: ast.Module, folder: Path) -> dict[str, Any]:
    """Arguments of transformers' Trainer that no command line can change: literals of ``TrainingArguments(...)`` in a
    script without a parser for them, and those of a JSON file that the script names itself."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    has_parser = any(_called(call)[1] in _TRAINER_PARSERS for call in calls)
    found: dict[str, Any] = {}
    for call in calls:
        name = _called(call)[1]
        if name in _TRAINER_ARGUMENTS and not has_parser:
            found |= {word.arg: _constant(word.value) for word in call.keywords if word.arg}
        elif name == "parse_json_file" and call.args and isinstance(path := _constant(call.args[0]), str):
            try:
                content = json.loads((folder / path).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            found |= content if isinstance(content, dict) else {}
    return {name: value for name, value in found.items() if isinstance(value, str | int | float)}


def with_settings(source: SourceFile, argv: Sequence[str], cwd: Path) -> SourceFile:
    """The source with defaults as further Python files of the command set them, as configurators read them, and with
    the keys that a Hydra or OmegaConf command assigns."""
    if source.modules & set(_ASSIGNED):
        known = {option.names[0] for option in source.options}
        words = (word.partition("=")[0].lstrip("+") for word in argv if is_assignment(word))
        added = (ScriptOption(names=(name,), is_assignment=True) for name in words if name not in known)
        return replace(source, options=(*source.options, *added))
    if not any(option.is_assignment for option in source.options):
        return source
    set_there: dict[str, Any] = {}
    for word in argv:
        if word.endswith(".py") and not word.startswith("-") and (cwd / word).resolve() != source.path.resolve():
            try:
                set_there |= constants(ast.parse(read_regular(cwd / word)))
            except (OSError, ValueError, SyntaxError):
                continue
    options = tuple(replace(one, default=set_there.get(one.names[0][2:], one.default)) for one in source.options)
    return replace(source, options=options)


def is_assignment(word: str) -> bool:
    return re.fullmatch(r"\+{0,2}[A-Za-z_][\w./@-]*=.*", word, re.DOTALL) is not None


def _option(names: list[str], call: ast.Call) -> ScriptOption:
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    action, default = given.get("action"), _constant(given.get("default"))
    is_boolean = getattr(action, "attr", getattr(action, "id", "")) == "BooleanOptionalAction"
    is_flag = (
        is_boolean or _constant(action) in ("store_true", "store_false") or _constant(given.get("is_flag")) is True
    )
    negative = [f"--no-{name[2:]}" for name in names if name.startswith("--")] if is_boolean else []
    pairs = [name.partition("/") for name in names]  # click: "--amp/--no-amp"
    negative += [off.strip() for _, _, off in pairs if off]
    choices = given.get("choices")
    if isinstance(type_ := given.get("type"), ast.Call) and _called(type_)[1] == "Choice" and type_.args:
        choices = type_.args[0]
    values = tuple(map(_constant, choices.elts)) if isinstance(choices, ast.List | ast.Tuple | ast.Set) else ()
    return ScriptOption(
        names=tuple(name.strip() for name, _, _ in pairs),
        negative=tuple(negative),
        default=default,
        choices=values,
        is_flag=is_flag or is_boolean or bool(negative),
    )


def _divides_accumulation(node: ast.AST) -> bool:
    """``accumulation //= n``, or ``accumulation = ... // n``."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.FloorDiv) and _is_accumulation(node.target)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.FloorDiv):
        return any(map(_is_accumulation, node.targets)) and _is_accumulation(node.value.left)
    return False


def _is_accumulation(node: ast.AST) -> bool:
    """A variable or attribute with a usual name for accumulation steps."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return _ROLE_OF.get(name) == "accumulation"


def _constant(node: ast.AST | None) -> Any:
    """The value of a literal, or of a product of such; None for everything else."""
    if node is None:
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = _constant(node.left), _constant(node.right)
        return math.prod(factors) if all(isinstance(factor, int | float) for factor in factors) else None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


# Options as arguments of a command, and their values there.


NUMBER_FORMATS = (
    ("float32", "bfloat16"),
    ("fp32", "bf16"),
    ("32-true", "bf16-mixed"),
    ("32", "bf16-mixed"),
    ("no", "bf16"),
    ("full", "bf16"),
    ("fp16", "bf16"),
    ("float16", "bfloat16"),
)
"""Spellings of a number format, and of the 16-bit one to try as well."""


def argument_of(option: ScriptOption) -> Argument:
    takes: Literal["assignment", "flag", "value"]
    takes = "assignment" if option.is_assignment else "flag" if option.is_flag else "value"
    return Argument(name=option.names[0], aliases=option.names[1:], negative=option.negative, takes=takes)


def present_number(argv: tuple[str, ...], option: ScriptOption) -> int | None:
    """An option's number in the command, else its default; None if it is not a whole number."""
    text = read_text(argv, argument_of(option))
    value = option.default if text is None else text
    return int(value) if str(value).isdigit() else None


def number_formats(present: Any, choices: tuple[Any, ...]) -> list[str]:
    """The current number format and the other one of its pair, in the program's spelling."""
    for pair in NUMBER_FORMATS:
        if str(present) in pair and (not choices or set(pair) <= set(map(str, choices))):
            return list(pair)
    return []


# A training command as typed: variables in front, the launcher and its options, the program of one rank.


_SHELLS = {"sh", "bash", "zsh", "dash", "ksh"}
_FOREIGN = {"mpirun", "mpiexec", "horovodrun", "jsrun"}
_DROPPED = {"nohup", "time", "exec", "env"}
_PYTHON = re.compile(r"python[\d.]*")
_SELF_STARTING = {
    "msrun": ("--local_worker_num", "--worker_num"),
    "paddle.distributed.launch": ("--nproc_per_node",),
    "paddle.distributed.run": ("--nproc_per_node",),
}
"""Launchers that stay in the command, and their options for the number of ranks per node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedCommand:
    """What one rank runs, and the settings around it."""

    words: tuple[str, ...]
    """As typed."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables in front of the command, and those that its launcher would have set."""
    launcher: str | None = None
    """Name of the launcher that was stripped, or that stays as it starts the ranks itself; None: there was none."""
    starts_ranks: bool = False
    """Whether ``argv`` still is a launcher, which starts the ranks of a node itself."""
    num_processes: int | None = None
    """Ranks per node; None: not set, or one per device."""
    num_nodes: int = 1
    accelerate: AccelerateLaunch | None = None
    """What ``accelerate launch`` sets, if it was the launcher."""


def take_apart(words: Sequence[str], cwd: Path) -> TypedCommand:
    """The command without the launcher in front of the program; for a shell script, the one command in it.

    Raises:
        ConfigError: there is none, or its shell script has several, or its launcher cannot be removed.
    """
    argv, env = list(words), dict[str, str]()
    if (script := _shell_script(argv)) is not None:
        argv = command_in(cwd / script, argv[argv.index(script) + 1 :])
    while argv and (argv[0] in _DROPPED or ASSIGNMENT.fullmatch(argv[0])):
        if match := ASSIGNMENT.fullmatch(argv[0]):
            env[match[1]] = match[2]
        argv.pop(0)
    if not argv:
        raise ConfigError(
            "no training command was given",
            remedy="Pass the command after --: tune-cluster init -- torchrun train.py --bs 4",
        )
    tasks = None
    if Path(argv[0]).name == "srun":
        argv, tasks = _without_srun(argv)
    _refuse(Path(argv[0]).name, argv)
    if (own := _self_starting(tuple(argv))) is not None:
        name, number = own
        return TypedCommand(
            words=tuple(words), argv=tuple(argv), env=env, launcher=name, starts_ranks=True, num_processes=number
        )
    found = without_launcher(tuple(argv))
    if found.launcher is not None and not found.argv[1:]:
        raise ConfigError(f"the {found.launcher} command has no script", remedy="Pass the complete command.")
    program = _program(argv, found)
    launch = read_launch(tuple(argv), found, program, cwd) if found.launcher == "accelerate" else None
    nodes = found.num_nodes or (launch.num_nodes if launch is not None else None) or 1
    per_node = found.processes_per_node if found.launcher is not None else tasks or _own_count(tuple(argv))
    if per_node is None and launch is not None and launch.world_size:
        per_node = max(1, launch.world_size // nodes)
    return TypedCommand(
        words=tuple(words),
        argv=program,
        env={**(launch.variables if launch is not None else {}), **env},
        launcher=found.launcher or ("srun" if tasks else None),
        num_processes=per_node,
        num_nodes=nodes,
        accelerate=launch,
    )


def _shell_script(argv: Sequence[str]) -> str | None:
    """The script of ``bash run.sh`` or ``./run.sh``; None for other commands."""
    if argv and argv[0].endswith(".sh"):
        return argv[0]
    is_shell = len(argv) > 1 and Path(argv[0]).name in _SHELLS
    return argv[1] if is_shell and argv[1].endswith(".sh") else None


_SRUN = {"-n": "--ntasks", "-N": "--nodes"}
_SRUN_FLAGS = frozenset(
    {"-E", "-H", "-I", "-K", "-O", "-Q", "-X", "-Z", "-k", "-l", "-s", "-u", "-v"}
    | {"--bcast", "--compress", "--contiguous", "--disable-status", "--exact", "--exclusive", "--hold", "--immediate"}
    | {"--interactive", "--join", "--kill-on-bad-exit", "--label", "--multi-prog", "--nice", "--no-allocate"}
    | {"--no-kill", "--overcommit", "--overlap", "--oversubscribe", "--preserve-env", "--propagate", "--pty", "--quiet"}
    | {"--quit-on-interrupt", "--reboot", "--resv-ports", "--send-libs", "--spread-job", "--test-only", "--unbuffered"}
    | {"--use-min-nodes", "--verbose", "--whole", "--x11"}
)
"""Options whose value, if they have one, is part of the same word."""


def _without_srun(argv: Sequence[str]) -> tuple[list[str], int | None]:
    """The command that ``srun`` starts, and the number of ranks per node; None if not set.

    Raises:
        ConfigError: there is no command, or several nodes.
    """
    given: dict[str, str] = {}
    words = list(argv[1:])
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--") and len(name) > 2:
            name, value = name[:2], name[2:]
        elif not equals and name not in _SRUN_FLAGS and words:
            value = words.pop(0)
        given[_SRUN.get(name, name)] = value
    if not words or given.get("--nodes", "1") != "1":
        raise ConfigError(
            "srun: expected a command that runs on one node",
            remedy="Pass the command of one rank, and the number of ranks per node: tune-cluster init "
            "--devices-per-node 8 -- python train.py ...",
        )
    tasks = given.get("--ntasks-per-node") or given.get("--ntasks") or ""
    return words, int(tasks) if tasks.isdigit() else None


def _refuse(program: str, argv: Sequence[str]) -> None:
    if program in _SHELLS:
        raise ConfigError(
            f"{argv[0]}: cannot parse a command that is started by a shell",
            remedy="Pass the script's training command instead: tune-cluster init -- torchrun train.py ...",
        )
    if program in _FOREIGN:
        raise ConfigError(
            f"{program} is not supported as a launcher",
            remedy="Pass the command of one rank, and the number of ranks per node: tune-cluster init "
            "--devices-per-node 8 -- python train.py ...",
        )


def _self_starting(argv: tuple[str, ...]) -> tuple[str, int | None] | None:
    """A launcher that stays in the command, and its number of ranks on a node."""
    words = {
        Path(argv[0]).name,
        *(argv[index + 1] for index, word in enumerate(argv[:3]) if word == "-m" and argv[index + 1 :]),
    }
    for name, options in _SELF_STARTING.items():
        if name in words:
            texts = (read_text(argv, either_dash(option)) for option in options)
            return name, next((int(text) for text in texts if text is not None and text.isdigit()), None)
    return None


def _own_count(argv: tuple[str, ...]) -> int | None:
    """How many devices a program without a launcher is configured to use, as in Lightning."""
    text = read_text(argv, either_dash("--devices", aliases=("--trainer.devices", "--num-devices", "--gpus")))
    return int(text) if text is not None and text.isdigit() and int(text) else None


def _program(argv: Sequence[str], found: Launched) -> tuple[str, ...]:
    """What a rank runs, with the interpreter that its launcher would have used."""
    program = list(found.argv)
    if program[0].endswith(".py"):
        return ("python", *program)
    if found.launcher is not None and program[0] == "python" and not _PYTHON.fullmatch(Path(argv[0]).name):
        program[0] = interpreter_of(argv[0])
    return tuple(program)


def interpreter_of(program: str) -> str:
    """The Python that a console script like ``torchrun`` runs with: ``python`` if that is the one on the path."""
    path = shutil.which(program)
    if path is None:
        return sys.executable  # nothing else next to it would be found either
    with Path(path).open("rb") as stream:
        first = stream.readline(500).decode("utf-8", errors="replace").strip()
    found = first.removeprefix("#!").strip().partition(" ")[0] if first.startswith("#!") else ""
    if not _PYTHON.fullmatch(Path(found).name):
        return "python"
    here = shutil.which("python")
    return "python" if here is not None and Path(here).absolute() == Path(found).absolute() else found
