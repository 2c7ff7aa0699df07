"""How often ``verify`` gives which answer, and after how many rounds; nothing runs, speeds are drawn.

    python -m benchmarks.confirmation.verification [--cases 2000] [--json]

A promotion measured rounds of the configuration and its baseline; the verification measures up to 12. What the runs of
a round have in common has a spread of 5%. ``hour``: all its runs are slower by as much.
Shares are those of the answers: no drift, drift, and could not verify.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.confirmation.methods import ROUND_NOISE
from orchestrator.proof.confirmation import FIRST_LOOK, Rounds, SpeedChange, change

TOLERANCE = 0.05
MAX_ROUNDS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is true, and what blurs it. Relative standard deviations throughout."""

    loss: float = 0.0
    """Loss of the configuration's own speed since its promotion; the baseline's is what it was."""
    noise: float = 0.02
    """Noise between runs."""
    noise_then: float | None = None
    """Noise at the promotion, where it was another."""
    rounds_then: int = 3
    common: float = ROUND_NOISE
    hour: float = 0.0
    """How much slower the machine is."""


def verified(world: World, rng: np.random.Generator) -> SpeedChange:
    """A verification as the product does it: rounds until settled, hopeless, or the last."""
    then = _rounds(rng, world.rounds_then, world, world.noise if world.noise_then is None else world.noise_then, 1.0)
    runs = _rounds(rng, MAX_ROUNDS, world, world.noise, 1.0 - world.loss)
    for count in range(FIRST_LOOK, MAX_ROUNDS + 1):
        now = Rounds(own=[one * (1 - world.hour) for one in runs.own[:count]], baseline=runs.baseline[:count])
        now = Rounds(own=now.own, baseline=[one * (1 - world.hour) for one in now.baseline])
        found = change(then, now, tolerance=TOLERANCE, max_rounds=MAX_ROUNDS)
        if found.loss != "open" or found.is_hopeless:
            break
    return found


def _rounds(rng: np.random.Generator, count: int, world: World, noise: float, factor: float) -> Rounds:
    common = world.common * rng.standard_normal(count)
    own, baseline = (np.exp(common + noise * rng.standard_normal(count)) for _ in range(2))
    return Rounds(own=(factor * own).tolist(), baseline=baseline.tolist())


WORLDS = (
    *(World(loss=loss, noise=noise) for noise in (0.01, 0.02, 0.03, 0.05) for loss in (0.0, 0.05, 0.1, 0.2)),
    *(World(loss=loss, noise=0.03, rounds_then=8) for loss in (0.0, 0.05, 0.1, 0.2)),
    *(World(loss=loss, noise=0.02, common=0.01) for loss in (0.0, 0.05, 0.1)),
    *(World(loss=loss, noise=0.02, hour=0.3) for loss in (0.0, 0.05, 0.1)),
    *(World(loss=loss, noise=0.01, noise_then=0.05) for loss in (0.0, 0.05, 0.1)),
    *(World(loss=loss, noise=0.05, noise_then=0.01) for loss in (0.0, 0.05, 0.1)),
)


def rates(world: World, num_cases: int) -> dict[str, Any]:
    """Shares of the answers, in how many cases an interval of the lead leaves out the truth, and rounds."""
    found = [verified(world, np.random.default_rng(seed)) for seed in range(num_cases)]
    leads = [one.lead.ci95 for one in found if one.lead is not None and one.lead.ci95 is not None]
    return {
        "loss": world.loss,
        "noise": world.noise,
        "noise_then": world.noise if world.noise_then is None else world.noise_then,
        "rounds_then": world.rounds_then,
        "common": world.common,
        "hour": world.hour,
        "no_drift": float(np.mean([one.loss == "excluded" for one in found])),
        "drift": float(np.mean([one.loss == "shown" for one in found])),
        "open": float(np.mean([one.loss == "open" for one in found])),
        "missed": float(np.mean([not ci95.low <= 1 - world.loss <= ci95.high for ci95 in leads])),
        "rounds": float(np.mean([one.num_rounds for one in found])),
    }


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "noise  then  rounds  common  slower   loss |  no drift   drift  could not | missed  rounds"
    for row in rows:
        yield (
            f"{row['noise']:5.0%} {row['noise_then']:5.0%} {row['rounds_then']:7} {row['common']:7.0%} "
            f"{row['hour']:7.0%} {row['loss']:6.0%} | {row['no_drift']:9.1%} {row['drift']:7.1%} {row['open']:10.1%} |"
            f" {row['missed']:6.1%} {row['rounds']:7.1f}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", type=int, default=2000)
    options = parser.parse_args(argv)
    rows = [rates(world, options.cases) for world in WORLDS]
    print(json.dumps(rows, indent=1) if options.json else "\n".join(lines(rows)))


if __name__ == "__main__":
    main()
