"""Where in the step a rank is, in words that do not depend on the number of layers.

A chunk's layers come in *runs* of equal ones (plain, or recomputed in one way). Memory at a layer so many from an end
of its run is affine in the lengths of all runs, which is what extrapolation needs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from trials.dryrun.runs import runs_of_chunk
from trials.dryrun.tracker import MemoryTracker
from trials.operators import in_backward
from trials.spec import Recompute
from trials.training.build import ModelPart


def follow(part: ModelPart, recompute: Recompute, tracker: MemoryTracker) -> None:
    """Tell the tracker the place whenever the part's forward or backward pass reaches another layer, and whose
    gradients appear."""
    chunk = part.chunk.chunk
    num_passes = 0

    def begin(_module: nn.Module, _args: Any) -> None:
        nonlocal num_passes
        if not in_backward():
            num_passes += 1
            tracker.phase, tracker.place = "forward", f"{num_passes}/{chunk} before"

    def end(_module: nn.Module, _args: Any, output: Any) -> None:
        if not in_backward():
            tracker.place = f"{num_passes}/{chunk} after"
            _follow_back(output, tracker.place, tracker)

    for layer, name in zip(part.model.layers.values(), _names(part, recompute), strict=True):
        _follow_layer(layer, f"{chunk}.{name}", tracker)
    part.model.register_forward_pre_hook(begin)
    part.model.register_forward_hook(end)
    _claim_gradients(part.model, tracker)


def _names(part: ModelPart, recompute: Recompute) -> list[str]:
    return [name for run in runs_of_chunk(recompute, part.chunk) for name in run.place_names]


def _follow_layer(layer: nn.Module, name: str, tracker: MemoryTracker) -> None:
    place = name

    def enter(*_: Any) -> None:
        nonlocal place
        if not in_backward():
            place = f"{tracker.place.partition('/')[0]}/{name}"
            tracker.place = place

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        if not in_backward():
            _follow_back(output, place, tracker)

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave)


def _follow_back(output: Any, place: str, tracker: MemoryTracker) -> None:
    """The backward pass is at ``place`` from when the gradient of ``output`` is there."""

    def arrive(_grads: Any) -> None:
        tracker.place = place

    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(arrive)


def _claim_gradients(model: nn.Module, tracker: MemoryTracker) -> None:
    """Count gradients as such from when they appear, also those of parameters FSDP has gathered for this pass."""
    hooked: Any = WeakIdKeyDictionary()

    def claim(parameter: Tensor) -> None:
        tracker.assign([parameter.grad], "grad")

    def find(module: nn.Module, _args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter not in hooked:
                hooked[parameter] = True
                parameter.register_post_accumulate_grad_hook(claim)  # type: ignore[no-untyped-call]

    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(find)
