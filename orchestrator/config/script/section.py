"""Section ``workload`` of a sweep file whose workload is a training program of the user's own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from orchestrator.config.scalars import Environment, Size, VariableName, resolve, word
from orchestrator.config.script.checks import (
    check_command,
    check_log,
    check_program,
    read_files,
)
from orchestrator.errors import ConfigError
from orchestrator.recipes.launchers import without_launcher
from orchestrator.recipes.training import Run, Training
from orchestrator.recipes.trainings import TRAININGS, training
from orchestrator.space.knobs.sections import Section, fault, show


def _known_recipe(name: str) -> str:
    try:
        training(name)
    except ConfigError as error:
        raise fault(None, error.message, error.remedy or "") from None
    return name


def _words(value: Any) -> Any:
    """The command as a list of words; numbers are words, too."""
    if isinstance(value, str):
        try:
            split = shlex.split(value)
        except ValueError:
            split = value.split()
        listed = ", ".join(map(_quoted, split))
        raise fault(None, "expected a list of words, got text: no shell takes it apart", f"Write [{listed}].")
    if not isinstance(value, list | tuple):
        raise fault(None, f"expected a list of words, got {show(value)}", "Write [python, train.py, --lr, 1e-3].")
    if not value:
        raise fault(None, "an empty command", "Write [python, train.py].")
    words = tuple(word(one, str(place)) for place, one in enumerate(value))
    return ("python", *words) if words[0].startswith("-") else words


def _quoted(word: str) -> str:
    is_plain = word and all(char.isalnum() or char in "_-./=+" for char in word)
    return word if is_plain else '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


RecipeName = Annotated[str, AfterValidator(_known_recipe), WithJsonSchema({"enum": list(TRAININGS)})]
Words = Annotated[
    tuple[str, ...],
    BeforeValidator(_words),
    WithJsonSchema({"type": "array", "minItems": 1, "items": {"type": ["string", "number"]}}),
]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]


class MetricsSection(Section):
    """How the program says what it measured, besides reports and what our hook sees."""

    log: str | None = Field(
        default=None,
        description="Regular expression for a line of its output, with the group step and any of loss, step_s, "
        "step_ms, tokens_per_s, samples_per_s, grad_norm, allocated_gib, reserved_gib; null: as the recipe knows it.",
    )
    files: list[str] = Field(
        default=[], description="Glob patterns of files it logs to, relative to cwd; {out} is the trial's own folder."
    )
    hook: bool = Field(default=True, description="Load our reporting hook into its Python.")

    _check = field_validator("log")(check_log)


class ScriptSection(Section):
    """A training program of your own, started as it is. See docs/your-own-training.md."""

    TAG: ClassVar[str] = "script"
    recipe: RecipeName = Field(description="The framework it is written for; custom: any program.")
    run: Words = Field(
        description="The command as a list of words, without a shell; {name} stands for a knob, accumulation, "
        "world_size, steps, seed, out, or one of `files`. `python` is the one on the node's PATH."
    )
    cwd: str = Field(default=".", validate_default=True, description="Folder it starts in, relative to the sweep file.")
    env: Environment = Field(default={}, description="Environment variables of its own.")
    env_pass: list[VariableName] = Field(
        default=[], description="Variables of the node's environment that it may see besides, by name."
    )
    files: dict[FileName, str] = Field(
        default={},
        description="Configuration files, relative to cwd, by the name of their placeholder; trials get copies.",
    )
    launcher: Literal["env", "own"] | None = Field(
        default=None,
        description="Who starts the ranks: env: we do, one per device, with torchrun's variables; own: the command, "
        "once per node; null: as the recipe needs it.",
    )
    metrics: MetricsSection = Field(default=MetricsSection(), description="Where its figures come from.")
    seq_length: Size | None = Field(default=None, description="Tokens per sample; null: as read, or not counted.")
    tokens_per_step: Size | None = Field(
        default=None, description="Tokens of an optimiser step, in place of seq_length."
    )
    global_batch_size: Size | None = Field(
        default=None, description="Samples of an optimiser step over all ranks; null: as the command says."
    )
    num_layers: Size | None = Field(default=None, description="Repeated layers; null: as read. Pipelines need it.")
    model: str | None = Field(
        default=None,
        description="config.json of a Hugging Face model, relative to cwd, whose dimensions the cost model takes.",
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="Seed of weights and data order; null: as the command says."
    )

    _resolve = field_validator("cwd")(resolve)
    _run: Run | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _read(self, info: ValidationInfo) -> ScriptSection:
        """Read what the command consists of; what was read when the sweep was created counts instead."""
        context = info.context or {}
        known = context.get("read")
        training = self.to_training()
        if not training.takes_launchers:
            check_command(self.run, training.launcher if self.launcher is None else self.launcher)
        if known is not None:
            files = {name: (str(one["path"]), str(one["text"])) for name, one in known.items()}
        else:
            if context.get("check_files", True) and not context.get("is_remote", False):
                words = without_launcher(tuple(self.run)).argv if training.takes_launchers else tuple(self.run)
                check_program(words, Path(self.cwd))
            found = training.find_files(self.run, self.cwd)
            named = {**found, **self.files, **({MODEL: self.model} if self.model else {})}
            files = read_files({name: str(Path(self.cwd) / path) for name, path in named.items()}, set(self.files))
        self._run = Run(
            argv=self.run,
            cwd=self.cwd,
            env=self.env,
            files={name: text for name, (_, text) in files.items()},
            paths={name: path for name, (path, _) in files.items()},
        )
        return self

    def to_training(self) -> Training:
        return training(self.recipe)

    def to_run(self) -> Run:
        """The command as it was read."""
        assert self._run is not None, "read when the section was checked"
        return self._run

    def what_was_read(self) -> dict[str, dict[str, str]]:
        """Path and text of every file by name, for the ledger."""
        run = self.to_run()
        return {name: {"path": run.paths[name], "text": text} for name, text in run.files.items()}


MODEL = "model_config"
"""Name under which the model's ``config.json`` is kept among the files."""
