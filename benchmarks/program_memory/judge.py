"""Predicts peaks from a program's first trials, as the search does, and compares them with the measured ones."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.cost.cost_model import OUT_OF_MEMORY_THRESHOLD
from cluster.cost.usual import MemoryShares
from orchestrator.search.knob_effects import RelativePredictor, shares_of_peak
from orchestrator.search.memory_belief import MemoryBelief
from orchestrator.space.notation import flat_params
from trials.reports import ScriptFacts
from trials.spec import Candidate, Layout, Precision, Recompute, ScriptData, ScriptModel, Workload

NUM_DRAWS = 8
"""Choices of the trials after the baseline."""
BASELINE_BATCH = 2
NUM_STDS = 2.0


@dataclass(frozen=True, slots=True)
class Program:
    """How a program is started."""

    title: str
    arguments: tuple[str, ...]
    ranks: int = 1


PROGRAMS: Mapping[str, Program] = {
    "torch": Program("plain PyTorch", ()),
    "images": Program("plain PyTorch, convolutions", ("--framework", "images")),
    "ddp": Program("DistributedDataParallel, 2 ranks", ("--framework", "ddp"), 2),
    "fsdp2": Program("FSDP2, as torchtitan wraps, 2 ranks", ("--framework", "fsdp2"), 2),
    "trainer": Program("Trainer of transformers", ("--framework", "trainer")),
    "accelerate": Program("Accelerate", ("--framework", "accelerate")),
    "lightning": Program("Lightning", ("--framework", "lightning")),
    "zero1": Program("DeepSpeed ZeRO-1, 2 ranks", ("--framework", "deepspeed"), 2),
    "zero3": Program("DeepSpeed ZeRO-3, 2 ranks", ("--framework", "deepspeed", "--zero", "3"), 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One point of the grid."""

    program: str
    batch: int
    recompute: bool
    low: bool
    """Whether it ran with bf16 autocast."""
    peak_bytes: int = 0
    facts: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, bool, bool]:
        return self.program, self.batch, self.recompute, self.low

    @property
    def tensor_bytes(self) -> int:
        """What the hook counted."""
        names = ("parameter_bytes_local", "gradient_bytes", "optimizer_bytes", "activation_bytes")
        return sum(self.facts.get(name, 0) for name in names)

    @property
    def candidate(self) -> Candidate:
        """The knobs as the search knows them."""
        return Candidate(
            layout=Layout(dp_replicate=PROGRAMS[self.program].ranks),
            micro_batch_size=self.batch,
            recompute=Recompute(full=((1,),)) if self.recompute else Recompute(),
            precision=Precision(level="O1", dtype="bfloat16") if self.low else Precision(),
        )

    def shares(self, *, of_tensors: bool) -> MemoryShares | None:
        names = ("parameter_bytes_local", "gradient_bytes", "optimizer_bytes", "activation_bytes")
        facts = ScriptFacts(**{name: self.facts.get(name) for name in names})
        return shares_of_peak(facts, self.tensor_bytes if of_tensors else self.peak_bytes, is_allocator=of_tensors)


@dataclass(slots=True)
class Judged:
    """Verdicts over all limits, draws and candidates."""

    num: int = 0
    num_above: int = 0
    false_fits: int = 0
    false_alarms: int = 0
    errors: list[float] = field(default_factory=list)
    num_within: int = 0

    def __iadd__(self, other: Judged) -> Judged:
        for name in ("num", "num_above", "false_fits", "false_alarms", "num_within"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.errors += other.errors
        return self

    @property
    def percentages(self) -> tuple[str, str, str, str]:
        """False fits of those that do not fit, false alarms of those that do, mean error, share within the interval."""
        fits = self.num - self.num_above
        return (
            f"{self.false_fits / max(1, self.num_above) * 100:.1f}",
            f"{self.false_alarms / max(1, fits) * 100:.1f}",
            f"{np.mean(self.errors) * 100:.1f}",
            f"{self.num_within / max(1, len(self.errors)) * 100:.0f}",
        )


def judge(runs: Sequence[Run], num_known: int, *, taken_apart: bool, of_tensors: bool) -> Judged:
    """Verdicts on one program from so many trials, the baseline first."""
    peaks = np.array([run.tensor_bytes if of_tensors else run.peak_bytes for run in runs], dtype=np.float64)
    first = next(i for i, run in enumerate(runs) if run.key[1:] == (BASELINE_BATCH, False, False))
    others, found = [i for i in range(len(runs)) if i != first], Judged()
    for draw in range(NUM_DRAWS if num_known > 1 else 1):
        known = [first, *random.Random(draw).sample(others, num_known - 1)]
        left = [i for i in others if i not in known]
        limits = [math.sqrt(a * b) for a, b in zip(sorted(peaks), sorted(peaks)[1:], strict=False)]
        for limit in (limit for limit in limits if limit > peaks[known].max()):
            belief = _belief(runs, known, peaks, limit, taken_apart=taken_apart, of_tensors=of_tensors)
            found += _verdicts(belief.probability_fits(np.array(left)), peaks[left], limit)
        belief = _belief(runs, known, peaks, peaks.max(), taken_apart=taken_apart, of_tensors=of_tensors)
        off = belief.expected_log(np.array(left)) + math.log(peaks.max()) - np.log(peaks[left])
        found.errors += np.abs(np.expm1(off)).tolist()
        found.num_within += int((np.abs(off) <= NUM_STDS * belief.std(np.array(left))).sum())
    return found


def _verdicts(probability: np.ndarray, peaks: np.ndarray, limit: float) -> Judged:
    above, expected = peaks > limit, probability >= 1 - OUT_OF_MEMORY_THRESHOLD
    return Judged(
        num=len(peaks),
        num_above=int(above.sum()),
        false_fits=int((expected & above).sum()),
        false_alarms=int((~expected & ~above).sum()),
    )


def _belief(
    runs: Sequence[Run],
    known: Sequence[int],
    peaks: np.ndarray,
    limit: float,
    *,
    taken_apart: bool,
    of_tensors: bool,
) -> MemoryBelief:
    predictor = _predictor(tuple(run.candidate for run in runs), known[0], limit, of_tensors)
    shares = {i: found for i in known if (found := runs[i].shares(of_tensors=of_tensors)) is not None}
    belief = predictor.memory_given(shares) if taken_apart else predictor.memory
    assert belief is not None, "there is a limit"
    return belief.after({i: float(peaks[i] / limit) for i in known}, (), ())


@functools.cache
def _predictor(candidates: tuple[Candidate, ...], baseline: int, limit: float, of_tensors: bool) -> RelativePredictor:
    model = ScriptModel(recipe="custom", run=("python", "train.py"), cwd="/")
    return RelativePredictor(
        Workload(model=model, data=ScriptData(), seq_length=1, global_batch_size=64),
        candidates,
        baseline=candidates[baseline],
        features=flat_params,
        kind="accelerator" if of_tensors else "cpu",
        limit_bytes=limit,
    )


def report(runs: Sequence[Run]) -> str:
    """A table per observable, a row per program; each cell has the values after one, two and three trials."""
    lines = []
    for of_tensors, taken_apart in ((False, False), (False, True), (True, True)):
        what = "counted tensors" if of_tensors else "resident set"
        how = "taken apart" if taken_apart else "peaks alone"
        lines += ["", f"{what}, {how}", "", "| program | false fits % | false alarms % | error % | within 2 std % |"]
        lines += ["|---|---:|---:|---:|---:|", *_table(runs, taken_apart=taken_apart, of_tensors=of_tensors)]
    return "\n".join(lines)


def _table(runs: Sequence[Run], *, taken_apart: bool, of_tensors: bool) -> list[str]:
    rows, total = [], {k: Judged() for k in (1, 2, 3)}
    for name, program in PROGRAMS.items():
        measured = [run for run in runs if run.program == name]
        if not measured:
            continue
        found = {k: judge(measured, k, taken_apart=taken_apart, of_tensors=of_tensors) for k in total}
        for k, everything in total.items():
            everything += found[k]
        rows.append((program.title, found))
    return [_row(title, found) for title, found in [*rows, ("all", total)]]


def _row(title: str, found: dict[int, Judged]) -> str:
    columns = zip(*(one.percentages for one in found.values()), strict=True)
    return f"| {title} | {' | '.join(' / '.join(column) for column in columns)} |"
