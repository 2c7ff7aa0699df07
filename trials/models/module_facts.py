"""Inspection of an imported module before any trial: layers, parameters, work, and possible splits.

``python -m trials.models.module_facts`` reads a :class:`CountRequest` as JSON from stdin and writes a
:class:`CountReply` to stdout. It imports user code, so it is a separate process.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from trials.datasets import collated, open_user_data
from trials.failure import InfeasibleSpec
from trials.files import from_json, to_json
from trials.models import build_imported, loss_of
from trials.models.fused import kind_of
from trials.models.imported_model import Built, head_of, part_of, shape_of
from trials.models.model import layers_in, pipeline_problem, plan_problem
from trials.sizes import Chunk
from trials.spec import Data, HuggingFaceModel, LlamaModel, ModuleFacts, PythonData, PythonModel, UserModel
from trials.user_code import described

MAX_PARAMETERS = 100_000_000
"""Larger modules are inspected without values if possible; then only shapes show whether stages match the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRequest:
    """A model without facts, and the data that it trains on."""

    model: UserModel
    data: Data
    seq_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CountReply:
    """The findings, or why there are none."""

    facts: ModuleFacts | None = None
    shape: LlamaModel | None = None
    problem: str | None = None


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


def count(request: CountRequest) -> CountReply:
    """Build the module and run one sample through it.

    Raises:
        InfeasibleSpec, DataError: it cannot be built, or has no data.
    """
    model = request.model
    built = _build(model)
    sample = _sample(request, next(built.module.parameters()).device)
    num_layers = len(list(layers_in(built.module, built.layers).children()))
    work = _work(built, model, *sample)
    facts = ModuleFacts(
        num_layers=num_layers,
        num_parameters=sum(parameter.numel() for parameter in built.module.parameters()),
        **work,
        has_batch_norm=any(isinstance(one, _BatchNorm) for one in built.module.modules()),
        has_convolutions=any(isinstance(one, nn.Conv2d) for one in built.module.modules()),
        has_loose_norms=any(kind_of(one) is not None for one in built.module.modules()),
        no_pipeline=pipeline_problem(built.module, built.layers, built.before, built.after)
        or _stages_problem(built, num_layers, sample[0]),
        no_tensor_parallel=plan_problem(built.module, built.tensor_parallel),
        head=head_of(built, sample[0]) if isinstance(model, HuggingFaceModel) else None,
    )
    shape = shape_of(built, model.config, model.vocab_size) if isinstance(model, HuggingFaceModel) else None
    return CountReply(facts=facts, shape=shape)


def _build(model: UserModel) -> Built:
    """Build the module with its values; a large one without, if possible."""
    try:
        with torch.device("meta"):
            built = build_imported(model, 0)
        number = sum(parameter.numel() for parameter in built.module.parameters())
    except Exception:  # an error in user code recurs below
        number = 0
    if number <= MAX_PARAMETERS:
        built = build_imported(model, 0)
    if next(built.module.parameters(), None) is None:
        raise InfeasibleSpec("the model has no parameters to train")
    return built


def _sample(request: CountRequest, device: torch.device) -> tuple[Tensor, Tensor]:
    data = request.data
    if isinstance(data, PythonData):
        inputs, targets = collated([open_user_data(data)[0]], data.dataset)
        return inputs.to(device), targets.to(device)
    tokens = torch.zeros(1, request.seq_length, dtype=torch.long, device=device)
    return tokens, tokens


def _work(built: Built, model: UserModel, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Return FLOPs, kept elements and operators of one sample.

    Raises:
        InfeasibleSpec: a step on it fails.
    """
    kept: dict[int, int] = {}
    parameters = {id(parameter) for parameter in built.module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if id(tensor) not in parameters and id(tensor._base) not in parameters:
            kept[tensor.untyped_storage()._cdata] = tensor.numel()
        return tensor

    loss_function = loss_of(model)
    operators = _Operators()
    try:
        with FlopCounterMode(display=False) as flops:
            with operators, saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = loss_function(built.call(built.module, inputs), targets)
            torch.autograd.backward(loss)
    except Exception as error:
        text = f"one training step on a sample of shape {tuple(inputs.shape)} fails: {described(error)}"
        raise InfeasibleSpec(text) from error
    for parameter in built.module.parameters():
        parameter.grad = None
    return {
        "flops_per_sample": float(flops.get_total_flops()),
        "activation_elements": sum(kept.values()),
        "num_kernels": operators.number,
    }


@torch.no_grad()
def _stages_problem(built: Built, num_layers: int, inputs: Tensor) -> str | None:
    """Return how the output of two consecutive stages differs from the whole module's; None if it does not."""
    if num_layers < 2:
        return None
    built.module.eval()
    whole = built.call(built.module, inputs)
    found: Any = inputs
    try:
        for i, layers in enumerate((range(1), range(1, num_layers))):
            chunk = Chunk(chunk=0, stage=i, virtual_stage=i, layer_ids=tuple(layers), is_first=i == 0, is_last=i == 1)
            stage = part_of(_copied(built), num_layers, chunk)
            found = stage(found)
            if not isinstance(found, Tensor):
                return (
                    f"its stages return a {type(found).__name__}; the modules before the layers must return one tensor"
                )
    except Exception as error:
        return f"it fails when split into stages: {described(error)}"
    finally:
        built.module.train()
    same = isinstance(whole, Tensor) and whole.shape == found.shape
    if same and not whole.is_meta:
        same = torch.allclose(whole, found, rtol=1e-4, atol=1e-5)
    if same:
        return None
    return (
        "its outputs change when split into stages: its forward does more than the modules in workload.before, "
        "layers and after"
    )


def _copied(built: Built) -> Built:
    return dataclasses.replace(built, module=copy.deepcopy(built.module))


def main(work: Callable[[CountRequest], CountReply] = count) -> None:
    """Answer the request on stdin; output of user code goes to stderr."""
    request: CountRequest = from_json(CountRequest, json.load(sys.stdin))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    if isinstance(request.model, PythonModel):
        os.chdir(request.model.cwd)
    try:
        reply = work(request)
    except Exception as error:
        is_known = isinstance(error, ValueError) and type(error).__module__ == "trials.failure"
        reply = CountReply(problem=str(error) if is_known else described(error))
    out.write(json.dumps(to_json(reply)) + "\n")
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
