"""Ways to train a wrong model, many of them faster: what a loss gate is for.

Each function patches the runner in the rank's process before it trains. Those that are errors of a layout are the
deliberate bugs of tests/trials/test_sensitivity.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from trials.spec import Layout

Bug = Callable[[], None]


def half_a_bucket_not_reduced() -> None:
    """DDP reduces the first half of every bucket only."""
    import torch.distributed as dist

    from trials.training import loop

    apply_ddp = loop.apply_ddp

    def hook(group, bucket):  # noqa: ANN001, ANN202  # DDP would look at annotations
        buffer = bucket.buffer()
        half = buffer[: buffer.numel() // 2]
        half.div_(dist.get_world_size(group))
        return dist.all_reduce(half, group=group, async_op=True).get_future().then(lambda _: buffer)

    def broken(*args: Any) -> Any:
        module = apply_ddp(*args)
        module.register_comm_hook(None, hook)
        return module

    loop.apply_ddp = broken


def one_layer_not_reduced() -> None:
    """FSDP2 does not reduce the gradients of the last layer."""
    from torch.distributed.fsdp import FSDPModule

    set_gradient_sync = FSDPModule.set_requires_gradient_sync

    def without_last_layer(self: Any, enabled: bool, **options: Any) -> None:
        set_gradient_sync(self, enabled, **options)
        layers = getattr(self, "layers", None)
        if layers is not None:
            set_gradient_sync(list(layers.values())[-1], False)

    FSDPModule.set_requires_gradient_sync = without_last_layer


def last_micro_batch_dropped() -> None:
    """Each rank trains on all its micro-batches but the last, and takes the mean over those."""
    from trials.training.loop import Accumulation

    run = Accumulation.run

    def broken(self: Accumulation, inputs: Any, targets: Any, marker: Any) -> Any:
        size = self._micro_batch_size
        return run(self, inputs[:-size], targets[:-size], marker)

    Accumulation.run = broken


def gradients_summed_over_micro_batches() -> None:
    """Gradients are the sum over micro-batches instead of their mean, which AdamW does not mind."""
    from trials.training import loop

    split = loop.torch.split
    backward = loop.torch.autograd.backward
    number = [1]

    def counting_split(tensor: Any, size: Any, *args: Any) -> Any:
        parts = split(tensor, size, *args)
        number[0] = len(parts)
        return parts

    loop.torch.split = counting_split
    loop.torch.autograd.backward = lambda loss, seed: backward(loss, seed * number[0])


def _with_optimizer(**changes: float) -> None:
    from trials.training import optimizer

    options = optimizer.options_of
    optimizer.options_of = lambda config: options(dataclasses.replace(config, **changes))


def _scaled_lr(factor: float) -> None:
    from trials.training import optimizer

    options = optimizer.options_of
    optimizer.options_of = lambda config: options(dataclasses.replace(config, lr=factor * config.lr))


def learning_rate_10_percent_off() -> None:
    _scaled_lr(1.1)


def learning_rate_doubled() -> None:
    _scaled_lr(2.0)


def no_weight_decay() -> None:
    _with_optimizer(weight_decay=0.0)


def second_moment_forgotten_sooner() -> None:
    """AdamW runs with beta2 0.9 instead of 0.95."""
    _with_optimizer(beta2=0.9)


def every_fourth_update_skipped() -> None:
    from trials.training.loop import Trainer

    update = Trainer._update
    count = [0]

    def broken(self: Trainer) -> None:
        count[0] += 1
        if count[0] % 4:
            update(self)

    Trainer._update = broken


def update_one_step_late() -> None:
    """Asynchronous SGD: the gradients of a step are applied in the next one."""
    import torch

    from trials.parallel.mesh import gradients_of
    from trials.training.loop import Trainer

    update = Trainer._update
    kept: list[Any] = []

    @torch.no_grad()
    def broken(self: Trainer) -> None:
        grads = gradients_of(self.gradients.held)
        before = kept.pop() if kept else None
        kept.append([grad.clone() for grad in grads])
        if before is not None:
            for grad, late in zip(grads, before, strict=True):
                grad.copy_(late)
            update(self)

    Trainer._update = broken


def other_data() -> None:
    """Batches drawn with another seed, from the same files."""
    from trials import worker

    share = worker.Share
    worker.Share = lambda **fields: share(**(fields | {"seed": fields["seed"] + 1}))


def every_batch_twice() -> None:
    """A loader that hands out stale data."""
    from trials.datasets import StepBatches

    getitem = StepBatches.__getitem__
    StepBatches.__getitem__ = lambda self, step: getitem(self, step // 2)


def ranks_share_rows() -> None:
    """Every data-parallel rank reads the rows of the first."""
    from trials import worker

    share = worker.Share
    worker.Share = lambda **fields: share(**(fields | {"dp_rank": 0}))


def other_weights() -> None:
    """Initial values drawn with another seed."""
    from trials.training import loop

    init = loop.init_parameters
    loop.init_parameters = lambda model, seed, *rest: init(model, seed + 1, *rest)


def _with_attention(wrap: Callable[[Any], Any]) -> None:
    from trials.models import built_in

    built_in.causal_attention = wrap(built_in.causal_attention)


def attention_gradient_detached() -> None:
    """Queries and keys get no gradient."""
    _with_attention(lambda attend: lambda q, k, v: attend(q.detach(), k.detach(), v))


def attention_sees_the_future() -> None:
    import torch.nn.functional as F

    _with_attention(
        lambda _: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] < q.shape[1])
    )


def attention_window_of_half_the_sequence() -> None:
    """Queries see the nearest half of the keys only."""
    import torch
    import torch.nn.functional as F

    def windowed(q: Any, k: Any, v: Any) -> Any:
        length = q.shape[2]
        near = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - length // 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near, enable_gqa=k.shape[1] < q.shape[1])

    _with_attention(lambda _: windowed)


def norm_gains_not_trained() -> None:
    from trials.training.loop import Trainer

    clear = Trainer._update

    def broken(self: Trainer) -> None:
        for parameter in self.parameters:
            if parameter.dim() == 1:
                parameter.grad = None
        clear(self)

    Trainer._update = broken


def no_master_weights() -> None:
    """16-bit weights are updated in place: most updates are smaller than what they can hold."""
    import torch

    from trials.training.optimizer import LocalAdamW

    step = LocalAdamW.step

    @torch.no_grad()
    def broken(self: LocalAdamW) -> None:
        step(self)
        for state in self.states:
            state.master.copy_(state.values)

    LocalAdamW.step = broken


def gradients_in_8_bits() -> None:
    """Gradients are rounded to float8 (e4m3), scaled per tensor, before the update."""
    import torch

    from trials.parallel.mesh import gradients_of
    from trials.training.loop import Gradients

    complete = Gradients.complete

    @torch.no_grad()
    def broken(self: Gradients) -> None:
        complete(self)
        for grad in gradients_of(self.held):
            scale = 448.0 / grad.abs().amax().clamp(min=1e-20)
            grad.copy_((grad * scale).to(torch.float8_e4m3fn).to(grad.dtype) / scale)

    Gradients.complete = broken


def tenth_of_the_gradients_kept() -> None:
    """Gradients keep the largest tenth of each tensor, without feedback of the rest."""
    import torch

    from trials.parallel.mesh import gradients_of
    from trials.training.loop import Gradients

    complete = Gradients.complete

    @torch.no_grad()
    def broken(self: Gradients) -> None:
        complete(self)
        for grad in gradients_of(self.held):
            size = grad.abs().float().flatten()
            if size.numel():
                grad.mul_(grad.abs() >= size.kthvalue(max(1, int(0.9 * size.numel()))).values)

    Gradients.complete = broken


def loss_scale_left_in() -> None:
    """Gradients are not divided by the loss scale."""
    from trials.training.loop import Gradients

    Gradients.multiply = lambda *_: None


DDP, ZERO3 = Layout(dp_replicate=2), Layout(dp_shard=2, zero_stage=3)
EVERYWHERE = Layout()
BUGS: dict[Bug, Layout] = {
    half_a_bucket_not_reduced: DDP,
    one_layer_not_reduced: ZERO3,
    ranks_share_rows: DDP,
    last_micro_batch_dropped: EVERYWHERE,
    gradients_summed_over_micro_batches: EVERYWHERE,
    learning_rate_10_percent_off: EVERYWHERE,
    learning_rate_doubled: EVERYWHERE,
    no_weight_decay: EVERYWHERE,
    second_moment_forgotten_sooner: EVERYWHERE,
    every_fourth_update_skipped: EVERYWHERE,
    update_one_step_late: EVERYWHERE,
    other_data: EVERYWHERE,
    every_batch_twice: EVERYWHERE,
    other_weights: EVERYWHERE,
    attention_gradient_detached: EVERYWHERE,
    attention_sees_the_future: EVERYWHERE,
    attention_window_of_half_the_sequence: EVERYWHERE,
    norm_gains_not_trained: EVERYWHERE,
    no_master_weights: EVERYWHERE,
    gradients_in_8_bits: EVERYWHERE,
    tenth_of_the_gradients_kept: EVERYWHERE,
    loss_scale_left_in: EVERYWHERE,
}
"""Bugs, each with the layout that it is tried in, in two micro-batches per rank."""
