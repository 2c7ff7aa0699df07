"""ZeRO stage 1 on plain tensors: gradients are reduced in buckets to the ranks that update them, weights gathered back.

Weights and gradients lie in flat buckets, in the order in which the backward pass produces gradients. Each rank updates
one slice of every bucket (Rajbhandari et al., arXiv 1910.02054). So a step sends as much as an all-reduce: each rank
sends a bucket's bytes once to reduce it and once to gather it, for any number of parameters.

Reductions overlap the backward pass; gathers overlap the update of other buckets and the next forward pass, in which
each layer waits only for its own weights (Megatron-LM's ``--overlap-param-gather``).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from trials.accelerator.device import current_stream, is_host, new_stream, on_stream
from trials.layout_rules import holds_plain
from trials.models.experts import RoutedExperts, mixtures_in
from trials.models.model import TrainModel
from trials.parallel.mesh import (
    DATA_AXES,
    SHARD_AXES,
    HeldTensor,
    ShardMap,
    expert_mesh,
    expert_shard_mesh,
    flat_mesh,
    held_parameters,
    shard_mesh,
    stored_part,
)
from trials.precision import float8_scales, mixed_precision_policy, wide_modules
from trials.spec import Layout, Precision
from trials.torch_support import parameter_groups, replicas_keep_buffers

# Older releases have other names for them.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

BUCKET_BYTES = 25 << 20
"""Size from which a bucket takes no more parameters: DDP's default."""
SLICE_BYTES = 1 << 20
"""Slice size from which collectives are efficient: with many ranks, buckets are larger."""
ALIGNMENT_BYTES = 128
"""Alignment of parameters and slices, for fast access by kernels and collectives."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The process groups that share the work on a bucket."""

    shards: dist.ProcessGroup
    """Ranks that update a slice each."""
    replicas: dist.ProcessGroup | None
    """Ranks that update the same slice in replicas of these shards; None if there are no replicas."""

    @property
    def count(self) -> int:
        """Number of data-parallel ranks."""
        return self.shards.size() * (1 if self.replicas is None else self.replicas.size())


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties shared by all parameters of a bucket."""

    dtype: torch.dtype
    num_replicas: int
    """Ranks of the gang that hold the same elements."""
    is_partial: bool
    """Whether gradients arrive as partial sums over the tensor-parallel group."""
    peers: Peers


class Bucket:
    """Some parameters and their gradients, each one after the other; the slice that this rank updates is a held tensor.

    Memory for values is allocated when the parameters move in, memory for gradients when the first one arrives.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], kind: Kind) -> None:
        self.parameters = tuple(parameters)
        self.is_partial = kind.is_partial
        self._peers = peers = kind.peers
        self._op = _averaging(kind.dtype)
        num_shards = peers.shards.size()
        self.num_replicas = kind.num_replicas // num_shards
        align = ALIGNMENT_BYTES // kind.dtype.itemsize
        self._starts = []
        size = 0
        for parameter in parameters:
            self._starts.append(size)
            size += -(-parameter.numel() // align) * align
        self._size = -(-size // (align * num_shards)) * align * num_shards
        share = self._size // num_shards
        self._own = slice(share * peers.shards.rank(), share * (peers.shards.rank() + 1))
        self._values: Tensor
        self._gradients: Tensor
        self._views: list[Tensor] = []
        """Gradients by parameter; empty before the first."""
        self._reducing: Any = None
        self._gathering: Any = None
        self.num_missing = len(self.parameters)
        """Gradients still missing from this step's last backward pass."""

    @torch.no_grad()
    def bind(self) -> None:
        """Move the parameters here, in their memory format; the memory of each is freed at once."""
        self._values = self._zeros()
        for i, parameter in enumerate(self.parameters):
            parameter.data = self._view(self._values, i).copy_(parameter)

    def _zeros(self) -> Tensor:
        """Allocate all elements. Gaps between parameters stay 0: only sums and averages of them are written."""
        return torch.zeros(self._size, dtype=self.parameters[0].dtype, device=self.parameters[0].device)

    def _view(self, flat: Tensor, index: int) -> Tensor:
        parameter = self.parameters[index]
        if _is_dense(parameter):
            return flat.as_strided(parameter.shape, parameter.stride(), self._starts[index])
        return flat[self._starts[index] :][: parameter.numel()].view(parameter.shape)

    def take(self, index: int) -> None:
        """Move the gradient of parameter ``index`` here, unless it was already accumulated here.

        The copy reads and writes each element once. Letting autograd accumulate into a view of zeros would read and
        write it twice.
        """
        if not self._views:
            self._gradients = self._zeros()
            self._views = [self._view(self._gradients, i) for i in range(len(self.parameters))]
        parameter, view = self.parameters[index], self._views[index]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def reduce(self) -> None:
        """Start averaging gradients over the ranks that share the states; this rank gets those of its slice."""
        if self._op == dist.ReduceOp.SUM:
            self._gradients.div_(self._peers.count)
        own = self._gradients[self._own]
        self._reducing = _reduce_scatter(own, self._gradients, op=self._op, group=self._peers.shards, async_op=True)

    def reduce_replicas(self) -> None:
        """After that, start averaging the slice over its replicas."""
        if self._peers.replicas is not None:
            self.wait()
            own = self._gradients[self._own]
            self._reducing = dist.all_reduce(own, op=self._op, group=self._peers.replicas, async_op=True)

    def wait(self) -> None:
        """Wait until the gradients are reduced."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None

    def values(self) -> Tensor:
        return self._values[self._own]

    def gradient(self) -> Tensor | None:
        return self._gradients[self._own]

    def publish(self) -> None:
        own = self._values[self._own]
        self._gathering = _all_gather(self._values, own, group=self._peers.shards, async_op=True)

    def wait_for_values(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None


def _averaging(dtype: torch.dtype) -> Any:
    """Return the reduction for averages; after SUM, the ranks have divided before. Sums in float16 overflow where
    averages do not, and not every backend divides first."""
    return dist.ReduceOp.SUM if dtype == torch.float16 else dist.ReduceOp.AVG


class BucketedReplica(nn.Module):
    """Wrapper of a model like DDP; gradients are whole while micro-batches accumulate, and slices after the last one.

    The reduction of a bucket starts when its gradients are complete, overlapping the rest of the backward pass. It is
    always in the order of the buckets, which is the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        kinds: dict[nn.Parameter, Kind],
        device: torch.device,
        units: Iterable[nn.Module] = (),
    ) -> None:
        """``units`` are modules whose parameters have no readers before they are called, outside of compiled graphs:
        they wait for their weights when called. All other weights are waited for before the model is called."""
        super().__init__()
        self.module = model
        self.reduces = True
        """Whether the next backward pass is the step's last."""
        num_shards = max(kind.peers.shards.size() for kind in kinds.values())
        self.bucket_bytes_cap = max(BUCKET_BYTES, SLICE_BYTES * num_shards)
        self.buckets = [Bucket(some, kind) for some, kind in _dealt_out(kinds, self.bucket_bytes_cap)]
        self._device = device
        self._stream = new_stream(device)
        self._is_bound = False
        self._num_reduced = 0
        for bucket in self.buckets:
            for i, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(_Arrival(self, bucket, i))  # type: ignore[no-untyped-call]
        self._needed_first = self._let_wait(units)
        # Weights of convolutions get their memory format in trial passes, before the first forward pass.
        if not any(parameter.dim() == 4 for parameter in kinds):
            self.bind()

    def _let_wait(self, units: Iterable[nn.Module]) -> list[Bucket]:
        """Make every unit wait for the buckets with its weights; return the buckets that also hold other weights."""
        bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        others = set(bucket_of)
        for unit in units:
            held = [parameter for parameter in unit.parameters() if parameter in bucket_of]
            others -= set(held)
            call = unit._compiled_call_impl or unit._call_impl
            own = tuple(dict.fromkeys(bucket_of[parameter] for parameter in held))
            unit._compiled_call_impl = functools.partial(_call_when_gathered, call, own)
        return list(dict.fromkeys(bucket_of[parameter] for parameter in others))

    def forward(self, *args: Any, **options: Any) -> Any:
        self.bind()
        _wait_for_values(self._needed_first)
        with _as_ddp(self):
            return self.module(*args, **options)

    def bind(self) -> None:
        """Move the parameters into their buckets, one bucket after the other, if they are not yet there."""
        if not self._is_bound:
            self._is_bound = True
            for bucket in self.buckets:
                bucket.bind()

    def arrived(self, bucket: Bucket, index: int) -> None:
        """Take a gradient that a backward pass has completed, and reduce full buckets."""
        if not self._is_bound:
            return  # a trial pass of the bare model
        bucket.take(index)
        if self.reduces:
            bucket.num_missing -= 1
            while self._num_reduced < len(self.buckets) and self.buckets[self._num_reduced].num_missing == 0:
                self._reduce_next()

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what is left after the step's last backward pass, and wait for everything.

        Two kinds of gradients are left: those that a schedule accumulated without autograd's hooks, and those of unused
        parameters, which are 0.
        """
        self.bind()
        _wait_for_values(self.buckets)
        for bucket in self.buckets[self._num_reduced :]:
            for i in range(len(bucket.parameters)):
                bucket.take(i)
        while self._num_reduced < len(self.buckets):
            self._reduce_next()
        with self._on_side_stream():
            self.buckets[-1].reduce_replicas()
            for bucket in self.buckets:
                bucket.wait()
        if self._stream is not None:
            self._compute_stream().wait_stream(self._stream)
        for bucket in self.buckets:
            bucket.num_missing = len(bucket.parameters)
        self._num_reduced = 0

    def _reduce_next(self) -> None:
        """Start reducing the next bucket. The previous one, most likely complete, goes on to its replicas."""
        with self._on_side_stream():
            if self._num_reduced:
                self.buckets[self._num_reduced - 1].reduce_replicas()
            self.buckets[self._num_reduced].reduce()
        self._num_reduced += 1

    @contextlib.contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Wait on a separate stream, so that the compute stream does not wait; the CPU has none."""
        if self._stream is not None:
            self._stream.wait_stream(self._compute_stream())
        with on_stream(self._stream):
            yield

    def _compute_stream(self) -> torch.Stream:
        stream = current_stream(self._device)
        assert stream is not None
        return stream


def _wait_for_values(buckets: Iterable[Bucket]) -> None:
    for bucket in buckets:
        bucket.wait_for_values()


def _call_when_gathered(call: Callable[..., Any], buckets: tuple[Bucket, ...], *args: Any, **options: Any) -> Any:
    """Call a module after the weights in ``buckets`` have arrived."""
    _wait_for_values(buckets)
    return call(*args, **options)


class _Arrival:
    """Hook that reports a parameter's gradient as complete to its replica."""

    def __init__(self, replica: BucketedReplica, bucket: Bucket, index: int) -> None:
        self._replica, self._bucket, self._index = replica, bucket, index

    def __call__(self, _parameter: Tensor) -> None:
        self._replica.arrived(self._bucket, self._index)


def _dealt_out(kinds: dict[nn.Parameter, Kind], bucket_bytes: int) -> list[tuple[list[nn.Parameter], Kind]]:
    """Distribute parameters to buckets in the order in which these fill: the last module's gradients come first."""
    filled: list[tuple[list[nn.Parameter], Kind]] = []
    open_: dict[Kind, list[nn.Parameter]] = {}
    for parameter in reversed(list(kinds)):
        kind = kinds[parameter]
        some = open_.setdefault(kind, [])
        some.append(parameter)
        if sum(one.nbytes for one in some) >= bucket_bytes:
            filled.append((open_.pop(kind), kind))
    position = {parameter: i for i, parameter in enumerate(reversed(list(kinds)))}
    filled += [(some, kind) for kind, some in open_.items()]
    return sorted(filled, key=lambda one: position[one[0][-1]])


def _is_dense(tensor: Tensor) -> bool:
    """Whether elements fill the tensor's memory without gaps, in any order."""
    strides = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return False
        expected *= size
    return expected == max(1, math.prod(tensor.shape))


def _as_ddp(replica: BucketedReplica) -> AbstractContextManager[None]:
    """Let torch.compile split the graph of a whole model at ``bucket_bytes_cap``, as for DDP, so that gradients arrive
    in pieces."""
    return DistributedDataParallel._inside_ddp_forward(replica)  # type: ignore[arg-type]


# Data parallelism of one part of the model: DDP, buckets for ZeRO-1, FSDP2 sharding and FSDP2 replication.


_TABLES = ("tok_embeddings", "output")
"""Names of the modules with a weight of the size of the vocabulary."""


def uses_fsdp(layout: Layout) -> bool:
    """Whether the data-parallel engine is FSDP2, for sharding or for replication."""
    return layout.dp * layout.cp > 1 and not holds_plain(layout)


def reduces_each(layout: Layout) -> bool:
    """Whether every micro-batch reduces its gradients, so that no rank keeps more than its shard of them."""
    return layout.zero_stage >= 2 and layout.gradient_reduction == "each"


def apply_fsdp(model: TrainModel, mesh: DeviceMesh, layout: Layout, precision: Precision) -> None:
    """Shard or replicate embedding, layers, norm and head as separate units, then the rest, with FSDP2 in place.

    In one unit, embedding and head would be gathered before the first layer and reduced after it, without overlap. As
    separate units, the head's gather overlaps the layers, and its reduction their backward pass.

    ZeRO stage 3 frees a layer's gathered weights after its forward pass; weights outside of layers stay gathered.
    Modules that stay in fp32 are units of their own, because a unit has one number format.
    """
    wide = wide_modules(model, precision)
    policies = dict.fromkeys(wide, MixedPrecisionPolicy())
    usual = mixed_precision_policy(precision)
    tables = _tables(model)
    if layout.shard_embedding:
        for table in tables:
            policy = policies.get(table, usual)
            fully_shard(table, mesh=flat_mesh(mesh, DATA_AXES), mp_policy=policy, reshard_after_forward=True)
    parts = _parts(model, [] if layout.shard_embedding else tables)
    parts = [*(module for module in wide if module not in {*parts, *tables}), *parts]
    if layout.zero_stage == 0:
        for mixture in mixtures_in([model]) if layout.ep > 1 else []:
            replicate(mixture.experts, mesh=expert_mesh(mesh)["edp"], mp_policy=usual)
        for part in parts:
            replicate(part, mesh=flat_mesh(mesh, DATA_AXES), mp_policy=policies.get(part, usual))
        return
    layers = {*model.layers.values()}
    if layout.ep > 1:
        for mixture in mixtures_in(layers):
            _shard(mixture.experts, expert_shard_mesh(mesh), usual, reshard=layout.zero_stage == 3)
    in_layers = {one for layer in layers for one in layer.modules()}
    for part in parts:
        reshard = layout.zero_stage == 3 and part in in_layers
        _shard(part, shard_mesh(mesh), policies.get(part, usual), reshard=reshard)
    if layout.ep > 1:
        _gather_experts_ahead(list(model.layers.values()))


class _ByteGather:
    """FSDP's all-gather, of bytes: not every backend has 8-bit floats."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        whole, part = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        work: dist.Work | None = _all_gather(whole, part, group=group, async_op=async_op)
        return work


class Float8Scales:
    """The scales of the weights that FSDP gathers in 8-bit floats, one per matrix and the same on all of its shards.

    All are computed at once after each update. Otherwise, each gather of each matrix would reduce a scale of its own.
    """

    def __init__(self, model: TrainModel, mesh: DeviceMesh | None) -> None:
        self._weights = [parameter for parameter in model.parameters() if _gathers_float8(parameter)]
        self._group = flat_mesh(mesh, SHARD_AXES).get_group() if mesh is not None and self._weights else None

    @torch.no_grad()
    def compute(self) -> None:
        """Compute the scales of the present weights."""
        if self._weights:
            largest = torch.stack(torch._foreach_norm([stored_part(one) for one in self._weights], math.inf))
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
            for weight, scale in zip(self._weights, float8_scales(largest), strict=True):
                cast(Any, weight)._local_tensor._precomputed_scale = scale


def _gathers_float8(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and hasattr(parameter._local_tensor, "fsdp_pre_all_gather")


def _shard(unit: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard: bool) -> None:
    """Shard one unit: weights by rows, and those of experts, if they cannot be dealt out evenly, each by rows."""
    number = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard | None:
        splits_each = parameter.dim() == 3 and parameter.shape[0] % number and parameter.shape[1] % number == 0
        return Shard(1) if splits_each else None

    fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=placement)
    if any(map(_gathers_float8, unit.parameters())):
        cast(FSDPModule, unit).set_custom_all_gather(cast(Any, _ByteGather()))


def _gather_experts_ahead(layers: Sequence[nn.Module]) -> None:
    """Let experts be gathered with their layer: the host, which waits for the router, would start it late.

    In the backward pass the units come in the order of their gradients; FSDP's own order lacks those recomputed.
    """
    for before, layer in zip((None, *layers), layers, strict=False):
        for mixture in mixtures_in([layer]):
            unit, experts = cast(FSDPModule, layer), cast(FSDPModule, mixture.experts)
            unit.set_modules_to_forward_prefetch([experts])
            unit.set_modules_to_backward_prefetch([experts])
            if before is not None:
                experts.set_modules_to_backward_prefetch([cast(FSDPModule, before)])


def _parts(model: TrainModel, tables: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the units of FSDP2, each before the one that contains it. Imported models have only layers and an untied
    head: the rest may read weights of modules that it does not call."""
    norm = None if model.is_own else getattr(model, "norm", None)
    return [*tables, *model.layers.values(), *([] if norm is None else [norm]), model]


def _tables(model: TrainModel) -> list[nn.Module]:
    """Return embedding and head, if they are in this part and share no weight with another module."""
    uses = Counter(parameter for one in model.modules() for parameter in one.parameters(recurse=False))
    modules = (getattr(model, name, None) for name in _TABLES)
    return [one for one in modules if one is not None and all(uses[parameter] == 1 for parameter in one.parameters())]


def apply_ddp(model: TrainModel, mesh: DeviceMesh, layout: Layout, device: torch.device) -> nn.Module:
    """Replicate over all data-parallel ranks; these are already equal, so nothing is sent."""
    options: dict[str, Any] = {} if is_host(device) else {"device_ids": [device.index]}
    # Every rank keeps its own batch-norm statistics; training does not read them.
    options |= replicas_keep_buffers() | {"gradient_as_bucket_view": True}
    assert layout.tp == 1 or layout.tp_engine == "local"
    group = flat_mesh(mesh, DATA_AXES).get_group()
    return DistributedDataParallel(model, process_group=group, **options)


def leave_experts_out(model: TrainModel) -> None:
    """Let DDP, which has one group, reduce only what all of its ranks hold: :func:`average_experts` does the rest."""
    names = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, RoutedExperts)
        for name, _ in module.named_parameters(recurse=False)
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]


class _ExpertAverage:
    """Averages gradients of experts over the ranks that hold the same ones, each when a step's last backward pass has
    completed it."""

    def __init__(self, replica: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        self._replica, self._group = replica, group
        self._reducing: list[Any] = []

    def __call__(self, parameter: Tensor) -> None:
        if self._replica.require_backward_grad_sync:
            grad, op = parameter.grad, _averaging(parameter.dtype)
            assert grad is not None
            if op == dist.ReduceOp.SUM:
                grad.div_(self._group.size())
            self._reducing.append(dist.all_reduce(grad, op=op, group=self._group, async_op=True))

    def wait(self) -> None:
        for work in self._reducing:
            work.wait()
        self._reducing.clear()


_EXPERT_AVERAGE = "tune_cluster_expert_average"
"""Attribute of a DDP module."""


def average_experts(replica: nn.Module, model: TrainModel, mesh: DeviceMesh) -> None:
    """Let the ranks of ``replica`` that hold the same experts average their gradients."""
    same = expert_mesh(mesh)["edp"]
    if same.size() == 1:
        return
    assert isinstance(replica, DistributedDataParallel)
    average = _ExpertAverage(replica, same.get_group())
    for mixture in mixtures_in([model]):
        for parameter in mixture.experts.parameters():
            parameter.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]
    setattr(replica, _EXPERT_AVERAGE, average)


def apply_buckets(model: TrainModel, mesh: DeviceMesh, layout: Layout, shard_map: ShardMap) -> BucketedReplica:
    """Wrap for ZeRO-1: all data-parallel ranks hold all parameters, and split their optimiser states; of experts, those
    that hold the same ones."""
    replicas = mesh["dp_replicate"].get_group() if layout.dp_replicate > 1 else None
    peers = Peers(flat_mesh(mesh, SHARD_AXES).get_group(), replicas)
    of_experts = Peers(expert_mesh(mesh)["edp"].get_group(), replicas) if layout.ep > 1 else peers
    experts = {one for mixture in mixtures_in([model]) for one in mixture.experts.parameters()}
    kinds = {}
    for held in held_parameters(model, shard_map, layout):
        (parameter,) = held.parameters
        if parameter.requires_grad:
            shared_by = of_experts if parameter in experts else peers
            kinds[parameter] = Kind(parameter.dtype, held.num_replicas, held.is_partial, shared_by)
    device = next(iter(kinds)).device
    return BucketedReplica(model, kinds, device, _units(model))


def _units(model: TrainModel) -> list[nn.Module]:
    """Return the modules that wait for their own weights; none if the model is one graph. Imported code may read a
    weight anywhere."""
    if model.is_own or model._compiled_call_impl is not None:
        return []
    ends = [module for name, module in model.named_children() if name != "layers"]
    return [*model.layers.values(), *ends]


def held_tensors(module: nn.Module, model: TrainModel, shard_map: ShardMap, layout: Layout) -> Sequence[HeldTensor]:
    """Return what this rank updates of ``model``, which ``module`` wraps, in the order of the update.

    The weights that the next forward pass needs first get their gradients last, so they come first.
    """
    return module.buckets[::-1] if isinstance(module, BucketedReplica) else held_parameters(model, shard_map, layout)


def begin_backward(module: nn.Module, *, is_last: bool, each: bool) -> None:
    """Set what the next backward pass does to gradients: reduce them over data-parallel ranks, or accumulate them.

    Call it before the forward pass, in which DDP already needs it.

    Args:
        is_last: whether it is the backward pass of the step's last micro-batch.
        each: whether all of them reduce, not only the last one. Even then, replicas of the shards (``dp_replicate``)
            are averaged only once: until then each rank accumulates its own shard.
    """
    if isinstance(module, DistributedDataParallel):
        # As DDP.no_sync() does; both the forward and the backward pass of a micro-batch must see it.
        module.require_backward_grad_sync = is_last
    elif isinstance(module, BucketedReplica):
        module.reduces = is_last
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last or each)
        module.set_requires_all_reduce(is_last)


def keep_weights(module: nn.Module, model: TrainModel, layout: Layout, *, is_last: bool) -> None:
    """Let ZeRO-2 keep gathered weights between micro-batches, because it shards only states.

    Parts that are sharded further are still freed after each use.
    """
    if layout.zero_stage == 2 and isinstance(module, FSDPModule):
        module.set_reshard_after_backward(is_last)
        for end in _tables(model) if layout.shard_embedding else []:
            cast(FSDPModule, end).set_reshard_after_backward(True)


def finish_gradients(module: nn.Module) -> None:
    """Reduce what the backward passes of a step left unreduced, for engines that do not do so themselves."""
    if isinstance(module, BucketedReplica):
        module.finish()
    elif (average := getattr(module, _EXPERT_AVERAGE, None)) is not None:
        average.wait()


def sharded_ends(model: nn.Module) -> list[FSDPModule]:
    """Return the sharded units of a replicated model. FSDP treats each as a separate model."""
    modules: list[Any] = list(model.modules())
    if not isinstance(modules[0], ReplicateModule):
        return []
    return [unit for unit in modules if isinstance(unit, FSDPModule) and not isinstance(unit, ReplicateModule)]


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce what has accumulated under ``root``, as pipeline schedules do at the end of a step."""
    take_in_gradients(root)
    root._get_fsdp_state()._root_post_backward_final_callback()


def take_in_gradients(root: FSDPModule) -> None:
    """Do under ``root`` what FSDP's hooks do at the end of a backward pass: accumulate gradients in the number format
    of reductions, and reduce them unless that is deferred."""
    for part in reversed(root._get_fsdp_state()._state_ctx.all_states):
        for group in reversed(parameter_groups(part)):
            group.post_backward()
