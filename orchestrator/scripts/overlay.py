"""A candidate laid over the user's command, read back, and judged: what a trial of it would run, or why it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from orchestrator.errors import ConfigError
from orchestrator.recipes.base import Note
from orchestrator.recipes.fields import is_at_or_below
from orchestrator.recipes.training import Overlay, OverlayRequest, Reading, Run
from orchestrator.scripts.own import is_settled, with_own
from orchestrator.scripts.placeholders import filled_run, names_in, placeholder_values
from orchestrator.scripts.script import PATHS, Script, flat, paths_of, values_of
from orchestrator.space.knobs import KNOB_NAMES
from orchestrator.space.knobs.canonical import build_candidate
from orchestrator.space.rules import Case, Rule
from trials.spec import Candidate


def request_of(script: Script, candidate: Candidate, device: str | None = None) -> OverlayRequest:
    """What the recipe is to lay over the command: own knobs only as far as nobody else can."""
    batch, is_unchanged = script.workload.global_batch_size, candidate == script.unchanged
    left = tuple(choice for choice in candidate.own if not is_settled(choice.name, script))
    return OverlayRequest(
        candidate=dataclasses.replace(candidate, own=left),
        reading=script.reading,
        named=frozenset() if is_unchanged else script.named,
        told=told_paths(script.run),
        world_size=candidate.layout.world_size,
        global_batch_size=batch,
        num_microbatches=max(1, candidate.num_microbatches(batch)),
        seed=script.seed,
        device=device or script.device,
    )


def told_paths(run: Run) -> frozenset[str]:
    """Paths of the fields that a command has placeholders for."""
    names = names_in((*run.argv, *run.env.values(), *run.files.values()))
    return frozenset(path for name in names if name in KNOB_NAMES for path in paths_of(name))


def render(script: Script, candidate: Candidate, *, last_step: int | None = None, device: str | None = None) -> Overlay:
    """The user's command with the candidate laid over it; with ``last_step`` also in trial mode.

    Its environment is that of the command and what was added to it.

    Args:
        device: kind of device that it runs on, where that is known.

    Raises:
        ConfigError: a file of the user's that cannot be changed.
    """
    values = placeholder_values(candidate, script.workload, last_step=last_step)
    run = filled_run(with_own(script, candidate), values)
    laid = script.training.overlay(run, request_of(script, candidate, device))
    if last_step is not None:
        laid = script.training.trial_mode(laid, last_step)
    env = {**run.env, **laid.env}
    files = {**run.files, **laid.files}
    used = [name for name in names_in((*laid.argv, *env.values())) if name in files]
    return dataclasses.replace(laid, env=env, files={name: files[name] for name in used})


def problem(script: Script, candidate: Candidate, device: str | None = None) -> str | None:
    """Why the candidate cannot be said in the words of the user's command; None where it can.

    What was laid over is read back, so that nobody finds out on the devices that a framework calls something else.
    """
    try:
        laid = render(script, candidate, device=device)
    except ConfigError as error:
        return str(error)
    errors = [note for note in laid.notes if note.severity == "error"]
    if errors:
        return _sentence(errors[0])
    if candidate == script.unchanged:
        return None
    run = Run(argv=laid.argv, cwd=script.run.cwd, env=laid.env, files=laid.files, paths=script.run.paths)
    return next(_contradictions(script, script.training.read(run), laid, candidate), None)


def rule_of(script: Script) -> Rule:
    """Legality by :func:`problem`, under the id ``recipe:NAME``."""

    def check(case: Case) -> str | None:
        device = case.topology.nodes[0].device_kind if case.topology is not None else None
        return problem(script, case.candidate, device)

    return Rule(id=script.rule_id, reads="candidate", check=check)


def notes_of(script: Script, candidate: Candidate) -> tuple[str, ...]:
    """What was not understood of the command, and what the recipe has to say of this candidate."""
    notes = [*script.reading.notes, *render(script, candidate).notes]
    return tuple(dict.fromkeys(_sentence(note) for note in notes))


def _contradictions(script: Script, said: Reading, laid: Overlay, candidate: Candidate) -> Iterator[str]:
    """What the laid command says otherwise than the candidate, and no note speaks of."""
    asked = flat(candidate)
    merged = {**asked, **{path: value for path, value in said.values.items() if path in PATHS}}
    reading = dataclasses.replace(said, values=merged, num_layers=said.num_layers or script.reading.num_layers)
    values = values_of(reading, num_layers=script.model.num_layers, num_devices=None)
    found = flat(build_candidate(values, script.model))
    for path in sorted({*asked, *found}):
        old, new = asked.get(path), found.get(path)
        if old != new and not any(is_at_or_below(path, note.knob) for note in laid.notes):
            yield f"{path}: asked for {old}, but the command would say {new}"
    batch = script.workload.global_batch_size
    num_microbatches = candidate.num_microbatches(batch)
    if said.num_microbatches not in (None, num_microbatches):
        yield f"{num_microbatches} micro-batches per step, but the command would say {said.num_microbatches}"
    if said.global_batch_size not in (None, batch):
        yield f"a global batch of {batch}, but the command would say {said.global_batch_size}"


def _sentence(note: Note) -> str:
    return f"{note.knob}: {note.message}" if note.knob else note.message
