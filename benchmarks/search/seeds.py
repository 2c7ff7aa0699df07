"""Seeds of synthetic problems: drawn for every run, so that no figure comes from problems that choices were made on."""

from __future__ import annotations

import argparse
import random

TUNING = 10_000
"""Seeds below are never drawn: they are for choosing between variants."""


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Add ``--seed``, which :func:`chosen` reads."""
    parser.add_argument("--seed", type=int, help=f"repeats a run; drawn from {TUNING} upwards by default")


def chosen(seed: int | None) -> int:
    """Return the seed given, or a fresh one."""
    return random.SystemRandom().randrange(TUNING, 10**6) if seed is None else seed


def draws(seed: int, num: int) -> list[int]:
    """Return the seeds of the single draws of a run: other seeds give other ones."""
    return [1000 * seed + number for number in range(num)]
