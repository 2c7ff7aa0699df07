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
"""Codes of ``CostInputs.schedule`` are positions in this tuple."""

CP_METHODS = ("all_gather", "ulysses", "ring")
"""Codes of ``CostInputs.cp_method`` are positions in this tuple."""

BUCKET_BYTES = 50e6
"""Two reduction buckets in flight, of 25 MB each (``torch.nn.parallel.DistributedDataParallel``)."""

WORKSPACE_BYTES = 128 << 20
"""fp32 copies of 16-bit gradients that our optimiser step makes at a time (``trials.training.optimizer``). Its fused
kernels have no other intermediate results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostInputs:
    """All that the cost model knows of each candidate. Arrays of shape (n,), those per stage (n, largest pp).

    Switches are 0 or 1; shares lie between 0 and 1. Sizes of data types are bytes per element or per parameter.
    """

    num_layers: Array
    hidden: Array
    ffn: Array
    num_heads: Array
    num_kv_heads: Array
    head_dim: Array
    vocab: Array
    seq_length: Array
    gated: Array
    """1: SwiGLU (three FFN matrices), 0: one activation (two)."""
    fused: Array
    """1: the FFN's activation keeps only its input and output, as fused and compiled kernels do."""
    dropout: Array
    tied: Array
    """1: embedding and head are one parameter."""
    trained_share: Array
    """Share of the weights that get gradients: 1, or near 0 for adapters on frozen weights."""
    expert_share: Array
    """Share of the layers whose feed-forward is a mixture of experts, each of width ``expert_ffn``; 0: a dense model.
    The other layers have one of width ``ffn``."""
    num_experts: Array
    """Routed experts of such a layer."""
    experts_per_token: Array
    """Routed experts that each token passes (top-k)."""
    expert_ffn: Array
    shared_ffn: Array
    """Width of the experts that all tokens pass, together."""
    ep: Array
    """Ranks over which the experts of a layer are spread; they lie among those that hold different tokens."""

    pp: Array
    dp_replicate: Array
    dp_shard: Array
    cp: Array
    cp_method: Array
    tp: Array
    zero_stage: Array
    reduces_last: Array
    """1: ZeRO-2 and ZeRO-3 keep gradients whole until the step's last micro-batch, instead of reducing each one's."""
    hides_collectives: Array
    """1: tensor parallelism gathers and scatters in parts, each while a matmul works on another (user buffers of
    Transformer Engine, PyTorch's async TP, MC2)."""
    hides_transfers: Array
    """1: with several chunks, transfers between pipeline ranks run while other chunks are computed."""
    hides_gathering: Array
    """1: ZeRO-1 and ZeRO-2 gather new weights while the next forward pass runs."""
    aged_attention: Array
    """1: fused attention kernels were written for an older generation of devices."""
    loose_norms: Array
    """1: norms are made of several kernels, with results in between in memory."""
    gathers_once: Array
    """1: ZeRO-3 gathers a layer's weights for the first micro-batch and keeps them for the step's others, forward and
    backward; 0: it gathers them for every pass."""
    stays_gathered: Array
    """1: ZeRO-3 frees weights after forward passes, but not after backward passes: the next forward pass finds them
    gathered, and each micro-batch gathers them once."""
    sequence_parallel: Array
    num_copies: Array
    shard_embedding: Array
    """1: embedding and head are sharded over all data-parallel ranks, whatever the ZeRO stage of the layers."""
    schedule: Array
    num_virtual_stages: Array
    micro_batch_size: Array
    num_microbatches: Array
    stage_layers: Array
    """Layers of each pipeline rank, all its chunks together; 0 beyond pp."""
    stage_full: Array
    """Layers of each pipeline rank that are recomputed in full."""
    stage_dropped: Array
    """Share of the kept activation bytes that selective recompute drops in the other layers of each rank."""
    stage_repeated: Array
    """Share of the forward pass that selective recompute repeats in the other layers of each rank."""
    recompute_communication: Array
    """Share of layers whose sequence shards are gathered again in the backward pass."""
    keeps_gathered: Array
    """Share of layers that keep the gathered inputs of their matmuls (sequence parallelism without re-gathering)."""

    compute_bytes: Array
    """Bytes of an activation element."""
    loss_bytes: Array
    """Bytes per logit, beyond its own value, while the loss is computed: 8 for two fp32 copies, 0 where the gradient is
    written in the logits' place."""
    loss_traffic: Array
    """Bytes read and written per logit from head to gradient of the logits, forward and backward."""
    loss_chunks: Array
    """Parts of a micro-batch whose logits exist one after the other; above 1 they are computed again."""
    head_sums_bytes: Array
    """Bytes per weight of the head of the sums in which the gradients of the parts of its positions are added up."""
    hides_sums: Array
    """1: tensor parallelism sums the gradients of projections' inputs while those of their weights are computed."""
    weight_bytes: Array
    gradient_bytes: Array
    optimizer_bytes: Array
    """Bytes of optimiser states and master weights per parameter."""
    cast_bytes: Array
    """Bytes per parameter of autocast's 16-bit copy of the weights (O1)."""
    bucket_bytes: Array
    """Bytes of the buffers through which data parallelism reduces gradients."""
    buffer_bytes: Array
    """Bytes of other buffers that last, on every rank."""
    keeps_gradients: Array
    """1: gradient buffers stay allocated during the forward pass."""
    workspace_limit_bytes: Array
    """Most that the intermediate results of an optimiser step take; infinite where it updates everything at once."""
    casts_operands: Array
    """1: matmuls make their 8-bit operands again from wider tensors, which are what is kept for the backward pass
    (torchao); 0: operands are kept as they are multiplied. Means nothing where matmuls have 16 bits or more."""
    offload_activations: Array
    """1: activations of all layers but the last wait in host memory."""
    offload_optimizer: Array
    """1: optimiser states and fp32 weights are in host memory, where the step computes."""
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
    """1: devices are cores of a processor."""
    node_size: Array
    """Devices that share the processors of a host."""
    link_bytes_per_s: Array
    """Per device and direction, inside the fast domain."""
    network_bytes_per_s: Array
    """Per device and direction, beyond it."""
    domain_size: Array
    """Devices joined by the fast links: a node, or several in rack-scale systems."""
    data_wait_s: Array
    """Time per step spent waiting for data, where known."""
    num_reads: Array
    """Records that all ranks together fetch from storage for one step; 0 where nothing is known of it."""
    reads_ahead: Array
    """1: data-loading processes fetch while the step runs."""

    def __len__(self) -> int:
        return len(self.num_layers)

    @property
    def dp(self) -> Array:
        return self.dp_replicate * self.dp_shard

    @property
    def num_shards(self) -> Array:
        """Ranks over which ZeRO shards states: context-parallel peers hold the same weights, so they share too."""
        return np.where(self.zero_stage > 0, self.dp_shard * self.cp, 1.0)

    @property
    def reductions(self) -> Array:
        """How often a step reduces its gradients: where ZeRO shards them once per micro-batch, unless it waits."""
        return np.where((self.zero_stage >= 2) & (self.reduces_last == 0), self.num_microbatches, 1.0)

    @property
    def selective_share(self) -> Array:
        """``stage_dropped``, averaged over all layers that are not recomputed in full."""
        plain = self.stage_layers - self.stage_full
        return np.asarray((plain * self.stage_dropped).sum(axis=1) / np.maximum(plain.sum(axis=1), 1))

    @property
    def world_size(self) -> Array:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def tokens_per_step(self) -> Array:
        return self.micro_batch_size * self.num_microbatches * self.dp * self.seq_length

    def take(self, rows: Any) -> CostInputs:
        """The rows that ``rows`` (indices, a mask or a slice) selects."""
        return CostInputs(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


DEFAULTS: Mapping[str, float] = {
    "head_sums_bytes": 0.0,
    "hides_collectives": 0.0,
    "hides_transfers": 0.0,
    "hides_gathering": 0.0,
    "aged_attention": 0.0,
    "loose_norms": 0.0,
    "gathers_once": 0.0,
    "stays_gathered": 0.0,
    "buffer_bytes": 0.0,
    "on_cores": 0.0,
    "expert_share": 0.0,
    "num_experts": 1.0,
    "experts_per_token": 1.0,
    "expert_ffn": 0.0,
    "shared_ffn": 0.0,
    "ep": 1.0,
}
"""Values of fields that most candidates do not differ in, where a row leaves them out."""

STAGE_FIELDS = ("stage_layers", "stage_full", "stage_dropped", "stage_repeated")
"""Fields of :class:`CostInputs` with one column per pipeline rank."""


def from_rows(rows: Sequence[Mapping[str, Any]]) -> CostInputs:
    """The inputs from one mapping per candidate, which may leave out ``DEFAULTS``; values per stage are sequences
    of any length."""
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
    """The rows of all parts, in order."""
    names = [field.name for field in fields(CostInputs)]
    return CostInputs(**{name: np.concatenate(_padded(name, [getattr(x, name) for x in parts])) for name in names})


class FactoredInputs(CostInputs):
    """The inputs of very many candidates, of which few rows exist at a time.

    Columns that hang together are a block: its distinct rows, and for each candidate which of them it has. A column
    as a whole is put together whenever it is asked for.
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
        """Its blocks, each once."""
        return list({id(block): block for block in self._block_of.values()}.values())

    def column(self, name: str, rows: Any = slice(None)) -> Array:
        """The field ``name`` of ``rows``."""
        block = self._block_of[name]
        return np.asarray(block.columns[name].take(block.places[rows], axis=0))

    def take(self, rows: Any) -> CostInputs:
        columns = {f.name: self.column(f.name, rows) for f in fields(CostInputs)}
        width = int(columns["pp"].max(initial=1))
        return CostInputs(**columns | {name: columns[name][:, :width] for name in STAGE_FIELDS})

    def part(self, rows: Any) -> FactoredInputs:
        """As :meth:`take`, without putting the columns together."""
        return FactoredInputs([InputBlock(block.columns, block.places[rows]) for block in self.blocks])

    def distinct(self) -> tuple[NDArray[np.intp], Codes]:
        """A row of each set of inputs that occurs, and every row's place among them."""
        return combined([(block.places, len(block)) for block in self.blocks])

    def followed_by(self, x: CostInputs) -> FactoredInputs:
        """With the rows of ``x`` at its end."""
        return FactoredInputs([block.followed_by(x) for block in self.blocks])


for _field in fields(CostInputs):
    setattr(FactoredInputs, _field.name, property(functools.partial(FactoredInputs.column, name=_field.name)))


def distinct_rows(x: Any) -> tuple[NDArray[np.intp], Any]:
    """A row of each set of inputs that is known to occur, and every row's place among them."""
    if isinstance(x, FactoredInputs):
        return x.distinct()
    return np.arange(len(x)), slice(None)


@dataclass(frozen=True, slots=True)
class InputBlock:
    """Columns of the inputs by their distinct rows; ``places`` has every candidate's among them, shape (n,)."""

    columns: Mapping[str, Array]
    places: Codes

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]], places: Codes) -> InputBlock:
        """From one mapping per row, not necessarily distinct; those of all have the same names."""
        columns = {name: column_of(name, [row[name] for row in rows]) for name in rows[0]}
        flat = np.hstack([column.reshape(len(rows), -1) for column in columns.values()])
        _, firsts, place_of = np.unique(flat, axis=0, return_index=True, return_inverse=True)
        return cls(
            {name: column[firsts] for name, column in columns.items()}, place_of.reshape(-1).astype(np.int32)[places]
        )

    def followed_by(self, x: CostInputs) -> InputBlock:
        """With the rows of ``x`` at its end."""
        columns = {}
        for name, column in self.columns.items():
            columns[name] = np.concatenate(_padded(name, [column, getattr(x, name)]))
        last = np.arange(len(self), len(self) + len(x), dtype=np.int32)
        return InputBlock(columns, np.concatenate([self.places, last]))


def column_of(name: str, values: Sequence[Any]) -> Array:
    """Values of one field; those per stage are sequences of any length."""
    if name not in STAGE_FIELDS:
        return np.array(values, dtype=np.float64)
    column = np.zeros((len(values), max(map(len, values), default=1)))
    for row, counts in enumerate(values):
        column[row, : len(counts)] = counts
    return column


def _padded(name: str, columns: Sequence[Array]) -> Sequence[Array]:
    """The same, as wide as the widest."""
    if name not in STAGE_FIELDS:
        return columns
    width = max(column.shape[1] for column in columns)
    return [_as_wide(column, width) for column in columns]


def _as_wide(column: Array, width: int) -> Array:
    return np.pad(column, ((0, 0), (0, width - column.shape[1])))


def even_layers(num_layers: int, pp: int) -> list[int]:
    """Layers of each pipeline rank when split as evenly as whole layers allow.

    What is left over goes to the middle: the first and the last stage also hold embedding and head.
    """
    base, extra = divmod(num_layers, pp)
    order = sorted(range(pp), key=lambda stage: (stage in (0, pp - 1), stage == pp - 1, stage))
    return [base + (stage in order[:extra]) for stage in range(pp)]


# ---- The cost model's coefficients, which no data sheet tells: names, meaning, and priors before any measurement

PRIORS_FILE = CONFIGS / "cost" / "priors.json"


@dataclass(frozen=True, slots=True)
class Coefficient:
    """A positive number, a priori ``value`` within a factor of ``exp(spread)`` (one standard deviation)."""

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
    Coefficient("misaligned_cost", 2.0, 0.4, "how much longer a matmul takes whose width is no multiple of 8"),
    Coefficient("attention_efficiency", 0.6, 0.4, "efficiency of fused attention's matmuls relative to others"),
    Coefficient("loose_norm_bytes", 80.0, 0.6, "traffic of norms of several kernels, per element of a layer's input"),
    Coefficient("memory_efficiency", 0.7, 0.3, "share of memory bandwidth that element-wise work reaches"),
    Coefficient("host_layer_s", 0.8e-3, 0.8, "host time to launch one layer's forward, backward or repeated pass"),
    Coefficient("link_efficiency", 0.6, 0.4, "share of the fast links' bandwidth that collectives reach"),
    Coefficient("network_efficiency", 0.6, 0.5, "share of the network's bandwidth that collectives reach"),
    Coefficient("collective_latency_s", 30e-6, 0.6, "fixed time of one collective"),
    Coefficient("hop_latency_s", 4e-6, 0.6, "time that each further rank of a ring adds to a collective"),
    Coefficient("transfer_latency_s", 100e-6, 0.8, "fixed time of one transfer between pipeline stages"),
    Coefficient("gradient_overlap", 0.5, 0.6, "share of the last backward pass that hides gradient reduction"),
    Coefficient("gather_overlap", 0.8, 0.4, "share of computation that hides ZeRO-3 gathering and copies' collectives"),
    Coefficient("overlap_slowdown", 0.2, 0.4, "what computation loses to communication it hides, relative to that"),
    Coefficient("recompute_cost", 1.0, 0.15, "a repeated forward pass relative to the first"),
    Coefficient("step_overhead_s", 10e-3, 0.8, "fixed host time of an optimiser step"),
    Coefficient("scale_overhead", 0.01, 0.8, "share of the step lost per doubling of the number of nodes"),
    Coefficient("read_s", 50e-6, 1.0, "storage time of one record, all ranks together; shared file systems give 20k/s"),
    Coefficient(
        "expert_efficiency", 0.8, 0.3, "efficiency of routed experts' matmuls relative to others of that shape"
    ),
)

MEMORY = (
    Coefficient("state_factor", 1.0, 0.15, "weights, gradients and optimiser states relative to their sum of bytes"),
    Coefficient("activation_factor", 1.0, 0.12, "kept activations relative to the operator-by-operator sum"),
    Coefficient("pipeline_held", 1.0, 0.4, "micro-batches that a pipeline rank holds relative to its schedule's"),
    Coefficient("head_factor", 1.0, 0.5, "logits and their gradients relative to one 16-bit and two fp32 copies"),
    Coefficient("workspace_bytes", 2.0, 0.8, "an optimiser step's intermediate results, per parameter that it updates"),
    Coefficient("constant_bytes", 1.5e9, 0.5, "device context and communicators, outside the framework's allocator"),
    Coefficient("fragmentation", 0.05, 0.8, "memory reserved but not allocated, relative to the allocated"),
)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Values of a group of coefficients, as logarithms in the group's order.

    ``log_values`` has shape (coefficients,); or (coefficients, n), where each of n candidates has values of its own:
    then ``k["name"]`` is an array of shape (n,), and what it is multiplied with must be of that shape as well.
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
    """The values that this file assumes, before any measurement."""
    return Coefficients(group, np.log([coefficient.value for coefficient in group]))


@dataclass(frozen=True, slots=True)
class Prior:
    """Normal distribution of log coefficients over (source, software, hardware); ``noise`` is what is left
    unexplained: the standard deviation of log(measured / predicted) inside a source.
    """

    group: tuple[Coefficient, ...]
    mean: Array
    covariance: Array
    noise: float

    @property
    def coefficients(self) -> Coefficients:
        return Coefficients(self.group, self.mean)


def assumed_prior(group: tuple[Coefficient, ...], noise: float) -> Prior:
    """The prior that this file assumes, without published measurements."""
    return Prior(group, assumed(group).log_values, np.diag([c.spread**2 for c in group]), noise)


def load_prior(kind: str, without: str | None = None, path: Path = PRIORS_FILE) -> Prior:
    """The prior fitted to published measurements, for ``kind`` ``time`` or ``memory``.

    ``without`` leaves out what one source taught, for judging the model on that source.
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
