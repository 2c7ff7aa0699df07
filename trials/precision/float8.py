"""Level O1-fp8: matmuls of the layers' linear modules in 8-bit floats, by torchao.

Inputs, weights and gradients are scaled by their largest element as they come (Micikevicius et al., arXiv 2209.05433):
e4m3 forward, e5m2 for gradients. Everything else is O1. torchao is imported only where the level is used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from trials.accelerator.device import architecture, capability, device_name, is_host, kind_of
from trials.failure import InfeasibleSpec
from trials.legality.float8 import LEVEL, MULTIPLE
from trials.models.base import TrainModel
from trials.spec import Precision

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 9)
"""CUDA compute capability with 8-bit float tensor cores: Ada."""
_ROCM_NAMES = ("gfx942", "gfx950")
"""Architectures of ROCm with 8-bit float matmuls: MI300 and MI350."""
_REMEDY = "use level O1"


def check_float8(device: torch.device) -> None:
    """Refuse a machine without torchao, or a device that cannot multiply 8-bit floats; a CPU emulates them.

    Raises:
        InfeasibleSpec: naming what is missing and the remedy.
    """
    if importlib.util.find_spec("torchao") is None:
        raise InfeasibleSpec(
            f"precision {LEVEL} needs the package torchao: pip install 'tune-cluster[fp8]' where trials run, or"
            f" {_REMEDY}"
        )
    if is_host(device):
        return
    kind = kind_of(device)
    if kind not in ("cuda", "rocm"):
        raise InfeasibleSpec(f"precision {LEVEL} runs on CUDA and ROCm devices, not on {kind}; {_REMEDY}")
    if kind == "rocm":
        if not (found := architecture(device)).startswith(_ROCM_NAMES):
            raise InfeasibleSpec(
                f"precision {LEVEL} needs an MI300 or newer, {device_name(device)} is {found}; {_REMEDY}"
            )
    elif (have := capability(device) or (0, 0)) < MIN_CAPABILITY:
        raise InfeasibleSpec(
            f"precision {LEVEL} needs compute capability {_version(MIN_CAPABILITY)}, {device_name(device)} has"
            f" {_version(have)}; {_REMEDY}"
        )


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def apply_float8(model: TrainModel, precision: Precision, device: torch.device, *, tp: int) -> None:
    """Let the layers' linear modules multiply 8-bit floats, in place; those of odd sizes keep 16 bits.

    Comes before tensor parallelism, which hooks into the modules. Weights stay as they are: the cast is part of the
    matmul, so that FSDP and the optimiser know nothing of it.

    Raises:
        InfeasibleSpec: no module qualifies.
    """
    if precision.level != LEVEL:
        return
    linears = [module for layer in model.layers.values() for module in layer.modules() if isinstance(module, nn.Linear)]
    chosen = [linear for linear in linears if _fits(linear, tp)]
    if linears and not chosen:
        raise InfeasibleSpec(f"precision {LEVEL}: no linear module of the layers has sizes divisible by {MULTIPLE}")
    if len(chosen) < len(linears):
        logger.warning("%d of %d linear modules keep 16 bits: their sizes do not divide", len(chosen), len(linears))
    ids = set(map(id, chosen))
    with torchao_float8() as float8:
        config = float8.Float8LinearConfig(emulate=emulates(device), pad_inner_dim=True)
        float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda module, _: id(module) in ids)
    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            module.forward = _like_linear(module)


def _fits(linear: nn.Linear, tp: int) -> bool:
    """Whether both sides are still multiples when one of them is divided by ``tp``."""
    return linear.in_features % (MULTIPLE * tp) == 0 and linear.out_features % (MULTIPLE * tp) == 0


def emulates(device: torch.device) -> bool:
    """Whether the products of 8-bit floats are computed in fp32, as on a CPU: the same numbers, but no faster."""
    return is_host(device)


@contextmanager
def torchao_float8() -> Iterator[Any]:
    """The package ``torchao.float8``. Its import complains of extensions for devices that are not here."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            float8: Any = importlib.import_module("torchao.float8")
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
    yield float8


def _like_linear(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module's ``forward`` as an operator called ``linear``, for patterns of recompute; it takes its input in the
    type of autocast, which torchao does on CUDA only."""
    forward = module.forward
    visible: Any = wrap_torch_function(_itself)
    linear: Callable[[Tensor], Tensor] = visible(_named_linear(forward))

    @functools.wraps(forward)
    def wrapped(x: Tensor) -> Tensor:
        kind = x.device.type
        return linear(x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x)

    return wrapped


def _named_linear(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def linear(x: Tensor) -> Tensor:
        return forward(x)

    return linear


def _itself(x: Tensor) -> tuple[Tensor]:
    return (x,)
