"""A training program of the user's own, read once: its command and files, what they say, what a sweep changes."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from orchestrator.recipes.fields import WORKLOAD, candidate_of, flatten, is_at_or_below
from orchestrator.recipes.training import Reading, Run, Training
from orchestrator.scripts.placeholders import names_in
from orchestrator.space.knobs import KNOB_NAMES, KNOBS
from orchestrator.space.knobs.canonical import Rest
from orchestrator.space.knobs.layer_choices import ALL_LAYERS, RecomputeChoice, StageSplit, even_split, layers_of
from orchestrator.space.knobs.own import OwnKnob
from trials.script.command import LogFormat
from trials.spec import (
    Candidate,
    Counts,
    Layout,
    LlamaModel,
    Loader,
    LoaderTuning,
    LossScale,
    Precision,
    ScriptData,
    ScriptModel,
    Workload,
)


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training program with what a sweep file says of it."""

    training: Training
    run: Run
    reading: Reading
    """What the command says by itself; the values of candidates' fields in canonical form."""
    workload: Workload
    """What candidates are measured on; its model is a :class:`ScriptModel`."""
    log: LogFormat
    hook: bool = True
    env_pass: tuple[str, ...] = ()
    own: tuple[OwnKnob, ...] = ()
    named: frozenset[str] = frozenset()
    """Paths of fields that the sweep file names, or that the command has placeholders for."""
    unchanged: Candidate | None = None
    """The candidate that the command amounts to as it stands; None where the file's baseline says something else."""
    seed: int | None = None
    """None: as the command says."""
    device: str | None = None
    """Kind of device that ranks train on, ``cpu`` or ``cuda``; None where the sweep file leaves it open."""

    @property
    def model(self) -> ScriptModel:
        assert isinstance(self.workload.model, ScriptModel)
        return self.workload.model

    @functools.cached_property
    def judged(self) -> dict[tuple[Candidate, str | None], str | None]:
        """Why candidates cannot run on a kind of device, None where they can, as far as somebody asked: every plan
        asks for all of them."""
        return {}

    @functools.cached_property
    def placeholders(self) -> frozenset[str]:
        """Names of all placeholders that the command has, its environment and its files among it."""
        return frozenset(names_in((*self.run.argv, *self.run.env.values(), *self.run.files.values())))

    @functools.cached_property
    def told(self) -> frozenset[str]:
        """Paths of the fields that the command has placeholders for."""
        return frozenset(path for name in self.placeholders if name in KNOB_NAMES for path in paths_of(name))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not understood of the command, for people."""
        return tuple(f"{note.knob}: {note.message}" if note.knob else note.message for note in self.reading.notes)

    @property
    def rule_id(self) -> str:
        return f"recipe:{self.training.name}"


# ---- what the command says, as values of knobs ----

_PARTS = {"dataloader": "loader.tuning", "cudnn_benchmark": "kernels.cudnn_tuning_range"}
_ANY = Workload(
    model=LlamaModel(hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, ffn_hidden_size=8),
    data=ScriptData(),
    seq_length=1,
    global_batch_size=1,
)


def flat(candidate: Candidate) -> dict[str, Any]:
    """Value by path of a candidate alone, its own knobs left out."""
    values = flatten(candidate, _ANY)
    return {path: value for path, value in values.items() if path != "own" and not is_at_or_below(path, WORKLOAD)}


PATHS = frozenset(
    flat(Candidate(precision=Precision(loss_scale=LossScale()), loader=Loader(tuning=LoaderTuning()))),
)
"""All paths that candidates have."""


@functools.cache
def paths_of(knob: str) -> frozenset[str]:
    """Paths of the candidate's fields that a knob sets, as :func:`orchestrator.recipes.fields.flatten` names them."""
    part = next(one.part for one in KNOBS if one.name == knob)
    above = _PARTS.get(knob, part if part == knob else f"{part}.{knob}")
    return frozenset(path for path in PATHS if is_at_or_below(path, above))


def said_knobs(reading: Reading) -> frozenset[str]:
    """Knobs of which the command says something."""
    return frozenset(knob.name for knob in KNOBS if not paths_of(knob.name).isdisjoint(reading.values))


def values_of(reading: Reading, *, num_layers: int, num_devices: int | None) -> dict[str, Any]:
    """Values of all knobs as the command says them; knobs of which it says nothing are neutral.

    Args:
        num_devices: on how many devices it runs; data parallelism takes up those that it says nothing of. None where
            that is not known: then it has one replica.
    """
    candidate = candidate_of({path: value for path, value in reading.values.items() if path in PATHS})
    said = said_knobs(reading)
    values = {knob.name: knob.read(candidate) for knob in KNOBS}
    values["stage_layers"] = _split(candidate.layout, num_layers)
    values["recompute"] = _policy(candidate, num_layers, knows_layers=reading.num_layers is not None)
    if num_devices is not None:
        values |= {name: Rest(num_devices) for name in ("dp_shard", "dp_replicate") if name not in said}
    return values


def _split(layout: Layout, num_layers: int) -> StageSplit:
    counts = layout.stage_layers
    even = even_split(num_layers, layout.pp, layout.num_virtual_stages, layout.schedule) if layout.pp > 1 else ()
    return StageSplit() if counts in ((), even) else StageSplit(kind="counts", rows=counts)


def _policy(candidate: Candidate, num_layers: int, *, knows_layers: bool) -> RecomputeChoice:
    """The recompute policy for any layout: all layers of this one are all of another."""
    policy = candidate.recompute
    everything = {layers_of(candidate.layout, num_layers), *(() if knows_layers else (((1,),),))}

    def choice(counts: Counts) -> Any:
        return 0 if not counts else ALL_LAYERS if counts in everything else counts

    return RecomputeChoice(
        full=choice(policy.full),
        select=tuple((part.pattern, choice(part.num_layers)) for part in policy.selective),
        communication=choice(policy.communication),
    )


def canonical_reading(reading: Reading, baseline: Candidate) -> Reading:
    """The reading with its values as the candidate has them that the command amounts to.

    So nothing is taken for a change which only spells the same in canonical form: ZeRO of stage 2 on one device.
    """
    said = flat(baseline)
    return dataclasses.replace(reading, values={path: said.get(path, value) for path, value in reading.values.items()})
