"""Cuts a module of the user's into pipeline stages: what a stage does not hold is replaced by modules that do nothing.

The module's own ``forward`` runs on every stage. So whatever it does with the samples has to happen in the modules that
are named: those before the layers, the layers, those after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trials.failure import InfeasibleSpec
from trials.stages import Chunk


class Absent(nn.Module):
    """Stands in for a module that another stage holds: gives its first argument, and has its plain attributes."""

    def __init__(self, held_elsewhere: nn.Module) -> None:
        super().__init__()
        for name, value in vars(held_elsewhere).items():
            if not name.startswith("_") and not isinstance(value, nn.Module | Tensor):
                setattr(self, name, value)

    def forward(self, *args: Any, **options: Any) -> Any:
        return args[0] if args else next(iter(options.values()))


class LayerList:
    """The layers of a module, in the list that it keeps them in itself; those of other stages left out."""

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
    """The list of layers at ``path``.

    Raises:
        InfeasibleSpec: nothing lies there, or nothing that can be counted through.
    """
    found = submodule(module, path, "layers")
    if not isinstance(found, nn.ModuleList | nn.Sequential | nn.ModuleDict) or len(found) == 0:
        raise InfeasibleSpec(f"workload.layers: {path!r} is a {type(found).__name__}, no list of layers (ModuleList)")
    return found


def submodule(module: nn.Module, path: str, key: str) -> nn.Module:
    """The module at ``path``; ``key`` of the workload names it.

    Raises:
        InfeasibleSpec: there is none; names those at the top.
    """
    try:
        return module.get_submodule(path)
    except AttributeError:
        there = ", ".join(name for name, _ in module.named_children()) or "nothing"
        raise InfeasibleSpec(f"workload.{key}: no module {path!r} in the model, which has {there}") from None


def pipeline_problem(
    module: nn.Module, layers: str, before: Sequence[str] | None, after: Sequence[str] | None
) -> str | None:
    """Why the module cannot be cut into stages, for all that can be told without running it."""
    if before is None or after is None:
        return "a pipeline has to be told what lies before and after the layers: set workload.before and .after"
    regions = {"before": [submodule(module, path, "before") for path in before]}
    regions |= {f"layer {i}": [layer] for i, layer in enumerate(layers_in(module, layers).children())}
    regions["after"] = [submodule(module, path, "after") for path in after]
    places: dict[int, str] = {}
    for region, modules in regions.items():
        for parameter in {id(p): p for one in modules for p in one.parameters()}.values():
            if (other := places.setdefault(id(parameter), region)) != region:
                return f"{other} and {region} share weights, which stages of a pipeline cannot"
    for name, parameter in module.named_parameters():
        if id(parameter) not in places:
            return f"{name} lies neither in the layers nor in workload.before or .after"
    return None


def cut(module: nn.Module, chunk: Chunk, layers: str, before: Sequence[str], after: Sequence[str]) -> None:
    """Leave only what ``chunk`` holds, in place."""
    absent = [] if chunk.is_first else [*before]
    absent += [] if chunk.is_last else [*after]
    for path in absent:
        module.set_submodule(path, Absent(module.get_submodule(path)))
    container = layers_in(module, layers)
    for number, key in enumerate(list(container._modules)):
        layer = container._modules[key]
        if number not in chunk.layer_ids and layer is not None:
            container._modules[key] = Absent(layer)
