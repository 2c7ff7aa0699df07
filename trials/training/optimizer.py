"""AdamW on a rank's part of the model, on its device or in host memory."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trials import offload
from trials.offload import GRANULE_BYTES, CopyStream, Region, host_memory_for
from trials.parallel.mesh import HeldTensor
from trials.spec import AdamW

# The workload's optimiser: AdamW on this rank's part of the model, with fp32 copies of 16-bit weights.


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.optim.adamw import adamw

WORKSPACE_BYTES = 128 << 20
"""Maximum bytes of fp32 copies of 16-bit gradients at a time: enough for kernels of about 0.1 ms."""


def options_of(config: AdamW) -> dict[str, Any]:
    """Return the workload's options under torch's names."""
    options = dataclasses.asdict(config)
    del options["clip_norm"]  # the training step applies it
    options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    return options


@functools.cache
def has_fused_adamw(device_type: str) -> bool:
    """Whether torch has a fused kernel without temporaries for this kind of device; tested on one element."""
    state = UpdateState(torch.zeros(1, device=device_type), is_fused=True)
    try:
        adamw_update([state], [torch.zeros(1, device=device_type)], fused=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


class UpdateState:
    """AdamW's state for some elements of the model: their fp32 values, and its moments."""

    def __init__(self, values: Tensor, master: Tensor | None = None, *, is_fused: bool | None = None) -> None:
        self.values = values
        """The elements in the model; a view."""
        self.master = values.float() if master is None else master
        """``values`` themselves if they are fp32 and no copy was passed."""
        self.exp_avg = torch.zeros_like(self.master, memory_format=torch.preserve_format)
        self.exp_avg_sq = torch.zeros_like(self.master, memory_format=torch.preserve_format)
        if is_fused is None:
            is_fused = has_fused_adamw(self.master.device.type)
        # The non-fused version reads the step count on the host, which would wait for the device once per tensor.
        self.num_steps = torch.zeros((), dtype=torch.float32, device=self.master.device if is_fused else "cpu")

    @property
    def is_copy(self) -> bool:
        return self.master is not self.values


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``start`` to ``stop`` of a held tensor, in memory order; to its end if ``stop`` is None."""

    held: HeldTensor
    state: UpdateState
    start: int = 0
    stop: int | None = None
    is_last: bool = True
    """Whether no further slice follows in the held tensor."""

    def gradient(self) -> Tensor | None:
        grad = self.held.gradient()
        return grad if grad is None or self.stop is None else grad.reshape(-1)[self.start : self.stop]


class LocalAdamW(torch.optim.Optimizer):
    """AdamW on this rank's part of every parameter as a plain tensor, with fp32 copies of 16-bit ones.

    The update is elementwise, so shards need no communication and tensors may be cut anywhere. With DTensors, each of
    its operations would be dispatched through the placements of all parameters and first derive them, which takes
    longer than training a small model.

    Parameters are updated in groups, so that fp32 copies of 16-bit gradients take at most :data:`WORKSPACE_BYTES`, and
    new weights are sent to other ranks while the next ones are computed. The update does not wait for them. Gradients
    are multiplied by ``grad_factor()`` after the cast, so that small ones do not underflow. States are created in the
    first step: FSDP may move shards before its first forward pass, and parameters have their final memory format then.
    """

    def __init__(
        self, held: Sequence[HeldTensor], *, grad_factor: Callable[[], float | Tensor] = lambda: 1.0, **hyper: Any
    ) -> None:
        parameters = [parameter for one in held for parameter in one.parameters]
        super().__init__(parameters, {})
        self._held = list(held)
        self._grad_factor = grad_factor
        self._hyper = hyper
        self._groups: list[list[Slice]] | None = None

    @property
    def states(self) -> list[UpdateState]:
        """All existing states; none before the first step."""
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
        """Return gradients for the update: fp32, unscaled and clipped, in the memory layout of their masters."""
        grads, short = [], []
        for state, grad in pairs:
            if grad.dtype == torch.float32 and grad.stride() == state.master.stride():
                grads.append(grad)
                continue
            grads.append(self._fp32_room(state.master))
            grads[-1].copy_(grad)
            if grad.dtype != torch.float32:
                short.append(grads[-1])
        if short:
            multiply(short, self._grad_factor())
        return grads

    def _fp32_room(self, master: Tensor) -> Tensor:
        """Return memory for the fp32 copy of a gradient, in the layout of ``master``."""
        return torch.empty_like(master)


def multiply(gradients: list[Tensor], factor: float | Tensor) -> None:
    """Multiply the gradients by a factor, which may be on a device, in place."""
    if isinstance(factor, Tensor):
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    elif factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def publish(group: list[Slice]) -> None:
    """Start sending the parts that the group has completed."""
    for one in group:
        if one.is_last:
            one.held.publish()


def grouped(pieces: Iterable[Slice], most: int) -> Iterator[list[Slice]]:
    """Yield groups of consecutive pieces with at most ``most`` elements in total, or of one larger piece."""
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
    """Cut what is held so that no piece with a copy has more than ``most`` elements; ``make`` copies all pieces."""
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


# AdamW with states and fp32 weights in host memory, computed there (ZeRO-Offload, Ren et al., 2101.06840).
#
# Group by group, gradients are copied out while the processor updates the previous group, and new weights are copied
# back while it updates the next one, both at the same time. The device keeps weights and gradients, and needs no
# further memory for the update. Only the ends of copies are page-locked: buffers for two groups, and fp32 weights if
# the model's are also fp32.


def build_optimizer(
    config: AdamW,
    held: Sequence[HeldTensor],
    device: torch.device,
    *,
    grad_factor: Callable[[], float | Tensor],
    on_host: bool,
) -> LocalAdamW | None:
    """Build AdamW for this rank's part; None for a rank without parameters, such as a pipeline stage without layers.

    ``grad_factor()`` gives what 16-bit gradients are multiplied by in fp32; those in fp32 come multiplied.
    """
    if not held:
        return None
    options: dict[str, Any] = {"grad_factor": grad_factor, **options_of(config)}
    return HostAdamW(held, device, **options) if on_host else LocalAdamW(held, **options)


class _Buffers:
    """Page-locked memory for one group at a time: outgoing gradients and returning 16-bit weights."""

    def __init__(self, gradients: Region, weights: Region | None) -> None:
        self._gradients = gradients
        self._weights = weights
        self._used = {"gradients": 0, "weights": 0}

    def room_for_gradient(self, grad: Tensor) -> Tensor:
        return self._room("gradients", self._gradients, grad)

    def room_for_weights(self, values: Tensor) -> Tensor:
        assert self._weights is not None
        return self._room("weights", self._weights, values)

    def begin(self) -> None:
        """Prepare for another group's gradients, once the host has read the previous ones."""
        self._used["gradients"] = 0

    def begin_weights(self) -> None:
        """Wait until the previous weights have left; usually long ago, as another group was updated in between."""
        if self._weights is not None:
            self._used["weights"] = 0
            if self._weights.busy_until is not None:
                self._weights.busy_until.synchronize()

    def sent(self, mark: torch.Event | None) -> None:
        if self._weights is not None:
            self._weights.busy_until = mark

    def _room(self, kind: str, region: Region, tensor: Tensor) -> Tensor:
        start = self._used[kind]
        self._used[kind] += _padded(tensor.nbytes)
        return region.like(tensor, start=start)


class HostAdamW(LocalAdamW):
    """A :class:`LocalAdamW` with all its data in host memory, including fp32 copies of fp32 parameters."""

    def __init__(self, held: Sequence[HeldTensor], device: torch.device, **options: Any) -> None:
        super().__init__(held, **options)
        self._device = device
        self._memory = host_memory_for(device)
        self._out, self._back = CopyStream(device), CopyStream(device)
        self._buffers: list[_Buffers] = []
        """One for even and one for odd groups."""
        self._current: _Buffers
        self._workspace: Tensor | None = None
        self._room_used = 0

    def _grouped(self) -> Iterator[list[Slice]]:
        most = WORKSPACE_BYTES // 4
        yield from grouped(slices(self._held, most, self._state), most)

    def _state(self, values: Tensor) -> UpdateState:
        with offload.allocating():
            if values.dtype == torch.float32:
                master = self._memory.take(values.nbytes).like(values)
            else:
                master = torch.empty_like(values, device="cpu", dtype=torch.float32)
            master.copy_(values)
            return UpdateState(values, master)

    def _make_buffers(self, groups: list[list[Slice]]) -> None:
        """Allocate the buffers of all steps, sized for the largest group."""
        gradients = max(sum(_padded(one.state.values.nbytes) for one in group) for group in groups)
        short = max(sum(_padded(one.state.values.nbytes) for one in group if _is_short(one.state)) for group in groups)
        for _ in groups[:2]:
            weights = self._memory.take(short) if short else None
            self._buffers.append(_Buffers(self._memory.take(gradients), weights))

    def _update_all(self, groups: list[list[Slice]]) -> None:
        if not self._buffers:
            self._make_buffers(groups)
        self._out.follow()
        coming = self._send_for(groups, 0)
        for i, group in enumerate(groups):
            (pairs, there), coming = coming, self._send_for(groups, i + 1)
            if there is not None:
                there.synchronize()  # so the device has also finished with the weights
            buffers = self._current = self._buffers[i % 2]
            buffers.begin_weights()
            self._room_used = 0
            with offload.allocating():
                self._update([(state, grad) for state, grad, _ in pairs])
            mark = self._back.mark()
            buffers.sent(mark)
            self._back.wait_for(mark)
            publish(group)

    def _send_for(
        self, groups: list[list[Slice]], number: int
    ) -> tuple[list[tuple[UpdateState, Tensor, Tensor]], torch.Event | None]:
        """Start copying out the gradients of group ``number``, if it exists. Return the states, the copies, their
        sources, which nothing else may hold, and an event at which all have arrived."""
        if number >= len(groups):
            return [], None
        buffers = self._buffers[number % 2]
        buffers.begin()
        triples = []
        for one in groups[number]:
            with self._out.used():  # some are cut from copies, which are created now
                grad = one.gradient()
            if grad is not None:
                triples.append((one.state, buffers.room_for_gradient(grad), grad))
                self._out.copy(triples[-1][1], grad)
        return triples, self._out.mark()

    def _fp32_room(self, master: Tensor) -> Tensor:
        """Return memory shared by all groups: newly mapped pages cost more than the copy."""
        if self._workspace is None:
            assert self._groups is not None
            most = max(sum(_padded(one.state.master.nbytes) for one in group) for group in self._groups)
            self._workspace = torch.empty(most, dtype=torch.uint8)
        start, self._room_used = self._room_used, self._room_used + _padded(master.nbytes)
        return Region(self._workspace).like(master, start=start)

    def _write_back(self, copied: list[UpdateState]) -> None:
        """Start copying new weights back, in the type of the parameters."""
        for state in copied:
            new = state.master
            if _is_short(state):
                new = self._current.room_for_weights(state.values)
                new.copy_(state.master)
            self._back.copy(state.values, new)


def _is_short(state: UpdateState) -> bool:
    return state.values.dtype != state.master.dtype


def _padded(num_bytes: int) -> int:
    """Round up so that what follows is aligned for copies."""
    return -(-num_bytes // GRANULE_BYTES) * GRANULE_BYTES
