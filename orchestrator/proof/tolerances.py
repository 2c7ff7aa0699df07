"""How far losses and gradient norms of equal training may lie apart, by number format; measured, see docs/loss-gate.md.

Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trials.spec import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How large a relative deviation may be, by step.

    It grows with the square of the steps: each step adds its error, and trains on those before.
    """

    first: float
    """Tolerance in step 1, where both runs still have the same weights."""
    growth: float = 0.0
    most: float = math.inf
    """Upper bound, however many steps."""

    def at(self, step: int) -> float:
        """Tolerance in this step, counted from 1."""
        return min(self.first + self.growth * (step - 1) ** 2, self.most)

    def wider(self, factor: float) -> Tolerance:
        """The tolerance times ``factor``, with the same upper bound."""
        return replace(self, first=self.first * factor, growth=self.growth * factor)

    def __add__(self, other: Tolerance) -> Tolerance:
        return Tolerance(first=self.first + other.first, growth=self.growth + other.growth, most=self.most + other.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tolerances of the loss and of the gradient norm."""

    loss: Tolerance
    grad_norm: Tolerance

    def wider(self, factor: float) -> Limits:
        return Limits(loss=self.loss.wider(factor), grad_norm=self.grad_norm.wider(factor))

    def __add__(self, other: Limits) -> Limits:
        return Limits(loss=self.loss + other.loss, grad_norm=self.grad_norm + other.grad_norm)


LOSS_MOST, GRAD_NORM_MOST = 0.025, 0.25
"""Upper bounds of the tolerances of one class, in any step."""


def _limits(loss: float, loss_growth: float, grad_norm: float, grad_norm_growth: float) -> Limits:
    return Limits(
        loss=Tolerance(first=loss, growth=loss_growth, most=LOSS_MOST),
        grad_norm=Tolerance(first=grad_norm, growth=grad_norm_growth, most=GRAD_NORM_MOST),
    )


ERRORS: dict[str, Limits] = {
    "float32": _limits(2e-6, 2e-7, 2e-5, 2e-6),
    "float32 high": _limits(5e-5, 3e-5, 1e-3, 2e-4),
    "float32 medium": _limits(3e-4, 1e-4, 3e-3, 5e-4),
    "bfloat16 O1": _limits(4e-4, 1e-4, 4e-3, 5e-4),
    "bfloat16 O1-fp8": _limits(8e-3, 2e-4, 5e-2, 5e-3),
    "bfloat16 O2": _limits(6e-4, 3e-4, 6e-3, 1e-3),
    "float16 O1": _limits(5e-5, 3e-5, 1e-3, 2e-4),
    "float16 O2": _limits(1e-4, 5e-5, 2e-3, 4e-4),
}
"""How far training in a class may lie from exact arithmetic. Two runs may lie apart by the sum of theirs."""
ROUNDING: dict[str, float] = {
    "float32": 2.0**-20,
    "float32 high": 2.0**-10,
    "float32 medium": 2.0**-7,
    "bfloat16 O1": 2.0**-7,
    "bfloat16 O1-fp8": 2.0**-3,
    "bfloat16 O2": 2.0**-7,
    "float16 O1": 2.0**-10,
    "float16 O2": 2.0**-10,
}
"""How far the initial weights of a twin are off, by class: by the machine epsilon of what the factors of products are
rounded to; in float32 by 8 of it, as sums of 64 products are: layouts and kernels differ by the order in which they
sum. By one of it, twins of a ResNet were measured to part later than memory formats do."""
BATCH_NORM_FACTOR = 20.0
"""How much further apart runs of models with batch norm may lie: it amplifies rounding."""
OTHER_BATCH_NORM = Limits(
    loss=Tolerance(first=0.05, growth=3e-4, most=0.15), grad_norm=Tolerance(first=0.4, growth=5e-4, most=0.5)
)
"""What comes on top where batch norm takes its statistics over micro-batches of another size."""


def coarser(one: str, other: str) -> Limits:
    """Limits of the coarser of two classes."""
    return max(ERRORS[one], ERRORS[other], key=lambda limits: limits.loss.first)


def class_name(precision: Precision, matmul_precision: str) -> str:
    """Class of a number format: its key in :data:`ERRORS`."""
    if precision.level != "O0":
        return f"{precision.dtype} {precision.level}"
    return "float32" if matmul_precision == "highest" else f"float32 {matmul_precision}"
