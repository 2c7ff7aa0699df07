"""Graph mode: torch.compile, block by block."""

from __future__ import annotations

from torch import Tensor, nn

from trials.models.llama import Llama
from trials.spec import Kernels


def apply_compile(model: Llama, kernels: Kernels, *, tensor_parallel: bool) -> None:
    """Compile every transformer block in place; equal blocks share the compiled code."""
    if kernels.compile == "off":
        return
    if tensor_parallel:
        model.tok_embeddings.register_forward_hook(_clone_output)
    for block in model.layers.values():
        block.compile(backend=kernels.backend, fullgraph=True)


def _clone_output(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    """Keep an asynchronous collective's result out of the compiled block, whose backward cannot take one.

    Waiting for it instead would run, but drops the embedding's gradient without a word.
    """
    return output.clone()
