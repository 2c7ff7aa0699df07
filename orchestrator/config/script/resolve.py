"""What a sweep file with a training program of the user's own comes to: the script, its baseline and its choices."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.knobs import BaselineSection, SpaceSection
from orchestrator.config.script.section import MODEL, ScriptSection
from orchestrator.errors import ConfigError
from orchestrator.recipes.hugging_face.config_file import decoder_said
from orchestrator.recipes.training import Reading, Run
from orchestrator.scripts.own import filled_in, is_placeholder, said
from orchestrator.scripts.placeholders import COUNTS, OUT, names_in
from orchestrator.scripts.script import Script, canonical_reading, paths_of, said_knobs, values_of
from orchestrator.space.knobs import KNOB_NAMES
from orchestrator.space.knobs.canonical import Rest, build_candidate
from orchestrator.space.knobs.own import OwnKnob, OwnScalar, in_order
from orchestrator.space.knobs.sections import fault
from trials.script.command import LogFormat
from trials.spec import Candidate, ScriptData, ScriptModel, Workload

LAYOUT_WITHOUT_PLACEHOLDER = frozenset({"dp_replicate"})
"""Knobs that act on any program, by how many ranks are started."""
CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class ScriptSweep:
    """A script with what the sweep file wants to try of it."""

    script: Script
    baseline_values: Mapping[str, Any]
    baseline_own: Mapping[str, OwnScalar]
    baseline: Candidate
    choices: Mapping[str, tuple[Any, ...]]


def resolve_script(
    workload: ScriptSection,
    space: SpaceSection,
    baseline: BaselineSection,
    *,
    num_devices: int | None,
    device: str | None = None,
) -> ScriptSweep:
    """Put together what the file says and what the command says.

    Args:
        num_devices: that the sweep always holds; None where the file does not tell.
        device: their kind; None where the file leaves it open.

    Raises:
        PydanticCustomError: at the key of the sweep file that is wrong, or missing.
    """
    run = workload.to_run()
    own = _own_knobs(space, baseline)
    given = {name: getattr(baseline, name) for name in KNOB_NAMES if name in baseline.model_fields_set}
    _check_placeholders(workload, run, own)
    _check_told(workload, space, run, given)
    _check_own(workload, run, own, baseline)
    reading = workload.to_training().read(run)
    model = _model(workload, reading)
    said_values = values_of(reading, num_layers=model.num_layers, num_devices=num_devices)
    values = {**said_values, **given}
    choices = _choices(space, values, given, num_devices)
    _check_devices(reading, given, num_devices)
    _check_layers(workload, reading, model, choices, values)
    own_values = {knob.name: value for knob in own if (value := _own_value(knob, baseline, run)) is not None}
    trial_0 = build_candidate(values, model, own, own_values)
    as_said = build_candidate(said_values, model, own, {} if baseline.own else own_values)
    script = Script(
        training=workload.to_training(),
        run=run,
        reading=_with_layers(canonical_reading(reading, as_said), model),
        workload=_workload(workload, model, reading, trial_0),
        log=_log(workload),
        hook=workload.metrics.hook,
        env_pass=tuple(workload.env_pass),
        own=own,
        named=_named(space, run, given),
        unchanged=None if _has_knobs(run, own) else as_said,
        seed=workload.seed,
        device=device,
    )
    return ScriptSweep(
        script=script, baseline_values=values, baseline_own=own_values, baseline=trial_0, choices=choices
    )


def _named(space: SpaceSection, run: Run, given: Mapping[str, Any]) -> frozenset[str]:
    """Paths of the fields that the file or the command has a word for."""
    told = _told(run)
    names = [name for name in KNOB_NAMES if getattr(space, name) is not None or name in given or name in told]
    return frozenset(path for name in names for path in paths_of(name))


def _has_knobs(run: Run, own: tuple[OwnKnob, ...]) -> bool:
    """Whether the command has placeholders of knobs, so that it cannot run as it stands."""
    return bool(_told(run)) or any(is_placeholder(knob.name, run) for knob in own)


def _own_knobs(space: SpaceSection, baseline: BaselineSection) -> tuple[OwnKnob, ...]:
    """Those to try, and those that the baseline sets for all."""
    fixed = [
        OwnKnob(name=name, values=(value,))
        for name, value in (baseline.own or {}).items()
        if name not in (space.own or {})
    ]
    return in_order((*space.own_knobs(), *fixed))


def _own_value(knob: OwnKnob, baseline: BaselineSection, run: Run) -> OwnScalar | None:
    given = baseline.own or {}
    return given[knob.name] if knob.name in given else said(knob, run)


def _told(run: Run) -> frozenset[str]:
    """Knobs of ours that the command has placeholders for."""
    return frozenset(names_in((*run.argv, *run.env.values(), *run.files.values()))) & frozenset(KNOB_NAMES)


# ---- what may be wrong ----


def _check_placeholders(workload: ScriptSection, run: Run, own: tuple[OwnKnob, ...]) -> None:
    known = (*KNOB_NAMES, *COUNTS, OUT, *(name for name in run.files if name != MODEL), *(knob.name for knob in own))
    places = {f"run.{place}": word for place, word in enumerate(workload.run)}
    places |= {f"env.{name}": text for name, text in workload.env.items()}
    for key, text in places.items():
        for name in names_in([text]):
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                guess = f"Did you mean {{{close[0]}}}? " if close else ""
                remedy = f"{guess}Write {{{{{name}}}}} for the text itself; a name of your own goes into space.own."
                raise fault(f"workload.{key}", f"nothing is called {{{name}}}", remedy)


def _check_told(workload: ScriptSection, space: SpaceSection, run: Run, given: Mapping[str, Any]) -> None:
    """Refuse knobs that a command of no framework cannot be told of, and placeholders without a baseline."""
    told = _told(run)
    if workload.recipe == CUSTOM:
        for name in KNOB_NAMES:
            if getattr(space, name) is not None and name not in told | LAYOUT_WITHOUT_PLACEHOLDER:
                message = "the command is not told of it, so it would change nothing"
                raise fault(f"space.{name}", message, f"Put {{{name}}} into workload.run.")
    for name in sorted(told - LAYOUT_WITHOUT_PLACEHOLDER):
        if name not in given:
            message = f"the command has {{{name}}}, so nobody knows what it runs with today"
            raise fault(f"baseline.{name}", message, f"Add baseline: {{{name}: VALUE}} with today's value.")


def _check_own(workload: ScriptSection, run: Run, own: tuple[OwnKnob, ...], baseline: BaselineSection) -> None:
    given = baseline.own or {}
    for knob in own:
        key = f"space.own.{knob.name}" if knob.name not in given or len(knob.values) > 1 else "baseline.own"
        file, colon, _ = knob.name.partition(":")
        is_here = is_placeholder(knob.name, run)
        if knob.name in KNOB_NAMES or knob.name in COUNTS or knob.name in (OUT, "dp"):
            raise fault(key, f"{knob.name} is a knob already", f"Write space.{knob.name}, or another name.")
        if colon and file not in run.files:
            names = ", ".join(name for name in run.files if name != MODEL) or "none"
            raise fault(key, f"no file is called {file}", f"Name it in workload.files; there are {names}.")
        if filled := filled_in(knob, run):
            message = f"the command fills in {{{filled}}} there already"
            raise fault(key, message, f"Leave {knob.name} out, or write its value of today into the command.")
        if is_here and knob.when:
            raise fault(key, "it has no value where its condition does not hold", "Give it a flag in place of {...}.")
        if is_here and knob.name not in given and knob.name not in run.files:
            remedy = f"Add baseline: {{own: {{{knob.name}: VALUE}}}} with today's value."
            raise fault(f"baseline.own.{knob.name}", "nobody knows what the command runs with today", remedy)
        is_plain = not knob.name.startswith(("-", "$")) and not colon
        if is_plain and not is_here and knob.flag is None and workload.recipe == CUSTOM:
            remedy = f"Put {{{knob.name}}} into workload.run, give it a flag, or write --{knob.name}."
            raise fault(key, "the command is not told of it", remedy)


def _check_devices(reading: Reading, given: Mapping[str, Any], num_devices: int | None) -> None:
    if num_devices is None and "dp_replicate" not in {*given, *said_knobs(reading)}:
        message = "nobody knows on how many devices the command runs today"
        raise fault("cluster.devices_per_node", message, "Add it, or baseline: {dp_replicate: N}.")


def _check_layers(
    workload: ScriptSection,
    reading: Reading,
    model: ScriptModel,
    choices: Mapping[str, tuple[Any, ...]],
    values: Mapping[str, Any],
) -> None:
    is_known = workload.num_layers or reading.num_layers or model.shape
    if not is_known and max(*choices["pp"], values["pp"]) > 1:
        message = "a pipeline needs to know how many layers there are"
        raise fault("workload.num_layers", message, "Add num_layers, or model: config.json.")


# ---- parts ----


def _model(workload: ScriptSection, reading: Reading) -> ScriptModel:
    run, shape = workload.to_run(), reading.shape
    if workload.model is not None:
        try:
            shape = decoder_said(run.files[MODEL], Path(run.paths[MODEL])).shape
        except ConfigError as error:
            message = f"{error.key}: {error.message}" if error.key else error.message
            raise fault("workload.model", message, "Name the config.json of a decoder, or leave it out.") from None
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
        message = "missing: the command does not say how many samples make an optimiser step"
        raise fault("workload.global_batch_size", message, "Add it: samples over all ranks and micro-batches.")
    tokens = workload.tokens_per_step
    if tokens is not None and tokens % batch:
        message = f"{tokens} is no multiple of global_batch_size {batch}"
        raise fault("workload.tokens_per_step", message, "Give tokens of whole samples, or leave it out.")
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

    Data parallelism that the file does not speak of takes up the devices that the other axes leave: all there are, or
    each number of them in ``space.world_size``. Replicas of shards stay as the command says.
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
