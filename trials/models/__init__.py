"""The models that a workload can have, and their losses. Depends on shapes and pipeline stages, not on parallelism."""

from __future__ import annotations

import torch
from torch import Tensor

from trials.models.built_in import LinearChain, Llama, ResNet, class_loss, next_token_loss, squared_error
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

__all__ = ["ImportedModel", "Initial", "Loss", "TrainModel", "build_imported", "build_model", "import_code", "loss_of"]


_BUILDS_ITS_OWN = "custom programs build their model themselves"


def build_model(workload: Workload, chunk: Chunk) -> TrainModel:
    """Build the part of the workload's model in ``chunk``: a built-in one on the meta device, a custom one with
    values."""
    match workload.model:
        case PythonModel() | HuggingFaceModel() as model:
            return part_of(build_imported(model, workload.seed), model.num_layers, chunk, model.facts.head)
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


def import_code(model: Model) -> None:
    """Import the model's code, so that it counts for the idle process, not for the model's memory.

    Raises:
        InfeasibleSpec: it cannot be imported.
    """
    if isinstance(model, PythonModel):
        load_function(model.model, model.cwd)
    elif isinstance(model, HuggingFaceModel):
        with torch.device("meta"):
            build_hugging_face(model.config)


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
