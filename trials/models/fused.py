"""Fused operators in place of a model's own: norms as one operator, and the kernels of Liger."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from trials.failure import InfeasibleSpec
from trials.operators import in_backward
from trials.reports import FusedOperator

Library = Literal["torch", "liger"]
LIGER = "liger_kernel"
"""Name under which Liger is imported."""
_ROTATE = "apply_rotary_pos_emb"
"""Name of the function that rotates queries and keys in the modules of transformers."""
_PARTS = {"rms_norm": "norm", "layer_norm": "norm", "swiglu": "gate", "geglu": "gate", "rope": "rotary"}
"""Names of operators by the modules of Liger that define them."""


class FusedMeter:
    """Counts the calls of fused operators, excluding recomputation and compiled graphs."""

    def __init__(self) -> None:
        self._num_places: Counter[tuple[str, Library]] = Counter()
        self._num_calls: Counter[tuple[str, Library]] = Counter()

    def place(self, name: str, library: Library) -> None:
        """Record one more place of the model that the operator replaces."""
        self._num_places[name, library] += 1

    def count(self, name: str, library: Library) -> None:
        if not torch.compiler.is_compiling() and not in_backward():
            self._num_calls[name, library] += 1

    def reset(self) -> None:
        """Reset the counts of calls."""
        self._num_calls.clear()

    def operators(self, num_steps: int) -> tuple[FusedOperator, ...]:
        """Return every operator with its calls per step since the last reset; 0 for one that was never called."""
        return tuple(
            FusedOperator(
                name=name,
                library=library,
                num_places=number,
                num_calls=round(self._num_calls[name, library] / max(1, num_steps)),
            )
            for (name, library), number in self._num_places.items()
        )


class FusedNorm(nn.Module):
    """A root-mean-square norm as one operator of torch, with the weight of the module that it replaces."""

    def __init__(self, weight: nn.Parameter, kind: NormKind, meter: FusedMeter) -> None:
        super().__init__()
        self.weight = weight
        self.kind = kind
        self._meter = meter

    def forward(self, x: Tensor) -> Tensor:
        self._meter.count("norm", "torch")
        # 1 plus a small weight is inexact in 16 bits.
        weight = self.weight.float() + self.kind.shift if self.kind.shift else self.weight
        dtype = torch.promote_types(x.dtype, weight.dtype)  # the fused kernel needs one type
        y = F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), self.kind.eps)
        return y.to(x.dtype) if self.kind.keeps_dtype else y


@dataclass(frozen=True, slots=True)
class NormKind:
    """What a root-mean-square norm computes."""

    eps: float
    shift: float
    """Number added to the weight: some norms learn the difference from 1."""
    keeps_dtype: bool
    """Whether the output has the type of the input; else it has the wider one of input and weight."""


def fuse(module: nn.Module, library: Library) -> FusedMeter:
    """Replace operators of an imported module, in place, before it is split.

    Raises:
        InfeasibleSpec: the library replaces nothing in this module.
    """
    meter = FusedMeter()
    if library == "liger":
        _apply_liger(module, meter)
    else:
        _fuse_norms(module, meter)
    return meter


def _fuse_norms(module: nn.Module, meter: FusedMeter) -> None:
    norms = [(name, one, kind) for name, one in module.named_modules() if (kind := kind_of(one))]
    if not norms:
        raise InfeasibleSpec(
            "fused torch: no root-mean-square norm in the model has separate operators; use fused auto"
        )
    for name, one, kind in norms:
        weight: Any = one.weight
        module.set_submodule(name, FusedNorm(weight, kind, meter))
        meter.place("norm", "torch")


def kind_of(module: nn.Module) -> NormKind | None:
    """Return the norm that the module computes by separate operators; None if it computes something else.

    The module is called on numbers, because names of classes differ.
    """
    parameters = dict(module.named_parameters())
    if isinstance(module, nn.RMSNorm | FusedNorm) or list(parameters) != ["weight"] or parameters["weight"].dim() != 1:
        return None
    eps = next((value for name in ("variance_epsilon", "eps") if isinstance(value := vars(module).get(name), float)), 0)
    with _disable_current_modes(), torch.no_grad():
        size = len(parameters["weight"])
        x = torch.linspace(-2, 3, 3 * size).sin().view(3, size) * torch.tensor([[1e-3], [1.0], [30.0]])
        weight = torch.linspace(0.5, 1.5, size)
        try:
            found = functional_call(module, {"weight": weight}, (x,))
            narrow = functional_call(module, {"weight": weight}, (x.bfloat16(),))
        except Exception:  # a module of another kind may raise anything
            return None
        if not isinstance(found, Tensor) or found.shape != x.shape:
            return None
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        for shift in (0.0, 1.0):
            if torch.allclose(found, normed * (weight + shift), rtol=1e-4, atol=1e-5):
                return NormKind(eps, shift, keeps_dtype=narrow.dtype == torch.bfloat16)
    return None


def check_liger(device_type: str) -> None:
    """Reject a machine without Liger, or a device that does not run its kernels.

    Raises:
        InfeasibleSpec: names what is missing and the remedy.
    """
    if device_type != "cuda":
        raise InfeasibleSpec(f"fused liger requires a CUDA device, not {device_type}; use fused torch")
    if importlib.util.find_spec(LIGER) is None:
        raise InfeasibleSpec(
            "fused liger requires the package liger-kernel: pip install 'tune-cluster[liger]' on the nodes, or use "
            "fused torch"
        )


def _apply_liger(module: Any, meter: FusedMeter) -> None:
    """Let Liger replace norms, gates and rotary positions; the runner computes head and loss.

    Liger replaces functions and classes of transformers for the whole process, which runs one trial.
    """
    patches: Any = importlib.import_module(f"{LIGER}.transformers.monkey_patch")
    kind = module.config.model_type
    if kind not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InfeasibleSpec(f"fused liger: Liger has no kernels for the model type {kind}; use torch or auto")
    patches._apply_liger_kernel_to_instance(model=module, fused_linear_cross_entropy=False, cross_entropy=False)
    for one in module.modules():
        forward = vars(one).get("forward")
        if (name := _name_of(forward)) is not None:
            one.forward = _counted(forward, name, meter)
    code = sys.modules[type(module).__module__]
    if (name := _name_of(getattr(code, _ROTATE, None))) is not None:
        setattr(code, _ROTATE, _counted(getattr(code, _ROTATE), name, meter))
    if not meter.operators(0):
        raise InfeasibleSpec(f"fused liger: Liger replaces nothing in the model type {kind}; use torch or auto")


def _name_of(function: Any) -> str | None:
    """Return the name in reports of an operator of Liger; None for other functions."""
    home = getattr(function, "__module__", None) or ""
    return _PARTS.get(home.rpartition(".")[2]) if home.startswith(f"{LIGER}.") else None


def _counted(function: Callable[..., Any], name: str, meter: FusedMeter) -> Callable[..., Any]:
    meter.place(name, "liger")

    @functools.wraps(function)
    def counted(*args: Any, **options: Any) -> Any:
        meter.count(name, "liger")
        return function(*args, **options)

    return counted


def merged(parts: Iterable[tuple[FusedOperator, ...]]) -> tuple[FusedOperator, ...]:
    """Merge the operators of a rank's chunks, of which each counts the places of the whole model."""
    found: dict[tuple[str, str], FusedOperator] = {}
    for operator in (one for part in parts for one in part):
        key = operator.name, operator.library
        if (before := found.get(key)) is not None:
            operator = dataclasses.replace(
                operator,
                num_calls=before.num_calls + operator.num_calls,
            )
        found[key] = operator
    return tuple(found.values())
