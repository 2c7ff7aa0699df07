"""The models that a workload can have, and their losses. Depends on shapes and pipeline stages, not on parallelism."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Literal

import torch
from torch import Tensor

from trials.models.built_in import LinearChain, Llama, ResNet, class_loss, next_token_loss, squared_error
from trials.models.deferred import Recorder, recording
from trials.models.fused import FusedMeter, check_liger, fuse, merged
from trials.models.imported_model import (
    Built,
    ImportedModel,
    build_hugging_face,
    build_python,
    loss_of_python,
    part_of,
    seeded,
)
from trials.models.model import Initial, Loss, TrainModel
from trials.sizes import Chunk
from trials.spec import (
    HuggingFaceModel,
    LinearModel,
    LlamaModel,
    Model,
    PythonModel,
    ResNetModel,
    ScriptModel,
    UserModel,
    Workload,
)
from trials.user_code import load_function

__all__ = [
    "FusedMeter",
    "ImportedModel",
    "Initial",
    "Loss",
    "TrainModel",
    "build_imported",
    "build_model",
    "check_liger",
    "import_code",
    "loss_of",
    "merged",
    "own_folder",
]


_BUILDS_ITS_OWN = "custom programs build their model themselves"


def build_model(workload: Workload, chunk: Chunk, fused: Literal["auto", "torch", "liger"] = "auto") -> TrainModel:
    """Build the part of the workload's model in ``chunk``, on the meta device.

    Raises:
        InfeasibleSpec: it cannot be built, or not with operators of the library ``fused``.
    """
    match workload.model:
        case PythonModel() | HuggingFaceModel() as model:
            built = build_without_values(model, workload.seed)
            meter = FusedMeter() if fused == "auto" else fuse(built.module, fused)
            own = part_of(built, model.num_layers, chunk, model.facts.head)
            own.fused_meter = meter
            own.leave_values()
            return own
        case ScriptModel():
            raise ValueError(_BUILDS_ITS_OWN)
    with torch.device("meta"):
        match workload.model:
            case LlamaModel() as shape:
                return Llama(shape, workload.seq_length, chunk)
            case ResNetModel() as shape:
                return ResNet(shape, chunk)
            case LinearModel() as shape:
                return LinearChain(shape, chunk)


def build_imported(model: UserModel, seed: int) -> Built:
    """Build the whole module, with the same values in every process: its own initial ones, drawn from ``seed``.

    Raises:
        InfeasibleSpec: it cannot be built.
    """
    with seeded(seed):
        return build_python(model) if isinstance(model, PythonModel) else build_hugging_face(model.config)


def build_without_values(model: UserModel, seed: int) -> Built:
    """Build the whole module of fake tensors, and record what computes its values; with values if that fails.

    It fails for code that reads values while it builds the module, and for values from elsewhere, such as a file.

    Raises:
        InfeasibleSpec: it cannot be built.
    """
    recorder = Recorder(seed)
    try:
        with recording(recorder):
            built = build_imported(model, seed)
        recorder.check(built.module)
    except Exception:  # user code may raise anything; what is not due to fake tensors recurs below
        return build_imported(model, seed)
    return dataclasses.replace(built, recorder=recorder)


def import_code(model: Model) -> None:
    """Import the model's code, so that it counts for the idle process, not for the model's memory.

    Raises:
        InfeasibleSpec: it cannot be imported.
    """
    if isinstance(model, PythonModel | HuggingFaceModel):
        with recording(Recorder(0)):
            torch.nn.Linear(1, 1)
    if isinstance(model, PythonModel):
        load_function(model.model, model.cwd)
    elif isinstance(model, HuggingFaceModel):
        with torch.device("meta"):
            build_hugging_face(model.config)


def own_folder(model: Model) -> contextlib.AbstractContextManager[None]:
    """Run the body in the folder of the user code, if any."""
    return contextlib.chdir(model.cwd) if isinstance(model, PythonModel) else contextlib.nullcontext()


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001  # the model received them
    """Return the outputs of a model that computes its loss itself."""
    return outputs


def loss_of(model: Model) -> Loss:
    """Return the loss for the model's outputs and the data's targets."""
    match model:
        case LlamaModel():
            return own_loss
        case HuggingFaceModel():
            return next_token_loss if model.facts.head is None else own_loss
        case ResNetModel():
            return class_loss
        case LinearModel():
            return squared_error
        case PythonModel():
            return loss_of_python(model)
        case ScriptModel():
            raise ValueError(_BUILDS_ITS_OWN)
