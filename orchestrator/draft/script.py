"""A first sweep file for a training program of the user's own, made from its command."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.draft.commandline import TypedCommand
from orchestrator.draft.machine import DraftedMachine
from orchestrator.draft.program import ReadProgram, read_program
from orchestrator.draft.source import SourceFile, find_script, read_source, with_settings
from orchestrator.draft.sweep_text import comment, quoted, safe_name, sweep_text, value_text, words_text
from orchestrator.errors import ConfigError
from orchestrator.recipes.training import Reading, Run, Training
from orchestrator.recipes.trainings import recognise, training

MAX_SIZES = 5
"""Micro-batch sizes that a draft proposes."""
PATIENCE_S = 600
"""Programs import, compile and read data before their first step, and may evaluate between two of them."""
Knobs = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedScript:
    """What was read of a training command."""

    command: TypedCommand
    framework: Training
    reading: Reading
    program: ReadProgram
    source: SourceFile | None
    run: Run

    @property
    def is_custom(self) -> bool:
        return self.framework.name == "custom"

    @property
    def micro_batch_size(self) -> int | None:
        found = self.reading.values.get("micro_batch_size")
        return found if isinstance(found, int) else self.program.micro_batch_size

    @property
    def uses_placeholders(self) -> bool:
        """Whether the candidate reaches the program through placeholders, since nobody knows its arguments."""
        return "micro_batch_size" not in self.reading.values

    @property
    def remarks(self) -> tuple[str, ...]:
        """What could not be read, for people."""
        is_done = self.uses_placeholders and self.program.is_tuned_by_batch
        notes = tuple(
            f"{note.knob}: {note.message}"
            for note in self.reading.notes
            if not (is_done and "placeholder" in note.message)
        )
        return (*notes, *(self.program.remarks if self.uses_placeholders else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptDraft:
    """A sweep file for a program of the user's own that nobody has written yet, and what there is to say about it."""

    name: str
    text: str
    hardware: str
    recipe: str
    title: str
    run: tuple[str, ...]
    global_batch_size: int
    baseline: Knobs | str
    space: Knobs
    max_trials: int
    remarks: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``init --json -- COMMAND``, without the file."""
        names = ("name", "hardware", "recipe", "global_batch_size", "max_trials")
        return {
            **{name: getattr(self, name) for name in names},
            "run": list(self.run),
            "env": dict(self.env),
            "baseline": self.baseline if isinstance(self.baseline, str) else dict(self.baseline),
            "space": dict(self.space),
            "not_read": list(self.remarks),
        }


def read_command(command: TypedCommand, cwd: Path, *, recipe: str | None, is_gpu: bool, ranks: int) -> DraftedScript:
    """What the command, its files and its script's source tell, for as many ranks.

    Raises:
        ConfigError: there is no such recipe.
    """
    run = Run(argv=command.argv, cwd=str(cwd), env=dict(command.env))
    known = training(recipe) if recipe is not None else recognise(run) or training("custom")
    paths = dict(known.find_files(run.argv, run.cwd))
    texts = {name: Path(path).read_text(encoding="utf-8") for name, path in paths.items()}
    run = Run(argv=run.argv, cwd=run.cwd, env=run.env, files=texts, paths=paths)
    path = find_script(command.argv, cwd)
    source = with_settings(read_source(path), command.argv, cwd) if path is not None else None
    return DraftedScript(
        command=command,
        framework=known,
        reading=known.read(run),
        program=read_program(command.argv, source, is_gpu=is_gpu, cores=os.cpu_count() or 1, ranks=ranks),
        source=source,
        run=run,
    )


def draft_script(
    script: DraftedScript,
    machine: DraftedMachine,
    *,
    name: str | None = None,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    max_trials: int | None = None,
    folder: Path,
) -> ScriptDraft:
    """The sweep file for a command on a machine.

    Args:
        folder: that of the sweep file, which the program's folder is named from.

    Raises:
        ConfigError: the batch is not known and was not given.
    """
    devices = machine.topology.num_devices
    batch = global_batch_size or _batch(script, devices)
    trials = max_trials or (25 if machine.is_gpu else 12)
    baseline = _baseline(script, devices)
    space = dict(_space(script, machine, batch))
    argv = script.program.argv if script.uses_placeholders else script.run.argv
    tokens = seq_length or script.reading.seq_length or script.program.seq_length
    named = name or safe_name(script.source.path.stem if script.source is not None else script.framework.name)
    workload = _workload(script, argv, batch, tokens, Path(script.run.cwd), folder)
    if script.command.launcher is None and devices == 1 and script.framework.launcher == "env":
        workload = {**workload, "launcher": "own"}  # torchrun's variables would make it a distributed one
    return ScriptDraft(
        name=named,
        text=sweep_text(list(_lines(named, script, machine, workload, baseline, space, trials))),
        hardware=machine.label,
        recipe=script.framework.name,
        title=script.framework.title,
        run=argv,
        env=script.run.env,
        global_batch_size=batch,
        baseline=baseline,
        space=space,
        max_trials=trials,
        remarks=script.remarks,
    )


def _batch(script: DraftedScript, devices: int) -> int:
    """Samples of an optimiser step as the command has it: micro-batch x accumulation x data-parallel ranks."""
    reading = script.reading
    if reading.global_batch_size is not None:
        return reading.global_batch_size
    if (micro := script.micro_batch_size) is None:
        raise ConfigError(
            "the batch size could not be read from the command",
            key="--global-batch-size",
            remedy="Say how many samples an optimiser step has, over all devices: --global-batch-size 64.",
        )
    model_parallel = 1
    for axis in ("layout.tp", "layout.pp", "layout.cp"):
        model_parallel *= int(reading.values.get(axis, 1))
    count = reading.num_microbatches or script.program.accumulation or 1
    return micro * count * max(1, devices // model_parallel)


def _baseline(script: DraftedScript, devices: int) -> Knobs | str:
    """``from_run`` where the command says it all."""
    if not script.uses_placeholders:
        return "from_run"
    found: dict[str, Any] = {"dp_replicate": devices} if devices > 1 else {}
    if (micro := script.micro_batch_size) is not None:
        found["micro_batch_size"] = micro
    if (level := script.reading.values.get("precision.level")) in ("O1", "O2"):
        found["precision"] = {"level": level, "dtype": script.reading.values.get("precision.dtype", "bfloat16")}
    if not script.is_custom and script.reading.values.get("recompute.full"):
        found["recompute"] = "full"
    if script.program.present:
        found["own"] = dict(script.program.present)
    return found


def _space(script: DraftedScript, machine: DraftedMachine, batch: int) -> Iterator[tuple[str, Any]]:
    """The knobs that matter for most programs, as far as this one has them."""
    reading, devices = script.reading, machine.topology.num_devices
    said = set(reading.values)
    if script.framework.name == "deepspeed" and devices > 1 and "layout.zero_stage" in said:
        yield "dp_shard", devices
        yield "zero_stage", [1, 2, 3]
    if not script.uses_placeholders or script.program.is_tuned_by_batch:
        yield "micro_batch_size", micro_batch_sizes(script.micro_batch_size or 1, batch, devices)
    if any(path.startswith("recompute.") for path in said):
        yield "recompute", ["none", "full"]
    if "precision.level" in said:
        yield "precision", ["O1"] if machine.is_gpu and reading.values["precision.level"] == "O1" else ["O0", "O1"]
    if "loader.num_workers" in said:
        yield "num_workers", sorted({int(reading.values["loader.num_workers"]), 0, 2})
    if "kernels.compile" in said and machine.is_gpu:
        yield "compile", ["off", "model"]
    if script.uses_placeholders and script.program.own:
        yield "own", dict(script.program.own)


def micro_batch_sizes(present: int, batch: int, devices: int) -> list[int]:
    """The present size and the powers of two around it that make up the batch, the largest ones first to be kept."""
    most = max(1, batch // devices)
    sizes = {size for size in (1 << n for n in range(most.bit_length())) if most % size == 0 and batch % devices == 0}
    near = sorted({present, *sizes}, key=lambda size: (size < present // 2, size))
    return sorted({present, *near[:MAX_SIZES]})


def _workload(
    script: DraftedScript, argv: Sequence[str], batch: int, tokens: int | None, cwd: Path, folder: Path
) -> dict[str, Any]:
    """Section ``workload``, key by key."""
    where = os.path.relpath(cwd, folder)
    found: dict[str, Any] = {"recipe": script.framework.name, "run": list(argv)}
    if where != ".":
        found["cwd"] = where if len(where) < len(str(cwd)) else str(cwd)
    if script.run.env:
        found["env"] = dict(script.run.env)
    if script.command.starts_ranks and script.framework.launcher != "own":
        found["launcher"] = "own"
    if tokens is not None and script.reading.seq_length is None:
        found["seq_length"] = tokens
    found["global_batch_size"] = batch
    pattern = script.source.log_pattern if script.source is not None else None
    if script.framework.log.name == "none" and pattern is not None:
        found["metrics"] = {"log": pattern}
    return found


def _lines(
    name: str,
    script: DraftedScript,
    machine: DraftedMachine,
    workload: Knobs,
    baseline: Knobs | str,
    space: Knobs,
    trials: int,
) -> Iterator[str]:
    typed = shlex.join(script.command.words)
    yield from comment(f"{name}: {script.framework.title}, on {machine.label}.")
    yield from comment(textwrap.shorten(f"Made from: {typed}", 230, placeholder=" ..."))
    for remark in (*script.remarks[:3], *machine.remarks):
        yield from comment(remark)
    yield from (f"name: {name}", "", "workload: # your own training; every key is in docs/your-own-training.md")
    for key, value in workload.items():
        note = " # samples of an optimiser step over all devices" if key == "global_batch_size" else ""
        shown = words_text(value) if key == "run" else value_text(value)
        yield f"  {key}: {shown}{note}"
    yield from (f"cluster: {machine.section}", "")
    if isinstance(baseline, str):
        yield f"baseline: {baseline} # the command as it stands, always the first trial"
    else:
        yield f"baseline: {value_text(baseline)} # as the command has it: always the first trial"
    yield "space: # what may be changed; what is not named stays as it is. Knobs: docs/knobs.md"
    for key, value in space.items():
        if key == "own":
            yield "  own: # arguments and variables of the program itself"
            yield from (f"    {quoted(own)}: {value_text(choices)}" for own, choices in value.items())
        else:
            yield f"  {key}: {value_text(value)}"
    yield f"deadlines: {{starting_s: {PATIENCE_S}, warmup_s: {PATIENCE_S}, stall_s: {PATIENCE_S}}}"
    yield f"budget: {{max_trials: {trials}}}"
