"""AdamW whose states and fp32 weights are in host memory, where it computes (ZeRO-Offload, Ren et al., 2101.06840).

Group by group, gradients are copied out while the processor updates the group before, and new weights are copied back
while it updates the next one. The device keeps weights and gradients, and needs nothing for the update itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trials.offload import host
from trials.offload.host import CopyStream, host_like
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


class HostAdamW(LocalAdamW):
    """:class:`LocalAdamW` with everything of its own in host memory, fp32 weights among it, also of fp32 parameters."""

    def __init__(self, held: Sequence[HeldTensor], device: torch.device, **options: Any) -> None:
        super().__init__(held, **options)
        self._device = device
        self._copies = CopyStream(device)
        self._sent: list[Tensor] = []
        """Gradients that are on their way out: some are copies of their own, and would be let go of before."""

    def _grouped(self) -> Iterator[list[Slice]]:
        most = WORKSPACE_BYTES // 4
        yield from grouped(slices(self._held, most, self._state), most)

    def _state(self, values: Tensor) -> UpdateState:
        with host.allocating():
            master = host_like(values, self._device, dtype=torch.float32)
            master.copy_(values)
            return UpdateState(values, master)

    def _update_all(self, groups: list[list[Slice]]) -> None:
        coming = self._send_for(groups[0])
        for i, group in enumerate(groups):
            (pairs, there), coming = coming, self._send_for(groups[i + 1]) if i + 1 < len(groups) else ([], None)
            if there is not None:
                there.synchronize()
            with host.allocating():
                self._update(pairs)
            self._copies.wait_for(self._copies.mark())
            publish(group)
        self._sent.clear()

    def _send_for(self, group: list[Slice]) -> tuple[list[tuple[UpdateState, Tensor]], torch.Event | None]:
        """Begin to copy the group's gradients out; the moment at which they are there."""
        pairs = []
        for one in group:
            grad = one.gradient()
            if grad is not None:
                pairs.append((one.state, host_like(grad, self._device)))
                self._copies.copy(pairs[-1][1], grad)
                self._sent.append(grad)
        return pairs, self._copies.mark()

    def _write_back(self, copied: list[UpdateState]) -> None:
        """Begin to copy new weights back, in the type of the parameters."""
        for state in copied:
            new = state.master
            if state.values.dtype != new.dtype:
                new = host_like(state.values, self._device)
                new.copy_(state.master)
            self._copies.copy(state.values, new)
