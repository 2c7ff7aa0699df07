"""Numbers and configurations as short text, the same in every table."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.report.summary import Speedup, speedup
from orchestrator.space.space import short_name
from orchestrator.statistics import Interval, relative_spread
from orchestrator.sweep.state import SweepState, Trial, describe_failure
from trials.codec import to_json
from trials.outcome import Measurement

STATUS_WORDS = {
    "stopped_early": "stopped early",
    "oom": "out of memory",
    "host_oom": "host memory",
    "timed_out": "timed out",
    "gang_lost": "gang lost",
}
STATUS_STYLES = {
    "measured": "green",
    "running": "cyan",
    "proposed": "dim",
    "crashed": "red",
    "timed_out": "red",
    "host_oom": "red",
}
DASH = "–"  # noqa: RUF001


def trial_id(number: int) -> str:
    """``t007``."""
    return f"t{number:03d}"


def status_words(status: str) -> str:
    return STATUS_WORDS.get(status, status)


def status_style(status: str) -> str:
    return STATUS_STYLES.get(status, "yellow")


def rate(value: float) -> str:
    """At least three significant digits: ``15,234``, ``98.7``."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def interval(ci95: Interval | None) -> str:
    """``14,900 – 15,500``."""  # noqa: RUF002
    return f"{rate(ci95.low)} {DASH} {rate(ci95.high)}" if ci95 else "interval unknown"


def ratio_interval(ci95: Interval | None) -> str:
    """``1.38x – 1.46x``."""  # noqa: RUF002
    return f"{ci95.low:.2f}x {DASH} {ci95.high:.2f}x" if ci95 else "interval unknown"


def spread(measurement: Measurement) -> str:
    """Half the relative inter-quartile range of the step times: ``± 1.2 %``."""
    return f"± {50 * relative_spread(measurement.step_times_s):.1f} %"


def versus(compared: Speedup | None) -> str:
    """``1.42x``; a difference inside the noise carries ``≈``."""
    if compared is None:
        return DASH
    return f"{'≈' if compared.verdict == 'tie' else ''}{compared.ratio.value:.2f}x"


def versus_style(compared: Speedup | None) -> str:
    return {"faster": "green", "slower": "red", "tie": "dim"}[compared.verdict] if compared else "dim"


def versus_baseline(trial: Trial, state: SweepState) -> Speedup | None:
    return speedup(trial, state.baseline) if trial.number != 0 else None


def num_bytes(value: float) -> str:
    """``1.25 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB" if value < 10 else f"{value:.1f} GiB"


def peak_memory(measurement: Measurement) -> str:
    """The largest peak over ranks, reserved by the allocator where that is known."""
    return num_bytes(measurement.peak_bytes)


def breakdown(measurement: Measurement) -> list[tuple[str, float]]:
    """(phase, its share of the step time) in the order of the step; shares sum to 1. Empty where nobody looked inside
    the step, as on simulated clusters."""
    parts = {name.removesuffix("_s"): max(0.0, s) for name, s in to_json(measurement.breakdown).items()}
    if not any(seconds for name, seconds in parts.items() if name != "other"):
        return []
    if not parts["bubble"]:
        del parts["bubble"]  # no pipeline
    total = sum(parts.values())
    return [(name, seconds / total) for name, seconds in parts.items()] if total else []


def milliseconds(seconds: float) -> str:
    """``72.3 ms``; seconds from one second on."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def duration(seconds: float) -> str:
    """``45 s``, ``3 min 20 s``, ``2 h 05 min``."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def device_time(device_seconds: float) -> str:
    """``0.42 device-hours``; minutes, or seconds, where that would show as nothing."""
    if device_seconds >= 360:
        return f"{device_seconds / 3600:.2f} device-hours"
    return (
        f"{device_seconds / 60:.1f} device-minutes" if device_seconds >= 6 else f"{device_seconds:.1f} device-seconds"
    )


class Names:
    """Short configuration names with what all trials share said once, in ``common``."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        names = {trial.number: short_name(trial.candidate).split() for trial in trials}
        first: list[str] = next(iter(names.values()), [])
        shared = [word for word in first if all(word in words for words in names.values())]
        self._shared = set(shared) if len(names) > 1 else set()
        self._names = names
        self.common = " ".join(word for word in first if word in self._shared)

    def __getitem__(self, trial: Trial) -> str:
        words = [word for word in self._names[trial.number] if word not in self._shared]
        return " ".join(words) or "as above"


def failure(trial: Trial) -> str:
    """One line of evidence of a trial that was not measured."""
    return describe_failure(trial.outcome)
