"""Applies the user's own autocast lists: operators that run in 16 bits, or in fp32, whatever autocast would do."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trials.models.base import TrainModel
from trials.operators import in_backward, leaves_in, map_leaves, operator_name
from trials.precision.mixed import compute_dtype
from trials.reports.findings import OperatorCast
from trials.spec import Precision

logger = logging.getLogger(__name__)


class CastMeter:
    """Counts the calls that the lists were applied to, except those of a recomputation."""

    def __init__(self, precision: Precision | None = None) -> None:
        self._lists = {} if precision is None else _by_name(precision)
        self._num_calls: Counter[str] = Counter()
        self._warned: set[str] = set()

    def count(self, name: str) -> None:
        self._num_calls[name] += 1

    def reset(self) -> None:
        """Forget what was counted."""
        self._num_calls.clear()

    def casts(self, num_steps: int) -> tuple[OperatorCast, ...]:
        """Calls per step since the last reset, for every name of the lists; 0 for a name never met."""
        self._warn_of_unmet_names()
        return tuple(
            OperatorCast(name=name, list=color, num_calls=round(self._num_calls[name] / max(1, num_steps)))
            for name, color in self._lists.items()
        )

    def _warn_of_unmet_names(self) -> None:
        for name in self._lists.keys() - self._num_calls.keys() - self._warned:
            logger.warning(
                "autocast %s list: this part of the model never calls %r; names are those of torch.nn.functional",
                self._lists[name],
                name,
            )
            self._warned.add(name)


class _CastMode(TorchFunctionMode):
    """Casts the floating-point arguments of listed operators and runs them with autocast off."""

    def __init__(self, lists: _Lists) -> None:
        super().__init__()
        self._lists = lists
        self._level = lists.level

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operator_name(func)
        # Without gradients it is FSDP moving weights around, not the model computing.
        is_ours = self._level == self._lists.level and torch.is_grad_enabled()
        dtype = self._lists.dtypes.get(name) if is_ours and name is not None else None
        first = next(leaves_in((args, kwargs), Tensor), None)
        if name is None or dtype is None or first is None or "out" in kwargs:
            return func(*args, **kwargs)
        if not in_backward():
            self._lists.meter.count(name)
        cast = functools.partial(_cast, dtype=dtype)
        with torch.autocast(first.device.type, enabled=False):
            return func(*map_leaves(cast, args, Tensor), **map_leaves(cast, kwargs, Tensor))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class _Lists:
    """Both lists, in force inside :meth:`active`."""

    def __init__(self, precision: Precision, meter: CastMeter) -> None:
        wide, narrow = torch.float32, compute_dtype(precision)
        self.dtypes = {name: narrow if color == "white" else wide for name, color in _by_name(precision).items()}
        self.meter = meter
        self.level = 0
        """How often it has been entered and not left; only the innermost casts."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self.level += 1
        try:
            with _CastMode(self):
                yield
        finally:
            self.level -= 1


def apply_autocast_lists(model: TrainModel, precision: Precision) -> CastMeter:
    """Apply ``precision.white`` and ``precision.black`` to everything the model runs, in place.

    The layers apply them on their own too: full recompute runs them outside the model's forward pass, and what
    watches a layer for selective recompute must see operators as they are cast.
    """
    if not precision.white and not precision.black:
        return CastMeter()
    meter = CastMeter(precision)
    lists = _Lists(precision, meter)
    for module in (model, *model.layers.values()):
        _run_inside(module, lists)
    return meter


def _run_inside(module: nn.Module, lists: _Lists) -> None:
    """Replace ``module.forward``; hooks, FSDP's among them, stay outside."""
    forward = module.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with lists.active():
            return forward(*args, **kwargs)

    module.forward = wrapped


def _by_name(precision: Precision) -> dict[str, str]:
    return dict.fromkeys(precision.white, "white") | dict.fromkeys(precision.black, "black")
