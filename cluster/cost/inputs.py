"""The cost model's inputs, candidates as columns, and its coefficients with their priors."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from cluster.candidate_table import Codes, combined
from configs import CONFIGS

# ---- The cost model's inputs: candidates as columns, one numpy array per quantity, one row per candidate

Array = npt.NDArray[np.float64]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
"""``CostInputs.schedule`` is an index into this tuple."""

CP_METHODS = ("all_gather", "ulysses", "ring", "hybrid")
"""``CostInputs.cp_method`` is an index into this tuple."""

BUCKET_BYTES = 50e6
"""Bytes of two reduction buckets in flight, 25 MB each (``torch.nn.parallel.DistributedDataParallel``)."""

WORKSPACE_BYTES = 128 << 20
"""Bytes of fp32 copies of 16-bit gradients that the built-in optimiser step holds at a time
(``trials.training.optimizer``). Its fused kernels have no other intermediate results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostInputs:
    """The cost model's inputs. Arrays of shape (n,); those per stage (n, largest pp).

    Switches are 0 or 1; shares lie between 0 and 1. Sizes of data types are bytes per element or per parameter.
    """

    num_layers: Array
    hidden: Array
    ffn: Array
    num_heads: Array
    num_kv_heads: Array
    head_dim: Array
    attention_params: Array
    """Weights of a layer's attention, of which tensor parallelism takes a share; 0: those of heads that make up its
    width, and of key-value heads. Weights that every tensor-parallel rank holds whole count ``tp`` times."""
    vocab: Array
    seq_length: Array
    gated: Array
    """1: SwiGLU (three FFN matrices), 0: one activation (two)."""
    fused: Array
    """1: the FFN's activation keeps only its input and output, as in fused and compiled kernels."""
    dropout: Array
    tied: Array
    """1: embedding and head are one parameter."""
    trained_share: Array
    """Share of the weights with gradients: 1, or near 0 for adapters on frozen weights."""
    expert_share: Array
    """Share of the layers with a mixture of experts, each of width ``expert_ffn``; 0: a dense model. The other layers'
    feed-forward has width ``ffn``."""
    num_experts: Array
    """Number of routed experts of such a layer."""
    experts_per_token: Array
    """Number of routed experts per token (top-k)."""
    expert_ffn: Array
    shared_ffn: Array
    """Total width of the experts shared by all tokens."""
    ep: Array
    """Ranks over which a layer's experts are distributed, a subset of the ranks with different tokens; those of tensor
    parallelism are not counted."""
    whole_experts: Array
    """1: tensor-parallel ranks hold different experts, and route different positions; 0: parts of the same ones."""

    pp: Array
    dp_replicate: Array
    dp_shard: Array
    cp: Array
    cp_method: Array
    ulysses_degree: Array
    """Ranks, of those that ``cp`` counts, that exchange heads with the hybrid method."""
    tp: Array
    zero_stage: Array
    reduces_last: Array
    """1: ZeRO-2 and ZeRO-3 reduce gradients only at the step's last micro-batch, not at each one."""
    hides_collectives: Array
    """1: tensor parallelism gathers and scatters in parts, each overlapping a matmul on another part (user buffers of
    Transformer Engine, PyTorch's async TP, MC2)."""
    hides_transfers: Array
    """1: with several chunks, transfers between pipeline ranks overlap the computation of other chunks."""
    hides_gathering: Array
    """1: ZeRO-1 and ZeRO-2 gather new weights during the next forward pass."""
    hides_reduction: Array
    """1: gradients are reduced in buckets during the backward pass; 0: unknown software, that may wait for its end."""
    aged_attention: Array
    """1: fused attention kernels are for an older generation of devices."""
    loose_norms: Array
    """1: norms consist of several kernels with intermediate results in memory."""
    gathers_once: Array
    """1: ZeRO-3 gathers a layer's weights for the first micro-batch and keeps them for the step's others, forward and
    backward; 0: it gathers them for every pass."""
    stays_gathered: Array
    """1: ZeRO-3 frees weights after forward but not after backward passes: the next forward pass finds them gathered,
    and each micro-batch gathers them once."""
    gathered_bytes: Array
    """Bytes per weight of a layer that ZeRO gathers; 0: those of an activation element."""
    gathered_table_bytes: Array
    """The same for embedding and head; 0: those of an activation element."""
    sequence_parallel: Array
    num_copies: Array
    shard_embedding: Array
    """1: embedding and head are sharded over all data-parallel ranks, whatever the ZeRO stage of the layers."""
    schedule: Array
    num_virtual_stages: Array
    stage_buffers: Array
    """Micro-batches that a rank of a plain pipeline has room for, relative to the stages from it on: 1, or more in
    software that buffers ahead."""
    micro_batch_size: Array
    num_microbatches: Array
    stage_layers: Array
    """Layers of each pipeline rank, all its chunks together; 0 beyond pp."""
    stage_full: Array
    """Fully recomputed layers of each pipeline rank."""
    stage_dropped: Array
    """Share of the kept activation bytes that selective recompute drops in the other layers of each rank."""
    stage_repeated: Array
    """Share of the forward pass that selective recompute repeats in the other layers of each rank."""
    stage_wide_weights: Array
    """Weights of each pipeline rank's layers in modules that stay in fp32 at level O2; see :mod:`cluster.cost.wide`."""
    stage_wide_products: Array
    """Multiplications per token in these modules, forward."""
    stage_wide_kept: Array
    """Elements per token that they keep in four bytes instead of two."""
    stage_wide_traffic: Array
    """Bytes per token that they read and write beyond those in 16 bits, forward."""
    wide_embedding: Array
    """1: the embedding is in fp32 at level O2."""
    wide_head: Array
    """1: so is the head, with its logits."""
    wide_flops_per_s: Array
    """Dense matmul peak of modules in fp32; 0 if there are none."""
    recompute_communication: Array
    """Share of layers whose sequence shards are gathered again in the backward pass."""
    keeps_gathered: Array
    """Share of layers that keep the gathered inputs of their matmuls (sequence parallelism without re-gathering)."""

    compute_bytes: Array
    """Bytes of an activation element."""
    stream_bytes: Array
    """Bytes of an element between layers, and of the norms' inputs, which autocast leaves in fp32; 0: those of an
    activation element."""
    loss_bytes: Array
    """Bytes per logit, beyond its own value, while the loss is computed: 8 for two fp32 copies, 0 if the gradient
    replaces the logits in place."""
    loss_traffic: Array
    """Bytes read and written per logit from the head to the logits' gradient, forward and backward."""
    loss_chunks: Array
    """Parts of a micro-batch whose logits exist one at a time; above 1, they are computed twice."""
    head_sums_bytes: Array
    """Bytes per weight of the head for accumulating its gradients over the parts."""
    hides_sums: Array
    """1: tensor parallelism sums projections' input gradients while weight gradients are computed."""
    weight_bytes: Array
    gradient_bytes: Array
    optimizer_bytes: Array
    """Bytes of optimiser states and master weights per parameter."""
    cast_bytes: Array
    """Bytes per parameter of autocast's 16-bit copy of the weights (O1)."""
    bucket_bytes: Array
    """Bytes of data parallelism's buffers for gradient reduction."""
    buffer_bytes: Array
    """Bytes of other persistent buffers, on every rank."""
    keeps_gradients: Array
    """1: gradient buffers stay allocated during the forward pass."""
    workspace_limit_bytes: Array
    """Limit of an optimiser step's intermediate results, in bytes; infinite if it updates everything at once."""
    update_bytes: Array
    """Bytes per parameter of further intermediate results of an optimiser step without that limit."""
    casts_operands: Array
    """1: matmuls recreate their 8-bit operands from wider tensors, which are kept for the backward pass (torchao); 0:
    operands are kept as multiplied. No effect for matmuls with 16 bits or more."""
    offload_activations: Array
    """1: activations of all layers except the last are offloaded to host memory."""
    offload_optimizer: Array
    """1: optimiser states and fp32 weights are in host memory, and the host runs the optimiser step."""
    flash: Array
    compiled: Array

    peak_flops_per_s: Array
    """Dense matmul peak in the candidate's number format."""
    base_flops_per_s: Array
    """Dense matmul peak of the device in 16 bits (for fp32 candidates the fp32 peak)."""
    memory_bytes: Array
    """Usable device memory."""
    memory_bytes_per_s: Array
    host_bytes_per_s: Array
    """Per device and direction, between its memory and the host's."""
    on_cores: Array
    """1: devices are CPU cores."""
    node_size: Array
    """Devices that share a host's processors."""
    link_bytes_per_s: Array
    """Per device and direction, inside the fast domain."""
    network_bytes_per_s: Array
    """Per device and direction, beyond it."""
    domain_size: Array
    """Devices joined by the fast links: a node, or several in rack-scale systems."""
    data_wait_s: Array
    """Time per step spent waiting for data, if known."""
    num_reads: Array
    """Records fetched from storage per step by all ranks; 0 if unknown."""
    reads_ahead: Array
    """1: data-loading processes fetch during the step."""

    def __len__(self) -> int:
        return len(self.num_layers)

    @property
    def dp(self) -> Array:
        return self.dp_replicate * self.dp_shard

    @property
    def residual_bytes(self) -> Array:
        """Bytes of an element between layers."""
        return np.where(self.stream_bytes > 0, self.stream_bytes, self.compute_bytes)

    @property
    def gather_bytes(self) -> Array:
        """Bytes per weight of a layer that ZeRO gathers."""
        return np.where(self.gathered_bytes > 0, self.gathered_bytes, self.compute_bytes)

    @property
    def gather_table_bytes(self) -> Array:
        """Bytes per weight of embedding or head that ZeRO gathers."""
        return np.where(self.gathered_table_bytes > 0, self.gathered_table_bytes, self.compute_bytes)

    @property
    def exchanging_heads(self) -> Array:
        """Context-parallel ranks that exchange heads for positions."""
        by_heads, hybrid = (self.cp_method == CP_METHODS.index(method) for method in ("ulysses", "hybrid"))
        return np.where(by_heads, self.cp, np.where(hybrid, self.ulysses_degree, 1.0))

    @property
    def passing_keys(self) -> Array:
        """Context-parallel ranks that exchange keys and values."""
        return self.cp / self.exchanging_heads

    @property
    def num_shards(self) -> Array:
        """Ranks over which ZeRO shards states. Includes context-parallel peers, which hold the same weights."""
        return np.where(self.zero_stage > 0, self.dp_shard * self.cp, 1.0)

    @property
    def reductions(self) -> Array:
        """Gradient reductions per step: once per micro-batch if ZeRO shards gradients, unless it waits."""
        return np.where((self.zero_stage >= 2) & (self.reduces_last == 0), self.num_microbatches, 1.0)

    @property
    def selective_share(self) -> Array:
        """``stage_dropped``, averaged over all layers without full recompute."""
        plain = self.stage_layers - self.stage_full
        return np.asarray((plain * self.stage_dropped).sum(axis=1) / np.maximum(plain.sum(axis=1), 1))

    @property
    def world_size(self) -> Array:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def tokens_per_step(self) -> Array:
        return self.micro_batch_size * self.num_microbatches * self.dp * self.seq_length

    def take(self, rows: Any) -> CostInputs:
        """Select ``rows`` (indices, a mask or a slice)."""
        return CostInputs(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("stage_wide_weights", "stage_wide_products", "stage_wide_kept", "stage_wide_traffic"), (0.0,)),
    **dict.fromkeys(("wide_embedding", "wide_head", "wide_flops_per_s"), 0.0),
    "head_sums_bytes": 0.0,
    "stage_buffers": 1.0,
    "hides_collectives": 0.0,
    "hides_transfers": 0.0,
    "hides_gathering": 0.0,
    "hides_reduction": 0.0,
    "aged_attention": 0.0,
    "loose_norms": 0.0,
    "update_bytes": 0.0,
    "gathers_once": 0.0,
    "stays_gathered": 0.0,
    "stream_bytes": 0.0,
    "gathered_bytes": 0.0,
    "gathered_table_bytes": 0.0,
    "buffer_bytes": 0.0,
    "on_cores": 0.0,
    "expert_share": 0.0,
    "num_experts": 1.0,
    "experts_per_token": 1.0,
    "expert_ffn": 0.0,
    "shared_ffn": 0.0,
    "ep": 1.0,
    "ulysses_degree": 1.0,
    "whole_experts": 0.0,
    "attention_params": 0.0,
}
"""Defaults of fields that rows may omit."""

STAGE_FIELDS = (
    "stage_layers",
    "stage_full",
    "stage_dropped",
    "stage_repeated",
    "stage_wide_weights",
    "stage_wide_products",
    "stage_wide_kept",
    "stage_wide_traffic",
)
"""Fields of :class:`CostInputs` with one column per pipeline rank."""


def from_rows(rows: Sequence[Mapping[str, Any]]) -> CostInputs:
    """Build the inputs from one mapping per candidate, which may omit ``DEFAULTS``. Values per stage are sequences of
    any length."""
    num_stages = max((len(row["stage_layers"]) for row in rows), default=1)
    columns = {}
    for name in (column.name for column in fields(CostInputs)):
        default = DEFAULTS.get(name)
        values = [row[name] if default is None else row.get(name, default) for row in rows]
        columns[name] = column_of(name, values)
        if name in STAGE_FIELDS:
            columns[name] = _as_wide(columns[name], num_stages)
    return CostInputs(**columns)


def concatenate(parts: Sequence[CostInputs]) -> CostInputs:
    """Concatenate the rows of all parts, in order."""
    names = [field.name for field in fields(CostInputs)]
    return CostInputs(**{name: np.concatenate(_padded(name, [getattr(x, name) for x in parts])) for name in names})


class FactoredInputs(CostInputs):
    """The inputs of very many candidates, of which few rows exist at a time.

    Columns that depend on each other form a block: its distinct rows, and an index into them per candidate. Whole
    columns are assembled on access.
    """

    __slots__ = ("_block_of", "_num")
    _block_of: Mapping[str, InputBlock]
    _num: int

    def __init__(self, blocks: Sequence[InputBlock]) -> None:
        object.__setattr__(self, "_block_of", {name: block for block in blocks for name in block.columns})
        object.__setattr__(self, "_num", len(blocks[0].places))

    def __len__(self) -> int:
        return self._num

    @property
    def blocks(self) -> list[InputBlock]:
        """Return the blocks, each once."""
        return list({id(block): block for block in self._block_of.values()}.values())

    def column(self, name: str, rows: Any = slice(None)) -> Array:
        """Return the field ``name`` of ``rows``."""
        block = self._block_of[name]
        return np.asarray(block.columns[name].take(block.places[rows], axis=0))

    def take(self, rows: Any) -> CostInputs:
        columns = {f.name: self.column(f.name, rows) for f in fields(CostInputs)}
        width = int(columns["pp"].max(initial=1))
        return CostInputs(**columns | {name: columns[name][:, :width] for name in STAGE_FIELDS})

    def part(self, rows: Any) -> FactoredInputs:
        """Same as :meth:`take`, without assembling the columns."""
        return FactoredInputs([InputBlock(block.columns, block.places[rows]) for block in self.blocks])

    def distinct(self) -> tuple[NDArray[np.intp], Codes]:
        """Return one row of each distinct set of inputs, and every row's index among them."""
        return combined([(block.places, len(block)) for block in self.blocks])

    def followed_by(self, x: CostInputs) -> FactoredInputs:
        """Append the rows of ``x``."""
        return FactoredInputs([block.followed_by(x) for block in self.blocks])


for _field in fields(CostInputs):
    setattr(FactoredInputs, _field.name, property(functools.partial(FactoredInputs.column, name=_field.name)))


def distinct_rows(x: Any) -> tuple[NDArray[np.intp], Any]:
    """Return one row of each set of inputs known to be distinct, and every row's index among them."""
    if isinstance(x, FactoredInputs):
        return x.distinct()
    return np.arange(len(x)), slice(None)


@dataclass(frozen=True, slots=True)
class InputBlock:
    """Columns of the inputs by distinct rows; ``places``: each candidate's row, shape (n,)."""

    columns: Mapping[str, Array]
    places: Codes

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]], places: Codes) -> InputBlock:
        """Build from one mapping per row, not necessarily distinct, all with the same names."""
        columns = {name: column_of(name, [row[name] for row in rows]) for name in rows[0]}
        flat = np.hstack([column.reshape(len(rows), -1) for column in columns.values()])
        _, firsts, place_of = np.unique(flat, axis=0, return_index=True, return_inverse=True)
        return cls(
            {name: column[firsts] for name, column in columns.items()}, place_of.reshape(-1).astype(np.int32)[places]
        )

    def followed_by(self, x: CostInputs) -> InputBlock:
        """Append the rows of ``x``."""
        columns = {}
        for name, column in self.columns.items():
            columns[name] = np.concatenate(_padded(name, [column, getattr(x, name)]))
        last = np.arange(len(self), len(self) + len(x), dtype=np.int32)
        return InputBlock(columns, np.concatenate([self.places, last]))


def column_of(name: str, values: Sequence[Any]) -> Array:
    """Convert the values of one field to a column. Values per stage are sequences of any length."""
    if name not in STAGE_FIELDS:
        return np.array(values, dtype=np.float64)
    column = np.zeros((len(values), max(map(len, values), default=1)))
    for row, counts in enumerate(values):
        column[row, : len(counts)] = counts
    return column


def _padded(name: str, columns: Sequence[Array]) -> Sequence[Array]:
    """Pad the columns to the widest."""
    if name not in STAGE_FIELDS:
        return columns
    width = max(column.shape[1] for column in columns)
    return [_as_wide(column, width) for column in columns]


def _as_wide(column: Array, width: int) -> Array:
    return np.pad(column, ((0, 0), (0, width - column.shape[1])))


def even_layers(num_layers: int, pp: int) -> list[int]:
    """Return the layers of each pipeline rank when split as evenly as whole layers allow.

    The remainder goes to the middle: the first and the last stage also hold embedding and head.
    """
    base, extra = divmod(num_layers, pp)
    order = sorted(range(pp), key=lambda stage: (stage in (0, pp - 1), stage == pp - 1, stage))
    return [base + (stage in order[:extra]) for stage in range(pp)]


# ---- The cost model's coefficients, which no data sheet contains: names, meaning, and priors

PRIORS_FILE = CONFIGS / "cost" / "priors.json"


@dataclass(frozen=True, slots=True)
class Coefficient:
    """A positive number with prior ``value``, uncertain by a factor of ``exp(spread)`` (one standard deviation)."""

    name: str
    value: float
    spread: float
    meaning: str


TIME = (
    Coefficient("matmul_efficiency", 0.8, 0.25, "share of the peak that large matmuls reach on a 312 TFLOP/s device"),
    Coefficient("peak_exponent", 0.15, 0.5, "how that share falls as the device's peak rises: (peak / 312e12) ** -x"),
    Coefficient("low_precision_gain", 0.75, 0.3, "share of the extra peak below 16 bits that matmuls gain"),
    Coefficient("half_waves", 0.15, 0.7, "tiles of a matmul's result per unit at which it is half as efficient"),
    Coefficient("half_depth", 150.0, 0.7, "length of a matmul's products at which it is half as efficient"),
    Coefficient("misaligned_cost", 2.0, 0.4, "how much longer a matmul takes if its width is not a multiple of 8"),
    Coefficient("attention_efficiency", 0.6, 0.4, "efficiency of fused attention's matmuls relative to others"),
    Coefficient("loose_norm_bytes", 80.0, 0.6, "traffic of norms of several kernels, per element of a layer's input"),
    Coefficient("memory_efficiency", 0.7, 0.3, "share of memory bandwidth that element-wise work reaches"),
    Coefficient("host_layer_s", 0.8e-3, 0.8, "host time to launch one layer's forward, backward or repeated pass"),
    Coefficient("link_efficiency", 0.6, 0.4, "share of the fast links' bandwidth that collectives reach"),
    Coefficient("network_efficiency", 0.6, 0.5, "share of the network's bandwidth that collectives reach"),
    Coefficient("collective_latency_s", 30e-6, 0.6, "fixed time of one collective"),
    Coefficient("hop_latency_s", 4e-6, 0.6, "time that each further rank of a ring adds to a collective"),
    Coefficient("transfer_latency_s", 100e-6, 0.8, "fixed time of one transfer between pipeline stages"),
    Coefficient("gradient_overlap", 0.5, 0.6, "share of the last backward pass that hides reduction, if unknown"),
    Coefficient("gather_overlap", 0.8, 0.4, "share of computation that hides collectives known to overlap it"),
    Coefficient(
        "overlap_slowdown", 0.2, 0.4, "slowdown of computation that hides communication, relative to the communication"
    ),
    Coefficient("recompute_cost", 1.0, 0.15, "a repeated forward pass relative to the first"),
    Coefficient("step_overhead_s", 10e-3, 0.8, "fixed host time of an optimiser step"),
    Coefficient("scale_overhead", 0.01, 0.8, "share of the step lost per doubling of the number of nodes"),
    Coefficient("read_s", 50e-6, 1.0, "storage time of one record, all ranks together; shared file systems give 20k/s"),
    Coefficient(
        "expert_efficiency", 0.8, 0.3, "efficiency of routed experts' matmuls relative to others of that shape"
    ),
)

MEMORY = (
    Coefficient("state_factor", 1.0, 0.06, "weights, gradients and optimiser states relative to their sum of bytes"),
    Coefficient("activation_factor", 1.0, 0.1, "kept activations relative to the operator-by-operator sum"),
    Coefficient("pipeline_held", 1.0, 0.25, "micro-batches that a pipeline rank holds relative to its schedule's"),
    Coefficient("head_factor", 1.0, 0.25, "logits and their gradients relative to their copies"),
    Coefficient("workspace_bytes", 2.0, 0.8, "an optimiser step's intermediate results, per parameter that it updates"),
    Coefficient("constant_bytes", 1.5e9, 0.5, "device context and communicators, outside the framework's allocator"),
    Coefficient("fragmentation", 0.05, 0.8, "memory reserved but not allocated, relative to the allocated"),
)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Values of a group of coefficients, as logs in the group's order.

    ``log_values`` has shape (coefficients,); or (coefficients, n) with separate values for each of n candidates. Then
    ``k["name"]`` has shape (n,), and so must everything it is multiplied with.
    """

    group: tuple[Coefficient, ...]
    log_values: Array
    _values: dict[str, Array | float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = np.exp(self.log_values)
        each = values.tolist() if values.ndim == 1 else values
        object.__setattr__(self, "_values", dict(zip((c.name for c in self.group), each, strict=True)))

    def __getitem__(self, name: str) -> Array | float:
        return self._values[name]

    def index(self, name: str) -> int:
        return next(i for i, coefficient in enumerate(self.group) if coefficient.name == name)


def assumed(group: tuple[Coefficient, ...]) -> Coefficients:
    """Return the values assumed in this file, before any measurement."""
    return Coefficients(group, np.log([coefficient.value for coefficient in group]))


@dataclass(frozen=True, slots=True)
class Prior:
    """Normal distribution of log coefficients over (source, software, hardware). ``noise``: standard deviation of
    log(measured / predicted) within a source, which remains unexplained.
    """

    group: tuple[Coefficient, ...]
    mean: Array
    covariance: Array
    noise: float

    @property
    def coefficients(self) -> Coefficients:
        return Coefficients(self.group, self.mean)


def assumed_prior(group: tuple[Coefficient, ...], noise: float) -> Prior:
    """Return the prior assumed in this file, without published measurements."""
    return Prior(group, assumed(group).log_values, np.diag([c.spread**2 for c in group]), noise)


def load_prior(kind: str, without: str | None = None, path: Path = PRIORS_FILE) -> Prior:
    """Read the prior fitted to published measurements, for ``kind`` ``time`` or ``memory``.

    ``without``: source to exclude, for judging the model on that source.
    """
    table: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))[kind]
    entry = table["without"].get(without, table["all"]) if without else table["all"]
    group = {"time": TIME, "memory": MEMORY}[kind]
    values, spreads = np.array([entry["coefficients"].get(c.name, [c.value, c.spread]) for c in group]).T
    places = {coefficient.name: i for i, coefficient in enumerate(group)}
    stored = [places.get(name) for name in entry["coefficients"]]
    correlation = np.eye(len(group))
    for i, row in zip(stored, entry["correlations"], strict=True):
        for j, value in zip(stored, row, strict=False):
            if i is not None and j is not None:
                correlation[i, j] = correlation[j, i] = value
    return Prior(group, np.log(values), correlation * np.outer(spreads, spreads), table["noise"])
