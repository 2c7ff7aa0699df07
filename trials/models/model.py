"""The runner's interface of a model and of its loss."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from trials.failure import InfeasibleSpec
from trials.sizes import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Initial:
    """A distribution of initial values: normal with this mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.0


class Layers(Protocol):
    """Modules by name, each replaceable."""

    def __iter__(self) -> Iterator[str]: ...

    def __getitem__(self, name: str) -> nn.Module: ...

    def __setitem__(self, name: str, layer: nn.Module) -> None: ...

    def values(self) -> ValuesView[nn.Module]: ...

    def items(self) -> ItemsView[str, nn.Module]: ...


class TrainModel(nn.Module):
    """A model, or the part of it in one virtual stage of a pipeline.

    It is created on the meta device; :meth:`materialize` fills what is not a parameter when storage exists.
    """

    is_own: ClassVar[bool] = False
    """Whether the code is the user's or a package's: it has its own initial values, may draw random numbers, and its
    layers need not be single graphs."""
    computes_loss: bool = False
    """Whether the stage with the last layer also takes ``targets`` and returns the loss instead of outputs."""
    layers: Layers
    """The repeated layers by their global number, as text: the units of pipelining, recompute, compile and FSDP."""

    def materialize(self, device: torch.device) -> None:
        """Fill buffers and tables, on ``device``."""

    def initial(self, name: str) -> Initial:
        """Return the distribution of initial values of the parameter of this name, unless :attr:`is_own`."""
        raise NotImplementedError

    def value_of(self, name: str) -> Tensor:
        """Return the whole initial value of the parameter of this name, if :attr:`is_own`."""
        raise NotImplementedError

    def forget_values(self) -> None:
        """Free what :meth:`value_of` needs."""

    def store_as(self, dtype: torch.dtype) -> None:
        """Convert parameters to this type."""
        self.to(dtype)


class Loss(Protocol):
    """A function from outputs and targets to the mean loss in fp32."""

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor: ...


# Plans of tensor parallelism: patterns of module paths, and how each module is split. This code splits nothing itself.
#
# Styles have the names that transformers uses in ``base_model_tp_plan``. Activations between a ``colwise`` module and
# the next ``rowwise`` one are plain tensors, so the code in between must take sizes from them: a number of heads from
# elsewhere is wrong by a factor of tp.


SUM_GRADIENTS = "replicated_with_grad_allreduce"
"""Style of a module that is whole on every rank, but works on a part of the heads: its gradients are summed."""
STYLES = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", SUM_GRADIENTS)
"""``colwise`` splits outputs, ``rowwise`` inputs; ``colwise_gather_output`` gathers the outputs again;
``embedding_rowwise`` splits the rows of an embedding table."""


def matches(module: nn.Module, plan: Sequence[Sequence[str]]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and style of every module with weights that a pattern matches; the first pattern counts."""
    expressions = [(re.compile(re.escape(pattern).replace(r"\*", "[^.]+")), style) for pattern, style in plan]
    for path, one in module.named_modules():
        style = next((style for expression, style in expressions if expression.fullmatch(path)), None)
        if style is not None and next(one.parameters(), None) is not None:
            yield path, one, style


def plan_problem(module: nn.Module, plan: Sequence[Sequence[str]]) -> str | None:
    """Return why the plan cannot split the module; None if it can."""
    if not plan:
        return "tensor parallelism requires a plan: set workload.tensor_parallel"
    found = list(matches(module, plan))
    named = {style for _, _, style in found}
    if unknown := sorted(named - set(STYLES)):
        return f"the plan has the unknown style {unknown[0]!r}; use one of {', '.join(STYLES)}"
    for pattern, _ in plan:
        if not any(True for _ in matches(module, [(pattern, "")])):
            return f"the plan has {pattern!r}, but no module with weights matches that path"
    uses = Counter(id(p) for one in module.modules() for p in one.parameters(recurse=False))
    for path, one, style in found:
        if style == SUM_GRADIENTS:
            continue
        if not isinstance(one, nn.Linear | nn.Embedding):
            return f"the plan splits {path}, a {type(one).__name__}; only Linear and Embedding can be split"
        if any(uses[id(parameter)] > 1 for parameter in one.parameters()):
            return f"the plan splits {path}, which shares its weights with another module"
    return None


# Cutting of an imported module into pipeline stages: modules of other stages are replaced by ones that do nothing.
#
# The module's own ``forward`` runs on every stage. So all work on the samples must happen in the named modules: those
# before the layers, the layers, and those after them.


class Absent(nn.Module):
    """Placeholder for a module of another stage: returns its first argument, and has its plain attributes."""

    def __init__(self, held_elsewhere: nn.Module) -> None:
        super().__init__()
        for name, value in vars(held_elsewhere).items():
            if not name.startswith("_") and not isinstance(value, nn.Module | Tensor):
                setattr(self, name, value)

    def forward(self, *args: Any, **options: Any) -> Any:
        return args[0] if args else next(iter(options.values()))


class LayerList:
    """The layers of a module, in their original list, without those of other stages."""

    def __init__(self, container: nn.Module, numbers: Sequence[int]) -> None:
        keys = list(container._modules)
        self._container = container
        self._keys = {str(i): keys[i] for i in numbers}

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __getitem__(self, name: str) -> nn.Module:
        layer = self._container._modules[self._keys[name]]
        assert layer is not None
        return layer

    def __setitem__(self, name: str, layer: nn.Module) -> None:
        self._container._modules[self._keys[name]] = layer

    def _by_name(self) -> Mapping[str, nn.Module]:
        return {name: self[name] for name in self}

    def values(self) -> Any:
        return self._by_name().values()

    def items(self) -> Any:
        return self._by_name().items()


def layers_in(module: nn.Module, path: str) -> nn.Module:
    """Return the list of layers at ``path``.

    Raises:
        InfeasibleSpec: there is nothing, or nothing that can be enumerated.
    """
    found = submodule(module, path, "layers")
    if not isinstance(found, nn.ModuleList | nn.Sequential | nn.ModuleDict) or len(found) == 0:
        raise InfeasibleSpec(
            f"workload.layers: {path!r} is a {type(found).__name__}, not a list of layers (ModuleList)"
        )
    return found


def submodule(module: nn.Module, path: str, key: str) -> nn.Module:
    """Return the module at ``path``, the value of the workload's ``key``.

    Raises:
        InfeasibleSpec: there is none; the message lists those at the top.
    """
    try:
        return module.get_submodule(path)
    except AttributeError:
        there = ", ".join(name for name, _ in module.named_children()) or "nothing"
        raise InfeasibleSpec(f"workload.{key}: no module {path!r} in the model, which has {there}") from None


def pipeline_problem(
    module: nn.Module, layers: str, before: Sequence[str] | None, after: Sequence[str] | None
) -> str | None:
    """Return why the module cannot be cut into stages, as far as known without running it; None if unknown."""
    if before is None or after is None:
        return "pipelines require the modules before and after the layers: set workload.before and .after"
    regions = {"before": [submodule(module, path, "before") for path in before]}
    regions |= {f"layer {i}": [layer] for i, layer in enumerate(layers_in(module, layers).children())}
    regions["after"] = [submodule(module, path, "after") for path in after]
    places: dict[int, str] = {}
    for region, modules in regions.items():
        for parameter in {id(p): p for one in modules for p in one.parameters()}.values():
            if (other := places.setdefault(id(parameter), region)) != region:
                return f"{other} and {region} share weights, which pipeline stages cannot do"
    for name, parameter in module.named_parameters():
        if id(parameter) not in places:
            return f"{name} is neither in the layers nor in workload.before or .after"
    return None


def cut(module: nn.Module, chunk: Chunk, layers: str, before: Sequence[str], after: Sequence[str]) -> None:
    """Keep only the part in ``chunk``, in place."""
    absent = [] if chunk.is_first else [*before]
    absent += [] if chunk.is_last else [*after]
    for path in absent:
        module.set_submodule(path, Absent(module.get_submodule(path)))
    container = layers_in(module, layers)
    for number, key in enumerate(list(container._modules)):
        layer = container._modules[key]
        if number not in chunk.layer_ids and layer is not None:
            container._modules[key] = Absent(layer)


# Random numbers by position: each is a pure function of a key and of the element's index in the whole tensor.
#
# Each holder of a part of a tensor draws only that part, on its own device, and gets the same bits as all other holders
# of the same elements: a counter-based generator (Salmon et al., SC 2011). It is SplitMix64 (Steele, Lea and Flood,
# OOPSLA 2014) started at the wanted position, with one 64-bit word for two elements. All arithmetic is exact (integers)
# or rounded by IEEE 754 (single additions and multiplications of fp32). So the result depends neither on the shape nor
# on vector units; a vectorised ``log``, for example, differs in the last elements of its loop.


CPU_TILE_WORDS = 1 << 16
"""64-bit words drawn at a time on a CPU: as many as fit its caches."""
DEVICE_TILE_WORDS = 1 << 20
"""The same on other devices: enough to keep one busy, with temporaries below 64 MiB."""

_INCREMENT = 0x9E3779B97F4A7C15
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""SplitMix64's steps: the shift of a word, then its factor."""
_MANTISSA_BITS = 6
"""The normal quantile is linear over each 64th of every power of two; the error is below 2e-5."""
_NUM_LINES = 1 << (1 + 8 + _MANTISSA_BITS)
"""One line for every sign, exponent and leading part of the mantissa of an fp32 number."""


def key_of(*parts: object) -> int:
    """Return 64 bits that identify ``parts``: for instance a seed and a parameter's name."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A part of a tensor as rows ``[R, N]`` of elements with consecutive indices in the whole tensor."""

    rows: Tensor
    first: Tensor
    """Index of the first element of every row, ``[R]``."""
    parity: int | None
    """Whether these are all even (0), all odd (1) or mixed (None)."""


class Draws:
    """Generator on one device. It holds tables and one tile's counters, so create it only for as long as needed."""

    def __init__(self, device: torch.device, tile_words: int | None = None) -> None:
        """``tile_words``: words drawn at a time, if not the device's default; the numbers do not depend on it."""
        self.tile_words = tile_words or (CPU_TILE_WORDS if device.type == "cpu" else DEVICE_TILE_WORDS)
        self._counters = torch.arange(self.tile_words + 1, device=device) * _signed(_INCREMENT)
        self._intercepts, self._slopes = (torch.tensor(table, device=device) for table in _quantile_lines())

    def tiles(self, part: Tensor, size: Sequence[int], start: Sequence[int]) -> Iterator[Tile]:
        """Cut ``part``, which starts at ``start`` in a tensor of this ``size``, into tiles that are drawn at once."""
        return tiles(part, size, start, 2 * self.tile_words)

    def normal(self, key: int, tile: Tile) -> Tensor:
        """Return standard normal values of a tile's elements in fp32, at most 6.4 from 0."""
        centred = self._integers(key, tile).float().add_(0.5)
        lines = (centred.view(torch.int32) >> (23 - _MANTISSA_BITS)).bitwise_and_(_NUM_LINES - 1).flatten()
        slopes, intercepts = (
            torch.index_select(table, 0, lines).view_as(centred) for table in (self._slopes, self._intercepts)
        )
        return slopes.mul_(centred).add_(intercepts)

    def uniform(self, key: int, tile: Tile) -> Tensor:
        """Return values of a tile's elements in fp32, uniform in -1..1."""
        return self._integers(key, tile).float().add_(0.5).mul_(2.0**-31)

    def _integers(self, key: int, tile: Tile) -> Tensor:
        """Return uniform 32-bit integers ``[R, N]``: halves of words. A row with an odd start skips the first half."""
        length = tile.rows.shape[1]
        before = 1 if tile.parity is None else tile.parity
        words = (tile.first >> 1).mul_(_signed(_INCREMENT)).add_(_signed(key + _INCREMENT)).unsqueeze(1)
        halves = _mixed(words + self._counters[: (before + length + 1) // 2]).view(torch.int32)
        if tile.parity is not None:
            return halves[:, before : before + length].contiguous()
        is_odd = (tile.first & 1).bool().unsqueeze(1)
        return torch.where(is_odd, halves[:, 1 : length + 1], halves[:, :length])


def tiles(part: Tensor, size: Sequence[int], start: Sequence[int], max_elements: int) -> Iterator[Tile]:
    """Cut a part of a tensor into tiles of at most ``max_elements``, an even number, with views of its memory."""
    if part.numel() == 0:
        return
    if not size:
        part, size, start = part.view(1), (1,), (0,)
    strides = [math.prod(size[dim + 1 :]) for dim in range(len(size))]
    # The last dimension that the part does not cover; from there on its elements are consecutive in the whole.
    split = max((dim for dim, whole in enumerate(size) if part.shape[dim] < whole), default=0)
    origin = sum(begin * stride for begin, stride in zip(start, strides, strict=True))
    first = torch.full((1,), origin, device=part.device)
    for dim in range(split):
        first = (first.unsqueeze(1) + torch.arange(part.shape[dim], device=part.device) * strides[dim]).flatten()
    all_alike = all(strides[dim] % 2 == 0 or part.shape[dim] == 1 for dim in range(split))
    length = math.prod(part.shape[split:])
    rows = part.view(len(first), length)
    height = max(1, max_elements // (length + 2))
    for row in range(0, len(first), height):
        for column in range(0, length, max_elements):
            yield Tile(
                rows=rows[row : row + height, column : column + max_elements],
                first=first[row : row + height] + column,
                parity=origin % 2 if all_alike else None,
            )


def _mixed(words: Tensor) -> Tensor:
    """Apply SplitMix64's output function in place. Right shifts must insert zeros, unlike those of signed integers."""
    for shift, factor in _MIXING:
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            words.mul_(_signed(factor))
    return words


def _signed(word: int) -> int:
    """Return the int64 with the lowest 64 bits of ``word``."""
    word %= 1 << 64
    return word - (1 << 64) if word >= 1 << 63 else word


@functools.cache
def _quantile_lines() -> tuple[list[float], list[float]]:
    """Return intercepts and slopes of the normal quantile of ``|x| / 2**32`` by the leading bits of ``x``; odd.

    ``|x|`` is in [0.5, 2**31], up to the median, where the quantile is 0. Computed in fp64; the resulting fp32 numbers
    are rounded once.
    """
    intercepts, slopes = [0.0] * _NUM_LINES, [0.0] * _NUM_LINES
    quantile, num_pieces = NormalDist().inv_cdf, 1 << _MANTISSA_BITS
    for exponent in range(-1, 31):
        ends = [2.0**exponent * (1 + piece / num_pieces) for piece in range(num_pieces + 1)]
        heights = [quantile(end * 2.0**-32) for end in ends]
        for piece in range(num_pieces):
            slope = (heights[piece + 1] - heights[piece]) / (ends[piece + 1] - ends[piece])
            line = ((exponent + 127) << _MANTISSA_BITS) + piece
            negative = line + _NUM_LINES // 2
            slopes[line] = slopes[negative] = slope
            intercepts[line] = heights[piece] - slope * ends[piece]
            intercepts[negative] = -intercepts[line]
    return intercepts, slopes
