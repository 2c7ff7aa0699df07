"""What other programs than our own runner keep in device memory: hypotheses that outcomes decide between."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from cluster.cost.inputs import SCHEDULES, Array, CostInputs
from cluster.cost.work import experts_params, layers_params, tables_params, work_of

# What other software may do with device memory, as transformations of the cost model's columns. Each names software
# that does so.


ZERO_BUCKET_ELEMENTS = 5e8
"""``reduce_bucket_size`` and ``allgather_bucket_size`` of DeepSpeed's ZeRO, by default."""


def long_gradients(x: CostInputs) -> CostInputs:
    """Gradients are added up in fp32 in a buffer that lasts from step to step, whatever the weights' format.

    Megatron-LM's ``--accumulate-allreduce-grads-in-fp32``, which ``--bf16`` turns on: its ``DistributedDataParallel``
    allocates one contiguous buffer per data type at the beginning.
    """
    return replace(x, gradient_bytes=np.full(len(x), 4.0), keeps_gradients=np.ones(len(x)))


def short_gradients(x: CostInputs) -> CostInputs:
    """Gradients have the format of the computation (DeepSpeed's ``grad_accum_dtype`` of 16 bits; Megatron-LM's
    ``--fp16``)."""
    return replace(x, gradient_bytes=np.minimum(x.gradient_bytes, x.compute_bytes))


def whole_gradients(x: CostInputs) -> CostInputs:
    """Every rank adds up all of its gradients in a step of several micro-batches, although ZeRO-2 or 3 shards them.

    ``no_sync`` of FSDP; PaddlePaddle's ``GroupShardedStage2`` where gradients are accumulated.
    """
    waits = (x.zero_stage >= 2) & (x.num_microbatches > 1) & (x.reduces_last == 0)
    left = whole_params(x) * (1 - 1 / x.num_shards) * x.gradient_bytes * x.trained_share
    return replace(x, buffer_bytes=x.buffer_bytes + np.where(waits, left, 0.0))


def short_states(x: CostInputs) -> CostInputs:
    """The optimiser's states have the weights' format and there are no fp32 copies: ``torch.optim.AdamW`` of 16-bit
    parameters, as in torchtune's ``dtype: bf16``."""
    is_mixed = x.optimizer_bytes > 8
    return replace(x, optimizer_bytes=np.where(is_mixed, 2 * x.weight_bytes, x.optimizer_bytes))


def gathered_logits(x: CostInputs) -> CostInputs:
    """Logits are gathered over tensor-parallel ranks, each of which computes all of the loss.

    Megatron-LM's ``parallel_output=False``; ``lm_head: colwise_rep`` in the plans of transformers; torchtitan without
    ``enable_loss_parallel``.
    """
    return replace(x, loss_chunks=x.loss_chunks / x.tp)


def copied_logits(x: CostInputs) -> CostInputs:
    """One more fp32 copy of the logits, of what the loss's own gradient takes: ``logits.float()`` beside log-softmax,
    its gradient and that of the negative log-likelihood (``torch.nn.functional.cross_entropy``, not fused)."""
    return replace(x, loss_bytes=x.loss_bytes + 4.0)


def whole_tables(x: CostInputs) -> CostInputs:
    """Embedding and head are whole on every tensor-parallel rank, but not the logits.

    Plans of transformers (``base_model_tp_plan``) divide layers and leave ``embed_tokens`` out.
    """
    return replace(x, vocab=x.vocab * x.tp, loss_chunks=x.loss_chunks * x.tp)


def kept_gathered_inputs(x: CostInputs) -> CostInputs:
    """Inputs of matmuls that sequence parallelism gathers are kept as they are multiplied, and not gathered again in
    the backward pass: autograd of DTensor's ``PrepareModuleInput`` saves what the matmul got."""
    return replace(x, keeps_gathered=np.where(x.sequence_parallel > 0, 1.0, x.keeps_gathered))


def whole_batch_in_flight(x: CostInputs) -> CostInputs:
    """A pipeline runs all forward passes first and holds all micro-batches of the step (GPipe; Huang et al., arXiv
    1811.06965; ``torch.distributed.pipelining.ScheduleGPipe``)."""
    return replace(x, schedule=np.where(x.pp > 1, float(SCHEDULES.index("gpipe")), x.schedule))


def large_buckets(x: CostInputs) -> CostInputs:
    """Data parallelism reduces and gathers through buckets of half a billion elements (DeepSpeed's ZeRO by default)."""
    width = np.minimum(x.compute_bytes, 2.0)
    size = np.minimum(ZERO_BUCKET_ELEMENTS, whole_params(x)) * width * 2
    return replace(x, buffer_bytes=x.buffer_bytes + np.where(x.dp > 1, size, 0.0))


def weights_stay_gathered(x: CostInputs) -> CostInputs:
    """ZeRO-3's weights stay gathered from one micro-batch to the next (FSDP's ``reshard_after_forward=False`` and
    ``SHARD_GRAD_OP``; DeepSpeed's ``stage3_max_live_parameters``, a billion by default, keeps small models whole)."""
    return replace(x, gathers_once=np.ones(len(x)))


def whole_params(x: CostInputs) -> Array:
    """Parameters of the pipeline rank that has most, before any sharding over data-parallel ranks, shape (n,)."""
    work = work_of(x)
    return np.asarray((layers_params(x, work) + experts_params(x, work) + tables_params(x)).max(axis=1))


# Structures of software: hypotheses on what a program keeps in device memory beyond what its layout says.
#
# What our own runner keeps is known. Other programs' gradients may be longer or shorter, their logits gathered, their
# buffers larger: each *habit* is a transformation of the cost model's columns, a structure is a set of habits, and
# outcomes decide between structures.


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
    Habit("long gradients", 0.1, long_gradients, ("short gradients",)),
    Habit("short gradients", 0.15, short_gradients),
    Habit("whole gradients", 0.15, whole_gradients),
    Habit("short states", 0.1, short_states),
    Habit("gathered logits", 0.1, gathered_logits),
    Habit("copied logits", 0.15, copied_logits),
    Habit("whole tables", 0.05, whole_tables),
    Habit("kept gathered inputs", 0.1, kept_gathered_inputs),
    Habit("whole batch in flight", 0.05, whole_batch_in_flight),
    Habit("large buckets", 0.1, large_buckets),
    Habit("weights stay gathered", 0.05, weights_stay_gathered),
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
