"""The tables of a sweep: trials, result, changes, step time breakdown, finalists and loss gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.base import GangProgress
from orchestrator import statistics, units
from orchestrator.diagnosis.values import PartName, StepParts
from orchestrator.report import descriptions
from orchestrator.report.curves import Finalist, ProofResult
from orchestrator.report.descriptions import FinalistOutcome
from orchestrator.report.sources import log_tail
from orchestrator.report.summary import ENDED, Speedup, speedup
from orchestrator.report.view import ALWAYS, Cell, Column, Flag, Mood, ShownRow, ShownTable, table_of
from orchestrator.space.notation import legend, names_apart, short_name
from orchestrator.sweep.events import GateAnswer
from orchestrator.sweep.state import SweepState, Trial, TrialStatus
from orchestrator.text import plain
from trials.outcome import GangLost, Measurement, StoppedEarly

MAX_ROUNDS = 8
"""Number of latest rounds of a finalist shown in one cell."""

STATUS_MOODS: Mapping[str, Mood] = {
    "measured": "good",
    "running": "running",
    "proposed": "rest",
    "crashed": "bad",
    "timed_out": "bad",
    "host_oom": "bad",
    "not_believed": "bad",
}
"""Mood of a trial's status; others are "doubt"."""

VERDICT_MOODS: Mapping[str, Mood] = {"faster": "good", "slower": "bad", "tie": "rest"}

FINALIST_MOODS: Mapping[FinalistOutcome, Mood] = {
    "winner": "best",
    "faster": "good",
    "slower": "bad",
    "trains_differently": "bad",
    "not_lasting": "bad",
    "not_judged": "doubt",
}
"""Mood of a finalist's outcome; others are "rest"."""

ANSWER_MOODS: Mapping[GateAnswer, Mood] = {"passed": "good", "failed": "bad", "inconclusive": "doubt"}


def trial_cell(number: int) -> Cell:
    """The name of a trial, with a link to its page."""
    return Cell(units.trial_id(number), number, trial=number)


def status_mood(status: str) -> Mood:
    return STATUS_MOODS.get(status, "doubt")


def versus_cell(compared: Speedup | None) -> Cell:
    """``1.42x`` of a trial that is faster than the baseline."""
    if compared is None:
        return Cell(units.DASH, mood="rest")
    return Cell(descriptions.versus(compared), compared.ratio.value, VERDICT_MOODS[compared.verdict])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable(ShownTable):
    """Trials, with the shared part of their configurations shown once."""

    trials: tuple[Trial, ...]
    """The trials of the rows."""
    common: str
    """The shared part of all configurations; may be empty."""
    unit: str
    """Unit of the speeds."""
    on_cpu: bool = False
    """Whether ranks compute on CPUs, where the peak is the growth of the resident set."""

    def first(self, num_rows: int) -> TrialTable:
        """The first rows, and the baseline."""
        kept = [i for i, trial in enumerate(self.trials) if i < num_rows or trial.number == 0]
        return replace(self, rows=[self.rows[i] for i in kept], trials=tuple(self.trials[i] for i in kept))

    @property
    def busy_note(self) -> str:
        """The explanation of the mark for a busy machine; empty if no trial has it."""
        return descriptions.busy_note({trial.number: trial.measurement for trial in self.trials})

    @property
    def trend_note(self) -> str:
        """The explanation of the mark for unsteady steps; empty if no trial has it."""
        return descriptions.trend_note({trial.number: trial.measurement for trial in self.trials})

    @property
    def peak_note(self) -> str:
        """The explanation of the memory column if it is not device memory; else empty."""
        return "memory: growth of the resident set; `dryrun` counts only tensors" if self.on_cpu else ""

    @property
    def tie_note(self) -> str:
        """The explanation of the mark for differences within the noise; empty if no trial has it."""
        has_tie = any(row.cells["speed-up"].text.startswith("≈") for row in self.rows if "speed-up" in row.cells)
        return "≈ within the noise of the two measurements" if has_tie else ""

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The signs in the rows' full names, with their meanings."""
        return legend(trial.candidate for trial in self.trials)


def trial_columns(unit: str, *, has_sizes: bool) -> tuple[Column, ...]:
    """``has_sizes``: whether trials use different numbers of devices."""
    found = (
        Column(title="trial", rises=True),
        Column(title="configuration", min_width=24, is_code=True, rises=True),
        Column(title="devices", priority=6, is_number=True, media=("terminal", "live") if has_sizes else ("live",)),
        Column(title="state", priority=8, rises=True),
        Column(title=unit, key="speed", is_number=True),
        Column(title="95% CI", is_number=True, mood="rest", media=("live",)),
        Column(title="spread", priority=1, is_number=True, mood="rest", rises=True),
        Column(title="speed-up", priority=7, is_number=True),
        Column(title="memory", priority=3, is_number=True),
        Column(title="step", priority=2, is_number=True, mood="rest", rises=True),
        Column(title="all devices", is_number=True, media=("live",)),
        Column(title="per device", is_number=True, media=("live",)),
        Column(title="predicted step", is_number=True, media=("live",), rises=True),
        Column(title="measured/predicted", is_number=True, media=("live",)),
    )
    same = "per device" if unit.endswith("/p") else "all devices" if unit.endswith("/s") else ""
    return tuple(column for column in found if column.title != same)


def make_trial_table(
    state: SweepState, trials: Sequence[Trial], live: Mapping[int, GangProgress] | None = None
) -> TrialTable:
    """The table of ``trials``, in the given order; ``live``: progress of running ones, on live pages."""
    chosen = state.winner if state.verdict is not None else state.best
    names, common = names_apart([trial.candidate for trial in trials])
    top = max((state.score(trial) for trial in trials if trial.measurement), default=1.0)
    finalists = set(state.proof.finalists) if state.proof else set[int]()
    rows = []
    for trial, name in zip(trials, names, strict=True):
        is_chosen = chosen is not None and chosen.number == trial.number
        cells = {
            "trial": trial_cell(trial.number),
            "configuration": Cell(
                name,
                note=descriptions.spelled_name(trial.candidate),
                below=_role(trial, finalists, _chosen_word(state) if is_chosen else ""),
                remark=descriptions.note_text(trial.note),
                share=state.score(trial) / top,
            ),
            "devices": Cell(str(trial.candidate.layout.world_size), trial.candidate.layout.world_size),
            "state": _state_cell(trial, state, live),
            **_measured_cells(trial, state),
        }
        rows.append(ShownRow(cells=cells, mood="best" if is_chosen else "", number=trial.number))
    return TrialTable(
        columns=trial_columns(state.unit, has_sizes=len({t.candidate.layout.world_size for t in trials}) > 1),
        rows=rows,
        trials=tuple(trials),
        common=common,
        unit=state.unit,
        on_cpu=state.virtual is None and state.sweep.devices.device_kind == "cpu",
    )


def _chosen_word(state: SweepState) -> str:
    """The label of the current best trial."""
    if state.verdict is None or state.verdict.conclusion == "unconfirmed":
        return "fastest"
    return "winner" if state.verdict.conclusion == "confirmed" else "kept"


def _role(trial: Trial, finalists: set[int], chosen: str) -> str:
    roles = ("baseline" if trial.number == 0 else "", chosen, "finalist" if trial.number in finalists else "")
    return ", ".join(filter(None, roles))


def _state_cell(trial: Trial, state: SweepState, live: Mapping[int, GangProgress] | None) -> Cell:
    """Its status or progress; a trial that ended with its sweep is not shown as lost."""
    outcome, mood = trial.outcome, status_mood(trial.status)
    if live is not None and trial.is_running:
        return progress_cell(live.get(trial.number))
    if live is not None and trial.number in state.waiting:
        return Cell("waiting", mood="rest")
    if isinstance(outcome, GangLost) and outcome.cause == "controller":
        return Cell("interrupted", mood=mood)
    return Cell(
        units.status_label(trial.status, state.virtual),
        mood=mood,
        flags=tuple(measurement_flags(trial.measurement)),
        below="" if outcome is None or trial.measurement else _reason(trial),
    )


def _reason(trial: Trial) -> str:
    """Why it was not measured; how far it came if stopped early."""
    is_stopped = isinstance(trial.outcome, StoppedEarly)
    return plain(trial.outcome.evidence.message if is_stopped else descriptions.failure(trial))  # type: ignore[union-attr]


def progress_cell(progress: GangProgress | None) -> Cell:
    """Progress of a running trial: ``measuring 5``."""
    step_time_s = progress.step_time_s if progress else None
    last = f"last step {units.milliseconds(step_time_s)}" if step_time_s else ""
    return Cell(descriptions.phase_text(progress) if progress else "started", mood="running", below=last)


def measurement_flags(measurement: Measurement | None) -> Iterator[Flag]:
    """Flags of an unreliable measurement: busy machine, unsteady steps."""
    if busy := descriptions.disturbed(measurement):
        yield Flag(text=descriptions.BUSY_MARK, note=busy)
    if trend := descriptions.trend(measurement):
        yield Flag(text=descriptions.TREND_MARK, note=trend)


def _measured_cells(trial: Trial, state: SweepState) -> dict[str, Cell]:
    """The cells of the known figures."""
    measurement = trial.measurement
    cells = {"speed-up": Cell("baseline", 1.0, "baseline")} if trial.number == 0 else {}
    expected_s = trial.expected.step_time_s if trial.expected else None
    if expected_s is not None:
        cells["predicted step"] = Cell(units.milliseconds(expected_s), expected_s)
    if measurement is None:
        return cells
    if trial.number and trial.check is None:
        cells["speed-up"] = versus_cell(versus_baseline(trial, state))
    speed, step_s = statistics.speed(measurement, state.objective), measurement.step_time_s
    total, each = measurement.tokens_per_step / step_s, measurement.tokens_per_s_per_device
    if expected_s is not None:
        cells["measured/predicted"] = Cell(f"{step_s / expected_s:.2f}x", step_s / expected_s)
    return cells | {
        "speed": Cell(units.rate(speed.value), speed.value),
        "95% CI": Cell(units.interval(speed.ci95), speed.ci95.low if speed.ci95 else speed.value),
        "spread": Cell(descriptions.spread(measurement)),
        "memory": Cell(descriptions.peak_memory(measurement), measurement.peak_bytes or None),
        "step": Cell(units.milliseconds(step_s), step_s),
        "all devices": Cell(units.rate(total), total),
        "per device": Cell(units.rate(each), each),
    }


def versus_baseline(trial: Trial, state: SweepState) -> Speedup | None:
    """How a trial compares with the baseline; None for the baseline, and if either was not measured."""
    return speedup(trial, state.baseline, state.objective) if trial.number != 0 else None


def by_speed(state: SweepState) -> list[Trial]:
    """The search's trials: the confirmed winner, measured ones by speed, then the others by number."""
    winner = state.verdict.winner if state.verdict is not None else None
    return sorted(state.searched(), key=lambda trial: (trial.number != winner, -state.score(trial), trial.number))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTrial:
    """A trial or check that ended without a measurement."""

    number: int
    configuration: str
    spelled: str
    evidence: str
    """Why, in one line."""
    log_tail: str
    """The last lines of the failed rank's log; empty if there are none, or if it was stopped early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """All trials and checks with the same status."""

    status: TrialStatus
    trials: tuple[FailedTrial, ...]


def failures(state: SweepState) -> list[Failures]:
    """Trials and checks without a measurement, by status."""
    found = []
    for status in ENDED[1:]:
        trials = tuple(_failed(trial) for trial in state.trials if trial.status == status)
        if trials:
            found.append(Failures(status=status, trials=trials))
    return found


def _failed(trial: Trial) -> FailedTrial:
    tail = None if isinstance(trial.outcome, StoppedEarly) else log_tail(trial)
    return FailedTrial(
        number=trial.number,
        configuration=short_name(trial.candidate),
        spelled=descriptions.spelled_name(trial.candidate),
        evidence=descriptions.failure(trial),
        log_tail=tail or "",
    )


def change_table(changed: Mapping[str, tuple[object, object]]) -> ShownTable:
    """Knobs with their values before and after."""
    columns = (
        Column(title="", name="knob", is_code=True),
        Column(title="", name="before", priority=99, min_width=10, mood="rest"),
        Column(title="", name="arrow", mood="rest"),
        Column(title="", name="after", min_width=10, mood="good"),
    )
    rows = ((knob, units.value_text(old), "→", units.value_text(new)) for knob, (old, new) in changed.items())
    return table_of(columns, rows)


def step_table(steps: Mapping[str, StepParts]) -> ShownTable | None:
    """The parts of the step of each role as shares; the largest are left out last. None if unknown."""
    divided = {role: step for role, step in steps.items() if step.parts}
    shares: dict[PartName, float] = {}
    for step in divided.values():
        for part in step.parts:
            shares[part.name] = max(shares.get(part.name, 0.0), part.seconds / step.step_time_s)
    if not divided:
        return None
    rank = {name: i for i, name in enumerate(sorted(shares, key=lambda name: -shares[name]))}
    columns = [Column(title="", name="trial", mood="rest"), Column(title="step", is_number=True)]
    columns += [
        Column(title=name.replace("_", "+"), priority=ALWAYS - 1 - rank[name], is_number=True) for name in shares
    ]
    rows = (
        [role, units.milliseconds(step.step_time_s), *(f"{step.seconds(n) / step.step_time_s:.0%}" for n in shares)]
        for role, step in divided.items()
    )
    return table_of(columns, rows)


def finalist_table(proof: ProofResult) -> ShownTable | None:
    """One row per finalist: its speed-up over the baseline in all rounds and in each; None without finalists."""
    if not proof.finalists:
        return None
    numbers = sorted({ratio.round for one in proof.finalists for ratio in one.rounds})
    columns = (
        Column(title="trial", rises=True),
        Column(title="configuration", min_width=24, is_code=True, rises=True, media=("page", "live")),
        Column(title="speed-up", is_number=True, mood="strong"),
        Column(title="95% CI", name="interval", key="interval", is_number=True, priority=9, mood="rest"),
        Column(title="rounds", priority=8, mood="rest", media=("terminal", "live")),
        Column(title="result", min_width=24, mood="rest", rises=True),
        *(Column(title=f"round {n + 1}", is_number=True, mood="rest", media=("page",)) for n in numbers),
    )
    rows = [ShownRow(cells=_finalist_cells(one), number=one.trial) for one in proof.finalists]
    return ShownTable(columns=columns, rows=rows)


def _finalist_cells(one: Finalist) -> dict[str, Cell]:
    signs = {ratio.round: f" {descriptions.BUSY_MARK}" if ratio.is_disturbed else "" for ratio in one.rounds}
    last = " ".join(f"{ratio.value:.2f}{signs[ratio.round].strip()}" for ratio in one.rounds[-MAX_ROUNDS:])
    more = "... " if len(one.rounds) > MAX_ROUNDS else ""
    overall = one.overall
    return {
        "trial": trial_cell(one.trial),
        "configuration": Cell(one.configuration, note=one.spelled),
        "speed-up": Cell(units.short_ratio(overall.value, overall), overall.value) if overall else Cell(units.DASH),
        "interval": Cell(units.ratio_interval(overall) if overall else "", overall.low if overall else None),
        "rounds": Cell(f"{more}{last}" if last else "no round yet", len(one.rounds)),
        "result": Cell(descriptions.finalist_text(one), mood=FINALIST_MOODS.get(one.outcome, "")),
        **{f"round {r.round + 1}": Cell(f"{r.value:.2f}x{signs[r.round]}", r.value) for r in one.rounds},
    }


_GATE_FIGURES: tuple[tuple[str, str, Mood], ...] = (
    ("loss", "loss", ""),
    ("allowed", "allowed loss", "rest"),
    ("gradient norm", "norm", ""),
    ("allowed", "allowed norm", "rest"),
    ("steps", "steps", ""),
)


def gate_table(proof: ProofResult) -> ShownTable | None:
    """One row per finalist that the loss gate judged; None without any."""
    if not proof.gates:
        return None
    columns = (
        Column(title="trial", rises=True),
        Column(title="result", min_width=24, rises=True),
        *(Column(title=title, key=key, is_number=True, mood=mood) for title, key, mood in _GATE_FIGURES),
        Column(title="judged as", min_width=12, rises=True),
        Column(title="against", rises=True),
    )
    rows = (
        (
            trial_cell(one.trial),
            Cell(_objections(one.answer, one.objections, one.remedy), mood=ANSWER_MOODS[one.answer]),
            *_deviation(one.loss_deviation, one.loss_tolerance),
            *_deviation(one.grad_norm_deviation, one.grad_norm_tolerance),
            Cell(str(one.num_steps), one.num_steps),
            one.precision_class,
            "fp32 reference" if one.compared_with == "reference" else "baseline",
        )
        for one in proof.gates
    )
    return table_of(columns, rows)


def _objections(answer: str, objections: Sequence[str], remedy: str) -> str:
    why = f": {'; '.join(objections)}" if objections else ""
    return f"{answer}{why}{f'; {remedy}' if remedy else ''}"


def _deviation(value: float | None, tolerance: float) -> tuple[Cell, Cell]:
    found = Cell(units.DASH) if value is None else Cell(units.percent(value), value)
    return found, Cell(units.percent(tolerance), tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The result of the loss gate, the longer run or the user's evaluation for a finalist, in a sentence."""

    kind: str
    """``Loss gate``, ``Soak`` or ``Your evaluation``."""
    trial: int
    answer: str
    """``passed``, ``failed`` or ``inconclusive``."""
    text: str
    details: str
    """Additional notes; may be empty."""
    mood: Mood
    notes: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    """Last lines of the evaluation's output."""


def judged(proof: ProofResult) -> Iterator[Judged]:
    """The gate's, the longer runs' and the evaluation's, in this order."""
    for gate in proof.gates:
        yield Judged(
            kind="Loss gate",
            trial=gate.trial,
            answer=gate.answer,
            text=descriptions.gate_text(gate),
            details=f"; {gate.num_steps} steps, {gate.precision_class}".rstrip(" ,"),
            mood=ANSWER_MOODS[gate.answer],
            notes=gate.notes,
        )
    for soak in proof.soaks:
        text, mood = descriptions.soak_text(soak), ANSWER_MOODS[soak.answer]
        yield Judged(
            kind="Soak", trial=soak.trial, answer=soak.answer, text=text, details="", mood=mood, notes=soak.notes
        )
    for one in proof.evaluations:
        yield Judged(
            kind="Your evaluation",
            trial=one.trial,
            answer="passed" if one.passed else "failed",
            text=descriptions.evaluation_text(one),
            details="",
            mood="good" if one.passed else "bad",
            log=one.output_tail,
        )
