"""How often the trend test over step times is wrong on noise without a trend, and what it finds of real ones.

    python -m benchmarks.step_trend [--series 4000]

Every family is drawn with relative noise of 0.3, 1, 3 and 10%; the table shows the worst of these.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trials.outcome import trend

Series = NDArray[np.float64]
NUM_STEPS = (8, 12, 16, 32, 64, 128)
NOISES = (0.003, 0.01, 0.03, 0.1)
_BURN_IN = 60


def correlated(rng: np.random.Generator, shape: tuple[int, int], phi: float) -> Series:
    """First-order autoregressive noise with standard deviation 1."""
    shocks = rng.standard_normal((shape[0], shape[1] + _BURN_IN))
    found = shocks.copy()
    for i in range(1, shocks.shape[1]):
        found[:, i] = phi * found[:, i - 1] + np.sqrt(1 - phi * phi) * shocks[:, i]
    return found[:, _BURN_IN:]


def _periodic(rng: np.random.Generator, shape: tuple[int, int], noise: float, height: float) -> Series:
    """Every N-th step takes longer (checkpoint, evaluation, garbage collection), N from 2 to 10, from any step on."""
    period, phase = (rng.integers(low, 11, size=(shape[0], 1)) for low in (2, 0))
    at = (np.arange(shape[1])[None] + phase) % period == 0
    return np.exp(noise * rng.standard_normal(shape)) * np.where(at, 1 + height, 1.0)


def _warming(rng: np.random.Generator, shape: tuple[int, int], noise: float) -> Series:
    """The first steps take up to 50% longer, decaying within half a step to two steps."""
    height, decay = (rng.uniform(low, high, (shape[0], 1)) for low, high in ((0.05, 0.5), (0.5, 2.0)))
    return np.exp(noise * rng.standard_normal(shape)) * (1 + height * np.exp(-np.arange(shape[1])[None] / decay))


def _two_modes(rng: np.random.Generator, shape: tuple[int, int], noise: float) -> Series:
    """A fifth of the steps, at random, takes 20% longer."""
    return np.exp(noise * rng.standard_normal(shape)) * np.where(rng.random(shape) < 0.2, 1.2, 1.0)


def _spikes(rng: np.random.Generator, shape: tuple[int, int], noise: float) -> Series:
    return np.exp(noise * rng.standard_normal(shape)) * np.where(rng.random(shape) < 0.05, 2.0, 1.0)


Family = Callable[[np.random.Generator, tuple[int, int], float], Series]

HONEST: dict[str, Family] = {
    "independent": lambda rng, shape, noise: np.exp(noise * rng.standard_normal(shape)),
    **{
        f"autocorrelated {phi:g}": lambda rng, shape, noise, phi=phi: np.exp(noise * correlated(rng, shape, phi))
        for phi in (0.3, 0.5, 0.7)
    },
    "heavy tails (t, 2 degrees)": lambda rng, shape, noise: np.exp(np.clip(noise * rng.standard_t(2, shape), -1, 3)),
    "skewed (exponential)": lambda rng, shape, noise: 1 + noise * rng.exponential(1.0, shape),
    "one step in 20 takes twice as long": _spikes,
    "one step in 5 takes 20% longer": _two_modes,
    "every N-th step takes 10% longer": lambda rng, shape, noise: _periodic(rng, shape, noise, 0.1),
    "every N-th step takes 3 times as long": lambda rng, shape, noise: _periodic(rng, shape, noise, 2.0),
    "tail of warming up": _warming,
}


def _ramp(per_step: float) -> Family:
    def draw(rng: np.random.Generator, shape: tuple[int, int], noise: float) -> Series:
        return (1 + per_step) ** np.arange(shape[1])[None] * np.exp(noise * correlated(rng, shape, 0.3))

    return draw


def _jump(height: float) -> Family:
    def draw(rng: np.random.Generator, shape: tuple[int, int], noise: float) -> Series:
        at = np.arange(shape[1]) >= shape[1] // 2
        return np.where(at, 1 + height, 1.0)[None] * np.exp(noise * correlated(rng, shape, 0.3))

    return draw


def _leak_with_checkpoints(rng: np.random.Generator, shape: tuple[int, int], noise: float) -> Series:
    return _ramp(0.01)(rng, shape, noise) * np.where(np.arange(shape[1])[None] % 5 == 2, 1.5, 1.0)


DRIFTING: dict[str, Family] = {
    "1% slower each step": _ramp(0.01),
    "0.3% slower each step": _ramp(0.003),
    "1% faster each step": _ramp(-0.01),
    "10% slower half way": _jump(0.1),
    "50% slower half way": _jump(0.5),
    "1% slower each step, every 5th 50% longer": _leak_with_checkpoints,
}


def share(family: Family, *, num_steps: int, noise: float, num_series: int, resolution: float = 0.0) -> float:
    """Share of the series of a family in which a trend is found."""
    drawn = family(np.random.default_rng(num_steps), (num_series, num_steps), noise)
    if resolution:
        drawn = np.maximum(resolution, np.round(drawn / resolution) * resolution)
    test = trend.__wrapped__  # the cache would only grow
    return sum(test(tuple(row.tolist()), resolution) is not None for row in drawn) / num_series


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=4000, help="series of each kind")
    num_series = parser.parse_args().series
    head = "".join(f"{num:>8}" for num in NUM_STEPS)
    print(f"{'false alarms, worst of all noises; steps:':<46}{head}")
    for name, family in HONEST.items():
        for resolution in (0.0, 0.05) if name == "independent" else (0.0,):
            words = f"{name}, read to {resolution:.0%}" if resolution else name
            cells = (
                max(share(family, num_steps=n, noise=z, num_series=num_series, resolution=resolution) for z in NOISES)
                for n in NUM_STEPS
            )
            print(f"{words:<46}" + "".join(f"{cell:>8.1%}" for cell in cells))
    print(f"\n{'trends found, by noise; steps:':<46}{head}")
    for name, family in DRIFTING.items():
        for noise in NOISES[:3]:
            cells = (share(family, num_steps=n, noise=noise, num_series=num_series // 4) for n in NUM_STEPS)
            print(f"{f'{name}, noise {noise:.1%}':<46}" + "".join(f"{cell:>8.0%}" for cell in cells))


if __name__ == "__main__":
    main()
