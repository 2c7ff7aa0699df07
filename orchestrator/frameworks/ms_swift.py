"""ms-swift: ``swift sft`` with arguments, or with a leading YAML or JSON file that its launcher converts to arguments.

Names and defaults are those of ms-swift 4.6 (``swift/cli/main.py``, ``swift/arguments``, ``swift/trainers``). By
default, activations are recomputed, and accumulation adds up to 16 samples.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.frameworks import documents
from orchestrator.frameworks.arguments import Words
from orchestrator.frameworks.edit import Overlay, OverlayRequest, Reading, Run, Training
from orchestrator.frameworks.launchers import count, program_of, python_next_to, without_launcher
from orchestrator.frameworks.trainer_arguments import ARGS, Dialect, find_files
from orchestrator.frameworks.transformers import expected_of, table, trial_of_trainer
from trials.script.command import LogFormat

_METHODS = ("pt", "sft", "rlhf")
_DIALECT = Dialect(
    defaults={
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": None,
        "bf16": None,  # as the model's own number format
        "fp16": None,
    },
    attention=("attn_impl", {"auto": "sdpa", "flash": "flash_attention_2", "math": "eager"}),
    presets=True,
)
TABLE = table(_DIALECT)
_SAMPLES = 16
"""Samples per step with the default accumulation."""
_TRIAL: Mapping[str, Any] = {"add_version": False, "split_dataset_ratio": 0}


def _method(argv: Words) -> str | None:
    """``sft`` and similar, for every way to start it; None if it is not an ms-swift training."""
    program = program_of(without_launcher(argv).argv)
    name = program.module or program.script or program.name
    if name == "swift" and program.arguments[:1] and program.arguments[0] in _METHODS:
        return program.arguments[0]
    parts = name.removesuffix(".py").replace("/", ".").split(".")
    return parts[-1] if parts[-3:-1] == ["swift", "cli"] and parts[-1] in _METHODS else None


def _recognises(run: Run) -> bool:
    return _method(run.argv) is not None


def _plain(run: Run) -> Run:
    """The command of one rank, with a leading file of arguments expanded, as by the launcher of ms-swift."""
    argv = without_launcher(run.argv).argv
    program, method = program_of(argv), _method(run.argv)
    words, env = program.arguments, dict(run.env)
    head = program.head
    if program.name == "swift":
        head = (python_next_to(program.head[-1]), "-m", f"swift.cli.{method}")
        words = words[1:]
    name = words[0].strip("{}") if words else ""
    name = name if name in run.files else ARGS if words and words[0].endswith((".yaml", ".yml", ".json")) else name
    if name in run.files:
        content = documents.load(run.files[name], run.paths.get(name, name))
        variables = content.pop("ENV", None) or {}
        env = {**{key: str(value) for key, value in variables.items()}, **env}
        words = (*_written_out(content), *words[1:])
    return dataclasses.replace(run, argv=(*head, *words), env=env)


def _written_out(content: Mapping[str, Any]) -> Iterator[str]:
    for name, value in content.items():
        yield f"--{name}"
        if isinstance(value, list):
            yield from map(str, value)
        else:
            yield json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else str(value)


def _find_files(argv: Words, cwd: str) -> dict[str, str]:
    """The leading file of arguments, and the JSON files that arguments, in it or outside it, refer to."""
    argv = without_launcher(argv).argv
    program = program_of(argv)
    words = program.arguments[1:] if program.name == "swift" else program.arguments
    found: dict[str, str] = {}
    if words and words[0].endswith((".yaml", ".yml", ".json")) and Path(cwd, words[0]).is_file():
        path = Path(cwd, words[0])
        found[ARGS] = str(path)
        content = documents.load(path.read_text(encoding="utf-8"), words[0])
        words = (*(_written_out(content) if isinstance(content, Mapping) else ()), *words[1:])
    return {**find_files((program.head[-1], *words), cwd), **found}


def _read(run: Run) -> Reading:
    plain = _plain(run)
    launched = without_launcher(run.argv)
    world = launched.world_size
    if world is None and program_of(launched.argv).name == "swift":  # with this variable it starts ranks
        world = count(plain.env.get("NPROC_PER_NODE"))
    env = {**plain.env, **({"WORLD_SIZE": str(world)} if world else {})}
    reading = TABLE.read(dataclasses.replace(plain, env=env))
    micro = reading.values.get("micro_batch_size")
    if reading.num_microbatches is None and isinstance(micro, int) and world:
        number = max(1, -(-_SAMPLES // (micro * world)))
        reading = dataclasses.replace(reading, num_microbatches=number, global_batch_size=micro * number * world)
    return reading


def _overlay(run: Run, request: OverlayRequest) -> Overlay:
    plain = _plain(run)
    laid = TABLE.overlay(plain, request)
    return dataclasses.replace(laid, env={**plain.env, **laid.env})


TRAINING = Training(
    name="ms-swift",
    title="ms-swift",
    package="ms-swift",
    releases=">=4.0,<5",
    takes_launchers=True,
    takes_custom_names=True,
    log=LogFormat(name="ms_swift", files=("{out}/logging.jsonl",)),
    recognises=_recognises,
    find_files=_find_files,
    read=_read,
    overlay=_overlay,
    trial_mode=partial(trial_of_trainer, dialect=_DIALECT, more=_TRIAL),
    expected=expected_of,
)
