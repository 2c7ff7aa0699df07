"""A training command as people type it, taken apart: variables, the launcher with its numbers, and what a rank runs."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.errors import ConfigError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SHELLS = {"sh", "bash", "zsh", "dash", "ksh"}
_FOREIGN = {"srun", "mpirun", "mpiexec", "horovodrun", "jsrun", "ray"}
_DROPPED = {"nohup", "time", "exec"}
_TORCHRUN_FLAGS = frozenset({"--standalone", "--no-python", "--run-path", "--use-env", "--virtual-local-rank"})
_ACCELERATE_FLAGS = frozenset(
    "--cpu --multi-cpu --multi-gpu --tpu --use-deepspeed --use-fsdp --use-megatron-lm --debug --quiet --no-python "
    "--use-xpu --enable-cpu-affinity --same-network --dynamo-use-fullgraph --dynamo-use-dynamic".split()
)
_DEEPSPEED_FLAGS = frozenset({"--force-multi", "--no-python", "--no-local-rank", "--enable-each-rank-log", "--no-ssh"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedCommand:
    """What one rank runs, and what the words around it said."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables in front of the command, and those that its launcher would have set."""
    launcher: str | None = None
    """Name of the launcher that was stripped, or that stays because it starts the ranks itself; None: there was none."""
    starts_ranks: bool = False
    """Whether ``argv`` still is a launcher, which starts the ranks of a node itself."""
    num_processes: int | None = None
    """Ranks on a node; None: not said, or as many as there are devices."""
    num_nodes: int = 1
    remarks: tuple[str, ...] = ()
    """What of the command was left out, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    """A program in front of a script that starts its ranks."""

    name: str
    flags: frozenset[str] = frozenset()
    """Its options without a value, with dashes."""
    processes: tuple[str, ...]
    """Options that say how many ranks a node has."""
    nodes: tuple[str, ...] = ()
    ignored: frozenset[str] = frozenset()
    """Options about where ranks meet and what they log, which trials have their own way for."""


_MEETING = frozenset(
    "--master-addr --master-port --node-rank --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --local-addr --role "
    "--max-restarts --monitor-interval --start-method --log-dir --redirects --tee --local-ranks-filter "
    "--main-process-ip --main-process-port --machine-rank --hostfile --include --exclude --launcher "
    "--gpu-ids --num-cpu-threads-per-process".split()
)
_TORCHRUN = _Launcher(
    name="torchrun", flags=_TORCHRUN_FLAGS, processes=("--nproc-per-node",), nodes=("--nnodes",), ignored=_MEETING
)
_ACCELERATE = _Launcher(
    name="accelerate launch",
    flags=_ACCELERATE_FLAGS,
    processes=("--num-processes",),
    nodes=("--num-machines",),
    ignored=_MEETING,
)
_DEEPSPEED = _Launcher(
    name="deepspeed",
    flags=_DEEPSPEED_FLAGS,
    processes=("--num-gpus", "--num-accelerators"),
    nodes=("--num-nodes",),
    ignored=_MEETING,
)
_ACCELERATE_VARIABLES = {
    "--mixed-precision": "ACCELERATE_MIXED_PRECISION",
    "--gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "--dynamo-backend": "ACCELERATE_DYNAMO_BACKEND",
    "--cpu": "ACCELERATE_USE_CPU",
    "--use-fsdp": "ACCELERATE_USE_FSDP",
    "--use-deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "--deepspeed-config-file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "--zero-stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "--fsdp-version": "FSDP_VERSION",
}
"""Variables in which the launcher hands its options on (accelerate 1.15, ``utils/launch.py``)."""
_SELF_STARTING = {
    "msrun": ("--local_worker_num", "--worker_num"),
    "paddle.distributed.launch": ("--nproc_per_node",),
}
"""Launchers that stay in the command, and the options that say how many ranks a node has."""


def take_apart(words: Sequence[str]) -> TypedCommand:
    """The command without its launcher.

    Raises:
        ConfigError: it is a shell's, or its launcher cannot be taken away.
    """
    argv, env = list(words), {}
    while argv and (argv[0] in (*_DROPPED, "env") or _ASSIGNMENT.fullmatch(argv[0])):
        if match := _ASSIGNMENT.fullmatch(argv[0]):
            env[match[1]] = match[2]
        argv.pop(0)
    if not argv:
        raise ConfigError("no command", remedy="Write it after --: tune-cluster init -- torchrun train.py --bs 4")
    program = Path(argv[0]).name
    _refuse(program, argv)
    found = _without_launcher(program, argv)
    return replace(found, env={**env, **found.env})


def _refuse(program: str, argv: Sequence[str]) -> None:
    if program in _SHELLS or program.endswith(".sh"):
        script = next((word for word in argv if word.endswith(".sh")), program)
        raise ConfigError(
            f"{script} is a shell's, and what it starts cannot be read",
            remedy="Give the training command that it ends with: tune-cluster init -- torchrun train.py ...",
        )
    if program in _FOREIGN:
        raise ConfigError(
            f"{program} starts ranks in a way that trials do not have",
            remedy="Give what one rank runs, and how many a node has: tune-cluster init --devices-per-node 8 -- "
            "python train.py ...",
        )


def _without_launcher(program: str, argv: list[str]) -> TypedCommand:
    if program in ("torchrun", "torch.distributed.run"):
        return _stripped(_TORCHRUN, interpreter_of(argv[0]), argv[1:])
    if program == "accelerate" and argv[1:2] == ["launch"]:
        return _stripped(_ACCELERATE, interpreter_of(argv[0]), argv[2:])
    if program in ("accelerate-launch", "accelerate_launch"):
        return _stripped(_ACCELERATE, interpreter_of(argv[0]), argv[1:])
    if program in ("deepspeed", "ds"):
        return _stripped(_DEEPSPEED, interpreter_of(argv[0]), argv[1:])
    module, position = _module(argv)
    if module in ("torch.distributed.run", "torch.distributed.launch"):
        return _stripped(_TORCHRUN, argv[0], argv[position + 1 :])
    if module in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
        rest = argv[position + 1 :]
        return _stripped(_ACCELERATE, argv[0], rest[1:] if rest[:1] == ["launch"] else rest)
    if module == "deepspeed.launcher.runner":
        return _stripped(_DEEPSPEED, argv[0], argv[position + 1 :])
    for name, options in _SELF_STARTING.items():
        if name in (program, module):
            number = next((found for option in options if (found := _number(argv, option)) is not None), None)
            return TypedCommand(argv=tuple(argv), launcher=name, starts_ranks=True, num_processes=number)
    return TypedCommand(argv=tuple(_with_python(argv)))


def _with_python(argv: list[str]) -> list[str]:
    """The command, with an interpreter in front of a bare Python file."""
    return ["python", *argv] if argv[0].endswith(".py") else argv


def _module(argv: Sequence[str]) -> tuple[str, int]:
    """The module that ``python -m`` runs, and where it stands."""
    if Path(argv[0]).name.startswith("python") and "-m" in argv[:4]:
        position = argv.index("-m") + 1
        return (argv[position] if position < len(argv) else "", position)
    return "", 0


def _number(argv: Sequence[str], option: str) -> int | None:
    for position, word in enumerate(argv):
        name, has_value, value = word.partition("=")
        if name.replace("-", "_").lstrip("_") == option.lstrip("-").replace("-", "_"):
            text = value if has_value else next(iter(argv[position + 1 : position + 2]), "")
            return int(text) if text.isdigit() else None
    return None


def _stripped(launcher: _Launcher, python: str, words: Sequence[str]) -> TypedCommand:
    """The command after the launcher's own options, which are read."""
    rest, said = list(words), dict[str, str]()
    is_module = False
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        option = "--" + name.lstrip("-").replace("_", "-")
        if name == "-m" or option == "--module":
            is_module = True
        elif option in launcher.flags:
            said[option] = "true"
        elif has_value or rest:
            said[option] = value if has_value else rest.pop(0)
    if not rest:
        raise ConfigError(f"{launcher.name} is given no script", remedy="Write the whole command as you type it.")
    argv = rest if "--no-python" in said else [python, *(["-m"] if is_module else []), *rest]
    counts = [said[option] for option in launcher.processes if option in said]
    nodes = [said[option] for option in launcher.nodes if option in said]
    env = {}
    if launcher is _ACCELERATE:
        env = {variable: said[option] for option, variable in _ACCELERATE_VARIABLES.items() if option in said}
    known = {*launcher.processes, *launcher.nodes, *launcher.ignored, *launcher.flags, *_ACCELERATE_VARIABLES}
    unknown = [f"{option} {value}" for option, value in said.items() if option not in known]
    return TypedCommand(
        argv=tuple(argv),
        env=env,
        launcher=launcher.name,
        num_processes=int(counts[0]) if counts and counts[0].isdigit() else None,
        num_nodes=int(nodes[0].partition(":")[2] or nodes[0]) if nodes and nodes[0].replace(":", "").isdigit() else 1,
        remarks=tuple(f"{launcher.name}'s {text} was left out: its ranks are started without it" for text in unknown),
    )


def interpreter_of(program: str) -> str:
    """The Python that a console script like ``torchrun`` runs with: ``python`` where that is the one on the path."""
    path = shutil.which(program)
    if path is None:
        return sys.executable  # what is typed beside it would not be found either
    try:
        first = Path(path).read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return "python"
    found = first.removeprefix("#!").strip().partition(" ")[0] if first.startswith("#!") else ""
    if not Path(found).name.startswith("python"):
        return "python"
    here = shutil.which("python")
    return "python" if here is not None and Path(here).absolute() == Path(found).absolute() else found
