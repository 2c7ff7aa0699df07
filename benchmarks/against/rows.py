"""A row of the table: the same quantity of ours and of a peer, measured several times in turn."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Measurements of ours and of a peer; ``ours[i]`` and ``peer[i]`` were taken one after the other."""

    what: str
    peer_name: str
    unit: str
    ours: tuple[float, ...]
    peer: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.ours or len(self.ours) != len(self.peer):
            raise ValueError(f"{self.what}: {len(self.ours)} measurements of ours and {len(self.peer)} of the peer")

    @property
    def ratios(self) -> list[float]:
        """Peer over ours: above 1, ours takes less."""
        return [peer / ours for ours, peer in zip(self.ours, self.peer, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def cells(self) -> list[str]:
        low, high = min(self.ratios), max(self.ratios)
        spread = f"{figure(low)} to {figure(high)}" if len(self.ratios) > 1 else "one pair"
        unit = self.unit if self.unit == "%" else f" {self.unit}"
        ours, peer = (figure(statistics.median(values)) + unit for values in (self.ours, self.peer))
        return [self.what, self.peer_name, ours, peer, figure(self.ratio), spread]


TITLES = ("what", "compared with", "tune-cluster", "other tool", "ratio", "range")


def table(rows: list[Row]) -> str:
    """Markdown, lowest ratio first, so that losses come first."""
    lines = [f"| {' | '.join(TITLES)} |", "|---|---|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(row.cells())} |" for row in sorted(rows, key=lambda row: row.ratio)]
    return "\n".join(lines)


def figure(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
