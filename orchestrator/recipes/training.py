"""What a recipe knows of training programs that people write for its framework: how to read their command, how to lay a
candidate over it, how to keep a trial from leaving anything behind.

A candidate is *overlaid* on the user's own arguments and configuration files: what it says is replaced or appended, in
copies, and all else stays as the user wrote it. A field in which the candidate equals what the command already says is
not written, so a knob that a sweep does not name is inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.recipes.base import Note
from trials.script.command import Expected, LogFormat
from trials.spec import Candidate, LlamaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training command as the user wrote it."""

    argv: tuple[str, ...]
    cwd: str
    """Absolute."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of each configuration file by its name: those the sweep file names, and those that
    :attr:`Training.find_files` found in the arguments."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Absolute path of each of these files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a command says, in our words."""

    values: Mapping[str, Any]
    """Value by path, as :func:`orchestrator.recipes.fields.flatten` names them (``layout.tp``, ``micro_batch_size``,
    ``precision.dtype``), of the fields that the framework has and that could be understood, its defaults included."""
    shape: LlamaModel | None = None
    """The decoder that is trained, where arguments or a ``config.json`` tell."""
    num_layers: int | None = None
    seq_length: int | None = None
    global_batch_size: int | None = None
    """Samples of an optimiser step, where the framework is told."""
    num_microbatches: int | None = None
    """Gradient accumulation steps, where the framework is told these instead."""
    seed: int | None = None
    world_size: int | None = None
    """Ranks that its launcher starts today, where it has one: no field of a candidate, because we start the ranks."""
    notes: tuple[Note, ...] = ()
    """What was not understood, and what that means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayRequest:
    """What is to be laid over a command."""

    candidate: Candidate
    reading: Reading
    """What the command says by itself."""
    named: frozenset[str] = frozenset()
    """Paths of fields that the sweep names: written also where the command does not say them."""
    told: frozenset[str] = frozenset()
    """Paths of fields that the command has placeholders for: filled in already, and nobody else's business."""
    world_size: int
    global_batch_size: int
    num_microbatches: int
    seed: int | None = None
    device: str | None = None
    """Kind of device that ranks train on, as torch calls it: ``cpu``, ``cuda``; None where it is not known."""

    def changes(self, path: str, value: Any) -> bool:
        """Whether ``value`` has to be written at ``path``: the command says something else, or nothing although the
        sweep names the field."""
        if path in self.told:
            return False
        if path in self.reading.values:
            return bool(self.reading.values[path] != value)
        return path in self.named


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """A command with a candidate laid over it."""

    argv: tuple[str, ...]
    """``{name}`` stands for the path of the copy of a file in ``files``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of the user's own."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of the copies by name: all files whose placeholder is in ``argv``."""
    notes: tuple[Note, ...] = ()
    """An error: this candidate cannot be said here; a warning is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How programs of one framework are read, changed, watched."""

    name: str
    title: str
    package: str | None
    """Distribution whose version matters, as pip calls it; None where there is none."""
    releases: str = ""
    """Versions that were tried or read, as a specifier: ``>=5.0,<6``; empty: any."""
    launcher: Literal["env", "own"] = "env"
    takes_launchers: bool = False
    """Whether overlays take ``torchrun`` or ``accelerate launch`` off a command, and set the variables instead."""
    takes_own_names: bool = False
    """Whether overlays write the user's own knobs that are called like arguments without dashes; else that is done
    before."""
    log: LogFormat
    recognises: Callable[[Run], bool]
    """Whether a command looks like one of this framework."""
    find_files: Callable[[tuple[str, ...], str], Mapping[str, str]] = lambda argv, cwd: {}  # noqa: ARG005
    """(argv, cwd) -> absolute path by name of the configuration files that the arguments point to and that an overlay
    may have to change."""
    read: Callable[[Run], Reading]
    overlay: Callable[[Run, OverlayRequest], Overlay]
    trial_mode: Callable[[Overlay, int], Overlay]
    """(overlay, last step) -> the same without saves, evaluation, trackers and hub, logging every step, and ending at
    that step, where possible in a way that leaves the schedule of the learning rate."""
    expected: Callable[[OverlayRequest], Expected]
    """What of the candidate can be seen from inside the program."""
