"""Numbers, times and statuses as short text, the same wherever people see them."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from typing import Literal, Protocol

from orchestrator.statistics import Interval

STATUS_LABELS = {
    "stopped_early": "stopped early",
    "oom": "out of memory",
    "host_oom": "host memory",
    "not_believed": "not believed",
    "timed_out": "timed out",
    "gang_lost": "gang lost",
}


DASH = "–"  # noqa: RUF001
"""Stands for a missing value, and between the ends of an interval."""


def trial_id(number: int) -> str:
    """The name of a trial: ``t007``."""
    return f"t{number:03d}"


def status_label(status: str, virtual: str | None = None) -> str:
    """The status of a trial for people: ``out of memory`` for ``oom``. A measured trial on a simulated cluster is
    ``simulated``."""
    return virtual if virtual and status == "measured" else STATUS_LABELS.get(status, status)


def with_reason(state: str, reason: str, separator: str = ", ") -> str:
    """``running, 2 more nodes are busy``; only the reason if it begins with the state: ``paused by anna@desk``."""
    if not reason:
        return state
    return reason if reason.startswith(f"{state} ") else f"{state}{separator}{reason}"


def rounded(value: float, digits: int = 4) -> float:
    """The value with this number of significant digits."""
    return float(f"{value:.{digits}g}")


def rate(value: float) -> str:
    """A speed, or another amount, with at least three significant digits: ``15,234``, ``98.7``."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def chance(probability: float) -> str:
    """A probability, never a certainty: ``85%``, ``under 1%``, ``over 99%``."""
    if probability < 0.01:
        return "under 1%"
    return "over 99%" if probability > 0.99 else f"{probability:.0%}"


def interval(ci95: Interval | None) -> str:
    """An interval of speeds: ``14,900–15,500``."""  # noqa: RUF002
    return f"{rate(ci95.low)}{DASH}{rate(ci95.high)}" if ci95 else "interval unknown"


class Bounds(Protocol):
    """An interval of a ratio; None if a bound is unknown."""

    @property
    def low(self) -> float | None: ...

    @property
    def high(self) -> float | None: ...


WIDE = 1.25
"""Upper over lower end of a ratio's interval from which on the value itself is not shown."""


MAX_DIGITS = 5
"""Maximum number of decimals of an interval's end: as many as needed to distinguish it from 1."""


def is_wide(found: Bounds | None) -> bool:
    """Whether to show the interval's end nearer to 1 first, instead of the value."""
    return found is not None and found.low is not None and found.high is not None and found.high > WIDE * found.low


def ratio(value: float, found: Bounds | None) -> str:
    """A ratio with its 95% interval: ``3.06x (95% CI: 2.98x–3.14x)``."""  # noqa: RUF002
    return f"{sure_ratio(value, found)} {ratio_ci(found)}"


def sure_ratio(value: float, found: Bounds | None) -> str:
    """Format a ratio: ``3.06x``, or its lower bound, ``at least 1.06x``, if the interval is wide."""
    if found is None or found.low is None or found.high is None or not is_wide(found):
        return f"{value:.2f}x"
    if found.low > 1:
        return f"at least {floor(found.low)}x"
    return f"at most {ceil(found.high)}x" if found.high < 1 else "not distinguishable from 1x"


def ratio_ci(found: Bounds | None) -> str:
    """The 95% interval of a ratio, in parentheses: ``(95% CI: 2.98x–3.14x)``."""  # noqa: RUF002
    shown = ratio_interval(found)
    return f"(95% CI: {shown})" if found is not None and found.low is not None else f"({shown})"


def short_ratio(value: float, found: Bounds | None) -> str:
    """A ratio in a table: ``3.06x``, but ``≥ 1.06x`` if its interval is wide, ``≈1.20x`` if that includes 1."""
    if found is None or found.low is None or found.high is None or not is_wide(found):
        return f"{value:.2f}x"
    if found.low > 1:
        return f"≥ {floor(found.low)}x"
    return f"≤ {ceil(found.high)}x" if found.high < 1 else f"≈{value:.2f}x"


def ratio_interval(found: Bounds | None) -> str:
    """An interval of a ratio, rounded outwards: ``1.38x–1.46x``."""  # noqa: RUF002
    if found is None or found.low is None or found.high is None:
        return "interval unknown"
    return f"{floor(found.low)}x{DASH}{ceil(found.high)}x"


def floor(value: float) -> str:
    """The value rounded down to two decimals, except for float error; a value above 1 never becomes 1."""
    for digits in range(2, MAX_DIGITS + 1):
        scale = 10**digits
        low = math.floor(scale * value + 1e-6) / scale
        if value <= 1 or low > 1:
            return f"{low:.{digits}f}"
    return f"{value:.2f}"


def ceil(value: float) -> str:
    """The value rounded up to two decimals; a value below 1 never becomes 1."""
    for digits in range(2, MAX_DIGITS + 1):
        scale = 10**digits
        high = math.ceil(scale * value - 1e-6) / scale
        if value >= 1 or high < 1:
            return f"{high:.{digits}f}"
    return f"{value:.2f}"


def percent(share: float) -> str:
    """``0.04%`` for a share of 0.0004, ``150%`` for one of 1.5."""
    value = 100 * share
    if abs(value) >= 99.5:  # fewer digits than it has need an exponent
        return f"{value:,.0f}%"
    return "under 0.0001%" if 0 < abs(value) < 0.0001 else f"{value:.2g}%"


def num_bytes(value: float) -> str:
    """An amount of memory: ``1.25 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB" if value < 10 else f"{value:.1f} GiB"


def milliseconds(seconds: float) -> str:
    """A short time: ``72.3 ms``, ``1.2 s``; a long one in whole seconds."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 0.9995:  # 1 s if rounded
        return f"{seconds:.3g} s"
    return "under 0.0001 ms" if 0 < seconds < 1e-7 else f"{1000 * seconds:.3g} ms"


def duration(seconds: float) -> str:
    """A long time: ``45 s``, ``3 min 20 s``, ``2 h 05 min``."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def device_time(device_seconds: float) -> str:
    """``0.42 device-hours``; minutes or seconds for small values."""
    if device_seconds >= 360:
        return f"{device_seconds / 3600:,.2f} device-hours"
    return (
        f"{device_seconds / 60:.1f} device-minutes" if device_seconds >= 6 else f"{device_seconds:.1f} device-seconds"
    )


def value_text(value: object) -> str:
    """The value of a knob: ``on`` and ``off`` for booleans, a dash for none."""
    return {True: "on", False: "off", None: DASH}[value] if isinstance(value, bool | None) else str(value)


def changes_text(changed: Mapping[str, tuple[object, object]]) -> str:
    """Knobs with their values before and after: ``precision O0 → O1-bf16, pin_memory off → on``."""
    return ", ".join(f"{name} {value_text(old)} → {value_text(new)}" for name, (old, new) in changed.items())


def count(number: int, noun: str) -> str:
    """A number of things: ``1 node``, ``2 nodes``, ``2 micro-batches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def signal_name(exit_code: int | None) -> str | None:
    """The signal that ended a process, ``SIGKILL`` for exit code -9; None if it was not a signal."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


# ---- Sweeps on simulated clusters measure and prove nothing; all output about them states that

ClusterKind = Literal["ray", "local", "simulated"]
Virtual = Literal["simulated"]

_WATERMARK = "SIMULATED"


def watermark(virtual: Virtual | None) -> str:
    """``SIMULATED``; empty for real trials."""
    return _WATERMARK if virtual else ""


def watermark_line(virtual: Virtual | None) -> str:
    """The watermark and its meaning, as a sentence; empty for real trials."""
    if virtual is None:
        return ""
    meaning = "nothing was measured or proven; all figures come from the cost model"
    return f"{_WATERMARK}: {meaning}."


def predicted_text(gain: str) -> str:
    """``Simulated: predicted to be 1.80x as fast as your current configuration``; ``gain`` begins with the ratio."""
    return f"Simulated: predicted to be {gain}"
