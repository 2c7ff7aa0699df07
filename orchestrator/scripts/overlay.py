"""A candidate laid over the user's command, and judged: what a trial of it would run, or why it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from orchestrator.errors import ConfigError
from orchestrator.recipes.base import Note
from orchestrator.recipes.training import Overlay, OverlayRequest
from orchestrator.scripts.own import is_settled, with_own
from orchestrator.scripts.placeholders import filled_run, names_in, placeholder_values
from orchestrator.scripts.script import Script
from orchestrator.space.rules import Case, Rule
from trials.spec import Candidate

START, CHANGES = "train.sh", "changes.diff"
"""Files that are exported beside copies: what starts the training, and what differs from the user's own."""


def request_of(script: Script, candidate: Candidate, device: str | None = None) -> OverlayRequest:
    """What the recipe is to lay over the command: own knobs only as far as nobody else can."""
    batch, is_unchanged = script.workload.global_batch_size, candidate == script.unchanged
    left = tuple(choice for choice in candidate.own if not is_settled(choice.name, script))
    return OverlayRequest(
        candidate=dataclasses.replace(candidate, own=left),
        reading=script.reading,
        named=frozenset() if is_unchanged else script.named,
        told=script.told,
        world_size=candidate.layout.world_size,
        global_batch_size=batch,
        num_microbatches=max(1, candidate.num_microbatches(batch)),
        seed=script.seed,
        device=device or script.device,
    )


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


def file_names(script: Script, names: Iterable[str]) -> dict[str, str]:
    """What the copies of configuration files are called, by placeholder: as the user's own, whose suffix programs go
    by, unless several would be called alike, or like a file that is exported beside them."""
    found: dict[str, str] = {}
    for name in sorted(names):
        own = script.run.paths.get(name, name).replace("\\", "/").rpartition("/")[2]
        taken = {*found.values(), START, CHANGES}
        found[name] = own if own not in taken else f"{name}-{own}"
    return found


def problem(script: Script, candidate: Candidate, device: str | None = None) -> str | None:
    """Why the candidate cannot be said in the words of the user's command; None where it can.

    Recipes read back what they laid over, so that nobody finds out on the devices that something else would be trained.
    """
    key = candidate, device
    if key not in script.judged:
        script.judged[key] = _problem(script, candidate, device)
    return script.judged[key]


def _problem(script: Script, candidate: Candidate, device: str | None) -> str | None:
    try:
        laid = render(script, candidate, device=device)
    except ConfigError as error:
        return str(error)
    return next((_sentence(note) for note in laid.notes if note.severity == "error"), None)


def rule_of(script: Script) -> Rule:
    """Legality by :func:`problem`, under the id ``recipe:NAME``."""

    def check(case: Case) -> str | None:
        device = case.topology.nodes[0].device_kind if case.topology is not None else None
        return problem(script, case.candidate, device)

    return Rule(id=script.rule_id, check=check)


def notes_of(script: Script, candidate: Candidate) -> tuple[str, ...]:
    """What was not understood of the command, and what the recipe has to say of this candidate."""
    said = map(_sentence, render(script, candidate).notes)
    return tuple(dict.fromkeys((*script.notes, *said)))


def _sentence(note: Note) -> str:
    return f"{note.knob}: {note.message}" if note.knob else note.message
