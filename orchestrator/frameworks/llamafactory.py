"""LLaMA-Factory: a YAML of arguments, with ``key=value`` words that override it.

Names and defaults are those of LLaMA-Factory 0.9.5 (``hparams/``, ``launcher.py``). It recomputes activations unless
``disable_gradient_checkpointing`` is set. Its launcher starts torchrun; tune-cluster starts the ranks' module instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from orchestrator.frameworks.arguments import Words
from orchestrator.frameworks.edit import Overlay, OverlayRequest, Reading, Run, Training
from orchestrator.frameworks.launchers import (
    Program,
    imports,
    program_of,
    python_next_to,
    script_text,
    without_launcher,
)
from orchestrator.frameworks.trainer_arguments import Dialect, find_files
from orchestrator.frameworks.transformers import expected_of, table, trial_of_trainer
from trials.script.command import LogFormat

_MODULE = "llamafactory.launcher"
_COMMANDS = ("llamafactory-cli", "lmf")
_DIALECT = Dialect(
    defaults={"disable_gradient_checkpointing": False},
    overrides="assignment",
    attention=("flash_attn", {"auto": "auto", "flash": "fa2", "math": "disabled"}),
    recompute="disable_gradient_checkpointing",
)
TABLE = table(_DIALECT)
_TRIAL: Mapping[str, Any] = {"overwrite_output_dir": True}


def _program(argv: Words) -> Program:
    return program_of(without_launcher(argv).argv)


def _recognises(run: Run) -> bool:
    program = _program(run.argv)
    if program.name in (*_COMMANDS, _MODULE, "llamafactory.cli") and program.script is None:
        return program.module == _MODULE or program.arguments[:1] == ("train",)
    return "llamafactory" in imports(script_text(run.argv, run.cwd))


def _plain(run: Run) -> Run:
    """The command of one rank; its launcher would start ranks itself, or none on the CPU."""
    argv = without_launcher(run.argv).argv
    program = program_of(argv)
    if program.name not in (*_COMMANDS, "llamafactory.cli"):
        return dataclasses.replace(run, argv=argv)
    words = program.arguments[1:] if program.arguments[:1] == ("train",) else program.arguments
    head = (*program.head[:-2], "-m") if program.module else (python_next_to(program.head[-1]), "-m")
    return dataclasses.replace(run, argv=(*head, _MODULE, *words))


def _find_files(argv: Words, cwd: str) -> dict[str, str]:
    return find_files(without_launcher(argv).argv, cwd)


def _read(run: Run) -> Reading:
    """The YAML with the words next to it. Variables set the number of ranks that its launcher starts."""
    plain = _plain(run)
    world = without_launcher(run.argv).world_size
    if world is None and _program(run.argv).name in _COMMANDS and run.env.get("NPROC_PER_NODE", "").isdigit():
        world = int(run.env["NPROC_PER_NODE"]) * int(run.env.get("NNODES", "1"))
    env = {**plain.env, **({"WORLD_SIZE": str(world)} if world else {})}
    return TABLE.read(dataclasses.replace(plain, env=env))


def _overlay(run: Run, request: OverlayRequest) -> Overlay:
    return TABLE.overlay(_plain(run), request)


TRAINING = Training(
    name="llamafactory",
    title="LLaMA-Factory",
    package="llamafactory",
    releases=">=0.9.3,<0.10",
    takes_launchers=True,
    takes_custom_names=True,
    log=LogFormat(name="llamafactory", files=("{out}/trainer_log.jsonl",)),
    recognises=_recognises,
    find_files=_find_files,
    read=_read,
    overlay=_overlay,
    trial_mode=partial(trial_of_trainer, dialect=_DIALECT, more=_TRIAL),
    expected=expected_of,
)
