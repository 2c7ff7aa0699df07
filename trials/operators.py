"""Helpers for observing torch's operators: names, tensors among their arguments, and the running pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

Leaf = TypeVar("Leaf")

_NOT_IN_PLACE = ("__invert__", "__index__", "__int__")


def operator_name(function: Callable[..., Any]) -> str | None:
    """Return an operator's name as in user code, from the function passed to a torch function mode.

    Names are those of ``torch.nn.functional`` (``linear``, ``scaled_dot_product_attention``); ``x * y`` is ``mul``.

    Return ``None`` for everything else: in-place functions, attributes, and dispatcher calls, which come from libraries
    (including collectives), not from users.
    """
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return None
    return plain_operator(getattr(function, "__name__", ""))


def plain_operator(name: str) -> str | None:
    """Return an operator's name as in user code, from that of a torch function or method; see :func:`operator_name`."""
    if name in ("__get__", "__set__", "__setitem__", "__delitem__"):
        return None
    if name.startswith("__i") and name not in _NOT_IN_PLACE:
        return None
    if name.endswith("_") and not name.endswith("__"):
        return None
    return name.strip("_") or None


def leaves_in(value: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """Yield the objects of this kind in an operator's arguments or result, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves_in(item, kind)
    elif isinstance(value, dict):
        yield from leaves_in(list(value.values()), kind)


def map_leaves(change: Callable[[Leaf], Any], value: Any, kind: type[Leaf]) -> Any:
    """Replace every object of this kind in ``value``, in the order of :func:`leaves_in`."""
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
    """Whether the calling thread is inside a backward pass (a private function of torch; none is public)."""
    return torch._C._current_graph_task_id() != -1
