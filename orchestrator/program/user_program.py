"""A custom training program, read once: its command and files, placeholders, values of knobs, and source."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.frameworks.edit import Reading, Run, Training
from orchestrator.frameworks.spelling import WORKLOAD, candidate_of, flatten, is_at_or_below
from orchestrator.space.file_types import ALL_LAYERS, RecomputeChoice, StageSplit, even_split, layers_of
from orchestrator.space.inside import NOTHING_INSIDE, InsideBaseline
from orchestrator.space.knobs import KNOB_NAMES, KNOBS, CustomKnob, argument_text
from orchestrator.space.notation import flat_params
from orchestrator.space.space import Rest
from trials.files import digest
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
    Recompute,
    ScriptData,
    ScriptModel,
    Workload,
)


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training program with the settings of the sweep file."""

    training: Training
    run: Run
    reading: Reading
    """Values that the command sets; values of candidates' fields are in canonical form."""
    workload: Workload
    """The workload of the candidates; its model is a :class:`ScriptModel`."""
    log: LogFormat
    hook: bool = True
    env_pass: tuple[str, ...] = ()
    own: tuple[CustomKnob, ...] = ()
    inside: InsideBaseline = NOTHING_INSIDE
    """The baseline's values of the built-in knobs that are set inside the program; at these values the hook leaves them
    alone."""
    named: frozenset[str] = frozenset()
    """Paths of fields that the sweep file sets, or that the command has placeholders for."""
    unchanged: Candidate | None = None
    """The candidate of the unmodified command; None if the file's baseline differs from it."""
    baseline: Candidate | None = None
    """The candidate of trial 0."""
    trial_args: tuple[str, ...] = ()
    """Arguments that only trials have."""
    seed: int | None = None
    """None: as in the command."""
    device: str | None = None
    """Kind of device that ranks train on, ``cpu`` or ``cuda``; None if the sweep file does not set it."""

    @property
    def model(self) -> ScriptModel:
        assert isinstance(self.workload.model, ScriptModel)
        return self.workload.model

    @functools.cached_property
    def judged(self) -> dict[tuple[Candidate, str | None], str | None]:
        """Cache of the reasons why candidates cannot run on a kind of device, None if they can: every plan requests all
        of them."""
        return {}

    @functools.cached_property
    def placeholders(self) -> frozenset[str]:
        """Names of all placeholders in the command, its environment and its files."""
        return frozenset(names_in((*self.run.argv, *self.run.env.values(), *self.run.files.values())))

    @functools.cached_property
    def templated(self) -> frozenset[str]:
        """Paths of the fields that the command has placeholders for."""
        return frozenset(path for name in templated_knobs(self.placeholders) for path in paths_of(name))

    @property
    def notes(self) -> tuple[str, ...]:
        """Parts of the command that were not understood, for people."""
        return tuple(f"{note.knob}: {note.message}" if note.knob else note.message for note in self.reading.notes)

    @property
    def rule_id(self) -> str:
        return f"recipe:{self.training.name}"


# ---- settings of the command, as values of knobs ----

_PARTS = {"dataloader": "loader.tuning", "cudnn_benchmark": "kernels.cudnn_tuning_range"}
_ANY = Workload(
    model=LlamaModel(hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, ffn_hidden_size=8),
    data=ScriptData(),
    seq_length=1,
    global_batch_size=1,
)


def flat(candidate: Candidate) -> dict[str, Any]:
    """Values of a candidate by path, without custom knobs."""
    values = flatten(candidate, _ANY)
    return {path: value for path, value in values.items() if path != "own" and not is_at_or_below(path, WORKLOAD)}


PATHS = frozenset(
    flat(Candidate(precision=Precision(loss_scale=LossScale()), loader=Loader(tuning=LoaderTuning()))),
)
"""All paths of candidates."""


@functools.cache
def paths_of(knob: str) -> frozenset[str]:
    """Paths of the candidate's fields that a knob sets, in the form of :mod:`orchestrator.frameworks.spelling`."""
    part = next(one.part for one in KNOBS if one.name == knob)
    above = _PARTS.get(knob, part if part == knob else f"{part}.{knob}")
    return frozenset(path for path in PATHS if is_at_or_below(path, above))


def configured_knobs(reading: Reading) -> frozenset[str]:
    """Knobs that the command sets."""
    return frozenset(knob.name for knob in KNOBS if not paths_of(knob.name).isdisjoint(reading.values))


def values_of(reading: Reading, *, num_layers: int, num_devices: int | None) -> dict[str, Any]:
    """Values of all knobs in the command; knobs that it does not set are neutral.

    Args:
        num_devices: number of devices that it runs on; data parallelism uses the rest. None if
            unknown: then it has one replica.
    """
    candidate = candidate_of({path: value for path, value in reading.values.items() if path in PATHS})
    configured = configured_knobs(reading)
    values = {knob.name: knob.read(candidate) for knob in KNOBS}
    if candidate.layout.cp_method != "hybrid":
        values["ulysses_degree"] = "auto"
    values["stage_layers"] = _split(candidate.layout, num_layers)
    values["recompute"] = _policy(candidate, num_layers, knows_layers=reading.num_layers is not None)
    if num_devices is not None:
        values |= {name: Rest(num_devices) for name in ("dp_shard", "dp_replicate") if name not in configured}
    return values


def _split(layout: Layout, num_layers: int) -> StageSplit:
    counts = layout.stage_layers
    even = even_split(num_layers, layout.pp, layout.num_virtual_stages, layout.schedule) if layout.pp > 1 else ()
    return StageSplit() if counts in ((), even) else StageSplit(kind="counts", rows=counts)


def _policy(candidate: Candidate, num_layers: int, *, knows_layers: bool) -> RecomputeChoice:
    """The recompute policy for any layout: all layers of this layout become all layers of another one."""
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
    """The reading with the values of the candidate that the command is equivalent to.

    Otherwise different spellings of the same canonical form would count as changes, such as ZeRO stage 2 on one device.
    """
    configured = flat(baseline)
    return dataclasses.replace(
        reading, values={path: configured.get(path, value) for path, value in reading.values.items()}
    )


COUNTS = ("accumulation", "total_accumulation", "total_micro_batch_size", "world_size", "steps", "seed")
"""Placeholders other than knobs: micro-batches of a step on a rank and over all ranks, samples of a micro-batch over
all ranks, ranks, last step, seed."""
OUT = "out"
"""The attempt's own folder."""
_BRACED = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")


def templated_knobs(placeholders: Iterable[str]) -> frozenset[str]:
    """Built-in knobs that a command with these placeholders receives."""
    names = ("micro_batch_size" if name == "total_micro_batch_size" else name for name in placeholders)
    return frozenset(names) & frozenset(KNOB_NAMES)


def names_in(texts: Iterable[str]) -> list[str]:
    """Names of the placeholders, without repetitions, in order."""
    found = (match[2] for text in texts for match in _BRACED.finditer(text))
    return list(dict.fromkeys(name for name in found if name))


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with these placeholders filled in; others stay."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        return values.get(match[2], match[0])

    return _BRACED.sub(value, text)


def filled_run(run: Run, values: Mapping[str, str]) -> Run:
    """The command with placeholders filled in; in files only those with known names, since other braces have no
    meaning."""
    return dataclasses.replace(
        run,
        argv=tuple(filled(word, values) for word in run.argv),
        env={name: filled(text, values) for name, text in run.env.items()},
        files={name: _filled_file(text, values) for name, text in run.files.items()},
    )


def _filled_file(text: str, values: Mapping[str, str]) -> str:
    for name in names_in([text]):
        if name in values:
            text = text.replace(f"{{{name}}}", values[name])
    return text


def placeholder_values(candidate: Candidate, workload: Workload, *, last_step: int | None) -> dict[str, str]:
    """The value of every placeholder except ``{out}`` and the names of files. Without a last step, ``{steps}`` is
    missing."""
    knobs = flat_params(candidate)
    if candidate.recompute == Recompute(full=layers_of(candidate.layout, workload.num_layers)):
        knobs = {**knobs, "recompute": "full"}  # the word used in sweep files, regardless of the number of layers
    counts = {
        "accumulation": max(1, candidate.num_microbatches(workload.global_batch_size)),
        "total_accumulation": max(1, workload.global_batch_size // candidate.micro_batch_size),
        "total_micro_batch_size": candidate.micro_batch_size * candidate.layout.dp,
        "world_size": candidate.layout.world_size,
        **({} if last_step is None else {"steps": last_step}),
        "seed": workload.seed,
    }
    own = {choice.name: choice.value for choice in candidate.own}
    known = {**{name: knobs[name] for name in KNOB_NAMES}, **own, **counts}
    return {name: argument_text(value) for name, value in known.items()}


SUFFIXES = frozenset({".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"})
"""Suffixes of source files. Files with other suffixes that programs and exports write themselves (YAML, JSON, shell
scripts) count only if the command names them."""
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages", "build", "dist", "mlruns"})
"""Folders without source; hidden folders and virtual environments are also skipped."""
PROGRAM = "program"
"""Name of the source's digest in the fingerprint of a sweep's environment."""
MAX_FILES = 5_000
"""Maximum number of files of a training program. The rest is omitted, and the tree records that."""
MAX_BYTES = 4 << 20
"""Larger files are treated as data."""
_GIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTree:
    """The source files below a folder."""

    files: dict[str, str]
    """SHA-256 of each file by its path relative to the folder, sorted."""
    is_whole: bool = True
    """False if there are more than :data:`MAX_FILES`."""
    commit: str = ""
    """The commit checked out there, with ``+`` if files were changed since; empty without git."""

    @property
    def sha256(self) -> str:
        """Equal if and only if files with equal names are equal."""
        return digest(self.files)

    def changed(self, other: dict[str, str]) -> tuple[str, ...]:
        """Paths whose content differs, or that only one of the two has."""
        names = sorted({*self.files, *other})
        return tuple(name for name in names if self.files.get(name) != other.get(name))


def program_source(script: Script) -> SourceTree | None:
    """The source of a script and the files that its command names; None if it is not on this host."""
    folder = Path(script.run.cwd)
    words = tuple(path for word in script.run.argv[1:] if (path := folder / word).suffix and path.is_file())
    return source_tree(folder, (*words, *(Path(path) for path in script.run.paths.values())))


def source_tree(folder: Path, others: tuple[Path, ...] = ()) -> SourceTree | None:
    """The source below ``folder``, and ``others``, the configuration files; None if it is not on this host."""
    if not folder.is_dir():
        return None
    files: dict[str, str] = {}
    is_whole = True
    for path in _sources(folder):
        if len(files) == MAX_FILES:
            is_whole = False
            break
        if (found := _sha256(path)) is not None:
            files[str(path.relative_to(folder))] = found
    for path in others:
        if (found := _sha256(path)) is not None:
            files[str(path.relative_to(folder) if path.is_relative_to(folder) else path)] = found
    return SourceTree(files=dict(sorted(files.items())), is_whole=is_whole, commit=_commit(folder))


def _sources(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        at = Path(where)
        folders[:] = sorted(name for name in folders if not _is_skipped(at / name))
        yield from (at / name for name in sorted(names) if Path(name).suffix in SUFFIXES)


def _is_skipped(folder: Path) -> bool:
    name = folder.name
    marks = (
        "pyvenv.cfg",
        "mlflow.db",
        "sweeps",
        "hook/tune_cluster_hook",
    )  # a home of sweeps, or an export with the hook
    is_foreign = any((folder / mark).exists() for mark in marks)
    return is_foreign or name in SKIPPED or name.startswith(".") or name.endswith(".egg-info")


def _sha256(path: Path) -> str | None:
    """The file's digest; None if it is not a file, cannot be read, or is data by its size."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _commit(folder: Path) -> str:
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    return f"{commit}+" if _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".") else commit


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
