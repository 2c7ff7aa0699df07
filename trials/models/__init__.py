"""The models that a workload can name, and their losses. Knows shapes and pipeline stages, but no parallelism."""

from __future__ import annotations

from trials.models.base import Initial, Loss, TrainModel
from trials.models.linear import LinearChain, squared_error
from trials.models.llama import Llama, next_token_loss
from trials.models.resnet import ResNet, class_loss
from trials.spec import LinearModel, LlamaModel, Model, ResNetModel, ScriptModel, Workload
from trials.stages import Chunk

__all__ = ["Initial", "Loss", "TrainModel", "build_model", "loss_of"]


_BUILDS_ITS_OWN = "a program of the user's own builds its model itself"


def build_model(workload: Workload, chunk: Chunk) -> TrainModel:
    """The part of the workload's model that ``chunk`` holds; call it under ``torch.device("meta")``."""
    match workload.model:
        case LlamaModel() as shape:
            return Llama(shape, workload.seq_length, chunk)
        case ResNetModel() as shape:
            return ResNet(shape, chunk)
        case LinearModel() as shape:
            return LinearChain(shape, chunk)
        case ScriptModel():
            raise ValueError(_BUILDS_ITS_OWN)


def loss_of(model: Model) -> Loss:
    """The loss that goes with the model's outputs and the data's targets."""
    match model:
        case LlamaModel():
            return next_token_loss
        case ResNetModel():
            return class_loss
        case LinearModel():
            return squared_error
        case ScriptModel():
            raise ValueError(_BUILDS_ITS_OWN)
