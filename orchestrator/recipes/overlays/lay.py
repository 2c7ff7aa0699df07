"""Lays a candidate over a command: writes what it changes, reads the result back, and notes where that says something
else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.recipes.base import ABSENT, Draft, Note, Setting
from orchestrator.recipes.fields import WORKLOAD, candidate_of, defaults, flatten, is_at_or_below
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.training import Overlay, OverlayRequest, Reading, Run
from orchestrator.space.knobs.canonical import canonical_layout, canonical_loader, canonical_precision
from orchestrator.space.knobs.layer_choices import layers_of
from trials.spec import Candidate, ScriptData, ScriptModel, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayPart:
    """Fields that belong together: where one of them changes, ``write`` says all of them."""

    paths: tuple[str, ...]
    write: Callable[[Edit, OverlayRequest], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Laying:
    """How candidates are laid over the commands of one framework."""

    parts: tuple[OverlayPart, ...]
    """Those of the layout before those whose meaning depends on it."""
    read: Callable[[Edit], Reading]
    batch: Callable[[Edit, OverlayRequest], None]
    """Writes how many micro-batches a step has, or samples."""
    seed: Callable[[Edit, int], None]
    check: Callable[[Edit, OverlayRequest], None]
    """Notes what the framework itself would refuse, and what it needs besides."""
    copies_files: bool = True
    """Whether configuration files that the arguments point to are changed in copies; else arguments say it all."""

    def overlay(self, run: Run, request: OverlayRequest) -> Overlay:
        """The command with the candidate laid over it; errors among the notes say what it does not say."""
        edit = Edit.of_run(run, copies_files=self.copies_files)
        reading = self._write(edit, request)
        self.check(edit, request)
        said = [note for note in reading.notes if note.severity == "error" or note not in request.reading.notes]
        spoken = [note.knob for note in edit.notes if note.severity == "error"]
        wrong = [note for note in contradictions(request, reading) if not any(_touch(note.knob, k) for k in spoken)]
        edit.notes = list(dict.fromkeys([*edit.notes, *said, *wrong]))
        return edit.overlay()

    def _write(self, edit: Edit, request: OverlayRequest) -> Reading:
        """Write what changes; what the command says then."""
        asked, now = values_of(request.candidate), request
        for part in self.parts:
            if any(now.changes(path, asked.get(path)) for path in part.paths):
                part.write(edit, now)
                now = replace(now, reading=_again(request, self.read(edit)))
        if _batch(request, now.reading) or (now.reading.global_batch_size, now.reading.num_microbatches) == (
            None,
            None,
        ):
            self.batch(edit, now)
        if request.seed is not None and request.seed != request.reading.seed:
            self.seed(edit, request.seed)
        return _again(request, self.read(edit))


def layers_in(request: OverlayRequest) -> int:
    """Layers of the model; where the command does not say how many, as many as the candidate recomputes at most."""
    recompute = request.candidate.recompute
    counts = [recompute.full, *(part.num_layers for part in recompute.selective)]
    return request.reading.num_layers or max((sum(map(sum, rows)) for rows in counts), default=0) or 1


def _again(request: OverlayRequest, now: Reading) -> Reading:
    """What a command says by now; the model stays the one that the user's own command describes."""
    first, values = request.reading, dict(now.values)
    if now.num_layers is None:
        held = layers_of(request.candidate.layout, layers_in(request))
        values = {path: held if value == _ONE_LAYER else value for path, value in values.items()}
        parts = values.get("recompute.selective", ())
        if parts:
            values["recompute.selective"] = tuple(
                replace(part, num_layers=held) if part.num_layers == _ONE_LAYER else part for part in parts
            )
    return replace(now, values=values, shape=first.shape, num_layers=first.num_layers, seq_length=first.seq_length)


_ONE_LAYER = ((1,),)
"""All layers of a model of which nobody knows how many there are."""


def contradictions(request: OverlayRequest, said: Reading) -> list[Note]:
    """An error for every field of the candidate that a command says otherwise, or not at all although the sweep names
    it."""
    asked = values_of(_canonical(request.candidate))
    canonical = values_of(_canonical(candidate_of({**asked, **_of_candidate(said.values)})))
    wrong = {
        path: (asked.get(path, ABSENT), canonical.get(path, ABSENT))
        for path in sorted({*asked, *canonical})
        if _is_said(path, said.values) and asked.get(path, ABSENT) != canonical.get(path, ABSENT)
        if path not in request.told
    }
    notes = [_error(path, f"asked for {a}, but the command says {b}") for path, (a, b) in wrong.items()]
    notes += [
        _error(path, "this framework is not told of it")
        for path, value in asked.items()
        if not _is_said(path, said.values)
        and any(_touch(path, name) for name in request.named)
        and value != defaults().get(path)
        and path not in (*_LEFT_OVER, *request.told)
    ]
    return notes + _batch(request, said)


def _batch(request: OverlayRequest, said: Reading) -> list[Note]:
    """Whether the command trains on the batch that was asked for."""
    if said.global_batch_size not in (None, request.global_batch_size):
        text = f"asked for a global batch of {request.global_batch_size}, but the command says {said.global_batch_size}"
        return [_error("micro_batch_size", text)]
    if said.num_microbatches not in (None, request.num_microbatches):
        text = f"asked for {request.num_microbatches} accumulation steps, but the command says {said.num_microbatches}"
        return [_error("micro_batch_size", text)]
    return []


_LEFT_OVER = ("layout.dp_replicate", "layout.dp_shard")
"""Degrees one of which most frameworks are not told: it is what the others leave over of the ranks."""
_ANYTHING = Workload(
    model=ScriptModel(recipe="custom", run=(), cwd="/"), data=ScriptData(), seq_length=1, global_batch_size=1
)


def values_of(candidate: Candidate) -> dict[str, Any]:
    """Value by path of a candidate's fields, without the user's own knobs, of which no framework's recipe knows."""
    return _of_candidate(flatten(candidate, _ANYTHING))


def _of_candidate(values: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in values.items() if path != "own" and not is_at_or_below(path, WORKLOAD)}


def _canonical(candidate: Candidate) -> Candidate:
    """The candidate in canonical form as far as that is the same for every model."""
    return Candidate(
        layout=canonical_layout(candidate.layout),
        micro_batch_size=candidate.micro_batch_size,
        recompute=candidate.recompute,
        precision=canonical_precision(candidate.precision),
        loader=canonical_loader(candidate.loader),
        kernels=candidate.kernels,
    )


def _is_said(path: str, values: Mapping[str, Any]) -> bool:
    return path in values or any(is_at_or_below(known, path) for known in values)


def _touch(one: str, other: str) -> bool:
    return is_at_or_below(one, other) or is_at_or_below(other, one)


def _error(knob: str, message: str) -> Note:
    return Note(knob=knob, message=message, severity="error")


# ---- settings of the recipe that exports ----


def draft_of(request: OverlayRequest) -> Draft:
    """A draft for settings of the framework's exports, whose names and rules are the same here."""
    reading = request.reading
    model = ScriptModel(recipe="custom", run=(), cwd="/", num_layers=layers_in(request))
    workload = Workload(
        model=model,
        data=ScriptData(),
        seq_length=reading.seq_length or 1,
        global_batch_size=request.global_batch_size,
    )
    return Draft(request.candidate, workload, values_of(request.candidate))


def written(edit: Edit, request: OverlayRequest, settings: Iterable[Setting]) -> dict[str, Any]:
    """What these settings of the framework's exports say of the candidate; their notes become the edit's."""
    draft = draft_of(request)
    for setting in settings:
        setting.write(draft)
    edit.notes += draft.notes
    return draft.settings
