"""Structures of software: hypotheses on what a program keeps in device memory beyond what its layout says.

What our own runner keeps is known. Other programs' gradients may be longer or shorter, their logits gathered or copied
once more: each *choice* is a transformation of the cost model's columns, a structure is one way to make all choices,
and outcomes decide between structures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from cluster.cost.inputs import CostInputs

Transformation = Callable[[CostInputs], CostInputs]
"""From the columns of the cost model to those under a hypothesis."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A hypothesis on what software keeps, and how likely it is before any outcome."""

    name: str
    probability: float = 1.0
    changes: tuple[Transformation, ...] = ()

    def of(self, x: CostInputs) -> CostInputs:
        """The columns under this hypothesis."""
        for change in self.changes:
            x = change(x)
        return x


def long_gradients(x: CostInputs) -> CostInputs:
    """Gradients are added up in fp32 in a buffer that lasts from step to step, whatever the weights' format.

    Megatron-LM's ``--accumulate-allreduce-grads-in-fp32`` (its ``DistributedDataParallel`` allocates one contiguous
    buffer per data type, at the beginning), which bf16 turns on.
    """
    return replace(x, gradient_bytes=np.full(len(x), 4.0), keeps_gradients=np.ones(len(x)))


def short_gradients(x: CostInputs) -> CostInputs:
    """Gradients have the format of the computation, 16 bits (``main_grads`` off; DeepSpeed's ``grad_accum_dtype``)."""
    return replace(x, gradient_bytes=np.minimum(x.gradient_bytes, x.compute_bytes))


def gathered_logits(x: CostInputs) -> CostInputs:
    """Logits are gathered over tensor-parallel ranks before the loss, so every rank computes all of it.

    Megatron-LM's ``parallel_output=False``; the loss of a model of transformers under a plain ``ColumnParallel`` head
    (torchtitan without ``enable_loss_parallel``).
    """
    return replace(x, loss_chunks=x.loss_chunks / x.tp)


def copied_logits(x: CostInputs) -> CostInputs:
    """One more fp32 copy of the logits: ``logits.float()`` stays alive beside the loss's own copy (transformers'
    ``ForCausalLMLoss``; the shifted logits' ``contiguous()``)."""
    return replace(x, loss_bytes=x.loss_bytes + 4.0)


Choice = tuple[tuple[str, float, Transformation | None], ...]
"""Alternatives: name, probability, and what changes (None: nothing)."""

CHOICES: tuple[Choice, ...] = (
    (("", 0.5, None), ("long gradients", 0.25, long_gradients), ("short gradients", 0.25, short_gradients)),
    (("", 0.8, None), ("gathered logits", 0.2, gathered_logits)),
    (("", 0.7, None), ("copied logits", 0.3, copied_logits)),
)

KNOWN = (Structure("as described"),)
"""The one structure of software whose columns say all that it keeps: our own runner."""


def _all() -> Iterator[Structure]:
    for made in itertools.product(*CHOICES):
        name = ", ".join(name for name, _, _ in made if name) or "as described"
        changes = tuple(change for _, _, change in made if change)
        yield Structure(name, math.prod(probability for _, probability, _ in made), changes)


FOREIGN = tuple(_all())
"""Structures of software of which nobody says what it keeps: training programs of the user's own."""
