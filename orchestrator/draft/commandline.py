"""A training command as people type it: variables in front, the launcher and what it says, the program of one rank."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.recipes.arguments import either_dash, read, read_text
from orchestrator.recipes.launchers import Launched, without_launcher

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SHELLS = {"sh", "bash", "zsh", "dash", "ksh"}
_FOREIGN = {"srun", "mpirun", "mpiexec", "horovodrun", "jsrun"}
_DROPPED = {"nohup", "time", "exec", "env"}
_PYTHON = re.compile(r"python[\d.]*")
_ACCELERATE_VARIABLES = {
    "--mixed-precision": "ACCELERATE_MIXED_PRECISION",
    "--gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "--dynamo-backend": "ACCELERATE_DYNAMO_BACKEND",
    "--zero-stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "--deepspeed-config-file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "--fsdp-version": "FSDP_VERSION",
}
"""Variables in which ``accelerate launch`` hands its options on (accelerate 1.15, ``utils/launch.py``)."""
_ACCELERATE_FLAGS = {
    "--cpu": "ACCELERATE_USE_CPU",
    "--use-fsdp": "ACCELERATE_USE_FSDP",
    "--use-deepspeed": "ACCELERATE_USE_DEEPSPEED",
}
_SELF_STARTING = {
    "msrun": ("--local_worker_num", "--worker_num"),
    "paddle.distributed.launch": ("--nproc_per_node",),
    "paddle.distributed.run": ("--nproc_per_node",),
}
"""Launchers that stay in the command, and the options that say how many ranks a node has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedCommand:
    """What one rank runs, and what the words around it said."""

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
    """Ranks on a node; None: not said, or as many as there are devices."""
    num_nodes: int = 1


def take_apart(words: Sequence[str]) -> TypedCommand:
    """The command without what stands in front of the program.

    Raises:
        ConfigError: there is none, or it is a shell's, or its launcher cannot be taken away.
    """
    argv, env = list(words), dict[str, str]()
    while argv and (argv[0] in _DROPPED or _ASSIGNMENT.fullmatch(argv[0])):
        if match := _ASSIGNMENT.fullmatch(argv[0]):
            env[match[1]] = match[2]
        argv.pop(0)
    if not argv:
        raise ConfigError("no command", remedy="Write it after --: tune-cluster init -- torchrun train.py --bs 4")
    _refuse(Path(argv[0]).name, argv)
    if (own := _self_starting(tuple(argv))) is not None:
        name, number = own
        return TypedCommand(
            words=tuple(words), argv=tuple(argv), env=env, launcher=name, starts_ranks=True, num_processes=number
        )
    found = without_launcher(tuple(argv))
    if found.launcher is not None and not found.argv[1:]:
        raise ConfigError(f"{found.launcher} is given no script", remedy="Write the whole command as you type it.")
    per_node = found.processes_per_node if found.launcher is not None else _own_count(tuple(argv))
    if per_node is None and found.world_size and found.launcher == "accelerate":
        per_node = found.world_size // (found.num_nodes or 1)
    return TypedCommand(
        words=tuple(words),
        argv=_program(argv, found),
        env={**_variables(found), **env},
        launcher=found.launcher,
        num_processes=per_node,
        num_nodes=found.num_nodes or 1,
    )


def _refuse(program: str, argv: Sequence[str]) -> None:
    if program in _SHELLS or program.endswith(".sh"):
        script = next((word for word in argv if word.endswith(".sh")), program)
        raise ConfigError(
            f"{script} is a shell's, and what it starts cannot be read",
            remedy="Give the training command in it: tune-cluster init -- torchrun train.py ...",
        )
    if program in _FOREIGN:
        raise ConfigError(
            f"{program} starts ranks in a way that trials do not have",
            remedy="Give what one rank runs, and how many a node has: tune-cluster init --devices-per-node 8 -- "
            "python train.py ...",
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
    """How many devices a program without launcher is told to use, as Lightning's are."""
    text = read_text(argv, either_dash("--devices", aliases=("--trainer.devices", "--num-devices", "--gpus")))
    return int(text) if text is not None and text.isdigit() and int(text) else None


def _variables(found: Launched) -> dict[str, str]:
    """What ``accelerate launch`` was told and would have handed on."""
    if found.launcher != "accelerate":
        return {}
    said = {variable: read_text(found.options, either_dash(name)) for name, variable in _ACCELERATE_VARIABLES.items()}
    flags = {v: "true" for name, v in _ACCELERATE_FLAGS.items() if read(found.options, either_dash(name, "flag"))}
    return {**{variable: text for variable, text in said.items() if text}, **flags}


def _program(argv: Sequence[str], found: Launched) -> tuple[str, ...]:
    """What a rank runs, with the interpreter that its launcher would have used."""
    program = list(found.argv)
    if program[0].endswith(".py"):
        return ("python", *program)
    if found.launcher is not None and program[0] == "python" and not _PYTHON.fullmatch(Path(argv[0]).name):
        program[0] = interpreter_of(argv[0])
    return tuple(program)


def interpreter_of(program: str) -> str:
    """The Python that a console script like ``torchrun`` runs with: ``python`` where that is the one on the path."""
    path = shutil.which(program)
    if path is None:
        return sys.executable  # what is typed beside it would not be found either
    with Path(path).open("rb") as stream:
        first = stream.readline(500).decode("utf-8", errors="replace").strip()
    found = first.removeprefix("#!").strip().partition(" ")[0] if first.startswith("#!") else ""
    if not _PYTHON.fullmatch(Path(found).name):
        return "python"
    here = shutil.which("python")
    return "python" if here is not None and Path(here).absolute() == Path(found).absolute() else found
