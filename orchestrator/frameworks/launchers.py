"""Removes the launcher that starts a command's ranks: tune-cluster starts them itself, one per device.

``torchrun --nproc-per-node 2 train.py --bs 4`` is the program ``python train.py --bs 4`` on two ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import MappingProxyType

from orchestrator.frameworks.arguments import Words, either_dash, is_option, read, read_text
from trials.files import open_regular

MODULE = either_dash("--module", "flag", aliases=("-m",))
NO_PYTHON = either_dash("--no-python", "flag")
_PER_NODE = either_dash(
    "--nproc-per-node", aliases=("--num-gpus", "--num-accelerators")
)  # torch's name and DeepSpeed's
_NODES = either_dash("--nnodes", aliases=("--num-nodes",))
_PROCESSES = either_dash("--num-processes")
_FLAGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "torchrun": frozenset({"--standalone", "--module", "-m", "--no-python", "--run-path", "--virtual-local-rank"}),
        "deepspeed": frozenset(
            {"--module", "--no-python", "--no-local-rank", "--no-ssh", "--no-ssh-check", "--force-multi", "--save-pid"}
            | {"--bind-cores-to-rank", "--quiet", "-q"}
        ),
        "accelerate": frozenset(
            {"--quiet", "-q", "--cpu", "--multi-gpu", "--tpu", "--use-deepspeed", "--use-fsdp", "--debug"}
            | {"--use-parallelism-config", "--use-megatron-lm", "-m", "--module", "--no-python", "--tpu-cluster"}
            | {"--no-tpu-cluster", "--tpu-use-sudo", "--downcast-bf16", "--same-network", "--enable-cpu-affinity"}
            | {
                "--fp8-use-autocast-during-eval",
                "--dynamo-use-fullgraph",
                "--dynamo-use-dynamic",
                "--dynamo-use-regional-compilation",
            }
        ),
    }
)
"""Options without a value, with hyphens; the value of any other option is one word."""
_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"} | {
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
_MAX_SCRIPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A command split into launcher and program; ``argv`` is what each rank runs."""

    argv: Words
    launcher: str | None = None
    """``torchrun``, ``accelerate`` or ``deepspeed``; None if the command starts a program directly."""
    options: Words = ()
    """Words for the launcher."""
    num_nodes: int | None = None
    processes_per_node: int | None = None
    world_size: int | None = None
    """Ranks that the launcher would start on all nodes; None if not set."""
    not_understood: Words = field(default=())
    """Counts that are not numbers, unchanged: ``auto``, ``gpu``, ``1:4``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command of one rank, split so that ``(*head, *arguments)`` is the command."""

    head: Words
    """The words up to the program's name: ``python -u train.py``, ``python -m swift.cli.sft``, ``llamafactory-cli``."""
    arguments: Words = ()
    script: str | None = None
    """The Python file, as written."""
    module: str | None = None
    """The module after ``-m``."""

    @property
    def name(self) -> str:
        """What is run: the module, the file name of the script, or the command."""
        return self.module or PurePath(self.script or (self.head[-1] if self.head else "")).name


def without_launcher(argv: Words) -> Launched:
    """The command of one rank, and the number of ranks that its launcher would start."""
    start, launcher = _launcher(argv)
    if launcher is None:
        return Launched(argv=argv)
    stop = _end_of_options(argv, start, launcher)
    options = argv[start:stop]
    nodes, per_node = count(read_text(options, _NODES)), count(read_text(options, _PER_NODE))
    all_processes = count(read_text(options, _PROCESSES)) if launcher == "accelerate" else None
    has_count = launcher == "torchrun" or per_node is not None
    world = all_processes or ((per_node or 1) * (nodes or 1) if has_count and not _unclear(options) else None)
    return Launched(
        argv=_command(argv, start, stop, options),
        launcher=launcher,
        options=options,
        num_nodes=nodes,
        processes_per_node=per_node,
        world_size=world,
        not_understood=_unclear(options),
    )


def program_of(argv: Words) -> Program:
    """The program of a command without launcher: a Python file, a module, or any other command."""
    for index, word in enumerate(argv):
        if word == "-m" and index + 1 < len(argv) and any(map(_is_python, argv[:index])):
            return Program(head=argv[: index + 2], arguments=argv[index + 2 :], module=argv[index + 1])
        if word.endswith(".py"):
            return Program(head=argv[: index + 1], arguments=argv[index + 1 :], script=word)
    return Program(head=argv[:1], arguments=argv[1:])


def script_text(argv: Words, cwd: str) -> str:
    """Text of the Python file that a command runs; empty if there is no readable file."""
    script = program_of(without_launcher(argv).argv).script
    if script is None:
        return ""
    try:
        with open_regular(Path(cwd) / script) as file:
            return file.read(_MAX_SCRIPT_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def imports(text: str) -> frozenset[str]:
    """Top-level packages that a Python text imports, anywhere in it."""
    found = re.findall(r"^[ \t]*(?:import|from)[ \t]+([\w., \t]+)", text, re.MULTILINE)
    return frozenset(name.strip().partition(".")[0].partition(" ")[0] for names in found for name in names.split(","))


def python_next_to(command: str) -> str:
    """The interpreter in a command if given by its path; else the ``python`` on PATH."""
    sibling = PurePath(command).with_name("python")
    return str(sibling) if len(sibling.parts) > 1 else "python"


# ---- launchers ----


def _launcher(argv: Words) -> tuple[int, str | None]:
    """Position of a launcher's options, and the launcher's name."""
    for index, word in enumerate(argv):
        name = PurePath(word).name
        if name in ("torchrun", "deepspeed") and not _is_value(argv, index):
            return index + 1, name
        if name == "accelerate" and argv[index + 1 : index + 2] == ("launch",):
            return index + 2, "accelerate"
        if name == "accelerate-launch":
            return index + 1, "accelerate"
        if word == "-m" and (launcher := _MODULES.get("".join(argv[index + 1 : index + 2]))):
            return index + 2, launcher
        if word.endswith(".py") or word == "-m":
            break
    return 0, None


def _is_value(argv: Words, index: int) -> bool:
    """Whether a word that looks like a launcher is the value of an option before it."""
    return index > 0 and is_option(argv[index - 1]) and argv[index - 1] not in ("--", "-u")


def _end_of_options(argv: Words, start: int, launcher: str) -> int:
    """Position of the program."""
    index = start
    while index < len(argv) and is_option(argv[index]) and argv[index] != "--":
        word = argv[index]
        takes_value = "=" not in word and word.replace("_", "-") not in _FLAGS[launcher]
        index += 2 if takes_value else 1
    return index


def _command(argv: Words, start: int, stop: int, options: Words) -> Words:
    """What a rank runs: the program with the launcher's Python."""
    rest = argv[stop + 1 :] if argv[stop : stop + 1] == ("--",) else argv[stop:]
    if read(options, NO_PYTHON):
        return rest
    before = argv[:start]
    at = next((index for index, word in enumerate(before) if _is_python(word)), None)
    if at is None:
        head = (*before[: _launcher_word(before)], python_next_to(before[_launcher_word(before)]))
    else:
        head = before[: before.index("-m")] if "-m" in before else before[: at + 1]
    return (*head, *(("-m",) if read(options, MODULE) else ()), *rest)


def _launcher_word(before: Words) -> int:
    return len(before) - (2 if before[-1] == "launch" else 1)


def _is_python(word: str) -> bool:
    return re.fullmatch(r"python[\d.]*|pypy[\d.]*", PurePath(word).name) is not None


def count(text: str | None) -> int | None:
    """The text as a positive whole number; None if it is not one."""
    return int(text) if text is not None and text.isdigit() and int(text) else None


def _unclear(options: Words) -> Words:
    texts = (read_text(options, argument) for argument in (_PER_NODE, _NODES, _PROCESSES))
    return tuple(text for text in texts if text is not None and not (text.isdigit() and int(text)))
