"""The loops that one writes by hand with what PyTorch offers for each layout, over the same model and batches as ours.

Each gives a function that takes one step: all micro-batches forward and backward, optimiser, ``loss.item()``.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from trials.models.built_in import Llama
from trials.sizes import Chunk, all_chunks, chunks_of_stage
from trials.spec import Layout, LlamaModel, TrialSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # they are torch's own, of what else is there
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

PeerName = Literal["plain", "ddp", "fsdp2", "tensor", "zero1", "each", "last", "context", "pipeline"]
Step = Callable[[], float]
Forward = Callable[[Tensor, Tensor], Tensor]
"""Function from inputs and targets of a micro-batch to its mean loss."""

_ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
_TENSOR_PLAN: dict[str, Callable[[], ParallelStyle]] = {
    "attention.wqkv": ColwiseParallel,
    "attention.wo": RowwiseParallel,
    "feed_forward.w13": ColwiseParallel,
    "feed_forward.w2": RowwiseParallel,
}


def peer_step(name: PeerName, spec: TrialSpec, batches: Iterator[Any], *, clips: bool) -> Step:
    """The hand-written loop ``name`` on this rank, to be called by all ranks of the gang.

    Args:
        spec: model, batch, micro-batch and degrees, as ours has them.
        clips: whether it clips gradients, which needs their global norm.

    Raises:
        RuntimeError, NotImplementedError: torch cannot do it on this device; maybe in the first step only.
    """
    if name == "pipeline":
        return _pipeline(spec, batches)
    loops: dict[PeerName, Callable[[TrialSpec, Iterator[Any], bool], Step]] = {
        "plain": _plain,
        "ddp": _replicated,
        "fsdp2": functools.partial(_sharded, reshard=True, synchronises_each=True),
        "each": functools.partial(_sharded, reshard=spec.candidate.layout.zero_stage == 3, synchronises_each=True),
        "last": functools.partial(_sharded, reshard=spec.candidate.layout.zero_stage == 3, synchronises_each=False),
        "tensor": _tensor_parallel,
        "zero1": _zero1,
        "context": _context_parallel,
    }
    return loops[name](spec, batches, clips)


def _model(spec: TrialSpec, chunk: Chunk | None = None) -> Llama:
    shape = spec.workload.model
    assert isinstance(shape, LlamaModel)
    model = Llama(shape, spec.workload.seq_length, chunk or all_chunks(Layout(), shape.num_layers)[0])
    model.materialize(torch.device("cpu"))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _loop(
    spec: TrialSpec,
    batches: Iterator[Any],
    forward: Forward,
    optimizer: torch.optim.Optimizer,
    clipped: nn.Module | None,
    before: Callable[[bool], None] | None = None,
) -> Step:
    """Micro-batches one after the other; ``before`` gets whether the next is the step's last."""
    size = spec.candidate.micro_batch_size

    def step() -> float:
        inputs, targets = next(batches)
        micro_batches = list(zip(inputs.split(size), targets.split(size), strict=True))
        losses = []
        for number, (rows, wanted) in enumerate(micro_batches, start=1):
            if before is not None:
                before(number == len(micro_batches))
            loss = forward(rows, wanted) / len(micro_batches)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        if clipped is not None:
            nn.utils.clip_grad_norm_(clipped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(sum(losses))

    return step


def _plain(spec: TrialSpec, batches: Iterator[Any], clips: bool) -> Step:
    model = _model(spec)
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)
    return _loop(spec, batches, lambda x, y: _cross_entropy(model(x), y), optimizer, model if clips else None)


def _replicated(spec: TrialSpec, batches: Iterator[Any], clips: bool) -> Step:
    model = DistributedDataParallel(_model(spec))
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)
    return _loop(spec, batches, lambda x, y: _cross_entropy(model(x), y), optimizer, model if clips else None)


def _zero1(spec: TrialSpec, batches: Iterator[Any], clips: bool) -> Step:
    """torch's optimiser that keeps its states in parts, under DDP."""
    model = DistributedDataParallel(_model(spec))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **_ADAMW)
    return _loop(spec, batches, lambda x, y: _cross_entropy(model(x), y), optimizer, model if clips else None)


def _sharded(spec: TrialSpec, batches: Iterator[Any], clips: bool, *, reshard: bool, synchronises_each: bool) -> Step:
    """FSDP2, layer by layer; gradients are reduced after each micro-batch, or after the last."""
    model: Any = _model(spec)
    for layer in model.layers.values():
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)

    def before(is_last: bool) -> None:
        if not synchronises_each:
            model.set_requires_gradient_sync(is_last)

    return _loop(spec, batches, lambda x, y: _cross_entropy(model(x), y), optimizer, model if clips else None, before)


def _mesh(name: str) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def _tensor_parallel(spec: TrialSpec, batches: Iterator[Any], clips: bool) -> Step:
    """``parallelize_module`` by columns and rows; embedding, head and loss split over the vocabulary."""
    model, mesh = _model(spec), _mesh("tp")
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {name: style() for name, style in _TENSOR_PLAN.items()})
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    groups: list[dict[str, Any]] = [{"params": split}, {"params": whole}]  # no kernel takes both kinds
    optimizer = torch.optim.AdamW(groups, **_ADAMW)
    step = _loop(spec, batches, lambda x, y: _cross_entropy(model(x), y), optimizer, model if clips else None)

    def under_loss_parallel() -> float:
        with loss_parallel():
            return step()

    return under_loss_parallel


def _context_parallel(spec: TrialSpec, batches: Iterator[Any], clips: bool) -> Step:
    """torch's experimental ``context_parallel``, under FSDP2 for the sum of gradients."""
    from torch.distributed.tensor.experimental import context_parallel

    model: Any = _model(spec)
    mesh = _mesh("cp")
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)
    table = model.rope

    def forward(rows: Tensor, wanted: Tensor) -> Tensor:
        return _cross_entropy(model(rows), wanted)

    def over_parts() -> Iterator[Any]:
        for inputs, targets in batches:
            yield inputs.clone(), targets.clone()

    parts = over_parts()

    def step() -> float:
        inputs, targets = next(parts)
        model.rope = table.clone()
        buffers = [inputs, targets, model.rope]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers={inputs, targets}):
            return _loop(spec, iter([(inputs, targets)]), forward, optimizer, model if clips else None)()

    return step


def _pipeline(spec: TrialSpec, batches: Iterator[Any]) -> Step:
    """torch's ``Schedule1F1B`` over stages of equal size; gradients are never clipped here."""
    layout, rank = spec.candidate.layout, dist.get_rank()
    (chunk,) = chunks_of_stage(layout, rank, spec.workload.num_layers)
    model = _model(spec, chunk)
    stage = PipelineStage(model, rank, layout.pp, torch.device("cpu"))
    losses: list[Tensor] = []
    num_micro_batches = spec.candidate.num_microbatches(spec.workload.global_batch_size)
    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=_cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)

    def step() -> float:
        inputs, targets = next(batches)
        losses.clear()
        if chunk.is_first:
            schedule.step(inputs)
        elif chunk.is_last:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).mean()) if losses else 0.0

    return step


@contextlib.contextmanager
def allocations() -> Iterator[list[int]]:
    """Has the list take, at the end of the body, the most bytes that it held beyond what it began with."""
    found: list[int] = []
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        yield found
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    found.append(most)
