"""Tells which module is at work: forward by hooks, backward by when its autograd nodes were made."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trials.operators import in_backward
from trials.parallel.shards import plain_name
from trials.torch_support import parameter_groups

GRADIENTS = "gradients"
"""Stands for a module where gradients are reduced outside of any: in DDP's buckets."""
STEP = "step"
"""Stands for the module and the phase outside of the passes, and for the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlace:
    """Where in the step the program is; as in :class:`trials.reports.profile.CollectiveCount`."""

    module: str
    phase: str


class ModuleTracker:
    """Follows the modules of ``models`` while entered.

    Autograd numbers its nodes in the order of their making, so the numbers drawn during a module's forward pass tell
    whose a node is that runs in the backward pass. That needs no hooks on tensors, which would change the graph.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self._models = models
        self._running: list[tuple[str, str | None]] = []
        self._starts: list[int] = []
        self._nodes: list[tuple[int, int, str]] = []
        """First number of a module's nodes, the end of its numbers, its name; inner modules before outer ones."""
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> ModuleTracker:
        for model in self._models:
            for name, module in model.named_modules():
                self._follow(module, general_name(name))
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def place(self) -> ModulePlace:
        """Where the program is now."""
        if self._running:
            module, phase = self._running[-1]
            return ModulePlace(module=module, phase=phase or ("recompute" if in_backward() else "forward"))
        if in_backward():
            return ModulePlace(module=self._module_of_node(), phase="backward")
        return ModulePlace(module=STEP, phase=STEP)

    def _module_of_node(self) -> str:
        node: Any = torch._C._current_autograd_node()
        if node is None or node.name().endswith("AccumulateGrad"):
            return GRADIENTS
        number = node._sequence_nr()
        return next((name for first, end, name in self._nodes if first <= number < end), STEP)

    def _follow(self, module: nn.Module, name: str) -> None:
        for handle in (
            module.register_forward_pre_hook(lambda *_: self._enter(name), prepend=True),
            module.register_forward_hook(lambda *_: self._leave(), always_call=True),
        ):
            self._undo.callback(handle.remove)
        if isinstance(module, FSDPModule):
            # It gathers ahead, for a module that is not running yet, and reduces after.
            for group in parameter_groups(module._get_fsdp_state()):
                self._undo.enter_context(self._named(group, "unshard", name, None))
                self._undo.enter_context(self._named(group, "post_backward", name, "backward"))

    def _enter(self, name: str) -> None:
        self._running.append((name, None))
        self._starts.append(torch._C._autograd._get_sequence_nr())

    def _leave(self) -> None:
        name, _ = self._running.pop()
        start = self._starts.pop()
        if not in_backward():
            self._nodes.append((start, torch._C._autograd._get_sequence_nr(), name))

    @contextlib.contextmanager
    def _named(self, owner: Any, method: str, module: str, phase: str | None) -> Iterator[None]:
        """Have calls of the method count as the module's."""
        original: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(original)
        def named(*args: Any, **options: Any) -> Any:
            here = phase or self.place().phase
            self._running.append((module, "backward" if here == "recompute" else here))
            try:
                return original(*args, **options)
            finally:
                self._running.pop()

        setattr(owner, method, named)
        try:
            yield
        finally:
            delattr(owner, method)


def general_name(name: str) -> str:
    """A module's path with ``*`` for numbers, so that equal layers have one name; :data:`STEP` for the model."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", plain_name(name)) or STEP
