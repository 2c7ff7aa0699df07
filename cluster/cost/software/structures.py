"""Structures of software: hypotheses on what a program keeps in device memory beyond what its layout says.

What our own runner keeps is known. Other programs' gradients may be longer or shorter, their logits gathered, their
buffers larger: each *habit* is a transformation of the cost model's columns, a structure is a set of habits, and
outcomes decide between structures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cluster.cost.inputs import CostInputs
from cluster.cost.software import habits

Transformation = Callable[[CostInputs], CostInputs]
"""From the columns of the cost model to those under a hypothesis."""


@dataclass(frozen=True, slots=True)
class Habit:
    """Something that software may do with memory, and how likely it does before any outcome."""

    name: str
    probability: float
    change: Transformation
    rules_out: tuple[str, ...] = ()
    """Habits that cannot come together with it."""


HABITS = (
    Habit("long gradients", 0.1, habits.long_gradients, ("short gradients",)),
    Habit("short gradients", 0.15, habits.short_gradients),
    Habit("whole gradients", 0.15, habits.whole_gradients),
    Habit("short states", 0.1, habits.short_states),
    Habit("gathered logits", 0.1, habits.gathered_logits),
    Habit("copied logits", 0.15, habits.copied_logits),
    Habit("whole tables", 0.05, habits.whole_tables),
    Habit("kept gathered inputs", 0.1, habits.kept_gathered_inputs),
    Habit("whole batch in flight", 0.05, habits.whole_batch_in_flight),
    Habit("large buckets", 0.1, habits.large_buckets),
    Habit("weights stay gathered", 0.05, habits.weights_stay_gathered),
)
MAX_HABITS = 2
"""Habits that a structure has at most: more of them together are too many to tell apart, and each as unlikely."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A hypothesis on what software keeps, and how likely it is before any outcome."""

    name: str
    probability: float = 1.0
    habits: tuple[Habit, ...] = ()

    def of(self, x: CostInputs) -> CostInputs:
        """The columns under this hypothesis."""
        for habit in self.habits:
            x = habit.change(x)
        return x


KNOWN = (Structure("as described"),)
"""The one structure of software whose columns say all that it keeps: our own runner."""


def structures_of(known: tuple[Habit, ...] = HABITS, most: int = MAX_HABITS) -> Iterator[Structure]:
    """Every set of up to ``most`` habits that may come together; a set is as likely as its habits and no others are."""
    for number in range(most + 1):
        for chosen in itertools.combinations(known, number):
            if {other for habit in chosen for other in habit.rules_out} & {habit.name for habit in chosen}:
                continue
            odds = math.prod(habit.probability / (1 - habit.probability) for habit in chosen)
            yield Structure(", ".join(habit.name for habit in chosen) or "as described", odds, chosen)


FOREIGN = tuple(structures_of())
"""Structures of software of which nobody says what it keeps: training programs of the user's own."""


def apart(structures: tuple[Structure, ...], x: CostInputs) -> list[tuple[Structure, CostInputs]]:
    """The structures that differ on these rows, with their columns; one stands for those that are alike."""
    found: dict[tuple[str, ...], tuple[Structure, CostInputs]] = {}
    alone = {habit.name: _is_felt(habit, x) for structure in structures for habit in structure.habits}
    for structure in structures:
        felt = tuple(habit.name for habit in structure.habits if alone[habit.name])
        if len(felt) < len(structure.habits) and felt in found:
            kept, columns = found[felt]
            found[felt] = Structure(kept.name, kept.probability + structure.probability, kept.habits), columns
        else:
            found[felt] = structure, structure.of(x)
    return list(found.values())


def _is_felt(habit: Habit, x: CostInputs) -> bool:
    """Whether the habit changes any column of these rows."""
    after = habit.change(x)
    return any(
        not np.array_equal(getattr(after, name), getattr(x, name))
        for name in CostInputs.__dataclass_fields__
        if getattr(after, name) is not getattr(x, name)
    )
