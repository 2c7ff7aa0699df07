"""Helpers for watching torch's operators: their names, the tensors among their arguments, which pass is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

Leaf = TypeVar("Leaf")

_NOT_IN_PLACE = ("__invert__", "__index__", "__int__")


def operator_name(function: Callable[..., Any]) -> str | None:
    """Name of an operator as users write it, from the function that a torch function mode is given.

    Names are those of ``torch.nn.functional`` (``linear``, ``scaled_dot_product_attention``); ``x * y`` is ``mul``.

    ``None`` for what is no operator on tensors by itself: in-place functions, attributes, and calls of the dispatcher,
    which libraries make (collectives among them) and users do not write.
    """
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return None
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__setitem__", "__delitem__"):
        return None
    if name.startswith("__i") and name not in _NOT_IN_PLACE:
        return None
    if name.endswith("_") and not name.endswith("__"):
        return None
    return name.strip("_") or None


def leaves_in(value: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """The objects of this kind in an operator's arguments or result, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves_in(item, kind)
    elif isinstance(value, dict):
        yield from leaves_in(list(value.values()), kind)


def map_leaves(change: Callable[[Leaf], Any], value: Any, kind: type[Leaf]) -> Any:
    """``value`` with every object of this kind replaced, in the order of :func:`leaves_in`."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple | list):
        return type(value)(map_leaves(change, item, kind) for item in value)
    if isinstance(value, dict):
        return {key: map_leaves(change, item, kind) for key, item in value.items()}
    return value


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass (private in torch, without a public form)."""
    return torch._C._current_graph_task_id() != -1
