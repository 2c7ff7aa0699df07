"""Data sets, and the loader that brings their batches to a rank. Knows neither models nor layouts."""

from __future__ import annotations

from trials.datasets.base import Batch, Share, StepBatches
from trials.datasets.images import ImageBatches, open_images
from trials.datasets.own import OwnBatches, open_own
from trials.datasets.tokens import TokenBatches, VectorBatches, load_text, open_token_file
from trials.failure import InfeasibleSpec
from trials.spec import (
    HuggingFaceModel,
    ImageFolderData,
    LinearModel,
    LlamaModel,
    PythonData,
    PythonModel,
    RandomData,
    ResNetModel,
    TextData,
    TokenFileData,
    Workload,
)

__all__ = ["Batch", "Share", "StepBatches", "build_dataset"]


def build_dataset(workload: Workload, share: Share) -> StepBatches:
    """Open the workload's data.

    Raises:
        DataError: it cannot be read, is too small, or does not fit the model.
        InfeasibleSpec: data of a kind the model cannot train on.
    """
    match workload.model, workload.data:
        case LlamaModel() | HuggingFaceModel() as model, TextData() as data:
            return TokenBatches(load_text(data), share, seq_length=workload.seq_length, vocab_size=model.vocab_size)
        case LlamaModel() | HuggingFaceModel() as model, TokenFileData() as data:
            return TokenBatches(
                open_token_file(data),
                share,
                seq_length=workload.seq_length,
                vocab_size=model.vocab_size,
                origin=data.path,
            )
        case ResNetModel() as model, ImageFolderData() as data:
            return ImageBatches(open_images(data, model), share, image_size=model.image_size)
        case LinearModel() as model, RandomData():
            return VectorBatches(share, size=model.size)
        case PythonModel(), PythonData() as data:
            return OwnBatches(open_own(data), share, origin=data.dataset)
    raise InfeasibleSpec(f"a {workload.model.kind} model cannot train on data of kind {workload.data.kind}")
