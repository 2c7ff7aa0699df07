"""Recompute policies: which activations are dropped after the forward pass and computed again in the backward."""

from __future__ import annotations

from typing import assert_never

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trials.models.llama import Llama
from trials.spec import FullRecompute, NoRecompute, Recompute


def apply_recompute(model: Llama, recompute: Recompute) -> None:
    """Wrap the layers that recompute, in place."""
    match recompute:
        case NoRecompute():
            return
        case FullRecompute(num_layers=num_layers):
            for name in list(model.layers)[:num_layers]:
                # The model draws no random numbers, so there is no state to restore.
                model.layers[name] = checkpoint_wrapper(model.layers[name], preserve_rng_state=False)
        case _:
            assert_never(recompute)
