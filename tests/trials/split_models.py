"""A tiny Llama split over a gang, without the rest of the runner: its loss and gradients, made whole again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings

import numpy
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.trials.tiny import SHAPE
from trials.attention import causal_attention, plan_attention
from trials.models.built_in import Llama
from trials.parallel.context import apply_context_parallel, split_sequence
from trials.parallel.copies import apply_copies, interleave_positions
from trials.parallel.mesh import ShardMap, build_mesh, init_parameters, plain_name
from trials.parallel.tensor import apply_tensor_parallel
from trials.recompute import apply_recompute
from trials.sizes import Chunk
from trials.spec import Candidate, Recompute, SelectiveRecompute

WHOLE = Chunk(chunk=0, stage=0, virtual_stage=0, layer_ids=tuple(range(SHAPE.num_layers)), is_first=True, is_last=True)
SEQ_LENGTH = 16
CPU = torch.device("cpu")


def build(layout, chunk=WHOLE, shape=SHAPE, **options):
    """The model split over tp and cp as :mod:`trials.training.loop` does it, with its start values."""
    with torch.device("meta"):
        model = Llama(shape, options.get("seq_length", SEQ_LENGTH), chunk)
    model.to(options.get("dtype", torch.float32))
    shard_map = ShardMap()
    dtype = torch.bfloat16 if options.get("autocast") else options.get("dtype", torch.float32)
    plan = plan_attention(shape, options.get("attention", "auto"), dtype, "cpu")
    plan = dataclasses.replace(plan, expands=options.get("expands", plan.expands))
    if layout.tp * layout.cp > 1:
        mesh = build_mesh(layout, CPU)
        if layout.tp > 1:
            shard_map = apply_tensor_parallel(model, mesh["tp"], layout)
        if layout.cp > 1:
            apply_context_parallel(model, mesh, layout, plan)
    if options.get("expands") and layout.cp == 1:
        model.attend_by(functools.partial(causal_attention, expands=True))
    apply_copies(model, candidate(layout, **options), plan)
    if options.get("recompute"):
        apply_recompute(model, Recompute(full=((1,),)), chunk)
    if options.get("selective"):
        chosen = SelectiveRecompute(pattern=options["selective"], num_layers=((2,),))
        apply_recompute(model, Recompute(selective=(chosen,)), chunk)
    if options.get("compiled"):
        warnings.simplefilter("ignore")  # dynamo warns of what it does to itself while tracing
        for layer in model.layers.values():
            layer.compile(backend="aot_eager", fullgraph=True)
    model.to_empty(device=CPU)
    model.materialize(CPU)
    init_parameters(model, 3, shard_map)
    return model, shard_map


def candidate(layout, num_sequences=4, **_):
    return Candidate(layout=layout, micro_batch_size=num_sequences)


def tokens(num_sequences=4):
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(SHAPE.vocab_size, (num_sequences, SEQ_LENGTH + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def loss_and_gradients(layout, autocast=False, **options):
    """Gradients of the whole model, put together from what this rank and its peers hold."""
    rows = tokens(options.get("num_sequences", 4))
    model, shard_map = build(layout, autocast=autocast, **options)
    cp_rank = (dist.get_rank() // layout.tp) if layout.cp > 1 else 0
    inputs, targets = (split_sequence(t, cp_rank, layout.cp) if layout.cp > 1 else t for t in rows)
    if candidate(layout, **options).splits_positions and layout.sequence_parallel:
        inputs, targets = (interleave_positions(t, layout.tp) for t in rows)
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = model(inputs, targets) / layout.cp
    loss.backward()
    grads = {}
    for wrapped_name, parameter in model.named_parameters():
        name = plain_name(wrapped_name)
        assert parameter.grad is not None, name
        grads[name] = _whole(name, parameter.grad, layout, shard_map)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / layout.tp, grads


def _whole(name, grad, layout, shard_map):
    """Sum over context-parallel ranks and, where partial, over tensor-parallel ones; shards side by side."""
    if isinstance(grad, DTensor):
        grad = grad.full_tensor()
    everybody = [torch.empty_like(grad) for _ in range(layout.world_size)]
    dist.all_gather(everybody, grad.contiguous())
    over_cp = [sum(everybody[tp :: layout.tp]) for tp in range(layout.tp)]
    shard = shard_map.shards.get(name)
    if shard is not None:
        return torch.cat(over_cp, shard.dim)
    if name in shard_map.partial:
        return sum(over_cp)
    return over_cp[0]


Result = tuple[float, dict[str, numpy.ndarray]]


def many(cases):
    """One case after the other in the same gang; results of rank 0, none from the others."""
    results = []
    for layout, options in cases:
        loss, grads = loss_and_gradients(layout, **options)
        results.append((loss, {name: grad.float().numpy() for name, grad in grads.items()}))
    return results if dist.get_rank() == 0 else []


def differences(result, wanted):
    """Difference of the losses, and the largest of any gradient relative to the largest element of that gradient."""
    assert result[1].keys() == wanted[1].keys()
    grads = [abs(result[1][name] - grad).max() / abs(grad).max() for name, grad in wanted[1].items()]
    return abs(result[0] - wanted[0]), float(max(grads))
