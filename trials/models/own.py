"""Modules whose code is not ours, as models of the runner: the user's, and those of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trials.failure import InfeasibleSpec
from trials.models.base import Loss, TrainModel
from trials.models.llama import Head
from trials.models.stage_cut import LayerList, cut, layers_in, pipeline_problem
from trials.models.tensor_plan import plan_problem
from trials.own_code.functions import call_function, load_function
from trials.spec import PythonModel
from trials.stages import Chunk

Call = Callable[[nn.Module, Tensor], Any]
"""Runs a module on a batch of inputs and gives its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A module with its values, in fp32 on the CPU, and what the runner has to know of it."""

    module: nn.Module
    layers: str
    before: Sequence[str] | None
    after: Sequence[str] | None
    tensor_parallel: Sequence[tuple[str, ...]]
    """Pairs of pattern and style, see :mod:`trials.models.tensor_plan`."""
    call: Call


class GivenModel(TrainModel):
    """Runs a module of the user's, or the part of it that one stage holds.

    Where it has a head (:attr:`~trials.spec.ModuleFacts.head`), that is taken out and comes after the module, as
    ``output``, to compute the loss.
    """

    is_own: ClassVar[bool] = True

    def __init__(self, built: Built, chunk: Chunk, no_tensor_parallel: str | None, head: str | None = None) -> None:
        """``no_tensor_parallel`` is why tensor parallelism cannot split it."""
        super().__init__()
        self.no_tensor_parallel = no_tensor_parallel
        self.module = built.module
        self.layers = LayerList(layers_in(built.module, built.layers), chunk.layer_ids)
        self.tensor_parallel = built.tensor_parallel
        self.output = _taken_out(self.module, head) if head is not None and chunk.is_last else None
        self.computes_loss = self.output is not None
        self._call = built.call
        self._input_dtype: torch.dtype | None = None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        """Outputs, or with ``targets`` the loss; only a module with a head is given them."""
        if self._input_dtype is not None and x.is_floating_point():
            x = x.to(self._input_dtype)
        outputs = self._call(self.module, x)
        return outputs if self.output is None else self.output(outputs, targets)

    @property
    def has_tied_head(self) -> bool:
        """Whether the head shares its weights with the module, with its embedding that is."""
        return self.output is not None and any(self.output.weight is one for one in self.module.parameters())

    def store_as(self, dtype: torch.dtype) -> None:
        """Keep parameters in this type, and inputs; tables among the buffers stay exact."""
        if dtype != torch.float32:
            self._input_dtype = dtype
        for parameter in self.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def _taken_out(module: nn.Module, path: str) -> Head:
    """The linear module at ``path`` as a head of ours, with its weights; ``module`` gives what it got from now on."""
    linear: Any = module.get_submodule(path)
    with torch.device("meta"):
        head = Head(linear.in_features, linear.out_features)
    head.weight = linear.weight
    module.set_submodule(path, nn.Identity())
    return head


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the same random numbers in every process for the duration of the body."""
    import random

    import numpy as np

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def build_python(model: PythonModel) -> Built:
    """Call the user's function.

    Raises:
        InfeasibleSpec: it cannot be imported, fails, or gives no module.
    """
    module = call_function(model.model, model.cwd)
    if not isinstance(module, nn.Module):
        raise InfeasibleSpec(f"{model.model} gives a {type(module).__name__}, no torch.nn.Module")
    return Built(
        module=module,
        layers=model.layers,
        before=model.before,
        after=model.after,
        tensor_parallel=model.tensor_parallel,
        call=_called,
    )


def _called(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def part_of(built: Built, num_layers: int, chunk: Chunk, head: str | None = None) -> GivenModel:
    """What ``chunk`` holds of the module, of which ``head`` computes the loss.

    Raises:
        InfeasibleSpec: it has other layers than the sweep was planned with, or cannot be cut.
    """
    found = len(list(layers_in(built.module, built.layers).children()))
    if found != num_layers:
        raise InfeasibleSpec(
            f"{built.layers} has {found} layers, but had {num_layers} when the sweep was planned; submit it under a new"
            " name"
        )
    # While it is whole: a stage lacks modules that the plan names.
    no_tensor_parallel = plan_problem(built.module, built.tensor_parallel)
    if not (chunk.is_first and chunk.is_last):
        if problem := pipeline_problem(built.module, built.layers, built.before, built.after):
            raise InfeasibleSpec(f"pp: {problem}")
        cut(built.module, chunk, built.layers, built.before or (), built.after or ())
    return GivenModel(built, chunk, no_tensor_parallel, head)


def loss_of_python(model: PythonModel) -> Loss:
    """The user's loss, in fp32.

    Raises:
        InfeasibleSpec: it cannot be imported.
    """
    function = load_function(model.loss, model.cwd)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        made = function(outputs, targets)
        if not isinstance(made, Tensor) or made.dim():
            shape = f" of shape {tuple(made.shape)}" if isinstance(made, Tensor) else ""
            raise InfeasibleSpec(
                f"{model.loss} gives a {type(made).__name__}{shape}; it has to give the mean, a scalar"
            )
        return made.float()

    return loss
