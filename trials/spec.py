"""Specification of a trial: workload, candidate and measurement protocol. Standard library only."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from trials.accelerator.kinds import DeviceKind
from trials.files import ADDED_LATER, digest, to_json

# ---- Kinds of models: shapes of the built-in ones, PyTorch modules, and training programs


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture-of-experts feed-forward: a router sends each token to some of the experts."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    """Width of one routed expert."""
    shared_ffn_hidden_size: int = 0
    """Total width of the experts that every token passes through; 0: none."""
    num_dense_layers: int = 0
    """First layers that have a plain feed-forward."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to the weights of the experts."""
    normalizes: bool = True
    """Whether the weights of a token's experts are scaled to sum to 1."""
    balance_rate: float = 1e-3
    """Step per optimiser step of the bias that balances the experts; 0: none."""
    aux_loss: float = 0.0
    """Weight of the loss per sequence and layer that balances the experts; 0: none."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the router's logits, which keeps them small; 0: none."""
    capacity: float | None = None
    """Slots of an expert over the mean number of a sequence's tokens; tokens without a slot skip it. None: no limit."""
    routing: Literal["learned", "balanced"] = "learned"
    """``balanced`` sends tokens to all experts in turn, whatever the scores."""

    @property
    def slots_per_token(self) -> float:
        """Rows of routed experts per token: with a capacity, used or not."""
        return self.top_k if self.capacity is None else self.top_k * self.capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-AI, arXiv 2405.04434): keys and values of all heads are projections of one
    narrow vector per position, and positions are in a part of the heads that the keys share."""

    kv_lora_rank: int
    """Width of the vector of keys and values."""
    qk_nope_head_dim: int
    """Size of a query or key without its rotary part."""
    qk_rope_head_dim: int
    """Size of the rotary part."""
    v_head_dim: int
    q_lora_rank: int = 0
    """Width of the vector of the queries; 0: they are projected from the hidden states."""


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
    experts: Experts | None = None
    """Replaces the feed-forward of all layers but the first ``num_dense_layers``; None: a dense model."""
    latent: LatentAttention | None = field(default=None, metadata=ADDED_LATER)
    """Replaces grouped-query attention; then ``num_kv_heads`` equals ``num_heads``."""

    @property
    def head_size(self) -> int:
        """Size of a query or key."""
        if self.latent is None:
            return self.hidden_size // self.num_heads
        return self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim

    @property
    def rotary_size(self) -> int:
        """Size of the part of a query or key that is rotated by its position."""
        return self.head_size if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def value_size(self) -> int:
        """Size of a value."""
        return self.head_size if self.latent is None else self.latent.v_head_dim


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
    """A chain of square Linear layers without bias or activation: pure matrix multiplication, as in AMP guides."""

    kind: ClassVar[str] = "linear"
    num_layers: int = 9
    size: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptModel:
    """A training program that ranks start unchanged instead of training a model themselves."""

    kind: ClassVar[str] = "script"
    recipe: str
    """Framework of the program: a name in :data:`orchestrator.frameworks.catalog.FRAMEWORKS`, or ``custom``."""
    run: tuple[str, ...]
    """The command as configured, without a shell; a trial fills in each placeholder ``{name}``."""
    cwd: str
    """Absolute path of its working directory."""
    env: tuple[tuple[str, ...], ...] = ()
    """Additional environment variables, pairs of name and value."""
    files: tuple[tuple[str, ...], ...] = ()
    """Configuration files that are copied for each trial, pairs of name and absolute path."""
    launcher: Literal["env", "own"] = "env"
    """What starts its ranks: ``env``, this project, one per device with torchrun's variables; ``own``, the command
    itself, once per node."""
    num_layers: int = 1
    """Number of repeated layers if known, else 1 for all of them together."""
    shape: LlamaModel | None = None
    """Shape of the decoder that it trains; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """Facts about a PyTorch module, found by building it once in advance. Zeros and None mean unknown."""

    num_layers: int
    num_parameters: int = 0
    flops_per_sample: float = 0.0
    """Forward and backward FLOPs per sample, without recomputation."""
    activation_elements: int = 0
    """Activation elements per sample that the forward pass keeps for the backward pass."""
    num_kernels: int = 0
    """Operators called by one forward pass."""
    has_batch_norm: bool = False
    """Whether batch norm makes results depend on the micro-batch size."""
    has_convolutions: bool = False
    """Whether it has image convolutions, for which the memory format matters."""
    has_loose_norms: bool = field(default=False, metadata=ADDED_LATER)
    """Whether it has root-mean-square norms of several operators."""
    no_pipeline: str | None = None
    """Why pipeline stages cannot split it; None if they can."""
    no_tensor_parallel: str | None = None
    """Why tensor parallelism cannot split it; None if it can."""
    head: str | None = None
    """Path of the linear module without bias whose outputs are a decoder's unmodified logits, so that it can be
    computed together with the loss. None if there is none, or if the loss is custom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonModel:
    """A custom PyTorch module, built in each rank by calling a function."""

    kind: ClassVar[str] = "python"
    model: str
    """Function without arguments that builds the module, as ``module:function``."""
    loss: str
    """Function from outputs and targets to the mean loss, a scalar, as ``module:function``."""
    layers: str
    """Dotted path of the list of repeated layers inside the module."""
    cwd: str
    """Absolute path of the folder that the functions are imported from."""
    before: tuple[str, ...] | None = None
    """Paths of the modules that do all the work before the layers; None if unknown."""
    after: tuple[str, ...] | None = None
    """Paths of the modules that do all the work after the layers; None if unknown."""
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
    """Built-in decoder with the same matrix products, from which its time is predicted; None if there is none."""
    facts: ModuleFacts

    @property
    def num_layers(self) -> int:
        return self.facts.num_layers


UserModel = PythonModel | HuggingFaceModel
"""Models with user code that the built-in runner trains."""


def decoder_of(model: object) -> LlamaModel | None:
    """Return the decoder with the model's dimensions; None if it is no decoder or they are unknown."""
    if isinstance(model, LlamaModel):
        return model
    return model.shape if isinstance(model, HuggingFaceModel | ScriptModel) else None


# ---- The specification of a trial

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from outer to inner; a rank's coordinates follow this order (``tp`` varies fastest)."""

Counts = tuple[tuple[int, ...], ...]
"""Numbers of layers, ``counts[chunk][stage]``: one row per chunk (virtual stage of a rank), one column per pipeline
rank; ``((n,),)`` without a pipeline. For optional counts, ``()`` means none anywhere."""


Model = LlamaModel | ResNetModel | LinearModel | PythonModel | HuggingFaceModel | ScriptModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TextData:
    """Byte-level tokens of text files.

    ``path`` names a file or a folder; ``None`` means the Python standard library's own source files.
    """

    kind: ClassVar[str] = "text"
    path: str | None = None
    pattern: str = "*.py"
    lengths: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    """Tokens of a document, ascending and equally likely; ``()``: every document has ``seq_length`` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFileData:
    """Token ids in one flat binary file, little-endian, read through a memory map."""

    kind: ClassVar[str] = "token_file"
    path: str
    dtype: Literal["uint8", "uint16", "int32", "int64"] = "uint16"
    lengths: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    """Tokens of a document, ascending and equally likely; ``()``: every document has ``seq_length`` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFolderData:
    """JPEG files in one folder per class; ``None`` means synthetic images, encoded once and then decoded like files."""

    kind: ClassVar[str] = "image_folder"
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomData:
    """Normal vectors and their targets, drawn per step; for workloads that only exercise computation."""

    kind: ClassVar[str] = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonData:
    """Samples of a custom data set: pairs of input and target. They vary in size if it has an attribute ``sizes``."""

    kind: ClassVar[str] = "python"
    dataset: str
    """Function without arguments that returns a map-style data set, as ``module:function``."""
    cwd: str
    """Absolute path of the folder that the function is imported from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptData:
    """The data that a training program reads by itself."""

    kind: ClassVar[str] = "script"


Data = TextData | TokenFileData | ImageFolderData | RandomData | PythonData | ScriptData


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

    kind: ClassVar[str] = "adamw"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = field(default=0.0, metadata=ADDED_LATER)
    """Largest global gradient norm of an update: larger gradients are scaled down to it. 0: no clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The model, data and optimiser of a sweep; the same for all its trials."""

    model: Model
    data: Data
    seq_length: int
    """Tokens per sample, at most if they vary in length; 1 if samples are not sequences (images, vectors)."""
    global_batch_size: int
    """Samples (sequences) per optimiser step over all data-parallel ranks."""
    optimizer: AdamW = AdamW()
    seed: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of a sample, ascending and equally likely; ``()`` if all have ``seq_length``."""
        found = self.data.lengths if isinstance(self.data, TextData | TokenFileData) else ()
        return tuple(min(length, self.seq_length) for length in found)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimiser step without padding, on average if samples vary in length."""
        if lengths := self.lengths:
            return max(1, round(self.global_batch_size * sum(lengths) / len(lengths)))
        return self.global_batch_size * self.seq_length

    @property
    def attended_length(self) -> float:
        """Length of the sequence that an average token is in."""
        lengths = self.lengths
        return sum(length**2 for length in lengths) / sum(lengths) if lengths else self.seq_length

    @property
    def num_layers(self) -> int:
        """Repeated layers: transformer blocks, residual blocks, linear layers."""
        return self.model.num_layers

    @property
    def speed_unit(self) -> str:
        """Unit of throughput per second and device: tokens, or samples if these are not sequences."""
        return (
            "tokens/s/p"
            if isinstance(self.model, LlamaModel | HuggingFaceModel) or self.seq_length > 1
            else "samples/s/p"
        )


def with_learned_routing(workload: Workload) -> Workload:
    """Return the workload as in production: ``routing: balanced`` is for measurements alone."""
    model = workload.model
    if not isinstance(model, LlamaModel) or model.experts is None or model.experts.routing == "learned":
        return workload
    return replace(workload, model=replace(model, experts=replace(model.experts, routing="learned")))


Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv"]
"""Pipeline schedules. ``zbv`` is the zero-bubble schedule in which rank r holds stages r and 2 pp - 1 - r
(Qi et al., arXiv 2401.10241)."""


CPMethod = Literal["all_gather", "ulysses", "ring", "hybrid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the ranks split the work, with every degree resolved.

    ``zero_stage`` selects what ``dp_shard`` shards: 1 optimiser states, 2 also gradients, 3 also parameters. It is 0
    exactly when ``dp_shard`` is 1. ``replicate_with`` selects the implementation of plain replication if there are
    several. In canonical form, knobs without effect have their default (``schedule`` without a pipeline, ``tp_engine``
    without tp).
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    replicate_with: Literal["ddp", "fsdp2"] = "ddp"
    shard_embedding: bool = False
    """Shard embedding and head over all data-parallel ranks as separate units, independently of the layers."""
    sequence_parallel: bool = False
    tp_engine: Literal["dtensor", "local"] = "dtensor"
    """``local`` follows Megatron: plain tensors and explicit collectives."""
    gradient_reduction: Literal["each", "last"] = "each"
    """When ZeRO stages 2 and 3 reduce the gradients of a step. ``each``: after every micro-batch, so that a rank keeps
    only its shard. ``last``: after the last one, which sends less but keeps whole gradients until then."""
    num_copies: Literal[1, 2] = 1
    """2 runs each micro-batch as two halves, so that one half's collectives overlap the other's computation. An odd
    number of sequences is split by positions (:attr:`Candidate.splits_positions`)."""
    cp_method: CPMethod = "all_gather"
    """How attention gets the rest of a sequence. ``all_gather``: gather the keys and values of all ranks first.
    ``ulysses``: exchange heads for positions. ``ring``: pass keys and values from rank to rank during the computation
    (Liu et al., arXiv 2310.01889). ``hybrid``: exchange heads among ``ulysses_degree`` neighbouring ranks, and pass
    keys and values between such groups."""
    schedule: Schedule = "1f1b"
    num_virtual_stages: int = 1
    """Chunks of layers per pipeline rank."""
    ep: int = field(default=1, metadata=ADDED_LATER)
    """Expert-parallel degree: number of parts that the experts of a layer are split into. Their ranks are some of those
    that ``dp_shard`` (without ZeRO ``dp_replicate``), ``cp`` and ``tp`` already count, and hold the rest of the layer
    as before."""
    ulysses_degree: int = field(default=1, metadata=ADDED_LATER)
    """Ranks among which ``cp_method: hybrid`` exchanges heads, a divisor of ``cp``; 1 with other methods."""
    stage_layers: Counts = ()
    """Layers of every stage and chunk; ``()`` exactly when ``pp`` is 1. Stages may be uneven and empty."""

    @property
    def dp(self) -> int:
        """Data-parallel degree: number of parts of the global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveRecompute:
    """Drop the outputs of operators that match ``pattern`` after the forward pass and compute them again.

    ``pattern`` is a regular expression that must match the full path of an operator in its layer, like
    ``feed_forward\\.mul``, or of a module, which stands for all operators in it. It applies to the first ``num_layers``
    layers of each chunk and stage.
    """

    pattern: str
    num_layers: Counts


GATHERED = {"attention": ("wqkv", "wq", "wk", "wv"), "feed_forward": ("w13", "w1", "w3")}
"""Sub-layers that gather sequence shards, with the projections that read what is gathered: the fused one of our models,
and the ones that other frameworks have instead."""


def gather_pattern(sub_layer: str) -> str:
    """Return the pattern of selective recompute that gathers the inputs of a sub-layer again."""
    return rf"{sub_layer}\.gather_sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Which activations are recomputed; by default none. Layers count from the start of their chunk.

    The three parts combine. For a layer recomputed in full, the others have no effect.
    """

    full: Counts = ()
    """Layers that keep only their input."""
    selective: tuple[SelectiveRecompute, ...] = ()
    communication: Counts = ()
    """Layers that gather their sequence shards again in the backward pass instead of keeping them, in all sub-layers.
    ``selective`` with :func:`gather_pattern` selects one."""

    @property
    def repeats_gathers(self) -> bool:
        """Whether sequence shards are gathered again, in all sub-layers or by pattern."""
        return bool(self.communication) or any("gather_sequence" in part.pattern for part in self.selective)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Loss scaling for float16: multiply by ``growth_factor`` after ``growth_interval`` finite steps in a row, by
    ``backoff_factor`` after ``backoff_interval`` steps in a row with inf or nan. ``dynamic=False`` keeps ``initial``.
    """

    initial: float = 2.0**15
    growth_factor: float = 2.0
    growth_interval: int = 1000
    backoff_factor: float = 0.5
    backoff_interval: int = 2
    dynamic: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Mixed precision: O0 is fp32, O1 autocast, O2 16-bit parameters with fp32 master weights. O1-fp8 and O2-fp8 are O1
    and O2 with the matmuls of the layers' linear modules in 8-bit floats, with dynamic scaling per tensor
    (Micikevicius et al., arXiv 2209.05433); ``dtype`` applies to everything else. With ``fp8_gather``, FSDP gathers the
    weights of these modules in 8-bit floats.

    ``loss_scale`` is set exactly when ``dtype`` is float16. ``white`` and ``black`` name operators (as in
    ``torch.nn.functional``: ``linear``, ``rms_norm``) that O1 runs in 16 bits or in fp32, overriding autocast's own
    lists. ``keep_fp32`` has patterns of module paths (``layers\\.0``, ``.*norm``, ``output``) or names of their classes
    (``LayerNorm``): under O2, these modules keep fp32 weights and compute in fp32.
    """

    level: Literal["O0", "O1", "O1-fp8", "O2", "O2-fp8"] = "O0"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    loss_scale: LossScale | None = None
    white: tuple[str, ...] = ()
    black: tuple[str, ...] = ()
    keep_fp32: tuple[str, ...] = ()
    fp8_gather: bool = False

    @property
    def base(self) -> str:
        """O0, O1 or O2: the level of everything except 8-bit matmuls."""
        return self.level.removesuffix("-fp8")

    @property
    def is_fp8(self) -> bool:
        """Whether the layers' matmuls are in 8-bit floats."""
        return self.level.endswith("-fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTuning:
    """Hill climbing over workers and prefetch factor before training, ``tuning_steps`` batches per point."""

    tuning_steps: int = 500
    max_workers: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Data loader settings. ``prefetch_factor`` (batches ahead per worker) is 0 exactly when there are no workers."""

    num_workers: int = 0
    prefetch_factor: int = 0
    pin_memory: bool = False
    """Page-locked host memory for asynchronous copies; CUDA only."""
    persistent_workers: bool = False
    """Keep workers from one epoch to the next."""
    full_batch: bool = False
    """Whether every rank reads the whole global batch and keeps its rows, instead of reading only those."""
    batching: Literal["padding", "packing", "buckets"] = field(default="padding", metadata=ADDED_LATER)
    """How samples of varying length become micro-batches. ``padding``: as they come, padded to the longest.
    ``packing``: several per row of ``seq_length``, attending only to themselves. ``buckets``: sorted by length over the
    whole step, padded to one of a few lengths."""
    tuning: LoaderTuning | None = None
    """If set, ``num_workers`` and ``prefetch_factor`` are searched first; the values here are then 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Graph mode, kernel selection and memory format.

    ``compile`` selects what is compiled, each block or the whole model; ``backend`` and ``compile_mode`` are arguments
    of torch.compile.
    """

    compile: Literal["off", "block", "model"] = "off"
    backend: str = "inductor"
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    dynamic: bool = field(default=False, metadata=ADDED_LATER)
    """Whether one graph serves inputs of all lengths, instead of one graph per length."""
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    fused: Literal["auto", "torch", "liger"] = field(default="auto", metadata=ADDED_LATER)
    """Library of the fused operators that replace those of an imported module. ``auto``: none, the module's own."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of fp32 matmuls, as in ``torch.set_float32_matmul_precision``."""
    cudnn_tuning_range: tuple[int, ...] = ()
    """First and last step in which cuDNN measures its algorithms; later steps use the fastest. ``()``: never."""
    memory_format: Literal["nchw", "nhwc", "auto"] = "nchw"
    """Memory format of convolutions; ``auto`` chooses by number format and verifies the choice by timing both."""
    loss_chunks: int = 1
    """Number of parts, by position, in which head and loss process a micro-batch; logits exist for one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What is kept in host memory while the device does not need it; by default nothing."""

    activations: bool = False
    """Activations that layers keep for the backward pass: copied out after the forward pass, copied back in advance."""
    optimizer: bool = False
    """Optimiser states and fp32 master weights; the host computes the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomChoice:
    """The value of one custom knob: an argument, a key of a configuration file, or an environment variable."""

    name: str
    """As in the sweep file: ``--flag``, ``file:dotted.key``, ``$NAME``, or a placeholder of the command."""
    value: Any
    """A string, number, truth value, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration: a point of the search space; canonical and hashable."""

    layout: Layout = Layout()
    micro_batch_size: int = 1
    """Samples (sequences) per data-parallel rank per micro-batch."""
    recompute: Recompute = Recompute()
    precision: Precision = Precision()
    loader: Loader = Loader()
    kernels: Kernels = Kernels()
    offload: Offload = Offload()
    own: tuple[CustomChoice, ...] = ()
    """Custom knobs by name; only for training programs."""

    @property
    def config_key(self) -> str:
        """SHA-256 of the canonical JSON: equal candidates have equal keys."""
        return _config_key(self)

    @property
    def splits_positions(self) -> bool:
        """Whether the two halves of a micro-batch are halves of the positions instead of the sequences."""
        return self.layout.num_copies > 1 and self.micro_batch_size % 2 == 1

    def num_microbatches(self, global_batch_size: int) -> int:
        """Micro-batches per optimiser step on each data-parallel rank (gradient accumulation steps)."""
        return global_batch_size // (self.micro_batch_size * self.layout.dp)


@functools.lru_cache(maxsize=2**17)
def _config_key(candidate: Candidate) -> str:
    """Compute the candidate's digest; cached because each proposal of a search needs that of every trial."""
    return digest(_non_default(to_json(candidate), to_json(Candidate())))


def _non_default(content: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Return what differs from the default, so that a knob added later does not change the keys of older candidates."""
    changed = {}
    for name, value in content.items():
        usual = default.get(name)
        if value != usual:
            changed[name] = _non_default(value, usual) if isinstance(value, dict) and isinstance(usual, dict) else value
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How to measure: warm up until step times are stable, then measure until the spread is small.

    A step counts as stable when the last two warm-up times differ by at most ``warmup_tolerance`` (relative).
    Measuring takes ``num_steps``, then more up to ``max_steps`` while the relative inter-quartile range of the step
    times is above ``max_relative_spread``.
    """

    min_warmup_steps: int = 2
    max_warmup_steps: int = 6
    warmup_tolerance: float = 0.2
    num_steps: int = 8
    max_steps: int = 16
    max_relative_spread: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec:
    """What torch's profiler records of a run."""

    start_step: int = 3
    """First recorded step, counted from 1 over warm-up and measurement: the first steps compile and allocate."""
    stop_step: int = 5
    """Last recorded step."""
    ranks: tuple[int, ...] = ()
    """Ranks to record; ``()`` means the first rank of every pipeline stage."""
    memory: bool = False
    stack: bool = False
    communication: bool = True
    """Whether to count collectives per module, in one additional step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """Everything a gang needs to run one trial; passed as JSON."""

    workload: Workload
    candidate: Candidate
    protocol: Protocol = Protocol()
    device: DeviceKind = "cpu"
    memory_limit_bytes: int | None = None
    """Device memory a rank may use in addition to that of the idle process; ``None``: no limit but the device's."""
    profile: ProfileSpec | None = None
    """If set, the run is profiled and its times are not a measurement."""
    perturbation: float = 0.0
    """Largest relative change of each initial weight. Two runs that differ in nothing else show how far rounding errors
    alone make trainings diverge."""
