"""AdamW whose states and fp32 weights are in host memory, where it computes (ZeRO-Offload, Ren et al., 2101.06840).

Group by group, gradients are copied out while the processor updates the group before, and new weights are copied back
while it updates the next one, both at once. The device keeps weights and gradients, and needs nothing for the update.
Of page-locked memory there is what copies run from and to: buffers for two groups, and fp32 weights where the model has
them in fp32 too; the rest has no need of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trials.offload import host
from trials.offload.host import GRANULE_BYTES, CopyStream, Region, memory_beside
from trials.parallel.held import HeldTensor
from trials.precision.mixed import LossScaler
from trials.spec import AdamW
from trials.training.optimizer.adamw import (
    WORKSPACE_BYTES,
    LocalAdamW,
    Slice,
    UpdateState,
    grouped,
    options_of,
    publish,
    slices,
)


def build_optimizer(
    config: AdamW, held: Sequence[HeldTensor], scaler: LossScaler | None, device: torch.device, *, on_host: bool
) -> LocalAdamW | None:
    """AdamW on what this rank holds; None for a rank without parameters, as a pipeline stage of no layers may be."""
    if not held:
        return None
    options: dict[str, Any] = {"grad_scale": lambda: 1.0 if scaler is None else scaler.scale, **options_of(config)}
    return HostAdamW(held, device, **options) if on_host else LocalAdamW(held, **options)


class _Buffers:
    """Page-locked memory for one group at a time: gradients on their way out, new 16-bit weights on their way back."""

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
        """Another group's gradients come, once the host has read those before."""
        self._used["gradients"] = 0

    def begin_weights(self) -> None:
        """Wait until the weights before have left, which is long ago: another group has been updated since."""
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
    """:class:`LocalAdamW` with everything of its own in host memory, fp32 weights among it, also of fp32 parameters."""

    def __init__(self, held: Sequence[HeldTensor], device: torch.device, **options: Any) -> None:
        super().__init__(held, **options)
        self._device = device
        self._memory = memory_beside(device)
        self._out, self._back = CopyStream(device), CopyStream(device)
        self._buffers: list[_Buffers] = []
        """For every other group."""
        self._current: _Buffers
        self._workspace: Tensor | None = None
        self._room_used = 0

    def _grouped(self) -> Iterator[list[Slice]]:
        most = WORKSPACE_BYTES // 4
        yield from grouped(slices(self._held, most, self._state), most)

    def _state(self, values: Tensor) -> UpdateState:
        with host.allocating():
            if values.dtype == torch.float32:
                master = self._memory.take(values.nbytes).like(values)
            else:
                master = torch.empty_like(values, device="cpu", dtype=torch.float32)
            master.copy_(values)
            return UpdateState(values, master)

    def _make_buffers(self, groups: list[list[Slice]]) -> None:
        """What all steps use, as large as the largest group needs."""
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
                there.synchronize()  # and so the device is through with the weights too
            buffers = self._current = self._buffers[i % 2]
            buffers.begin_weights()
            self._room_used = 0
            with host.allocating():
                self._update([(state, grad) for state, grad, _ in pairs])
            mark = self._back.mark()
            buffers.sent(mark)
            self._back.wait_for(mark)
            publish(group)

    def _send_for(
        self, groups: list[list[Slice]], number: int
    ) -> tuple[list[tuple[UpdateState, Tensor, Tensor]], torch.Event | None]:
        """Begin to copy gradients of group ``number`` out, if there is one: states, copies and what is copied, which
        nobody else may hold; the moment at which all are there."""
        if number >= len(groups):
            return [], None
        buffers = self._buffers[number % 2]
        buffers.begin()
        triples = []
        for one in groups[number]:
            with self._out.used():  # some are cut from copies, which are made now
                grad = one.gradient()
            if grad is not None:
                triples.append((one.state, buffers.room_for_gradient(grad), grad))
                self._out.copy(triples[-1][1], grad)
        return triples, self._out.mark()

    def _fp32_room(self, master: Tensor) -> Tensor:
        """Memory that serves one group after the other: pages that are new to the process cost more than the copy."""
        if self._workspace is None:
            assert self._groups is not None
            most = max(sum(_padded(one.state.master.nbytes) for one in group) for group in self._groups)
            self._workspace = torch.empty(most, dtype=torch.uint8)
        start, self._room_used = self._room_used, self._room_used + _padded(master.nbytes)
        return Region(self._workspace).like(master, start=start)

    def _write_back(self, copied: list[UpdateState]) -> None:
        """Begin to copy new weights back, in the type of the parameters."""
        for state in copied:
            new = state.master
            if _is_short(state):
                new = self._current.room_for_weights(state.values)
                new.copy_(state.master)
            self._back.copy(state.values, new)


def _is_short(state: UpdateState) -> bool:
    return state.values.dtype != state.master.dtype


def _padded(num_bytes: int) -> int:
    """With space so that what follows begins where copies like it."""
    return -(-num_bytes // GRANULE_BYTES) * GRANULE_BYTES
