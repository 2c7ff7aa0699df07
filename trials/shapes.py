"""Kinds of models: shapes of built-in ones, PyTorch modules and training programs of the user's own.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaModel:
    """Shape of a Llama-style decoder (RMSNorm, RoPE, SwiGLU, grouped-query attention, untied head)."""

    kind: ClassVar[str] = "llama"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    vocab_size: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetModel:
    """ResNet v1.5 for images (He et al., arXiv 1512.03385; stride in the 3x3 convolution), batch norm."""

    kind: ClassVar[str] = "resnet"
    depth: Literal[18, 50] = 50
    num_classes: int = 1000
    image_size: int = 224
    width: int = 64
    """Channels of the first stage."""

    @property
    def blocks_per_stage(self) -> tuple[int, ...]:
        """Residual blocks of the four stages (table 1 of the paper)."""
        return (2, 2, 2, 2) if self.depth == 18 else (3, 4, 6, 3)

    @property
    def num_layers(self) -> int:
        return sum(self.blocks_per_stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModel:
    """A chain of square Linear layers without bias or activation: pure matrix multiplication, as AMP guides time."""

    kind: ClassVar[str] = "linear"
    num_layers: int = 9
    size: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptModel:
    """A training program of the user's own, which ranks start as it is instead of training a model themselves."""

    kind: ClassVar[str] = "script"
    recipe: str
    """The framework it is written for: a name of :data:`orchestrator.frameworks.catalog.FRAMEWORKS`, or ``custom``."""
    run: tuple[str, ...]
    """The command as the user wrote it, without a shell; ``{name}`` stands for what a trial fills in."""
    cwd: str
    """Absolute path of the folder it starts in."""
    env: tuple[tuple[str, ...], ...] = ()
    """Environment of its own, pairs of name and value."""
    files: tuple[tuple[str, ...], ...] = ()
    """Configuration files of which trials get copies, pairs of name and absolute path."""
    launcher: Literal["env", "own"] = "env"
    """Who starts its ranks: we do, one per device with torchrun's variables, or the command, once per node."""
    num_layers: int = 1
    """Repeated layers, as far as known; 1 stands for all of them together."""
    shape: LlamaModel | None = None
    """The decoder that it trains, where its dimensions are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """What building a PyTorch module once, beforehand, told of it. Zeros and None stand for what is not known."""

    num_layers: int
    num_parameters: int = 0
    flops_per_sample: float = 0.0
    """Forward and backward FLOPs of one sample, none recomputed."""
    activation_elements: int = 0
    """Elements that one sample's forward pass keeps for the backward pass."""
    num_kernels: int = 0
    """Operators that a forward pass calls."""
    has_batch_norm: bool = False
    """Whether what it learns depends on the size of micro-batches."""
    no_pipeline: str | None = None
    """Why pipeline stages cannot split it; None: they can."""
    no_tensor_parallel: str | None = None
    """Why tensor parallelism cannot; None: it can."""
    head: str | None = None
    """Path of the linear module, without a bias, whose outputs are a decoder's logits as they are: it and the loss can
    be computed together. None: there is none, or the loss is not ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonModel:
    """A PyTorch module of the user's, which ranks build by calling a function of theirs."""

    kind: ClassVar[str] = "python"
    model: str
    """Function without arguments that builds the module, as ``module:function``."""
    loss: str
    """Function of outputs and targets that gives the mean loss, a scalar, as ``module:function``."""
    layers: str
    """Dotted path of the list of repeated layers inside the module."""
    cwd: str
    """Absolute path of the folder that the functions are imported from."""
    before: tuple[str, ...] | None = None
    """Paths of the modules that do all the work before the layers; None: not told."""
    after: tuple[str, ...] | None = None
    """Paths of the modules that do all the work after the layers; None: not told."""
    tensor_parallel: tuple[tuple[str, ...], ...] = ()
    """Pairs of a pattern of module paths, ``*`` for any one part, and how tensor parallelism splits these."""
    facts: ModuleFacts

    @property
    def num_layers(self) -> int:
        return self.facts.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel:
    """A decoder of transformers, built from its configuration without weights."""

    kind: ClassVar[str] = "huggingface"
    config: str
    """Content of its ``config.json``."""
    vocab_size: int
    shape: LlamaModel | None = None
    """The built-in decoder with the same matrix products, by which its time is predicted; None: there is none."""
    facts: ModuleFacts

    @property
    def num_layers(self) -> int:
        return self.facts.num_layers


OwnModel = PythonModel | HuggingFaceModel
"""Models whose code is not ours, but which our runner trains."""


def decoder_of(model: object) -> LlamaModel | None:
    """The decoder by whose dimensions the model is reckoned; None for what is no decoder, or of unknown dimensions."""
    if isinstance(model, LlamaModel):
        return model
    return model.shape if isinstance(model, HuggingFaceModel | ScriptModel) else None
