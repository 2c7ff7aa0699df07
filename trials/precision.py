"""Mixed precision: autocast with custom lists, 16-bit parameters, loss scaling. Depends only on ``models``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.overrides import TorchFunctionMode, wrap_torch_function

from trials.accelerator.device import architecture, capability, device_name, is_host, kind_of
from trials.failure import InfeasibleSpec
from trials.legality import MULTIPLE
from trials.models.model import TrainModel
from trials.operators import in_backward, leaves_in, map_leaves, operator_name
from trials.reports import LossScaleState, OperatorCast
from trials.spec import Candidate, LossScale, Precision

# Autocast, 16-bit parameters with fp32 masters, and loss scaling.


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIN_CAPABILITY = {"tf32": (8, 0), "bfloat16": (8, 0), "float16": (7, 0)}
"""Lowest CUDA compute capability with tensor cores for the number format: Ampere, Volta. All devices have float32."""


def check_device(precision: Precision, device: torch.device) -> None:
    """Reject a 16-bit type that the CUDA device does not accelerate.

    Raises:
        InfeasibleSpec: names the device and what it lacks.
    """
    wanted, have = MIN_CAPABILITY.get(precision.dtype), capability(device)
    if have is None or wanted is None:
        return
    if have < wanted:
        name = device_name(device)
        raise InfeasibleSpec(
            f"{precision.dtype} is slow on {name}: it requires compute capability {_version(wanted)}, the device "
            f"has {_version(have)}; {_remedy(precision.dtype, have)}"
        )


def _version(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))


def _remedy(dtype: str, have: tuple[int, int]) -> str:
    """Name an alternative to ``dtype`` for a device of this capability."""
    if dtype == "bfloat16" and have >= MIN_CAPABILITY["float16"]:
        return "use float16 with loss scaling, or level O0 (float32)"
    return "use level O0 (float32)"


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the type of matmuls: autocast's under O1, the parameters' under O2, else fp32."""
    return _DTYPES[precision.dtype]


def autocast(candidate: Candidate, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context of the forward pass: autocast for O1 and O1-fp8, else nothing.

    Autocast's cache keeps a 16-bit copy of every weight until the forward pass ends. ZeRO-3 gathers weights for each
    use, so there the cache would save no casts and keep the whole model in memory; it is off.
    """
    precision = candidate.precision
    if precision.base != "O1":
        return contextlib.nullcontext()
    keeps_casts = candidate.layout.zero_stage < 3
    return torch.autocast(device.type, dtype=compute_dtype(precision), cache_enabled=keeps_casts)


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of fp32 products during the body: of matmuls, as in ``torch.set_float32_matmul_precision``, and
    of cuDNN's convolutions, for which torch allows TF32 by default.

    It uses ``allow_tf32``, which every release supports and inductor reads.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    _set_precision(precision, tf32_convolutions=precision != "highest")
    try:
        yield
    finally:
        _set_precision(before[0], tf32_convolutions=before[1])


def _set_precision(precision: str, *, tf32_convolutions: bool) -> None:
    with warnings.catch_warnings():
        # Some releases warn that this will be removed, and the others lack its replacement.
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32_convolutions


def parameter_dtype(precision: Precision, *, sharded: bool) -> torch.dtype:
    """Return the type of stored parameters. FSDP stores fp32 and casts on gathering: its shards are the masters."""
    return _DTYPES[precision.dtype] if keeps_masters(precision, sharded=sharded) else torch.float32


def keeps_masters(precision: Precision, *, sharded: bool) -> bool:
    """Whether the optimiser must keep fp32 copies of 16-bit parameters."""
    return precision.base == "O2" and not sharded


def mixed_precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    """FSDP2's form of O2: gather and compute in 16 bits, reduce gradients in fp32."""
    if precision.base != "O2":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=_DTYPES[precision.dtype], reduce_dtype=torch.float32)


class LossScaler:
    """Implements the schedule of :class:`~trials.spec.LossScale`.

    torch's scaler backs off at the first overflow, this one after ``backoff_interval`` in a row. The caller reports
    overflows, so that all ranks agree in every layout.
    """

    def __init__(self, config: LossScale) -> None:
        self.config = config
        self.scale = config.initial
        self.num_skipped = 0
        self._num_finite = 0
        self._num_overflowed = 0

    def update(self, *, finite: bool) -> None:
        """Update the scale, given whether the step's gradients were finite."""
        self.num_skipped += not finite
        if not self.config.dynamic:
            return
        self._num_finite = self._num_finite + 1 if finite else 0
        self._num_overflowed = 0 if finite else self._num_overflowed + 1
        if self._num_finite == self.config.growth_interval:
            self._rescale(self.config.growth_factor)
        elif self._num_overflowed == self.config.backoff_interval:
            self._rescale(self.config.backoff_factor)

    def state(self) -> LossScaleState:
        """Current scale and counters."""
        return LossScaleState(
            scale=self.scale,
            num_finite=self._num_finite,
            num_overflowed=self._num_overflowed,
            num_skipped=self.num_skipped,
        )

    def _rescale(self, factor: float) -> None:
        rescaled = self.scale * factor
        # The scaled loss is computed in fp32, which limits the scale.
        if 0.0 < rescaled < torch.finfo(torch.float32).max:
            self.scale = rescaled
        self._num_finite = self._num_overflowed = 0


# Custom autocast lists: operators that run in 16 bits or fp32, overriding autocast.


logger = logging.getLogger(__name__)


class CastMeter:
    """Counts operator calls that the lists changed, excluding recomputation."""

    def __init__(self, precision: Precision | None = None) -> None:
        self._lists = {} if precision is None else _by_name(precision)
        self._num_calls: Counter[str] = Counter()
        self._warned: set[str] = set()

    def count(self, name: str) -> None:
        self._num_calls[name] += 1

    def reset(self) -> None:
        """Reset the counts."""
        self._num_calls.clear()

    def casts(self, num_steps: int) -> tuple[OperatorCast, ...]:
        """Return calls per step since the last reset, for every name in the lists; 0 for a name that never occurred."""
        self._warn_of_unmet_names()
        return tuple(
            OperatorCast(name=name, list=color, num_calls=round(self._num_calls[name] / max(1, num_steps)))
            for name, color in self._lists.items()
        )

    def _warn_of_unmet_names(self) -> None:
        for name in self._lists.keys() - self._num_calls.keys() - self._warned:
            logger.warning(
                "autocast %s list: this part of the model never calls %r; use names from torch.nn.functional",
                self._lists[name],
                name,
            )
            self._warned.add(name)


class _CastMode(TorchFunctionMode):
    """Casts floating-point arguments of listed operators and runs them with autocast off."""

    def __init__(self, lists: _Lists) -> None:
        super().__init__()
        self._lists = lists
        self._level = lists.level

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operator_name(func)
        # Without gradients, FSDP is moving weights, and the model is not computing.
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
    """Both lists, active inside :meth:`active`."""

    def __init__(self, precision: Precision, meter: CastMeter) -> None:
        wide, narrow = torch.float32, compute_dtype(precision)
        self.dtypes = {name: narrow if color == "white" else wide for name, color in _by_name(precision).items()}
        self.meter = meter
        self.level = 0
        """Nesting depth; only the innermost level casts."""

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

    Layers also apply them separately: full recompute runs layers outside the model's forward pass, and selective
    recompute must see the operators as cast.
    """
    if not precision.white and not precision.black:
        return CastMeter()
    meter = CastMeter(precision)
    lists = _Lists(precision, meter)
    for module in (model, *model.layers.values()):
        _run_inside(module, lists)
    return meter


def _run_inside(module: nn.Module, lists: _Lists) -> None:
    """Replace ``module.forward``; hooks, including FSDP's, stay outside."""
    forward = module.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with lists.active():
            return forward(*args, **kwargs)

    module.forward = wrapped


def _by_name(precision: Precision) -> dict[str, str]:
    return dict.fromkeys(precision.white, "white") | dict.fromkeys(precision.black, "black")


# Level O2: modules in fp32.


HEADS = ("output", "fc")
"""Names of the modules whose outputs become the loss."""


def wide_modules(model: nn.Module, precision: Precision) -> list[nn.Module]:
    """Return the outermost modules of which a pattern of ``precision.keep_fp32`` matches the full path or the name of
    the class. Containers are not called, so they do not count."""
    patterns = [re.compile(pattern) for pattern in precision.keep_fp32]
    return list(_outermost(model, "", patterns)) if patterns else []


def _outermost(module: nn.Module, prefix: str, patterns: Sequence[re.Pattern[str]]) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        names = (path, type(child).__name__.removeprefix("FSDP"))  # FSDP2 prepends this to the names of classes
        is_called = not isinstance(child, nn.ModuleDict | nn.ModuleList)
        if is_called and any(pattern.fullmatch(one) for pattern in patterns for one in names):
            yield child
        else:
            yield from _outermost(child, f"{path}.", patterns)


def store(model: TrainModel, precision: Precision, *, sharded: bool, is_whole: bool) -> None:
    """Convert parameters to the type they are stored in, except those of modules that stay in fp32.

    Raises:
        InfeasibleSpec: no module of the whole model matches the patterns, or modules of both types share a weight.
    """
    wide = wide_modules(model, precision)
    if precision.keep_fp32 and not wide:
        message = f"keep_fp32: no module of the model matches {' or '.join(map(repr, precision.keep_fp32))}"
        if is_whole:
            raise InfeasibleSpec(message)
        logger.warning("%s on this stage", message)
    inside = {one for module in wide for one in module.modules()}
    outside = [p for one in model.modules() if one not in inside for p in one.parameters(recurse=False)]
    kept = {parameter: parameter.data for one in inside for parameter in one.parameters(recurse=False)}
    if any(parameter in kept for parameter in outside):
        raise InfeasibleSpec("keep_fp32: a module in fp32 shares a weight with one in 16 bits; name both or neither")
    model.store_as(parameter_dtype(precision, sharded=sharded))
    for parameter, values in kept.items():
        parameter.data = values
    for module in wide:
        module.float()


def compute_wide(model: TrainModel, precision: Precision) -> None:
    """Let the modules that stay in fp32 cast their inputs to it and their outputs back to 16 bits, in place. The head's
    outputs stay in fp32 for the loss."""
    heads = [getattr(model, name, None) for name in HEADS]
    for module in wide_modules(model, precision):
        back = torch.float32 if module in heads else compute_dtype(precision)
        module.forward = _widened(module.forward, back)


def _widened(forward: Callable[..., Any], back: torch.dtype) -> Callable[..., Any]:
    widen, narrow = functools.partial(_cast, dtype=torch.float32), functools.partial(_cast, dtype=back)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*map_leaves(widen, args, Tensor), **map_leaves(widen, kwargs, Tensor))
        return map_leaves(narrow, (outputs,), Tensor)[0]

    return wrapped


# Levels O1-fp8 and O2-fp8: matmuls of the layers' linear modules in 8-bit floats, by torchao.
#
# Inputs, weights and gradients are scaled dynamically by their largest element (Micikevicius et al., arXiv 2209.05433):
# e4m3 forward, e5m2 for gradients. Everything else is O1 or O2. torchao is imported only for these levels.


FLOAT8_MIN_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with 8-bit float tensor cores: Ada."""
_ROCM_NAMES = ("gfx942", "gfx950")
"""ROCm architectures with 8-bit float matmuls: MI300 and MI350."""


def check_float8(precision: Precision, device: torch.device) -> None:
    """Reject a machine without torchao or a device that cannot multiply 8-bit floats; CPUs emulate them.

    Raises:
        InfeasibleSpec: names what is missing and the remedy.
    """
    level, remedy = precision.level, f"use level {precision.base}"
    if importlib.util.find_spec("torchao") is None:
        raise InfeasibleSpec(
            f"precision {level} requires the package torchao: pip install 'tune-cluster[fp8]' on the nodes, or {remedy}"
        )
    if is_host(device):
        return
    kind = kind_of(device)
    if kind not in ("cuda", "rocm"):
        raise InfeasibleSpec(f"precision {level} requires a CUDA or ROCm device, not {kind}; {remedy}")
    if kind == "rocm":
        if not (found := architecture(device)).startswith(_ROCM_NAMES):
            raise InfeasibleSpec(
                f"precision {level} requires an MI300 or newer, {device_name(device)} is {found}; {remedy}"
            )
    elif (have := capability(device) or (0, 0)) < FLOAT8_MIN_CAPABILITY:
        raise InfeasibleSpec(
            f"precision {level} requires compute capability {_version(FLOAT8_MIN_CAPABILITY)}, "
            f"{device_name(device)} has {_version(have)}; {remedy}"
        )


def apply_float8(model: TrainModel, precision: Precision, device: torch.device, *, tp: int, num_shards: int) -> None:
    """Make the layers' linear modules multiply 8-bit floats, in place; modules of unsuitable sizes keep 16 bits.

    Call it before tensor parallelism, which hooks into the modules. The cast is part of the matmul, so FSDP and the
    optimiser are not affected, except with ``precision.fp8_gather``: FSDP casts such weights before it gathers them. It
    does so only if every one of ``num_shards`` ranks holds as many rows.

    Raises:
        InfeasibleSpec: no module qualifies.
    """
    if not precision.is_fp8:
        return
    linears = [module for layer in model.layers.values() for module in layer.modules() if isinstance(module, nn.Linear)]
    wide = {one for module in wide_modules(model, precision) for one in module.modules()}
    linears = [linear for linear in linears if linear not in wide]
    chosen = [linear for linear in linears if _fits(linear, tp)]
    gathered = [one for one in chosen if one.out_features % (tp * num_shards) == 0] if precision.fp8_gather else []
    if linears and not chosen:
        raise InfeasibleSpec(
            f"precision {precision.level}: no linear module in the layers has sizes divisible by {MULTIPLE}"
        )
    if chosen and precision.fp8_gather and not gathered:
        raise InfeasibleSpec(
            f"fp8_gather: no linear module in the layers has rows divisible by {tp * num_shards}, the number of shards"
        )
    if len(chosen) < len(linears):
        logger.warning(
            "%d of %d linear modules stay in 16 bits: their sizes are not divisible", len(chosen), len(linears)
        )
    with torchao_float8() as float8:
        for modules, in_8_bits in ((gathered, True), ([one for one in chosen if one not in gathered], False)):
            ids = set(map(id, modules))
            config = float8.Float8LinearConfig(
                emulate=emulates(device), pad_inner_dim=True, enable_fsdp_float8_all_gather=in_8_bits
            )
            float8.convert_to_float8_training(
                model, config=config, module_filter_fn=lambda module, _, ids=ids: id(module) in ids
            )
    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            module.forward = _like_linear(module)


def _fits(linear: nn.Linear, tp: int) -> bool:
    """Whether both sides are still multiples of the required size when one of them is divided by ``tp``."""
    return linear.in_features % (MULTIPLE * tp) == 0 and linear.out_features % (MULTIPLE * tp) == 0


def float8_scales(largest: Tensor) -> Tensor:
    """Return the scales of weights in e4m3, given each one's largest magnitude; as torchao computes them."""
    with torchao_float8() as float8:
        dtype = float8.Float8LinearConfig().cast_config_weight.target_dtype
        scales: Tensor = float8.float8_utils.amax_to_scale(largest, dtype)
    return scales


def emulates(device: torch.device) -> bool:
    """Whether 8-bit products are computed in fp32, as on a CPU: the same values, but no faster."""
    return is_host(device)


@contextmanager
def torchao_float8() -> Iterator[Any]:
    """Import ``torchao.float8``, suppressing its warnings about extensions for absent devices."""
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
    """Wrap the module's ``forward`` as an operator named ``linear``, for recompute patterns. It casts its input to the
    type of autocast, which torchao does only on CUDA."""
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
