"""Section ``workload`` of a sweep file for a training program, resolved to the program, its baseline and its
choices."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

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

from orchestrator.config.settings import (
    BaselineSection,
    Environment,
    Size,
    SpaceSection,
    VariableName,
    is_there,
    resolve,
    word,
)
from orchestrator.errors import ConfigError, reason_of
from orchestrator.frameworks.catalog import training, trainings
from orchestrator.frameworks.decoder_config import decoder_of_config
from orchestrator.frameworks.edit import Reading, Run, Training
from orchestrator.frameworks.launchers import program_of, without_launcher
from orchestrator.program.candidate_command import command_value, filled_in, is_placeholder
from orchestrator.program.user_program import (
    COUNTS,
    OUT,
    Script,
    canonical_reading,
    configured_knobs,
    names_in,
    paths_of,
    templated_knobs,
    values_of,
)
from orchestrator.space.file_types import Section, fault, received
from orchestrator.space.inside import ARGUMENTS, BATCH_ARGUMENTS, BUILT_IN, MICRO_BATCH, InsideBaseline
from orchestrator.space.knobs import INSIDE, KNOB_NAMES, KNOBS, CustomKnob, CustomScalar, in_order
from orchestrator.space.space import Rest, build_candidate
from trials.files import open_regular
from trials.script.command import LogFormat, is_seen_anyway
from trials.secrets import keep_secret, redactor
from trials.spec import Candidate, ScriptData, ScriptModel, Workload

MAX_FILE_BYTES = 1 << 20
_GROUPS = ("loss", "step_s", "step_ms", "tokens_per_s", "samples_per_s", "grad_norm", "allocated_gib", "reserved_gib")


def check_log(pattern: str | None) -> str | None:
    """The pattern of log lines.

    Raises:
        PydanticCustomError: not a regular expression, no group ``step``, or an unknown group.
    """
    if pattern is None:
        return None
    try:
        groups = set(re.compile(pattern).groupindex)
    except re.error as error:
        raise fault(
            None, f"invalid regular expression: {error}", "Escape literal special characters with a backslash."
        ) from None
    if "step" not in groups:
        raise fault(None, "the pattern has no group named 'step'", r"Match the step number with (?P<step>\d+).")
    if unknown := sorted(groups - {"step", *_GROUPS}):
        raise fault(None, f"unknown group {unknown[0]!r}", f"Allowed groups: step, {', '.join(_GROUPS)}.")
    return pattern


def check_command(run: Sequence[str], launcher: str) -> None:
    """Refuse a command that starts ranks if tune-cluster starts them.

    Raises:
        PydanticCustomError: it does.
    """
    if launcher == "own":
        return
    launched = without_launcher(tuple(run))
    if launched.launcher is not None:
        listed = ", ".join(f'"{word}"' if "{" in word else word for word in launched.argv)
        remedy = f"Use run: [{listed}]. If {launched.launcher} must start the ranks, set launcher: own."
        raise fault("run", f"{launched.launcher} would start its own ranks inside every rank", remedy)


def check_program(run: Sequence[str], cwd: Path) -> None:
    """Refuse a command that cannot start on this host: its folder, program or script does not exist.

    Raises:
        PydanticCustomError: one of them does not exist.
    """
    if not cwd.is_dir():
        raise fault(
            "cwd", f"directory {str(cwd)!r} does not exist", "Check the path; it is relative to the sweep file."
        )
    program = run[0]
    if "{" not in program and shutil.which(program if os.sep not in program else str(cwd / program)) is None:
        problem = "executable" if os.sep in program else "on PATH"
        raise fault("run.0", f"program {program!r} is not {problem}", "Install the program, or set its full path.")
    script = program_of(without_launcher(tuple(run)).argv).script
    if script is not None and "{" not in script and not is_there(cwd / script):
        place = list(run).index(script)
        raise fault(
            f"run.{place}", f"file {str(cwd / script)!r} does not exist", "Check the path; it is relative to cwd."
        )


def read_files(paths: Mapping[str, str], given: set[str]) -> dict[str, tuple[str, str]]:
    """Absolute path and text of every file by name; ``given``: the files in the sweep file.

    Raises:
        PydanticCustomError: one of them cannot be read, is not text, is too large, or contains a credential.
    """
    redact = redactor()
    found = {}
    for name, path in paths.items():
        file, key = os.path.normpath(path), f"files.{name}" if name in given else "run"
        try:
            with open_regular(Path(file)) as stream:
                text = stream.read(MAX_FILE_BYTES + 1).decode("utf-8")
        except OSError as error:
            raise fault(
                key, f"cannot read {file!r}: {reason_of(error)}", "Check the path; it is relative to cwd."
            ) from None
        except UnicodeDecodeError:
            raise fault(key, f"{file!r} is not UTF-8 text", "Use a text file in UTF-8.") from None
        if len(text) > MAX_FILE_BYTES:
            raise fault(
                key, f"{file!r} is larger than {MAX_FILE_BYTES >> 20} MiB", "Check that this is a configuration file."
            )
        if redact(text) != text:
            raise fault(
                key,
                f"{file!r} contains a credential",
                "Keep secrets in environment variables, and list those in env_pass.",
            )
        found[name] = (file, text)
    return found


def refuse_for_scripts(spec: Any) -> None:
    """Refuse sections that require the built-in runner or a simulated cluster.

    Raises:
        PydanticCustomError: at the key.
    """
    if spec.cluster.kind == "simulated":
        raise fault("cluster.kind", "a simulated cluster cannot run training programs", "Use kind: local or kind: ray.")
    if spec.runner != type(spec).model_fields["runner"].default:
        raise fault("runner", "'runner' and workload.run are mutually exclusive", "Remove runner.")
    if spec.profile.is_on and not spec.profile.is_auto and not spec.workload.metrics.hook:
        raise fault(
            "profile",
            "profiling requires the hook, but workload.metrics.hook is false",
            "Set workload.metrics.hook to true.",
        )
    if spec.space.balance:
        raise fault(
            "space.balance", "balancing is only supported for the built-in runner's models", "Remove space.balance."
        )


def _known_recipe(name: str) -> str:
    try:
        training(name)
    except ConfigError as error:
        raise fault(None, error.message, error.remedy or "") from None
    return name


def _words(value: Any) -> Any:
    """The command as a list of arguments; numbers become text."""
    if isinstance(value, str):
        try:
            split = shlex.split(value)
        except ValueError:
            split = value.split()
        listed = ", ".join(map(_quoted, split))
        raise fault(
            None, "expected a list of arguments, got a string", f"Use [{listed}]; the command does not run in a shell."
        )
    if not isinstance(value, list | tuple):
        raise fault(
            None,
            f"expected a list of arguments{received(value)}",
            "Use a value such as [python, train.py, --lr, 1e-3].",
        )
    if not value:
        raise fault(None, "the command is empty", "Use a value such as [python, train.py].")
    words = tuple(word(one, str(place)) for place, one in enumerate(value))
    return ("python", *words) if words[0].startswith("-") else words


def _quoted(word: str) -> str:
    is_plain = word and all(char.isalnum() or char in "_-./=+" for char in word)
    return word if is_plain else '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


RecipeName = Annotated[str, AfterValidator(_known_recipe), WithJsonSchema({"enum": trainings()})]
Words = Annotated[
    tuple[str, ...],
    BeforeValidator(_words),
    WithJsonSchema({"type": "array", "minItems": 1, "items": {"type": ["string", "number"]}}),
]
Arguments = Annotated[
    list[str],
    BeforeValidator(
        lambda value: [word(one, str(i)) for i, one in enumerate(value)] if isinstance(value, list) else value
    ),
    WithJsonSchema({"type": "array", "items": {"type": ["string", "number"]}}),
]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]


class MetricsSection(Section):
    """How to read measurements from the output of the program, in addition to reports and the hook."""

    log: str | None = Field(
        default=None,
        description="A regular expression for a log line, with the group `step` and any of the groups `loss`, "
        "`step_s`, `step_ms`, `tokens_per_s`, `samples_per_s`, `grad_norm`, `allocated_gib` and `reserved_gib`. If "
        "null, the expression of the recipe is used.",
    )
    files: list[str] = Field(
        default=[], description="Glob patterns for log files, relative to `cwd`. `{out}` is the trial's directory."
    )
    hook: bool = Field(
        default=True, description="Whether to load the reporting hook into the program's Python processes."
    )

    _check = field_validator("log")(check_log)


class ScriptSection(Section):
    """Your training program, unmodified (see docs/your-own-training.md)."""

    TAG: ClassVar[str] = "script"
    recipe: RecipeName = Field(description="The framework of the program. Use `custom` for any other program.")
    run: Words = Field(
        description="The command as a list of arguments, run without a shell. `{name}` is a placeholder for a knob, "
        "`accumulation`, `total_accumulation`, `total_micro_batch_size`, `world_size`, `steps`, `seed`, `out`, a "
        "custom knob, or one of `files`. `python` is the one on the node's PATH."
    )
    trial_args: Arguments = Field(
        default=[],
        description="Arguments for trials only, such as an output directory. They are added to `run` or replace the "
        "same argument there. Exports do not contain them.",
    )
    cwd: str = Field(
        default=".", validate_default=True, description="The working directory, relative to the sweep file."
    )
    env: Environment = Field(default={}, description="Environment variables for the program.")
    env_pass: list[VariableName] = Field(
        default=[], description="The names of environment variables to pass through from the node."
    )
    files: dict[FileName, str] = Field(
        default={},
        description="The configuration files of the program, relative to `cwd`, by placeholder name. Each trial gets "
        "copies.",
    )
    launcher: Literal["env", "own"] | None = Field(
        default=None,
        description="What starts the ranks. With `env`, tune-cluster starts one rank per device, with torchrun's "
        "environment variables. With `own`, the command starts them; it runs once per node. If null, the "
        "recipe's default is used.",
    )
    metrics: MetricsSection = Field(
        default=MetricsSection(),
        description="How to read measurements from the output of the program, in addition to reports and the hook.",
    )
    seq_length: Size | None = Field(
        default=None,
        description="The number of tokens per sample. If null, it is read from the command, or tokens are not counted.",
    )
    tokens_per_step: Size | None = Field(
        default=None, description="The number of tokens per optimiser step, instead of `seq_length`."
    )
    global_batch_size: Size | None = Field(
        default=None,
        description="The number of samples per optimiser step, over all ranks. If null, it is read from the command.",
    )
    num_layers: Size | None = Field(
        default=None,
        description="The number of repeated layers. Required for pipelines. If null, it is read from the command.",
    )
    model: str | None = Field(
        default=None,
        description="The path to the config.json of a Hugging Face model, relative to `cwd`. The cost model uses its "
        "dimensions.",
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="The seed for weights and data order. If null, it is read from the command."
    )

    @model_validator(mode="after")
    def _keep_secret(self) -> Self:
        """Variables in env_pass are redacted in all output of this process, except those that programs always see."""
        keep_secret(name for name in self.env_pass if not is_seen_anyway(name))
        return self

    _resolve = field_validator("cwd")(resolve)
    _run: Run | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _read(self, info: ValidationInfo) -> ScriptSection:
        """Read the parts of the command; the result from when the sweep was created takes precedence."""
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
        """The command as read."""
        assert self._run is not None, "read when the section was checked"
        return self._run

    def what_was_read(self) -> dict[str, dict[str, str]]:
        """Path and text of every file by name, for the ledger."""
        run = self.to_run()
        return {name: {"path": run.paths[name], "text": text} for name, text in run.files.items()}


MODEL = "model_config"
"""Name of the model's ``config.json`` among the files."""


LAYOUT_WITHOUT_PLACEHOLDER = frozenset({"dp_replicate"})
"""Knobs that apply to any program through the number of ranks."""
LAYOUT_AXES = frozenset({"dp_replicate", "dp_shard", "tp", "cp", "pp"})
CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class ScriptSweep:
    """A program with the choices of the sweep file."""

    script: Script
    baseline_values: Mapping[str, Any]
    baseline_custom: Mapping[str, CustomScalar]
    baseline: Candidate
    choices: Mapping[str, tuple[Any, ...]]


def resolve_script(
    workload: ScriptSection,
    space: SpaceSection,
    baseline: BaselineSection,
    *,
    num_devices: int | None,
    devices_per_node: int | None = None,
    device: str | None = None,
) -> ScriptSweep:
    """Combine the file with the settings in the command.

    Args:
        num_devices: devices held throughout the sweep; None if unknown.
        devices_per_node: those of one node; None if unknown.
        device: their kind; None if unknown.

    Raises:
        PydanticCustomError: at the wrong or missing key of the sweep file.
    """
    run = workload.to_run()
    own = _custom_knobs(space, baseline)
    given = {name: getattr(baseline, name) for name in KNOB_NAMES if name in baseline.model_fields_set}
    _check_inside(workload, space, run)
    _check_placeholders(workload, run, own)
    _check_knobs_are_used(workload, space, run, given)
    set_inside = {knob.name for knob in space.set_inside.custom_knobs()}
    _check_custom_knobs(workload, run, tuple(knob for knob in own if knob.name not in set_inside), baseline)
    reading = workload.to_training().read(run)
    model = _model(workload, reading)
    inside = space.set_inside.choices()
    _check_no_setting(workload, reading, inside)
    command_values = values_of(reading, num_layers=model.num_layers, num_devices=num_devices)
    command_values |= {name: given[name] for name in inside if name in given}  # not set in the command
    values = {**command_values, **given}
    choices = _choices(space, values, given, num_devices)
    _check_devices(reading, given, num_devices)
    _check_layers(workload, reading, model, choices, values)
    custom_values = {knob.name: value for knob in own if (value := _custom_value(knob, baseline, run)) is not None}
    trial_0 = build_candidate(values, model, own, custom_values, devices_per_node=devices_per_node)
    _check_ranks(run, reading, given, trial_0)
    as_configured = build_candidate(command_values, model, own, {} if baseline.own else custom_values)
    resolved = _workload(workload, model, reading, trial_0)
    script = Script(
        training=workload.to_training(),
        run=run,
        reading=_with_layers(canonical_reading(reading, as_configured), model),
        workload=resolved,
        log=_log(workload),
        hook=workload.metrics.hook,
        env_pass=tuple(workload.env_pass),
        own=own,
        inside=InsideBaseline(
            values={knob.name: knob.read(trial_0) for knob in KNOBS if knob.name in inside},
            global_batch_size=resolved.global_batch_size,
            num_microbatches=max(1, trial_0.num_microbatches(resolved.global_batch_size)),
        ),
        named=_mentioned_paths(
            space, run, {name: given[name] for name in given if name not in inside or name == MICRO_BATCH}
        ),
        unchanged=None if _has_knobs(run, own) else as_configured,
        baseline=trial_0,
        trial_args=tuple(workload.trial_args),
        seed=workload.seed,
        device=device,
    )
    return ScriptSweep(
        script=script, baseline_values=values, baseline_custom=custom_values, baseline=trial_0, choices=choices
    )


def _mentioned_paths(space: SpaceSection, run: Run, given: Mapping[str, Any]) -> frozenset[str]:
    """Paths of the fields that the file or the command sets."""
    templated = _templated_knobs(run)
    names = [name for name in KNOB_NAMES if getattr(space, name) is not None or name in given or name in templated]
    return frozenset(path for name in names for path in paths_of(name))


def _has_knobs(run: Run, own: tuple[CustomKnob, ...]) -> bool:
    """Whether the command contains knob placeholders and cannot run unmodified."""
    return bool(_templated_knobs(run)) or any(is_placeholder(knob.name, run) for knob in own)


def _custom_knobs(space: SpaceSection, baseline: BaselineSection) -> tuple[CustomKnob, ...]:
    """Custom knobs to try, and those that the baseline sets for all trials."""
    fixed = [
        CustomKnob(name=name, values=(value,))
        for name, value in (baseline.own or {}).items()
        if name not in (space.own or {})
    ]
    return in_order((*space.custom_knobs(), *space.set_inside.custom_knobs(), *fixed))


def _custom_value(knob: CustomKnob, baseline: BaselineSection, run: Run) -> CustomScalar | None:
    given = baseline.own or {}
    return given[knob.name] if knob.name in given else command_value(knob, run)


def _templated_knobs(run: Run) -> frozenset[str]:
    """Built-in knobs with placeholders in the command."""
    return templated_knobs(names_in((*run.argv, *run.env.values(), *run.files.values())))


# ---- validation ----


def _check_placeholders(workload: ScriptSection, run: Run, own: tuple[CustomKnob, ...]) -> None:
    known = (*KNOB_NAMES, *COUNTS, OUT, *(name for name in run.files if name != MODEL), *(knob.name for knob in own))
    places = {f"run.{place}": word for place, word in enumerate(workload.run)}
    places |= {f"trial_args.{place}": word for place, word in enumerate(workload.trial_args)}
    places |= {f"env.{name}": text for name, text in workload.env.items()}
    for key, text in places.items():
        for name in names_in([text]):
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                guess = f"Did you mean '{{{close[0]}}}'? " if close else ""
                remedy = f"{guess}For literal text, use {{{{{name}}}}}; for a custom knob, define it in space.own."
                raise fault(f"workload.{key}", f"unknown placeholder {{{name}}}", remedy)


def _check_knobs_are_used(workload: ScriptSection, space: SpaceSection, run: Run, given: Mapping[str, Any]) -> None:
    """Refuse knobs that a command without a framework cannot use, and placeholders without a baseline."""
    templated = _templated_knobs(run)
    if workload.recipe == CUSTOM:
        for name in KNOB_NAMES:
            if getattr(space, name) is not None and name not in templated | LAYOUT_WITHOUT_PLACEHOLDER:
                message = "the command does not use this knob"
                or_inside = f", or move the knob to space.{INSIDE}" if name in BUILT_IN else ""
                raise fault(f"space.{name}", message, f"Put {{{name}}} in workload.run{or_inside}.")
    for name in sorted(templated - LAYOUT_WITHOUT_PLACEHOLDER):
        if name not in given:
            message = f"the placeholder {{{name}}} has no value in the baseline"
            raise fault(
                f"baseline.{name}", message, f"Set baseline: {{{name}: VALUE}} to the value that you use today."
            )


def _check_inside(workload: ScriptSection, space: SpaceSection, run: Run) -> None:
    """Refuse knobs inside the program that cannot be set, or that the command also sets."""
    if space.inside is None:
        return
    if not workload.metrics.hook:
        message = "these knobs require the hook, but workload.metrics.hook is false"
        raise fault(f"space.{INSIDE}", message, "Set workload.metrics.hook to true.")
    if INSIDE in run.files:
        raise fault(f"workload.files.{INSIDE}", f"the name {INSIDE!r} is reserved", "Use another name for the file.")
    for name in space.inside.choices():
        if getattr(space, name) is not None or name in _templated_knobs(run):
            where = f"in space.{name}" if getattr(space, name) is not None else f"by the command, as {{{name}}}"
            raise fault(f"space.{INSIDE}.{name}", f"the knob is also set {where}", "Remove one of the two.")
    for name in BATCH_ARGUMENTS if space.inside.micro_batch_size is not None else ():
        if name in space.inside.training_arguments:
            key = f"space.{INSIDE}.{ARGUMENTS}.{name}"
            raise fault(key, f"the argument is already set by {MICRO_BATCH}", "Remove the key.")


def _check_no_setting(workload: ScriptSection, reading: Reading, inside: Mapping[str, Any]) -> None:
    """Refuse knobs inside the program that its framework has a setting for."""
    for name in inside:
        if not paths_of(name).isdisjoint(reading.values):
            message = f"{workload.to_training().title} has a setting for this knob"
            raise fault(f"space.{INSIDE}.{name}", message, f"Move the knob to space.{name}.")


def _check_custom_knobs(
    workload: ScriptSection, run: Run, own: tuple[CustomKnob, ...], baseline: BaselineSection
) -> None:
    given = baseline.own or {}
    for knob in own:
        key = f"space.own.{knob.name}" if knob.name not in given or len(knob.values) > 1 else "baseline.own"
        file, colon, _ = knob.name.partition(":")
        is_here = is_placeholder(knob.name, run)
        if knob.name in KNOB_NAMES or knob.name in COUNTS or knob.name in (OUT, "dp"):
            raise fault(
                key, f"{knob.name} is the name of a built-in knob", f"Use space.{knob.name}, or rename the custom knob."
            )
        if colon and file not in run.files:
            names = ", ".join(name for name in run.files if name != MODEL) or "none"
            raise fault(key, f"unknown file {file!r}", f"Add the file to workload.files (defined: {names}).")
        if filled := filled_in(knob, run):
            message = f"the command already sets this knob with the placeholder {{{filled}}}"
            raise fault(
                key, message, f"Remove {knob.name}, or replace the placeholder with the value that you use today."
            )
        if is_here and knob.when:
            raise fault(
                key,
                "the placeholder has no value when the knob's condition does not hold",
                "Use a flag instead of a placeholder.",
            )
        if is_here and knob.name not in given and knob.name not in run.files:
            remedy = f"Set baseline: {{own: {{{knob.name}: VALUE}}}} to the value that you use today."
            raise fault(f"baseline.own.{knob.name}", "the baseline value is unknown", remedy)
        is_plain = not knob.name.startswith(("-", "$")) and not colon
        if is_plain and not is_here and knob.flag is None and workload.recipe == CUSTOM:
            remedy = (
                f"Put {{{knob.name}}} in workload.run, set a flag for the knob, or rename the knob to --{knob.name}."
            )
            raise fault(key, "the command does not use this knob", remedy)


def _check_devices(reading: Reading, given: Mapping[str, Any], num_devices: int | None) -> None:
    if num_devices is None and "dp_replicate" not in {*given, *configured_knobs(reading)}:
        message = "the number of devices in the baseline is unknown"
        raise fault("cluster.devices_per_node", message, "Set devices_per_node, or baseline: {dp_replicate: N}.")


def _check_ranks(run: Run, reading: Reading, given: Mapping[str, Any], baseline: Candidate) -> None:
    """Refuse a baseline from a command whose settings imply another number of ranks. A launcher's number is always
    replaced."""
    today, ranks = reading.world_size, baseline.layout.world_size
    if today in (None, ranks) or LAYOUT_AXES & given.keys() or without_launcher(run.argv).launcher is not None:
        return
    message = f"the command trains on {today} ranks, but the sweep's baseline on {ranks}"
    remedy = f"Use {today} devices (cluster.devices_per_node), or set the layout: baseline: {{dp_replicate: {ranks}}}."
    raise fault("baseline", message, remedy)


def _check_layers(
    workload: ScriptSection,
    reading: Reading,
    model: ScriptModel,
    choices: Mapping[str, tuple[Any, ...]],
    values: Mapping[str, Any],
) -> None:
    is_known = workload.num_layers or reading.num_layers or model.shape
    if not is_known and max(*choices["pp"], values["pp"]) > 1:
        message = "the number of layers is required for pipeline parallelism"
        raise fault("workload.num_layers", message, "Set num_layers, or model: config.json.")


# ---- parts ----


def _model(workload: ScriptSection, reading: Reading) -> ScriptModel:
    run, shape = workload.to_run(), reading.shape
    if workload.model is not None:
        try:
            shape = decoder_of_config(run.files[MODEL], Path(run.paths[MODEL])).shape
        except ConfigError as error:
            message = f"{error.key}: {error.message}" if error.key else error.message
            raise fault(
                "workload.model", message, "Use the config.json of a decoder model, or remove the key."
            ) from None
    known = workload.num_layers or reading.num_layers or (shape.num_layers if shape else None)
    if shape is not None and known is not None:
        shape = dataclasses.replace(shape, num_layers=known)
    return ScriptModel(
        recipe=workload.recipe,
        run=run.argv,
        cwd=run.cwd,
        env=tuple(sorted(run.env.items())),
        files=tuple(sorted(run.paths.items())),
        launcher=workload.launcher or workload.to_training().launcher,
        num_layers=known or 1,
        shape=shape,
    )


def _workload(workload: ScriptSection, model: ScriptModel, reading: Reading, baseline: Candidate) -> Workload:
    batch = workload.global_batch_size or reading.global_batch_size
    if batch is None and reading.num_microbatches is not None:
        batch = reading.num_microbatches * baseline.micro_batch_size * baseline.layout.dp
    if batch is None:
        message = "required key is missing: the command does not set the number of samples per optimiser step"
        raise fault(
            "workload.global_batch_size", message, "Set the number of samples over all ranks and micro-batches."
        )
    tokens = workload.tokens_per_step
    if tokens is not None and tokens % batch:
        message = f"{tokens} is not a multiple of global_batch_size {batch}"
        raise fault("workload.tokens_per_step", message, "Set a multiple of global_batch_size, or remove the key.")
    return Workload(
        model=model,
        data=ScriptData(),
        seq_length=workload.seq_length or (tokens // batch if tokens else None) or reading.seq_length or 1,
        global_batch_size=batch,
        seed=workload.seed if workload.seed is not None else reading.seed or 0,
    )


def _choices(
    space: SpaceSection, values: Mapping[str, Any], given: Mapping[str, Any], num_devices: int | None
) -> dict[str, tuple[Any, ...]]:
    """Values to try of every knob.

    Data parallelism that the file omits uses the remaining devices: all, or each number in ``space.world_size``.
    Replicas of shards keep the value in the command.
    """
    choices = space.choices(values)
    sizes = space.world_size or (() if num_devices is None else (num_devices,))
    degrees = [values[name] for name in ("dp_replicate", "dp_shard")]
    is_hybrid = all(isinstance(degree, int) and degree > 1 for degree in degrees)
    if not sizes or is_hybrid:
        return choices
    if space.dp_replicate is None and "dp_replicate" not in given:
        choices["dp_replicate"] = tuple(map(Rest, sizes))
    if space.dp_shard is None and "dp_shard" not in given:
        choices["dp_shard"] = (Rest(sizes[0]),)
    return choices


def _with_layers(reading: Reading, model: ScriptModel) -> Reading:
    return dataclasses.replace(reading, num_layers=model.num_layers if reading.num_layers else None)


def _log(workload: ScriptSection) -> LogFormat:
    known, metrics = workload.to_training().log, workload.metrics
    files = tuple(metrics.files) or known.files
    if metrics.log is not None:
        return LogFormat(name="pattern", pattern=metrics.log, files=files)
    return dataclasses.replace(known, files=files)
