"""A trial's instructions: the workload with its model, one candidate, and how to measure it. Standard library only."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from trials.accelerator.kinds import DeviceKind
from trials.files import digest, to_json

# ---- Kinds of models: shapes of built-in ones, PyTorch modules and users' training programs
#
# Standard library only.


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture-of-experts feed-forward: a router sends each token to some of the experts."""

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    """Width of one routed expert."""
    shared_ffn_hidden_size: int = 0
    """Width of the experts that every token passes, together; 0: none."""
    num_dense_layers: int = 0
    """First layers that have a plain feed-forward."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to the weights of the experts."""
    normalizes: bool = True
    """Whether the weights of a token's experts are scaled to sum to 1."""
    balance_rate: float = 1e-3
    """Step per optimiser step of the bias that balances the experts; 0: none."""
    routing: Literal["learned", "balanced"] = "learned"
    """``balanced`` sends tokens to all experts in turn, whatever the scores."""


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
    """A user's training program, which ranks start as it is instead of training a model themselves."""

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
    """Facts about a PyTorch module, from building it once beforehand. Zeros and None mean unknown."""

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
    has_convolutions: bool = False
    """Whether it convolves images, so that their memory format matters."""
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
    """The built-in decoder with the same matrix products, by which its time is predicted; None: there is none."""
    facts: ModuleFacts

    @property
    def num_layers(self) -> int:
        return self.facts.num_layers


UserModel = PythonModel | HuggingFaceModel
"""Models whose code is not ours, but which our runner trains."""


def decoder_of(model: object) -> LlamaModel | None:
    """The decoder by whose dimensions the model is reckoned; None for what is no decoder, or of unknown dimensions."""
    if isinstance(model, LlamaModel):
        return model
    return model.shape if isinstance(model, HuggingFaceModel | ScriptModel) else None


# ---- The specification of a trial: the workload, one candidate, and how to measure it. Standard library only

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from outer to inner; a rank's coordinates follow this order (``tp`` varies fastest)."""

Counts = tuple[tuple[int, ...], ...]
"""Numbers of layers, ``counts[chunk][stage]``: one row per chunk (virtual stage of a rank), one column per pipeline
rank. Without a pipeline that is ``((n,),)``. Where a count is optional, ``()`` stands for none anywhere."""


Model = LlamaModel | ResNetModel | LinearModel | PythonModel | HuggingFaceModel | ScriptModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TextData:
    """Byte-level tokens of text files.

    ``path`` names a file or a folder; ``None`` means the Python standard library's own source files.
    """

    kind: ClassVar[str] = "text"
    path: str | None = None
    pattern: str = "*.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFileData:
    """Token ids in one flat binary file, little-endian, read through a memory map."""

    kind: ClassVar[str] = "token_file"
    path: str
    dtype: Literal["uint8", "uint16", "int32", "int64"] = "uint16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFolderData:
    """JPEG files in one folder per class; ``None`` means images made up and encoded once, then decoded like files."""

    kind: ClassVar[str] = "image_folder"
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomData:
    """Normal vectors and their targets, drawn per step; for workloads that only exercise computation."""

    kind: ClassVar[str] = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonData:
    """Samples of a user's data set: pairs of input and target."""

    kind: ClassVar[str] = "python"
    dataset: str
    """Function without arguments that gives a map-style data set, as ``module:function``."""
    cwd: str
    """Absolute path of the folder that the function is imported from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptData:
    """Whatever the user's training program reads."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained and on what data; the same for every trial of a sweep."""

    model: Model
    data: Data
    seq_length: int
    """Tokens per sample; 1 where samples are no sequences (images, vectors)."""
    global_batch_size: int
    """Samples (sequences) per optimiser step over all data-parallel ranks."""
    optimizer: AdamW = AdamW()
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length

    @property
    def num_layers(self) -> int:
        """Repeated layers: transformer blocks, residual blocks, linear layers."""
        return self.model.num_layers

    @property
    def speed_unit(self) -> str:
        """What throughput is counted in, per second and device: tokens, or samples where they are no sequences."""
        return (
            "tokens/s/p"
            if isinstance(self.model, LlamaModel | HuggingFaceModel) or self.seq_length > 1
            else "samples/s/p"
        )


Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv"]
"""Pipeline schedules. ``zbv`` is the zero-bubble one in which rank r holds stages r and 2 pp - 1 - r
(Qi et al., arXiv 2401.10241)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the ranks split the work; every degree resolved.

    ``zero_stage`` says what ``dp_shard`` shards: 1 optimiser states, 2 also gradients, 3 also parameters; it is 0
    exactly when ``dp_shard`` is 1. ``replicate_with`` picks the engine of plain replication where there is a choice.
    Canonical form gives knobs without effect their default (``schedule`` without a pipeline, ``tp_engine`` without tp).
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    replicate_with: Literal["ddp", "fsdp2"] = "ddp"
    shard_embedding: bool = False
    """Shard embedding and head over all data-parallel ranks as units of their own, whatever the layers do."""
    sequence_parallel: bool = False
    tp_engine: Literal["dtensor", "local"] = "dtensor"
    """``local`` is Megatron's way: plain tensors and explicit collectives."""
    gradient_reduction: Literal["each", "last"] = "each"
    """When ZeRO stages 2 and 3 reduce the gradients of a step's micro-batches: after each, so that a rank holds no more
    than its shard of them, or after the last, which sends less and keeps them whole until then."""
    num_copies: Literal[1, 2] = 1
    """2 runs each micro-batch as two halves, so that one half's collectives overlap the other's computation."""
    cp_method: Literal["all_gather", "ulysses", "ring"] = "all_gather"
    """How attention sees the rest of a sequence: keys and values of all ranks gathered before it, heads exchanged for
    positions, or keys and values passed from rank to rank while it computes (Liu et al., arXiv 2310.01889)."""
    schedule: Schedule = "1f1b"
    num_virtual_stages: int = 1
    """Chunks of layers per pipeline rank."""
    stage_layers: Counts = ()
    """Layers of every stage and chunk; ``()`` exactly when ``pp`` is 1. Stages may be uneven and empty."""

    @property
    def dp(self) -> int:
        """Data-parallel degree: into how many parts the global batch is split."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveRecompute:
    """Outputs of the operators matching ``pattern`` are dropped after the forward pass and computed again.

    ``pattern`` is a regular expression that must match the whole of an operator's path inside its layer, like
    ``feed_forward\\.mul``, or that of a module, which then stands for all operators in it. It applies to the first
    ``num_layers`` layers of each chunk and stage.
    """

    pattern: str
    num_layers: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Which activations are not kept; the default keeps all. Layers count from the start of their chunk.

    The three parts combine: a layer recomputed in full has nothing left for the others.
    """

    full: Counts = ()
    """Layers that keep only their input."""
    selective: tuple[SelectiveRecompute, ...] = ()
    communication: Counts = ()
    """Layers that gather their sequence shards again in the backward pass instead of keeping them."""


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
    """Mixed precision: O0 is fp32, O1 autocast, O2 16-bit parameters with fp32 master weights. O1-fp8 is O1 with the
    matmuls of the layers' linear modules in 8-bit floats, scaled per tensor as they come (Micikevicius et al., arXiv
    2209.05433); ``dtype`` is that of everything else.

    ``loss_scale`` is set exactly when ``dtype`` is float16. ``white`` and ``black`` name operators (as in
    ``torch.nn.functional``: ``linear``, ``rms_norm``) that O1 runs in 16 bits, or in fp32, whatever autocast says.
    """

    level: Literal["O0", "O1", "O1-fp8", "O2"] = "O0"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    loss_scale: LossScale | None = None
    white: tuple[str, ...] = ()
    black: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTuning:
    """Hill climbing over workers and prefetch before training, ``tuning_steps`` batches per point."""

    tuning_steps: int = 500
    max_workers: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """How batches reach the step. ``prefetch_factor`` (batches ahead per worker) is 0 exactly when there are none."""

    num_workers: int = 0
    prefetch_factor: int = 0
    pin_memory: bool = False
    """Page-locked host memory for asynchronous copies; CUDA only."""
    persistent_workers: bool = False
    """Keep workers from one epoch to the next."""
    full_batch: bool = False
    """Every rank reads the whole global batch and keeps its rows, instead of reading only those."""
    tuning: LoaderTuning | None = None
    """If set, ``num_workers`` and ``prefetch_factor`` are searched for first; their own values are then 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Graph mode, kernel selection and memory format.

    ``compile`` says what is compiled, each block or the whole model; ``backend`` and ``compile_mode`` are those of
    torch.compile.
    """

    compile: Literal["off", "block", "model"] = "off"
    backend: str = "inductor"
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of fp32 matmuls, as in ``torch.set_float32_matmul_precision``."""
    cudnn_tuning_range: tuple[int, ...] = ()
    """First and last step in which cuDNN measures its algorithms; later steps use what was found. ``()``: never."""
    memory_format: Literal["nchw", "nhwc", "auto"] = "nchw"
    """Memory format of convolutions; ``auto`` chooses by number format, and times both to verify it."""
    loss_chunks: int = 1
    """Into how many parts of its positions a micro-batch is cut for head and loss, so that only the logits of one part
    exist at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What waits in host memory while the device does not need it; the default keeps all on the device."""

    activations: bool = False
    """Activations that layers keep for the backward pass: copied out after the forward pass, back ahead of need."""
    optimizer: bool = False
    """States of the optimiser and fp32 master weights; the step computes on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomChoice:
    """The value of one of the custom knobs: an argument, a key of a configuration file, an environment variable."""

    name: str
    """As in the sweep file: ``--flag``, ``file:dotted.key``, ``$NAME``, or a placeholder of the command."""
    value: Any
    """A string, number or truth value, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration: a point of the search space, canonical, hashable."""

    layout: Layout = Layout()
    micro_batch_size: int = 1
    """Samples (sequences) per data-parallel rank per micro-batch."""
    recompute: Recompute = Recompute()
    precision: Precision = Precision()
    loader: Loader = Loader()
    kernels: Kernels = Kernels()
    offload: Offload = Offload()
    own: tuple[CustomChoice, ...] = ()
    """The user's knobs, by name; only where their own program is trained."""

    @property
    def config_key(self) -> str:
        """SHA-256 of the canonical JSON: equal exactly for equal candidates."""
        return _config_key(self)

    def num_microbatches(self, global_batch_size: int) -> int:
        """Micro-batches per optimiser step on each data-parallel rank (gradient accumulation steps)."""
        return global_batch_size // (self.micro_batch_size * self.layout.dp)


@functools.lru_cache(maxsize=2**17)
def _config_key(candidate: Candidate) -> str:
    """The candidate's digest, kept because every proposal of a search asks for that of every trial."""
    return digest(_non_default(to_json(candidate), to_json(Candidate())))


def _non_default(content: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """What differs from the default: so a knob that is added later leaves the keys of candidates without it alone."""
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
    """First recorded step, counted from 1 over warm-up and measuring: the first steps compile and allocate."""
    stop_step: int = 5
    """Last recorded step."""
    ranks: tuple[int, ...] = ()
    """Ranks to record; ``()`` stands for the first rank of every pipeline stage."""
    memory: bool = False
    stack: bool = False
    communication: bool = True
    """Whether to count collectives per module, in one further step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """All a gang needs to run one trial, as JSON."""

    workload: Workload
    candidate: Candidate
    protocol: Protocol = Protocol()
    device: DeviceKind = "cpu"
    memory_limit_bytes: int | None = None
    """Device memory a rank may use beyond what the idle process holds; ``None`` leaves it to the device."""
    profile: ProfileSpec | None = None
    """If set, the run is recorded, and its times are not a measurement."""
    perturbation: float = 0.0
    """How far every initial weight is off, relative to it and at most: a run that differs from another by nothing but
    this shows how far rounding alone takes the training apart."""
