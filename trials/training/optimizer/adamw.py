"""Builds the workload's optimiser: AdamW on what this rank holds of the model, over fp32 copies of 16-bit weights."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trials.parallel.held import HeldTensor
from trials.spec import AdamW

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.optim.adamw import adamw

WORKSPACE_BYTES = 128 << 20
"""Most that fp32 copies of 16-bit gradients take at a time: enough for kernels of some tenth of a millisecond."""


def options_of(config: AdamW) -> dict[str, Any]:
    """The workload's choices by the names that torch has for them."""
    options = dataclasses.asdict(config)
    options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    return options


@functools.cache
def has_fused_adamw(device_type: str) -> bool:
    """Whether torch updates all tensors of such a device by one kernel, without temporaries: tried on one element."""
    state = UpdateState(torch.zeros(1, device=device_type), is_fused=True)
    try:
        adamw_update([state], [torch.zeros(1, device=device_type)], fused=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


class UpdateState:
    """What AdamW keeps of some elements of the model: their fp32 values, and its own states beside them."""

    def __init__(self, values: Tensor, master: Tensor | None = None, *, is_fused: bool | None = None) -> None:
        self.values = values
        """In the model; a view of it."""
        self.master = values.float() if master is None else master
        """``values`` themselves where they are fp32 and nobody gave a copy."""
        self.exp_avg = torch.zeros_like(self.master, memory_format=torch.preserve_format)
        self.exp_avg_sq = torch.zeros_like(self.master, memory_format=torch.preserve_format)
        if is_fused is None:
            is_fused = has_fused_adamw(self.master.device.type)
        # What is not fused reads the count on the host, which would have to wait for a device, once per tensor.
        self.num_steps = torch.zeros((), dtype=torch.float32, device=self.master.device if is_fused else "cpu")

    @property
    def is_copy(self) -> bool:
        return self.master is not self.values


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """Elements from ``start`` to ``stop`` of a held tensor, in memory order; all of them where ``stop`` is None."""

    held: HeldTensor
    state: UpdateState
    start: int = 0
    stop: int | None = None
    is_last: bool = True
    """Whether the held tensor's later elements, if any, are no slice of their own."""

    def gradient(self) -> Tensor | None:
        grad = self.held.gradient()
        return grad if grad is None or self.stop is None else grad.reshape(-1)[self.start : self.stop]


class LocalAdamW(torch.optim.Optimizer):
    """AdamW on this rank's part of every parameter as a plain tensor, over fp32 copies of 16-bit ones.

    The update is element-wise, so shards have nothing to tell each other, and tensors may be cut anywhere. Over
    DTensors every one of its operations is dispatched through the placements of all parameters, and first works them
    out, which takes longer than training a small model.

    They are updated group by group, so that fp32 copies of 16-bit gradients take no more than :data:`WORKSPACE_BYTES`,
    and new weights are on their way to other ranks while more are made. Nobody waits for those here. Gradients are
    divided by ``grad_scale()`` after that cast, where small ones do not underflow. States are made at the first step:
    FSDP may place shards anew before its first forward pass, and parameters have the memory format they train in.
    """

    def __init__(
        self, held: Sequence[HeldTensor], *, grad_scale: Callable[[], float] = lambda: 1.0, **hyper: Any
    ) -> None:
        parameters = [parameter for one in held for parameter in one.parameters]
        super().__init__(parameters, {})
        self._held = list(held)
        self._grad_scale = grad_scale
        self._hyper = hyper
        self._groups: list[list[Slice]] | None = None

    @property
    def states(self) -> list[UpdateState]:
        """All states there are, none before the first step."""
        return [one.state for group in self._groups or () for one in group]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        if self._groups is None:
            self._groups = list(self._grouped())
        self._update_all(self._groups)

    def _grouped(self) -> Iterator[list[Slice]]:
        return grouped(slices(self._held, WORKSPACE_BYTES // 4), WORKSPACE_BYTES // 4)

    def _update_all(self, groups: list[list[Slice]]) -> None:
        for group in groups:
            self._update([(one.state, grad) for one in group if (grad := one.gradient()) is not None])
            publish(group)

    def _update(self, pairs: list[tuple[UpdateState, Tensor]]) -> None:
        if not pairs:
            return
        states = [state for state, _ in pairs]
        fused = has_fused_adamw(states[0].master.device.type)
        adamw_update(states, self._in_fp32(pairs), fused=fused, **self._hyper)
        self._write_back([state for state in states if state.is_copy])

    def _write_back(self, copied: list[UpdateState]) -> None:
        if copied:
            torch._foreach_copy_([state.values for state in copied], [state.master for state in copied])

    def _in_fp32(self, pairs: list[tuple[UpdateState, Tensor]]) -> list[Tensor]:
        """Gradients as the update takes them: fp32, unscaled, and laid out in memory as their masters."""
        grads, short = [], []
        for state, grad in pairs:
            if grad.dtype == torch.float32 and grad.stride() == state.master.stride():
                grads.append(grad)
                continue
            grads.append(self._fp32_room(state.master))
            grads[-1].copy_(grad)
            if grad.dtype != torch.float32:
                short.append(grads[-1])
        scale = self._grad_scale()
        if short and scale != 1.0:
            torch._foreach_mul_(short, 1.0 / scale)
        return grads

    def _fp32_room(self, master: Tensor) -> Tensor:
        """Memory for the fp32 copy of a gradient, laid out as ``master``."""
        return torch.empty_like(master)


def publish(group: list[Slice]) -> None:
    """Begin to send what the group has completed."""
    for one in group:
        if one.is_last:
            one.held.publish()


def grouped(pieces: Iterable[Slice], most: int) -> Iterator[list[Slice]]:
    """What is updated together: one piece after the other, together no more than ``most`` elements unless it is one."""
    group: list[Slice] = []
    size = 0
    for piece in pieces:
        num_elements = piece.state.master.numel()
        if group and size + num_elements > most:
            yield group
            group, size = [], 0
        group.append(piece)
        size += num_elements
    if group:
        yield group


def slices(
    held: Iterable[HeldTensor], most: int, make: Callable[[Tensor], UpdateState] | None = None
) -> Iterator[Slice]:
    """What is held, cut so that no piece with a copy has more than ``most`` elements; ``make`` gives all pieces one."""
    for one in held:
        values = one.values()
        is_whole = make is None and values.dtype == torch.float32
        if is_whole or values.numel() <= most or not values.is_contiguous():
            yield Slice(one, (make or UpdateState)(values))
            continue
        flat = values.view(-1)
        for start in range(0, len(flat), most):
            stop = min(start + most, len(flat))
            yield Slice(one, (make or UpdateState)(flat[start:stop]), start, stop, is_last=stop == len(flat))


def adamw_update(
    states: list[UpdateState],
    grads: list[Tensor],
    *,
    fused: bool,
    betas: tuple[float, float] = (0.9, 0.999),
    lr: float = 1e-3,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    adamw(
        [state.master for state in states],
        grads,
        [state.exp_avg for state in states],
        [state.exp_avg_sq for state in states],
        [],
        [state.num_steps for state in states],
        foreach=not fused,
        fused=fused,
        amsgrad=False,
        maximize=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        eps=eps,
        weight_decay=weight_decay,
    )
