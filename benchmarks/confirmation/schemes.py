"""Which estimate of the noise and which boundary: one baseline, three finalists, looks after 3 to 16 rounds.

noise     pooled: over all trials; own: of the pair; larger: the larger of the two (what the product uses)
boundary  Bonferroni over looks and finalists, or one calibrated to err in exactly 5% where all trials are equally
          noisy: Pocock's, Wang and Tsiatis' with shapes 0.4 (what the product uses) and 0.25, O'Brien and Fleming's
error     share of confirmations without any difference in which any interval at any look leaves out 1: with equal
          noise, with a finalist four times as noisy as others, and with a baseline three times as noisy
power, rounds  for one finalist 5 or 20% faster: share in which it is shown, and rounds until then (16 where never)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

Array = NDArray[np.float64]

K = 3
LOOKS = np.arange(3, 17)
BOUNDARIES = {"bonferroni": None, "pocock": 0.5, "wang_0.4": 0.4, "wang_0.25": 0.25, "obrien": 0.0}
POWERS = ((0.05, 0.01), (0.05, 0.02), (0.05, 0.05), (0.2, 0.02), (0.2, 0.05), (0.2, 0.1))
"""Gain and noise."""


def schemes(num_cases: int) -> list[dict[str, Any]]:
    """A row per scheme; every scheme sees the same confirmations."""
    rng = np.random.default_rng(1)
    equal, finalist, baseline = np.ones(4), np.array([1, 1, 1, 4.0]), np.array([3.0, 1, 1, 1])
    nulls = {
        f"error_{name}": statistics(rng.standard_normal((num_cases, LOOKS[-1], K + 1)) * spread)
        for name, spread in (("equal", equal), ("noisy_finalist", finalist), ("noisy_baseline", baseline))
    }
    effects = {}
    for gain, noise in POWERS:
        logs = noise * rng.standard_normal((num_cases, LOOKS[-1], K + 1))
        logs[:, :, 1] += np.log1p(gain)
        effects[f"{gain:.0%}_noise_{noise:.0%}"] = statistics(logs)
    calibration = statistics(np.random.default_rng(2).standard_normal((60_000, LOOKS[-1], K + 1)))
    return [
        {"noise": noise, "boundary": boundary, **figures(critical, noise, nulls, effects)}
        for noise in ("own", "pooled", "larger")
        for boundary, critical in criticals(noise, calibration[noise])
    ]


def statistics(logs: Array) -> dict[str, Array]:
    """t statistics by estimate of the noise, of shape (cases, looks, finalists)."""
    found: dict[str, list[Array]] = {"own": [], "pooled": [], "larger": []}
    for n in LOOKS:
        seen = logs[:, :n]
        apart = seen[:, :, 1:] - seen[:, :, :1]
        residuals = seen - seen.mean(1, keepdims=True) - seen.mean(2, keepdims=True) + seen.mean((1, 2), keepdims=True)
        own = apart.std(1, ddof=1)
        pooled = np.sqrt(2 * (residuals**2).sum((1, 2)) / ((n - 1) * K))[:, None] + 0 * own
        for name, noise in (("own", own), ("pooled", pooled), ("larger", np.maximum(own, pooled))):
            found[name].append(apart.mean(1) / noise * np.sqrt(n))
    return {name: np.stack(looks, 1) for name, looks in found.items()}


def criticals(noise: str, null: Array) -> Iterator[tuple[str, Array]]:
    """Critical value at each look, by boundary."""
    degrees = (LOOKS - 1) * (1 if noise == "own" else K)
    largest = np.abs(null).max(2)
    for name, shape in BOUNDARIES.items():
        if shape is None:
            yield name, -stdtrit(degrees, 0.05 / K / len(LOOKS) / 2)
            continue
        scale = (LOOKS / LOOKS[-1]) ** (shape - 0.5)
        low, high = 1.0, 10.0
        for _ in range(40):
            middle = (low + high) / 2
            wrong = (largest > -stdtrit(degrees, ndtr(-middle * scale))).any(1).mean()
            low, high = (middle, high) if wrong > 0.05 else (low, middle)
        yield name, -stdtrit(degrees, ndtr(-high * scale))


def figures(
    critical: Array, noise: str, nulls: dict[str, dict[str, Array]], effects: dict[str, dict[str, Array]]
) -> dict[str, float]:
    found = {name: float((np.abs(t[noise]) > critical[:, None]).any((1, 2)).mean()) for name, t in nulls.items()}
    for name, t in effects.items():
        shown = t[noise][:, :, 0] > critical
        rounds = np.where(shown.any(1), LOOKS[shown.argmax(1)], LOOKS[-1])
        found |= {f"power_{name}": float(shown.any(1).mean()), f"rounds_{name}": float(rounds.mean())}
    return {name: round(value, 4) for name, value in found.items()}
