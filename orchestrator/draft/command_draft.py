"""A first sweep file for a custom training program, made from its command."""

from __future__ import annotations

import ast
import math
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.draft.inside_draft import InsideDraft, draft_inside
from orchestrator.draft.machine import DraftedMachine, comment, quoted, safe_name, sweep_text, value_text, yaml_words
from orchestrator.draft.observed import Detected, expert_parallel_degrees
from orchestrator.draft.program_reading import ReadProgram, read_program, usual_variables, worker_counts
from orchestrator.draft.static_reading import (
    SourceFile,
    TypedCommand,
    find_script,
    read_source,
    with_settings,
)
from orchestrator.errors import ConfigError
from orchestrator.frameworks.catalog import recognise, training
from orchestrator.frameworks.edit import Reading, Run, Training
from orchestrator.frameworks.trainer_arguments import CONFIG
from trials.files import fields_json, read_regular

MAX_SIZES = 5
"""Micro-batch sizes that a draft proposes."""
# Programs import, compile and read data before their first step, and may evaluate between steps.
PATIENCE_S = 600
GENERIC_STEMS = {"train", "main", "run", "pretrain", "finetune", "fit", "training", "trainer"}
"""Program names that do not identify what is trained."""
Knobs = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedScript:
    """Result of reading a training command."""

    command: TypedCommand
    framework: Training
    reading: Reading
    program: ReadProgram
    source: SourceFile | None
    run: Run
    detected: Detected

    @property
    def is_custom(self) -> bool:
        return self.framework.name == "custom"

    @property
    def micro_batch_size(self) -> int | None:
        if self.detected.is_seen:
            return self.detected.facts.micro_batch_size
        found = self.reading.values.get("micro_batch_size")
        return found if isinstance(found, int) else self.program.micro_batch_size

    @property
    def uses_placeholders(self) -> bool:
        """Whether the candidate reaches the program through placeholders, since its arguments are unknown."""
        return "micro_batch_size" not in self.reading.values or "micro_batch_size" in self.detected.proofs

    @property
    def remarks(self) -> tuple[str, ...]:
        """What could not be read, as text for users."""
        is_done = self.uses_placeholders and self.program.is_tuned_by_batch
        notes = tuple(
            f"{note.knob}: {note.message}"
            for note in self.reading.notes
            if not (is_done and "placeholder" in note.message)
        )
        return (*notes, *(self.program.remarks if self.uses_placeholders else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptDraft:
    """A drafted sweep file for a custom program, and remarks on it."""

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
    detected: Detected = field(default_factory=Detected)
    files: Mapping[str, str] = field(default_factory=dict)
    """Configuration files with placeholders, to be stored next to the sweep file, by name."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``init --json -- COMMAND``, without the file."""
        names = ("name", "hardware", "recipe", "global_batch_size", "max_trials", "run", "env", "baseline", "space")
        return {
            **fields_json(self, *names),
            "not_read": list(self.remarks),
            "seen": self.detected.to_json() if self.detected.is_seen else None,
            "not_seen": self.detected.problem or None,
        }


def read_command(
    command: TypedCommand,
    cwd: Path,
    *,
    recipe: str | None,
    is_gpu: bool,
    ranks: int,
    detected: Detected | None = None,
) -> DraftedScript:
    """Combine the command, its files, the source of its script and what a run showed, for this number of ranks.

    Raises:
        ConfigError: there is no such recipe.
    """
    known, run = _opened(command, cwd, recipe)
    path = find_script(command.argv, cwd)
    source = with_settings(read_source(path), command.argv, cwd) if path is not None else None
    detected = detected or Detected()
    reading = known.read(run)
    if known.name == "lightning" and detected.is_seen and "micro_batch_size" not in reading.values:
        known = training("custom")  # the settings are in code, without arguments that a recipe could change
        reading = known.read(run)
    return DraftedScript(
        command=command,
        framework=known,
        reading=reading,
        program=read_program(command.argv, source, is_gpu=is_gpu, ranks=ranks, detected=detected),
        source=source,
        run=run,
        detected=detected,
    )


def ranks_in_files(command: TypedCommand, cwd: Path, *, recipe: str | None) -> int | None:
    """Ranks of a node in the settings of the framework, as in LightningCLI's YAML; None if not set."""
    known, run = _opened(command, cwd, recipe)
    world = known.read(run).world_size
    return None if world is None else max(1, world // command.num_nodes)


def _opened(command: TypedCommand, cwd: Path, recipe: str | None) -> tuple[Training, Run]:
    """The framework of the command, and the command with the files that its arguments name."""
    run = Run(argv=command.argv, cwd=str(cwd), env=dict(command.env))
    known = training(recipe) if recipe is not None else recognise(run) or training("custom")
    run = _with_launcher(command, run, known)
    paths = dict(known.find_files(run.argv, run.cwd))
    texts = {name: read_regular(Path(path)) for name, path in paths.items()}
    return known, Run(argv=run.argv, cwd=run.cwd, env=run.env, files=texts, paths=paths)


def _with_launcher(command: TypedCommand, run: Run, known: Training) -> Run:
    """The command with ``accelerate launch`` if the framework reads its YAML, which it then changes in a copy; else
    with the variables that the launcher sets."""
    launch = command.accelerate
    if launch is None or CONFIG not in known.find_files(launch.before(run.argv), run.cwd):
        return run
    env = {name: text for name, text in run.env.items() if launch.variables.get(name) != text}
    return replace(run, argv=launch.before(run.argv), env=env)


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
        folder: folder of the sweep file; the program's folder is relative to it.

    Raises:
        ConfigError: the batch is not known and was not given.
    """
    devices = machine.topology.num_devices
    batch = _batch(script, devices, global_batch_size)
    trials = max_trials or (25 if machine.is_gpu else 12)
    inside = InsideDraft()
    if script.is_custom:
        is_gpu, cores = machine.is_gpu, _cores_per_device(machine)
        inside = draft_inside(
            script.source,
            script.program,
            script.detected,
            micro_batch_sizes(script.micro_batch_size or 1, batch, devices),
            is_gpu=is_gpu,
            devices=devices,
            cores=cores,
        )
    baseline = _baseline(script, devices)
    if not isinstance(baseline, str):
        baseline = {**baseline, **inside.present}
    space = dict(_space(script, machine, batch))
    if inside.proposed:
        space["inside"] = inside.proposed
    if script.uses_placeholders and not space:
        space["own"] = dict(usual_variables(is_gpu=machine.is_gpu, cores=os.cpu_count() or 1))
    argv = _argv(script)
    tokens = seq_length or _stated_length(script) or script.detected.facts.seq_length
    named = name or _name(script)
    copies = _copies(script, named)
    argv = tuple(next((f"{{{one.name}}}" for one in copies if one.word == word), word) for word in argv)
    workload = _workload(script, argv, batch, tokens, Path(script.run.cwd), folder)
    if copies:
        where = Path(os.path.relpath(folder, script.run.cwd))
        workload["files"] = {one.name: str(where / one.file) for one in copies}
    starts_itself = script.detected.starts_ranks or (script.command.launcher is None and devices == 1)
    if starts_itself and script.framework.launcher == "env":
        workload = {**workload, "launcher": "own"}  # torchrun's variables would make it a distributed one
    return ScriptDraft(
        name=named,
        text=sweep_text(list(_lines(named, script, machine, workload, baseline, space, inside, trials))),
        hardware=machine.label,
        recipe=script.framework.name,
        title=script.framework.title,
        run=argv,
        env=workload.get("env", {}),
        global_batch_size=batch,
        baseline=baseline,
        space=space,
        max_trials=trials,
        remarks=script.remarks,
        detected=script.detected,
        files={one.file: one.text for one in copies},
    )


def _argv(script: DraftedScript) -> tuple[str, ...]:
    """The command of the sweep file."""
    launch = script.command.accelerate
    if not script.uses_placeholders:
        return script.run.argv
    has_launcher = launch is not None and script.run.argv != script.command.argv
    return launch.before(script.program.argv) if launch is not None and has_launcher else script.program.argv


def _stated_length(script: DraftedScript) -> int | None:
    """Tokens per sample, from the command or its files."""
    return script.reading.seq_length or script.program.seq_length


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A configuration file with placeholders."""

    name: str
    """Placeholder of the file."""
    word: str
    """The argument of the command that names the original file."""
    file: str
    """Its name next to the sweep file."""
    text: str


def _copies(script: DraftedScript, named: str) -> list[_Copy]:
    files = script.program.files if script.uses_placeholders else {}
    return [
        _Copy(name=f"config{place or ''}", word=word, file=f"{named}-{Path(word).name}", text=text)
        for place, (word, text) in enumerate(files.items())
    ]


def _name(script: DraftedScript) -> str:
    """The name of the program, preceded by that of its folder if it is a common one."""
    if script.source is None:
        return safe_name(script.framework.name)
    path = script.source.path.absolute()
    return safe_name(f"{path.parent.name}-{path.stem}" if path.stem.lower() in GENERIC_STEMS else path.stem)


def _batch(script: DraftedScript, devices: int, given: int | None) -> int:
    """Samples of an optimiser step: as detected in a run, else as specified, else as in the command: micro-batch x
    accumulation x data-parallel ranks.

    Raises:
        ConfigError: the specified number differs from the detected one, or the number is unknown.
    """
    reading = script.reading
    if (seen := script.detected.facts.samples_per_step) is not None:
        batch = seen * max(1, devices // _model_parallel(reading))
        if given not in (None, batch):
            raise ConfigError(
                f"the script uses {batch} samples per optimiser step, not {given}: {script.detected.words}",
                key="--global-batch-size",
                remedy=f"Use {batch}, or omit the option; --no-run uses {given} without running the program.",
            )
        return batch
    if given is not None:
        return given
    if reading.global_batch_size is not None:
        return reading.global_batch_size
    if (micro := script.micro_batch_size) is None:
        unseen = f", and a run did not detect it: {script.detected.problem}" if script.detected.problem else ""
        raise ConfigError(
            f"cannot read the batch size from the command{unseen}",
            key="--global-batch-size",
            remedy="Pass the number of samples per optimiser step over all devices, such as --global-batch-size 64. If "
            "unsure, `tune-cluster check` compares the number with the batch that the program uses.",
        )
    count = reading.num_microbatches or script.program.accumulation or 1
    return micro * count * max(1, devices // _model_parallel(reading))


def _model_parallel(reading: Reading) -> int:
    """Ranks that share a replica of the model."""
    return math.prod(int(reading.values.get(axis, 1)) for axis in ("layout.tp", "layout.pp", "layout.cp"))


def _baseline(script: DraftedScript, devices: int) -> Knobs | str:
    """``from_run`` if the command defines everything."""
    if not script.uses_placeholders:
        return "from_run"
    shards = devices > 1 and bool(script.reading.values.get("layout.zero_stage"))
    found: dict[str, Any] = {"dp_shard" if shards else "dp_replicate": devices} if devices > 1 else {}
    if (micro := script.micro_batch_size) is not None:
        found["micro_batch_size"] = micro
    if (level := script.reading.values.get("precision.level")) in ("O1", "O2"):
        found["precision"] = {"level": level, "dtype": script.reading.values.get("precision.dtype", "bfloat16")}
    if not script.is_custom and script.reading.values.get("recompute.full"):
        found["recompute"] = "full"
    if script.program.num_workers is not None:
        found["num_workers"] = script.program.num_workers
    if script.program.ep is not None:
        found["ep"] = script.program.ep
    if script.program.present:
        found["own"] = dict(script.program.present)
    return found


def _space(script: DraftedScript, machine: DraftedMachine, batch: int) -> Iterator[tuple[str, Any]]:
    """The knobs that matter for most programs, if this one has them."""
    reading, devices = script.reading, machine.topology.num_devices
    recorded = set(reading.values)
    if script.framework.name == "deepspeed" and devices > 1 and "layout.zero_stage" in recorded:
        yield "dp_shard", devices
        yield "zero_stage", [1, 2, 3]
    if not script.uses_placeholders or script.program.is_tuned_by_batch:
        yield "micro_batch_size", micro_batch_sizes(script.micro_batch_size or 1, batch, devices)
    if script.uses_placeholders and script.program.ep is not None:
        yield "ep", sorted(expert_parallel_degrees(script.program.ep, devices, script.detected.facts))
    if any(path.startswith("recompute.") for path in recorded):
        yield "recompute", ["none", "full"]
    if "precision.level" in recorded:
        yield "precision", _precisions(reading, is_gpu=machine.is_gpu)
    if script.uses_placeholders and (workers := script.program.num_workers) is not None:
        yield "num_workers", worker_counts(workers, _cores_per_device(machine))
    elif "loader.num_workers" in recorded:
        yield "num_workers", sorted({int(reading.values["loader.num_workers"]), 0, 2})
    if "kernels.compile" in recorded and machine.is_gpu:
        yield "compile", ["off", "model"]
    if script.uses_placeholders and script.program.own:
        yield "own", dict(script.program.own)


def _cores_per_device(machine: DraftedMachine) -> int:
    return (os.cpu_count() or 1) // machine.devices_per_node


def _precisions(reading: Reading, *, is_gpu: bool) -> list[Any]:
    """The current number format, and the usual alternative on CPUs or if it is fp32."""
    level, dtype = reading.values["precision.level"], reading.values.get("precision.dtype")
    today = {"level": level, "dtype": dtype} if level != "O0" and dtype == "float16" else level
    if is_gpu and level != "O0":
        return [today]
    if level == "O2":
        return ["O0", today]
    return ["O0", today if level == "O1" else "O1"]


def micro_batch_sizes(present: int, batch: int, devices: int) -> list[int]:
    """The current size and the adjacent divisors of a device's batch."""
    most = max(1, batch // devices)
    sizes = {size for size in range(1, most + 1) if most % size == 0 and batch % devices == 0}
    near = sorted(sizes - {present}, key=lambda size: (abs(math.log2(size / present)), -size))
    return sorted({present, *near[: MAX_SIZES - 1]})


def _workload(
    script: DraftedScript, argv: Sequence[str], batch: int, tokens: int | None, cwd: Path, folder: Path
) -> dict[str, Any]:
    """Section ``workload``, key by key."""
    where = os.path.relpath(cwd, folder)
    found: dict[str, Any] = {"recipe": script.framework.name, "run": list(argv)}
    if script.uses_placeholders and script.program.trial:
        found["trial_args"] = list(script.program.trial)
    if where != ".":
        found["cwd"] = where if len(where) < len(str(cwd)) else str(cwd)
    if env := {**script.run.env, **(script.program.env if script.uses_placeholders else {})}:
        found["env"] = env
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
    inside: InsideDraft,
    trials: int,
) -> Iterator[str]:
    typed = shlex.join(script.command.words)
    yield from comment(f"{name}: {script.framework.title}, on {machine.label}.")
    yield from comment(textwrap.shorten(f"Made from: {typed}", 230, placeholder=" ..."))
    if script.detected.is_seen:
        yield from comment(f"Detected in a run: {script.detected.words}.")
    for remark in (*script.remarks[:3], *machine.remarks):
        yield from comment(remark)
    yield from (f"name: {name}", "", "workload: # your training program; all keys: docs/your-own-training.md")
    notes = {
        "global_batch_size": " # samples per optimiser step over all devices",
        "trial_args": " # in trials only",
    }
    if not _stated_length(script) and workload.get("seq_length") == script.detected.facts.seq_length:
        notes["seq_length"] = " # tokens per sample, read from the model's inputs"
    for key, value in workload.items():
        shown = yaml_words(value) if key in ("run", "trial_args") else value_text(value)
        yield f"  {key}: {shown}{notes.get(key, '')}"
    yield from (f"cluster: {machine.section}", "")
    if isinstance(baseline, str):
        yield f"baseline: {baseline} # the command unchanged, always the first trial"
    else:
        yield f"baseline: {value_text(baseline)} # values of the command, always the first trial"
    yield "space: # knobs to tune; all others keep their value. Reference: docs/knobs.md"
    for key, value in space.items():
        if key == "own":
            yield "  own: # options and environment variables of your program"
            yield from (f"    {quoted(own)}: {value_text(choices)}" for own, choices in value.items())
        elif key == "inside":
            yield "  inside: # set inside the program, which has no options for them"
            yield from (f"    {name}: {value_text(choices)}" for name, choices in value.items())
            yield from (f"    # {name}: {value_text(choices)}" for name, choices in inside.offered.items())
        else:
            yield f"  {key}: {value_text(value)}"
    if inside.offered and "inside" not in space:
        yield "  # inside: # can be set inside the program, which has no options for them"
        yield from (f"  #   {name}: {value_text(choices)}" for name, choices in inside.offered.items())
    yield f"deadlines: {{starting_s: {PATIENCE_S}, warmup_s: {PATIENCE_S}, stall_s: {PATIENCE_S}}}"
    yield f"budget: {{max_trials: {trials}}}"


# The line that a script prints per step, as a regular expression derived from its print call, if that is simple.


_PRINTERS = {"print", "info", "log", "write", "warning", "print_rank_0", "rank_zero_info", "rank0_print", "echo"}
_NUMBER = r"[\w.+-]+"
_STEP = re.compile(r"\b(global_?step|step|iter|iteration|iter_num|it|batch|batch_idx|i)\b", re.IGNORECASE)
_SIGNS = (
    ("loss", re.compile(r"\b(train_?)?loss\b", re.IGNORECASE)),
    ("grad_norm", re.compile(r"\b(grad_?norm|gnorm)\b", re.IGNORECASE)),
    ("step_ms", re.compile(r"\bms/(batch|step|it|iter|iteration)\b", re.IGNORECASE)),
)
_MILLISECONDS = re.compile(r"^\s*(ms|msec|milliseconds)\b", re.IGNORECASE)
_SECONDS = re.compile(r"^\s*(s|sec|secs|seconds)(/(it|step|iter))?\b", re.IGNORECASE)
_PERCENT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[diouxXeEfFgGsra]")


def log_pattern(tree: ast.AST) -> str | None:
    """A regular expression with the groups ``step`` and ``loss``, and others if recognized; None if no print call
    shows a step and a loss in a simple way."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _PRINTERS and node.args and (pattern := _pattern(list(_pieces(node)))) is not None:
                found.append(pattern)
    return max(found, key=lambda pattern: (pattern.count("(?P<"), "val" not in pattern), default=None)


def _pieces(call: ast.Call) -> Iterator[str | ast.expr]:
    """Text and expressions in the order in which the call prints them."""
    first = call.args[0]
    if len(call.args) > 1 and isinstance(first, ast.Constant) and _PERCENT.search(str(first.value)):
        yield from _filled(re.split(f"({_PERCENT.pattern})", str(first.value)), call.args[1:])  # log.info("%d", step)
        return
    for position, argument in enumerate(call.args):
        if position:
            yield " "
        yield from _parts(argument)


def _parts(node: ast.expr) -> Iterator[str | ast.expr]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                yield value.value
            elif isinstance(value, ast.Constant):
                yield str(value.value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _parts(node.left)
        yield from _parts(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
        values = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        yield from _filled(re.split(f"({_PERCENT.pattern})", str(node.left.value)), values)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        if isinstance(node.func.value, ast.Constant):
            yield from _filled(re.split(r"(\{[^{}]*\})", str(node.func.value.value)), node.args)
    else:
        yield node


def _filled(texts: Sequence[str], values: Sequence[ast.expr]) -> Iterator[str | ast.expr]:
    """Texts with each placeholder, every other one of them, replaced by its value."""
    rest = list(values)
    for position, text in enumerate(texts):
        if position % 2 == 0:
            yield text.replace("%%", "%")
        elif rest:
            yield rest.pop(0)


def _pattern(pieces: list[str | ast.expr]) -> str | None:
    found: dict[str, int] = {}
    parts: list[str] = []
    for position, piece in enumerate(pieces):
        if isinstance(piece, str):
            parts.append(_escaped(piece))
            continue
        before = pieces[position - 1] if position and isinstance(pieces[position - 1], str) else ""
        after = pieces[position + 1] if position + 1 < len(pieces) else ""
        group = _group(piece, str(before), after if isinstance(after, str) else "")
        if group is None or group in found:
            parts.append(r"\s*\S+?" if isinstance(after, str) and after.strip() else r"\s*\S+")
        else:
            found[group] = position
            parts.append(rf"\s*(?P<{group}>\d+)" if group == "step" else rf"\s*(?P<{group}>{_NUMBER})")
    if not {"step", "loss"} <= set(found):
        return None
    return "".join(parts[: max(found.values()) + 2]).replace(r"\s*\s*", r"\s*").strip()


def _group(value: ast.expr, before: str, after: str) -> str | None:
    """What a printed value is, by the adjacent words and the names in it."""
    if _MILLISECONDS.match(after):
        return "step_ms"
    names = " ".join(node.id for node in ast.walk(value) if isinstance(node, ast.Name))
    label = re.split(r"[,|;\[\]]", before.rstrip(" :=([{#"))[-1]
    for text in (label, names):
        for group, sign in _SIGNS:
            if sign.search(text):
                return group
        if _STEP.search(text) and not _SECONDS.match(after) and _counts(value):
            return "step"
    return None


def _counts(value: ast.expr) -> bool:
    """Whether an expression may be the number of a step: a name, or one with a constant added."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and isinstance(value.right, ast.Constant):
        return _counts(value.left)
    return isinstance(value, ast.Name | ast.Attribute)


def _escaped(text: str) -> str:
    """The text for a regular expression, in which white space matches any amount of it."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))
