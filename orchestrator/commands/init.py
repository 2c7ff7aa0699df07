"""``tune-cluster init``: writes a first sweep file, drafted for a command or a model, or an example."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import CONFIGS
from orchestrator.commands.detection import Notify, detect
from orchestrator.draft.command_draft import ScriptDraft, draft_script, ranks_in_files, read_command
from orchestrator.draft.draft import SweepDraft, make_draft, require_room, skeleton, write_draft
from orchestrator.draft.machine import DraftedMachine, described_machine, machine_at, machine_here
from orchestrator.draft.model_config import DraftedModel, model_of_file, model_of_size
from orchestrator.draft.observed import Detected
from orchestrator.draft.static_reading import find_script, take_apart
from orchestrator.errors import ConfigError
from orchestrator.sweep.snapshot import check_name
from trials.files import write_atomically

_FOLDER = CONFIGS / "sweeps"
_PROGRAMS = CONFIGS / "examples"
_TRAINS = re.compile(r"(pre)?train|fine_?tune|main|fit|run", re.IGNORECASE)
_MODEL_REFERENCE = re.compile(r"^(\s*model:\s*)(\.\./models/(\S+\.yaml))", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The inputs of a first sweep; None: not given."""

    model: Path | None = None
    parameters: str | None = None
    cluster: str | None = None
    address: str | None = None
    nodes: int | None = None
    devices_per_node: int | None = None
    seq_length: int | None = None
    global_batch_size: int | None = None
    max_trials: int | None = None
    name: str | None = None

    def drafted_model(self) -> DraftedModel:
        """The requested model.

        Raises:
            ConfigError: there is none, or two.
        """
        if self.model is not None and self.parameters is not None:
            raise ConfigError("--model and --parameters are mutually exclusive", remedy="Remove one of them.")
        if self.model is not None:
            return model_of_file(self.model)
        if self.parameters is not None:
            return model_of_size(self.parameters)
        programs = sorted(path.name for path in Path.cwd().glob("*.py") if _TRAINS.match(path.stem))
        program = programs[0] if programs else "train.py"
        raise ConfigError(
            "expected a training command or a model",
            remedy=f"For your own program, run: tune-cluster init -- python {program} ... For a model, use --model "
            "config.json (Hugging Face) or --parameters 13B. To list complete examples, use --list.",
        )

    def drafted_machine(self, used_per_node: int | None = None, used_nodes: int = 1) -> DraftedMachine:
        """The requested hardware; else this host's.

        Args:
            used_per_node: devices per node that a command uses, unless others are requested.
            used_nodes: nodes that it uses.

        Raises:
            ConfigError: it is not described, does not answer, or is too small.
        """
        if self.cluster is not None and self.address is not None:
            raise ConfigError("--cluster and --address are mutually exclusive", remedy="Remove one of them.")
        devices, nodes = self.devices_per_node or used_per_node, self.nodes or (used_nodes if used_nodes > 1 else None)
        if self.cluster is not None:
            return described_machine(self.cluster, nodes, devices)
        if self.address is not None:
            return machine_at(self.address, nodes, devices)
        if nodes not in (None, 1):
            raise ConfigError(
                f"this host is one node, not {nodes}",
                key="--nodes",
                remedy="To use more nodes, add --cluster or --address.",
            )
        return machine_here(devices)


def draft_sweep(questions: Questions, output: Path, *, force: bool) -> SweepDraft:
    """Draft a sweep, and write its file.

    Raises:
        ConfigError: see :class:`Questions`, :func:`make_draft` and :func:`write_draft`.
    """
    if questions.name is not None:
        check_name(questions.name, "sweep name")
    draft = make_draft(
        questions.drafted_model(),
        questions.drafted_machine(),
        name=questions.name,
        seq_length=questions.seq_length,
        global_batch_size=questions.global_batch_size,
        max_trials=questions.max_trials,
    )
    write_draft(draft.text, output, force=force)
    return draft


def draft_command(
    words: Sequence[str],
    questions: Questions,
    output: Path,
    *,
    recipe: str | None,
    force: bool,
    detection_s: float | None = None,
    notify: Notify = lambda _: None,
) -> ScriptDraft:
    """Draft a sweep of a custom training program, and write its file.

    Args:
        detection_s: time limit for running the program; None: it is only parsed.
        notify: receives progress.

    Raises:
        ConfigError: the command or its batch cannot be parsed, see :class:`Questions` and :func:`write_draft`.
    """
    if questions.model is not None or questions.parameters is not None or questions.cluster is not None:
        raise ConfigError(
            "a training command cannot be combined with --model, --parameters or --cluster",
            remedy="Remove these options. To use a Ray cluster, pass --address.",
        )
    if questions.name is not None:
        check_name(questions.name, "sweep name")
    require_room(output, force=force)
    cwd = Path.cwd()
    command = take_apart(words, cwd)
    if len(words) == 1 and not words[0].endswith(".sh") and find_script(words, cwd) is None:
        raise ConfigError(
            f"file {words[0]!r} does not exist", remedy="Check the path, or pass the complete command after --."
        )
    alone = command.launcher is None and len(words) > 1
    processes = command.num_processes or ranks_in_files(command, cwd, recipe=recipe)
    machine = questions.drafted_machine(processes or (1 if alone else None), command.num_nodes)
    script = read_command(command, cwd, recipe=recipe, is_gpu=machine.is_gpu, ranks=machine.topology.num_devices)
    if detection_s is not None:
        if questions.address is not None or machine.num_nodes > 1:
            detected = Detected(problem="the cluster's hosts are remote")
        else:
            detected = detect(script, machine, budget_s=detection_s, notify=notify)
        if detected.starts_ranks:
            machine = questions.drafted_machine(detected.facts.world_size)
        ranks = machine.topology.num_devices
        script = read_command(command, cwd, recipe=recipe, is_gpu=machine.is_gpu, ranks=ranks, detected=detected)
    draft = draft_script(
        script,
        machine,
        name=questions.name,
        seq_length=questions.seq_length,
        global_batch_size=questions.global_batch_size,
        max_trials=questions.max_trials,
        folder=output.absolute().parent,
    )
    copies = {output.parent / name: text for name, text in draft.files.items()}
    for file in copies:
        require_room(file, force=force)
    for file, text in copies.items():
        write_atomically(file, [text.encode()])
    write_draft(draft.text, output, force=force)
    return draft


def write_skeleton(recipe: str, questions: Questions, output: Path, *, force: bool) -> None:
    """Write a sweep file for a framework, with a placeholder for the command.

    Raises:
        ConfigError: the recipe is unknown, or the file exists.
    """
    require_room(output, force=force)
    text = skeleton(recipe, questions.drafted_machine(), max_trials=questions.max_trials)
    write_atomically(output, [text.encode()])


def examples() -> dict[str, str]:
    """Descriptions of the example sweeps, by name."""
    return {path.stem: _about(path) for path in sorted(_FOLDER.glob("*.yaml"))}


def copy_example(name: str, output: Path, *, force: bool) -> tuple[Path, ...]:
    """Write an example sweep, with its model file or program next to it; return the files written.

    Raises:
        ConfigError: the example is unknown, or one of the files exists.
    """
    source = _FOLDER / f"{name}.yaml"
    if name not in examples():
        raise ConfigError(
            f"unknown example {name[:40]!r}", key="--example", remedy=f"Choose from: {', '.join(examples())}."
        )
    text = source.read_text(encoding="utf-8").replace("# yaml-language-server: $schema=sweep.schema.json\n", "")
    files = {output.parent / path.name: path.read_text(encoding="utf-8") for path in _programs(text)}
    text = text.replace(f"cwd: ../{_PROGRAMS.name}", "cwd: .")
    if model := _MODEL_REFERENCE.search(text):
        files[output.parent / model[3]] = (_FOLDER / model[2]).read_text(encoding="utf-8")
        text = _MODEL_REFERENCE.sub(r"\1\3", text)
    files = {output: text, **files}
    for file in files:
        require_room(file, force=force)
    for file, content in files.items():
        write_atomically(file, [content.encode()])
    return tuple(files)


def _programs(text: str) -> tuple[Path, ...]:
    """The training programs of the examples, and their files, that a sweep file names."""
    return tuple(path for path in sorted(_PROGRAMS.iterdir()) if re.search(rf"\b{re.escape(path.name)}\b", text))


def _about(path: Path) -> str:
    """The first sentence of the file's first comment for people."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            comment.append(line.lstrip("# "))
    return " ".join(comment).partition(". ")[0].rstrip(".") + "."


def init_json(draft: SweepDraft | ScriptDraft, output: Path) -> dict[str, Any]:
    """The documented JSON form of ``init --json``."""
    return {"file": str(output), **draft.to_json()}
