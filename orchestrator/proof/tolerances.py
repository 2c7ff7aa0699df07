"""How far losses and gradient norms of equal training may lie apart, by number format; measured, see docs/loss-gate.md.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from trials.spec import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Relative; grows by a fixed amount per step, since what was rounded once is trained on."""

    first: float
    """In step 1, where both still have the same weights."""
    per_step: float

    def at(self, step: int) -> float:
        """In this step, counted from 1."""
        return self.first + (step - 1) * self.per_step

    def __add__(self, other: Tolerance) -> Tolerance:
        return Tolerance(first=self.first + other.first, per_step=self.per_step + other.per_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """For the loss and for the gradient norm."""

    loss: Tolerance
    grad_norm: Tolerance

    def __add__(self, other: Limits) -> Limits:
        return Limits(loss=self.loss + other.loss, grad_norm=self.grad_norm + other.grad_norm)


def _limits(loss: float, loss_per_step: float, grad_norm: float, grad_norm_per_step: float) -> Limits:
    return Limits(
        loss=Tolerance(first=loss, per_step=loss_per_step),
        grad_norm=Tolerance(first=grad_norm, per_step=grad_norm_per_step),
    )


ERRORS: dict[str, Limits] = {
    "float32": _limits(1e-6, 1e-5, 1e-5, 1e-4),
    "float32 high": _limits(1e-4, 1e-4, 1e-3, 1e-3),
    "float32 medium": _limits(5e-4, 5e-4, 1e-2, 2e-3),
    "bfloat16 O1": _limits(5e-4, 5e-4, 1e-2, 2e-3),
    "bfloat16 O2": _limits(5e-4, 5e-4, 1e-2, 2e-3),
    "float16 O1": _limits(5e-4, 5e-4, 1e-2, 2e-3),
    "float16 O2": _limits(5e-4, 5e-4, 1e-2, 2e-3),
}
"""How far training in a class may lie from exact arithmetic. Two runs may lie apart by the sum of theirs."""
BATCH_NORM = _limits(5e-2, 5e-3, 2e-1, 1e-2)
"""What comes on top where batch norm takes its statistics over micro-batches of another size."""


def class_name(precision: Precision, matmul_precision: str) -> str:
    """The key of :data:`ERRORS`."""
    if precision.level != "O0":
        return f"{precision.dtype} {precision.level}"
    return "float32" if matmul_precision == "highest" else f"float32 {matmul_precision}"
