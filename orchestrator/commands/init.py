"""What ``tune-cluster init`` does: a sweep file to begin with, drafted for a model and a machine, or an example."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import CONFIGS
from orchestrator.draft.draft import SweepDraft, make_draft, require_room, write_draft
from orchestrator.draft.machine import DraftedMachine, described_machine, machine_at, machine_here
from orchestrator.draft.model import DraftedModel, model_of_file, model_of_size
from orchestrator.errors import ConfigError
from orchestrator.sweep.home import check_name
from trials.files import write_atomically

_FOLDER = CONFIGS / "sweeps"
_MODEL_REFERENCE = re.compile(r"^(\s*model:\s*)(\.\./models/(\S+\.yaml))", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked about a first sweep; None: nobody has said."""

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
        """The model asked for.

        Raises:
            ConfigError: there is none, or two.
        """
        if self.model is not None and self.parameters is not None:
            raise ConfigError("--model and --parameters exclude each other", remedy="Leave one out.")
        if self.model is not None:
            return model_of_file(self.model)
        if self.parameters is not None:
            return model_of_size(self.parameters)
        raise ConfigError(
            "no model",
            key="--model",
            remedy="Name a Hugging Face config.json, or a size: --parameters 13B. --list shows complete examples.",
        )

    def drafted_machine(self) -> DraftedMachine:
        """The hardware asked for; else this host's.

        Raises:
            ConfigError: it is not described, does not answer, or is too small.
        """
        if self.cluster is not None and self.address is not None:
            raise ConfigError("--cluster and --address exclude each other", remedy="Leave one out.")
        if self.cluster is not None:
            return described_machine(self.cluster, self.nodes, self.devices_per_node)
        if self.address is not None:
            return machine_at(self.address, self.nodes, self.devices_per_node)
        if self.nodes not in (None, 1):
            raise ConfigError(
                f"this host is one node, not {self.nodes}", key="--nodes", remedy="Give --cluster or --address, too."
            )
        return machine_here(self.devices_per_node)


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


def examples() -> dict[str, str]:
    """The example sweeps that come with the program: what each shows, by name."""
    return {path.stem: _about(path) for path in sorted(_FOLDER.glob("*.yaml"))}


def copy_example(name: str, output: Path, *, force: bool) -> tuple[Path, ...]:
    """Write an example sweep, and the model file that it names beside it; return the files written.

    Raises:
        ConfigError: there is no such example, or one of the files is there already.
    """
    source = _FOLDER / f"{name}.yaml"
    if name not in examples():
        raise ConfigError(f"no example {name[:40]!r}", key="--example", remedy=f"There are {', '.join(examples())}.")
    text = source.read_text(encoding="utf-8").replace("# yaml-language-server: $schema=sweep.schema.json\n", "")
    files: dict[Path, str] = {}
    if model := _MODEL_REFERENCE.search(text):
        files[output.parent / model[3]] = (_FOLDER / model[2]).read_text(encoding="utf-8")
        text = _MODEL_REFERENCE.sub(r"\1\3", text)
    files = {output: text, **files}
    for file in files:
        require_room(file, force=force)
    for file, content in files.items():
        write_atomically(file, [content.encode()])
    return tuple(files)


def _about(path: Path) -> str:
    """The first comment of the file that is meant for people, up to its first full stop."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            comment.append(line.lstrip("# "))
    return " ".join(comment).partition(". ")[0].rstrip(".") + "."


def init_json(draft: SweepDraft, output: Path) -> dict[str, Any]:
    """The documented JSON form of ``init --json``."""
    return {"file": str(output), **draft.to_json()}
