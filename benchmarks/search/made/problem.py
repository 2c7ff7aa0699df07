"""Made problems: a drawn tuning task and its truth, a function of the problem's name alone, which contains a seed."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.figures import TOLERANCE
from benchmarks.search.made import dryruns, holdings, machine, spaces
from benchmarks.search.made.shapes import SIZES
from benchmarks.search.made.spaces import Setup
from cluster.cost.cost_model import inputs_of
from cluster.cost.inputs import Array, CostInputs, load_prior
from cluster.hardware.topology import ClusterDescription, catalogue, describe_topology
from orchestrator.space.notation import flat_params
from trials.spec import Candidate

ALL_STRUCTURES = tuple({**holdings.CHANGED_INPUTS, **holdings.STRUCTURES})
STRUCTURES: Mapping[str, tuple[str, ...]] = {
    "dry-run": (),
    "runner": (),
    "off-prior": (),
    "fp32-gradients": ("fp32-gradients",),
    "short-gradients": ("short-gradients",),
    "gathered-logits": ("gathered-logits",),
    "buffers": ("buffers",),
    "held-batches": ("held-batches",),
    "whole-tables": ("whole-tables",),
    "reserved-cache": ("reserved-cache",),
    "kept-blocks": ("kept-blocks",),
    "gathered-sequence": ("gathered-sequence",),
    "kept-first-layers": ("kept-first-layers",),
    "peer-buffers": ("peer-buffers",),
    "fp32-residual": ("fp32-residual",),
    "update-copies": ("update-copies",),
    "mixed": tuple(name for name in ALL_STRUCTURES if name not in holdings.SEALED),
}
"""What is planted in the problems of a family; of ``mixed`` two or three of them."""
STRUCTURES_OF_TIME: Mapping[str, tuple[str, ...]] = dict.fromkeys(machine.CONTRARY, ())
"""The same of families whose order by the cost model is wrong."""
RUNNER = ("dry-run", "runner")
"""Families trained by our own runner, whose memory the product knows; the others are other frameworks' programs."""
MAX_ATTEMPTS = 60
MEMORY_SHARES = (1.0, 0.9, 0.75, 0.6, 0.5)
"""Shares of a card's memory that a task may use, the largest that binds."""
BINDS = 0.2, 0.8
"""Share of the candidates that must not fit."""
LOST = 1.1
"""How much slower than the best a contrary error must make the candidate that would be the best without it."""
FELT, SHARE_FELT = 0.03, 0.15
"""By how much, in log, a planted structure must move the peaks of what share of the candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One candidate as the samplers see it."""

    knobs: Mapping[str, str]
    """Only those that differ within the problem."""
    time_s: float | None
    """Measured seconds per step, with noise; None: out of memory."""


@dataclass(frozen=True, kw_only=True)
class MadeProblem:
    """A tuning task with its truth. Arrays have shape (n,), rows are ``setup.candidates``."""

    name: str
    setup: Setup
    limit_bytes: float
    true_s: Array
    """Seconds per step without noise, also of candidates that do not fit."""
    true_bytes: Array
    """Peak of the fullest rank."""
    noise_std: float
    """Standard deviation of the log of a measured step time."""
    reports_peaks: bool
    """Whether measured trials tell their peaks; programs of other frameworks need not."""
    planted: tuple[str, ...]
    """Structures of memory and errors of time in it."""
    baseline: int
    """Where a careful user starts; fits, and is not within 2% of the best."""

    def __len__(self) -> int:
        return len(self.setup.candidates)

    @property
    def family(self) -> str:
        return self.name.rpartition("/")[0]

    @functools.cached_property
    def fits(self) -> NDArray[np.bool_]:
        return np.asarray(self.true_bytes <= self.limit_bytes)

    @property
    def best_s(self) -> float:
        """The fastest that fits."""
        return float(self.true_s[self.fits].min())

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.setup.candidates

    @property
    def cluster(self) -> ClusterDescription:
        """The cluster as the product knows it, with the memory that trials may use."""
        return describe_topology(self.setup.topology(self.limit_bytes))

    @functools.cached_property
    def configurations(self) -> tuple[Configuration, ...]:
        rows = [flat_params(candidate) for candidate in self.candidates]
        varying = [name for name in rows[0] if len({row[name] for row in rows}) > 1]
        measured = self.measured_s
        return tuple(
            Configuration(
                knobs={name: str(row[name]) for name in varying},
                time_s=float(measured[i]) if self.fits[i] else None,
            )
            for i, row in enumerate(rows)
        )

    @functools.cached_property
    def measured_s(self) -> Array:
        """What trials measure, whoever asks: one draw of noise per candidate."""
        return np.asarray(self.true_s * np.exp(_rng(self.name, "noise").normal(0.0, self.noise_std, len(self))))

    @functools.cached_property
    def measured_bytes(self) -> Array:
        """What trials tell of their peaks; the fullest rank is not always asked at its worst moment."""
        return np.asarray(self.true_bytes * np.exp(-np.abs(_rng(self.name, "peaks").normal(0.0, 0.01, len(self)))))


def families(*, contrary: bool = False) -> list[str]:
    """Names of all families: structure and size class. ``contrary``: those with a wrong order of times instead."""
    return [f"{structure}/{size}" for structure in (STRUCTURES_OF_TIME if contrary else STRUCTURES) for size in SIZES]


def problem_names(
    seed: int, num: int, only: Sequence[str] | None = None, *, tuning: bool = False, contrary: bool = False
) -> list[str]:
    """Draw names of problems, evenly from the families whose name contains one of ``only``.

    ``tuning``: without ``SEALED`` structures, which no choice should be made on.
    """
    chosen = [name for name in families(contrary=contrary) if only is None or any(part in name for part in only)]
    chosen = [name for name in chosen if not (tuning and name.split("/")[0] in holdings.SEALED)]
    random.Random(seed).shuffle(chosen)
    return [f"{chosen[i % len(chosen)]}/{seed}.{i // len(chosen)}" for i in range(num if chosen else 0)]


def make_problem(name: str) -> MadeProblem | None:
    """The problem of that name; None where no draw gave one in which memory binds."""
    for attempt in range(MAX_ATTEMPTS):
        if (made := _attempt(name, attempt)) is not None:
            return made
    return None


def _rng(*key: object) -> np.random.Generator:
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8]))


def _attempt(name: str, attempt: int) -> MadeProblem | None:
    structure, size, _ = name.split("/")
    is_foreign = structure not in RUNNER
    drawing = random.Random(f"{name}/{attempt}")
    is_counted = structure == "dry-run"
    setup = dryruns.draw(drawing, size) if is_counted else spaces.draw(drawing, size, is_foreign=is_foreign)
    if setup is None:
        return None
    rng = _rng(name, attempt)
    whole = describe_topology(setup.topology(catalogue()[setup.card].usable_memory_bytes))
    x = inputs_of([(setup.decoder_workload, c) for c in setup.candidates], whole)
    structures = _structures(structure, rng)
    peaks = dryruns.peaks(setup) if is_counted else _peaks(x, structure, structures, rng)
    if peaks is None:
        return None
    errors = tuple(rng.choice(list(machine.ERRORS), rng.integers(1, machine.MAX_ERRORS + 1), replace=False).tolist())
    usual, errors = errors, (*errors, *((structure,) if structure in machine.CONTRARY else ()))
    coefficients = machine.planted(load_prior("time"), rng, 1.0 if structure == "off-prior" else 0.7)
    own = machine.own_errors(x, rng)
    noise_std, reports_peaks = float(rng.choice([0.002, 0.005, 0.01, 0.02])), not is_foreign or bool(rng.random() < 0.6)
    seed = int(rng.integers(2**31))
    for share in MEMORY_SHARES:
        limit = share * catalogue()[setup.card].usable_memory_bytes
        seconds, otherwise = (
            machine.step_times(x, coefficients, some, peaks / limit, np.random.default_rng(seed)) * np.exp(own)
            for some in (errors, usual)
        )
        baseline = _baseline(x, seconds, peaks <= limit)
        if baseline is not None and (errors == usual or _is_misled(seconds, otherwise, peaks <= limit)):
            return MadeProblem(
                name=name,
                setup=setup,
                limit_bytes=limit,
                true_s=seconds,
                true_bytes=peaks,
                noise_std=noise_std,
                reports_peaks=reports_peaks,
                planted=(*structures, *errors),
                baseline=baseline,
            )
    return None


def _is_misled(seconds: Array, otherwise: Array, fits: NDArray[np.bool_]) -> bool:
    """Whether the best of the candidates that fit by ``otherwise`` is clearly not the best by ``seconds``."""
    rows = np.flatnonzero(fits)
    return bool(seconds[rows[otherwise[rows].argmin()]] > LOST * seconds[rows].min())


def _structures(structure: str, rng: np.random.Generator) -> tuple[str, ...]:
    planted = {**STRUCTURES, **STRUCTURES_OF_TIME}[structure]
    if structure != "mixed":
        return planted
    return tuple(rng.choice(list(planted), rng.integers(2, 4), replace=False).tolist())


def _peaks(x: CostInputs, structure: str, structures: tuple[str, ...], rng: np.random.Generator) -> Array | None:
    """Peaks with the structures and errors of their own; None where the structures hardly matter in this space."""
    coefficients = machine.planted(load_prior("memory"), rng, 1.5 if structure == "off-prior" else 1.0)
    exact = holdings.held(x, structures, coefficients, rng).peak_bytes
    plain = holdings.held(x, (), coefficients, rng).peak_bytes
    if structures and np.mean(np.abs(np.log(exact / plain)) > FELT) < SHARE_FELT:
        return None
    own = rng.normal(0.0, float(rng.uniform(0.005, 0.03)), len(x))
    return np.asarray(exact * np.exp(own))


def _baseline(x: CostInputs, seconds: Array, fits: NDArray[np.bool_]) -> int | None:
    """The plainest candidate that fits; None where the task is no problem: memory does not bind, or that one is as
    good as the best."""
    least, most = BINDS
    if not least <= 1 - fits.mean() <= most or fits[int(seconds.argmin())]:
        return None
    rows = np.flatnonzero(fits)
    recomputed = x.stage_full.sum(axis=1) / x.num_layers
    order = np.lexsort(
        (
            rows,
            x.offload_optimizer[rows],
            x.num_virtual_stages[rows],
            x.zero_stage[rows],
            x.micro_batch_size[rows],
            -recomputed[rows],
            -x.selective_share[rows],
            (x.tp * x.pp * x.cp)[rows],
        )
    )
    plainest = int(rows[order[0]])
    return plainest if seconds[plainest] > seconds[fits].min() * (1 + TOLERANCE) else None
