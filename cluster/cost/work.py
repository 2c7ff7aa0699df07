"""The work of a candidate, independent of coefficients, and its arrangement by a pipeline's schedule."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np

from cluster.cost.inputs import SCHEDULES, Array, CostInputs
from trials.spec import GATHERED, Counts, Experts, LatentAttention, LlamaModel, Recompute, Schedule

# ---- The work of a candidate, independent of coefficients: FLOPs, bytes and parameters of layer, head and collectives
#
# Per micro-batch and rank. Sums go operator by operator, after Korthikanti et al., arXiv 2205.05198, section 4,
# extended to gated FFNs and grouped-query attention.

# Mixtures of experts: storage, computation and traffic of their layers, averaged over layers with and without experts.
#
# A token passes ``experts_per_token`` of the routed experts and all shared ones (Fedus et al., arXiv 2101.03961; Dai et
# al., arXiv 2401.06066). Experts are distributed over ``ep`` ranks; tokens are sent to them and back, in forward and
# backward passes (Lepikhin et al., arXiv 2006.16668). Routing is assumed to be balanced, as by auxiliary losses. Arrays
# have shape (n,).


def dense_params(x: CostInputs) -> Array:
    """Return a layer's feed-forward weights that every token passes, with the router; not divided by tp."""
    matrices = (2 + x.gated) * x.hidden
    return np.asarray((1 - x.expert_share) * matrices * x.ffn + unsplit_params(x))


def unsplit_params(x: CostInputs) -> Array:
    """Return the weights of a mixture that every token passes, per layer: shared experts and router."""
    shared = (2 + x.gated) * x.hidden * x.shared_ffn
    return np.asarray(x.expert_share * (shared + np.where(x.num_experts > 1, x.hidden * x.num_experts, 0.0)))


def routed_params(x: CostInputs) -> Array:
    """Return the weights of a layer's routed experts on one rank; not divided by tp."""
    return np.asarray(x.expert_share * (2 + x.gated) * x.hidden * x.expert_ffn * x.num_experts / x.ep)


def used_params(x: CostInputs) -> Array:
    """Return the weights of the routed experts that each token passes in a layer; not divided by tp."""
    return np.asarray(x.expert_share * (2 + x.gated) * x.hidden * x.expert_ffn * x.experts_per_token)


def inner_width(x: CostInputs) -> Array:
    """Return the columns of the feed-forward's inner tensors, per token and layer."""
    of_mixture = x.shared_ffn + x.experts_per_token * x.expert_ffn
    return np.asarray((1 - x.expert_share) * x.ffn + x.expert_share * of_mixture)


def copied_rows(x: CostInputs) -> Array:
    """Return the copies of a token's hidden vector sent to experts, per layer."""
    return np.asarray(x.expert_share * np.where(x.num_experts > 1, x.experts_per_token, 0.0))


def rows_per_expert(x: CostInputs, tokens: Array) -> Array:
    """Return the rows that an expert multiplies at a time, if every rank has ``tokens`` per micro-batch."""
    return np.asarray(tokens * x.experts_per_token * x.ep / np.maximum(x.num_experts, 1.0))


def exchanged_bytes(x: CostInputs, tokens: Array) -> tuple[Array, Array]:
    """Return the bytes that a rank sends to other ranks' experts, per layer and direction: over fast links, and beyond.

    Expert-parallel ranks are adjacent, outside those of tensor parallelism, each of which sends its share of the
    tokens. A token goes to another fast domain once, however many of its experts are there, and is forwarded over the
    fast links (DeepSeek-AI, arXiv 2412.19437, section 3.2.2). Experts are chosen independently of their place.
    """
    vectors = tokens * x.hidden * x.compute_bytes / x.tp * x.expert_share
    inside = np.clip(np.floor(x.domain_size * exchanging_ranks(x) / (x.ep * x.tp)), 1, exchanging_ranks(x))
    domains = exchanging_ranks(x) / inside
    reached = (domains - 1) * (1 - (1 - 1 / domains) ** x.experts_per_token)
    return np.asarray(vectors * x.experts_per_token * (inside - 1) / inside), np.asarray(vectors * reached)


def exchanging_ranks(x: CostInputs) -> Array:
    """Return the number of ranks that a rank exchanges tokens with, including itself."""
    return np.asarray(x.ep * np.where(x.whole_experts > 0, x.tp, 1.0))


HEAD_STEP = 32
"""Head sizes of fused attention kernels are multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work per micro-batch and rank, arrays of shape (n,)."""

    tokens: Array
    """Tokens of a micro-batch on one rank: divided by cp, not by tp."""
    layer_params: Array
    """Matmul weights of one layer without routed experts; not divided by tp. Weights that every tensor-parallel rank
    holds whole count ``tp`` times."""
    expert_params: Array
    """Matmul weights of a rank's routed experts per layer; not divided by tp."""
    matmul_flops: Array
    """Forward FLOPs of one layer's matmuls without routed experts. These and all following fields are this rank's
    share."""
    expert_flops: Array
    """FLOPs of routed experts' matmuls."""
    attention_flops: Array
    elementwise_bytes: Array
    """Bytes read and written by norms, activations, residuals, and by softmax if scores are materialised."""
    weight_traffic_bytes: Array
    head_flops: Array
    head_bytes: Array
    """Bytes of logits read and written, forward and backward."""
    tp_bytes: Array
    """Bytes of one tensor-parallel all-reduce, of which there are two per layer and pass."""
    keys_bytes: Array
    """Bytes received from context-parallel peers per layer and exchange of keys and values."""
    heads_bytes: Array
    """Bytes of queries, keys, values and outputs received from context-parallel peers per layer and exchange of
    heads."""
    pp_bytes: Array
    """Bytes sent from one stage to the next."""


def work_of(x: CostInputs) -> Work:
    """Return the work of each candidate."""
    tokens = x.micro_batch_size * x.seq_length / x.cp
    width, kv_width = x.num_heads * x.head_dim, x.num_kv_heads * x.head_dim
    attention_params = np.where(x.attention_params > 0, x.attention_params, x.hidden * (2 * width + 2 * kv_width))
    used = attention_params + dense_params(x)
    layer_params = used + x.whole_experts * (x.tp - 1) * unsplit_params(x)
    expert_params = routed_params(x)
    # Fused kernels skip the masked half of the scores. Their head sizes are multiples of 32; other heads are padded
    # (FlashAttention-2's ``HEADDIM_SWITCH``).
    padded = np.ceil(x.head_dim / HEAD_STEP) * HEAD_STEP / x.head_dim
    attention = 4 * tokens * x.seq_length * width / x.tp * np.where(x.flash > 0, 0.5 * padded, 1.0)
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    scores = tokens * x.seq_length * x.num_heads / x.tp * (1 - x.flash)
    elementwise = x.compute_bytes * tokens * (
        (10 + 2 * x.dropout) * x.hidden / shared
        + (3 * width + (2 + 2 * x.gated) * inner_width(x) + 4 * copied_rows(x) * x.hidden) / x.tp
    ) + scores * x.compute_bytes * (5 + 2 * x.dropout)
    heads, keys = x.exchanging_heads, x.passing_keys
    return Work(
        tokens=tokens,
        layer_params=layer_params,
        expert_params=expert_params,
        matmul_flops=2 * tokens * used / x.tp,
        expert_flops=2 * tokens * used_params(x) / x.tp,
        attention_flops=attention,
        elementwise_bytes=elementwise,
        weight_traffic_bytes=(layer_params + expert_params) / x.tp * x.compute_bytes,
        head_flops=2 * tokens * x.hidden * x.vocab / x.tp,
        # Each part's product is written and read in half the bytes of the sums, which are read and written.
        head_bytes=x.vocab / x.tp * (tokens * x.loss_traffic + 3 * x.hidden * x.loss_chunks * x.head_sums_bytes),
        tp_bytes=np.where(x.tp > 1, tokens * x.hidden * x.compute_bytes, 0.0),
        keys_bytes=2 * tokens * (keys - 1) * x.compute_bytes * kv_width / x.tp,
        heads_bytes=2 * tokens * (heads - 1) / heads * x.compute_bytes * (width + kv_width) / x.tp,
        pp_bytes=np.where(x.pp > 1, tokens * x.hidden * x.residual_bytes / x.tp, 0.0),
    )


def layers_params(x: CostInputs, work: Work) -> Array:
    """Return the parameters of each pipeline rank's layers without routed experts, divided by tp, shape (n, stages)."""
    return np.asarray(x.stage_layers * ((work.layer_params + 4 * x.hidden) / x.tp)[:, None])


def experts_params(x: CostInputs, work: Work) -> Array:
    """Return the parameters of each pipeline rank's routed experts, divided by tp, shape (n, stages)."""
    return np.asarray(x.stage_layers * (work.expert_params / x.tp)[:, None])


def tables_params(x: CostInputs) -> Array:
    """Return the parameters of embedding and head on each pipeline rank, divided by tp, shape (n, stages)."""
    one_table = (x.pp == 1) & (x.tied > 0)
    num_tables = is_first(x) + is_last(x) * np.where(one_table, 0.0, 1.0)[:, None]
    return np.asarray(num_tables * (x.vocab * x.hidden / x.tp)[:, None])


def is_first(x: CostInputs) -> Array:
    """Return 1 for the pipeline rank with the embedding, else 0, shape (n, stages)."""
    return np.broadcast_to(np.arange(x.stage_layers.shape[1]) == 0, x.stage_layers.shape).astype(np.float64)


def is_last(x: CostInputs) -> Array:
    """Return 1 for the pipeline rank with head and loss, else 0: in the V-shaped schedule, the first rank."""
    last = np.where(x.schedule == 3, 0, x.pp - 1)
    return np.asarray(np.arange(x.stage_layers.shape[1])[None, :] == last[:, None], dtype=np.float64)


# The shares of a decoder layer that selective recompute drops and repeats, from its operators' kept outputs and work.


FLOPS_PER_BYTE = 160.0
"""Matmul FLOPs of current accelerators, at usual efficiencies, per byte read or written."""
COMPILED_TRAFFIC_SHARE = 0.75
"""Share of a layer's element-wise traffic left after compiling: norms fused with additions, rotation and gating in one
pass each. By count for SwiGLU decoders, 8 hidden + 2 width + 3 FFN elements of 10 + 3 + 4."""
MAX_DROPPED = 0.95
"""Largest share of a layer's kept bytes that can be dropped: its input always stays."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator, per token: output elements kept for the backward pass, FLOPs, elements read and written."""

    kept: float
    flops: float = 0.0
    traffic: float = 0.0

    @property
    def work(self) -> float:
        """FLOPs, plus those that would fit into the time to read and write its two-byte elements."""
        return self.flops + 2 * self.traffic * FLOPS_PER_BYTE


def operators_of(model: LlamaModel, seq_length: int) -> dict[str, Operator]:
    """Return the operators of :class:`trials.models.built_in.Block` by path; fused attention skips the masked half."""
    h, f = model.hidden_size, model.ffn_hidden_size
    return {
        "attention_norm.rms_norm": Operator(h, 0, 2 * h),
        **(_attention_operators(model) if model.latent is None else _latent_operators(model, model.latent)),
        "attention.scaled_dot_product_attention": Operator(
            model.num_heads * model.head_size, 4 * seq_length * model.num_heads * model.head_size * 0.5
        ),
        "attention.wo.linear": Operator(0, 2 * h * model.num_heads * model.value_size),
        "add": Operator(h, 0, 3 * h),
        "feed_forward_norm.rms_norm": Operator(h, 0, 2 * h),
        **(_dense_operators(h, f) if model.experts is None else _expert_operators(h, model.experts)),
    }


def _attention_operators(model: LlamaModel) -> dict[str, Operator]:
    h, kv = model.hidden_size, model.head_size * model.num_kv_heads
    return {
        "attention.wqkv.linear": Operator(0, 2 * h * (h + 2 * kv)),
        "attention.addcmul": Operator(h + kv, 0, 3 * (h + kv)),
        "attention.contiguous": Operator(kv, 0, 2 * kv),
    }


def _latent_operators(model: LlamaModel, latent: LatentAttention) -> dict[str, Operator]:
    h, heads, rank, common = model.hidden_size, model.num_heads, latent.q_lora_rank, latent.kv_lora_rank
    qk, turned = heads * model.head_size, latent.qk_rope_head_dim
    keys_and_values = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    queries = {
        "attention.wq_a.linear": Operator(rank, 2 * h * rank),
        "attention.q_norm.rms_norm": Operator(rank, 0, 2 * rank),
    }
    return {
        **(queries if rank else {}),
        "attention.wq_b.linear": Operator(0, 2 * (rank or h) * qk),
        "attention.wkv_a.linear": Operator(common, 2 * h * (common + turned)),
        "attention.kv_norm.rms_norm": Operator(common, 0, 2 * common),
        "attention.wkv_b.linear": Operator(0, 2 * common * keys_and_values),
        "attention.addcmul": Operator(0, 0, 3 * (heads + 1) * turned),
        "attention.cat": Operator(2 * qk, 0, 4 * qk),
        "attention.pad": Operator(qk, 0, 2 * qk),
    }


def _fused(operator: Operator, path: str) -> Operator:
    """Return the operator in a compiled graph: the gate's activation is kept nowhere, and elementwise operators share
    their reads and writes."""
    kept = 0.0 if path.endswith(".silu") else operator.kept
    return Operator(kept, operator.flops, operator.traffic * COMPILED_TRAFFIC_SHARE)


def _dense_operators(h: int, f: int) -> dict[str, Operator]:
    return {
        "feed_forward.w13.linear": Operator(2 * f, 4 * h * f),
        "feed_forward.silu": Operator(f, 0, 2 * f),
        "feed_forward.mul": Operator(f, 0, 3 * f),
        "feed_forward.w2.linear": Operator(0, 2 * h * f),
    }


def _expert_operators(h: int, experts: Experts) -> dict[str, Operator]:
    """Operators of a token's routed experts. Patterns do not reach grouped products, so these have no path."""
    f = round(experts.slots_per_token * experts.ffn_hidden_size)
    return {
        "grouped_matmul": Operator(2 * f + round(experts.slots_per_token * h), 6 * h * f),
        "feed_forward.experts.silu": Operator(f, 0, 2 * f),
        "feed_forward.experts.mul": Operator(f, 0, 3 * f),
    }


def matches(pattern: str, path: str) -> bool:
    """Whether the pattern matches the operator's whole path or that of an enclosing module, as in
    :class:`trials.recompute.PatternTally`."""
    parts = path.split(".")
    return any(re.fullmatch(pattern, ".".join(parts[:i])) for i in range(1, len(parts) + 1))


@functools.lru_cache(maxsize=4096)
def selective_shares(
    recompute: Recompute, model: LlamaModel, seq_length: int, plain: Counts, *, compiled: bool = False
) -> tuple[list[float], list[float]]:
    """Return the shares of kept bytes dropped and of work repeated, each per pipeline rank: the mean over its layers
    without full recompute.

    Args:
        plain: numbers of those layers, ``[chunk][stage]``.
        compiled: whether the layers are compiled.
    """
    num_stages = len(plain[0])
    if not recompute.selective:
        return [0.0] * num_stages, [0.0] * num_stages
    operators = operators_of(model, seq_length)
    if compiled:
        operators = {path: _fused(operator, path) for path, operator in operators.items()}
    # The layer's input is also kept.
    all_kept = model.hidden_size + sum(operator.kept for operator in operators.values())
    all_work = sum(operator.work for operator in operators.values())
    dropped, repeated = [0.0] * num_stages, [0.0] * num_stages
    for path, operator in operators.items():
        counts = _layers(path, recompute, plain)
        for stage, count in enumerate(counts):
            layers = max(1, sum(row[stage] for row in plain))
            dropped[stage] += count / layers * operator.kept / all_kept
            repeated[stage] += count / layers * operator.work / all_work
    return [min(MAX_DROPPED, share) for share in dropped], repeated


def gathers_repeated(recompute: Recompute, plain: Counts) -> float:
    """Return the number of layers that gather their sequence shards again, where each sub-layer is half a layer.

    Args:
        plain: as for :func:`selective_shares`.
    """
    everywhere = recompute.communication or tuple((0,) * len(row) for row in plain)
    total = 0
    for name in GATHERED:
        chosen = [everywhere]
        chosen += [part.num_layers for part in recompute.selective if matches(part.pattern, f"{name}.gather_sequence")]
        total += sum(max(column) for rows in zip(*chosen, strict=True) for column in zip(*rows, strict=True))
    return total / len(GATHERED)


def _layers(path: str, recompute: Recompute, plain: Counts) -> list[int]:
    """Return the layers of each stage in which a pattern selects the operator, without fully recomputed ones."""
    chosen = [part.num_layers for part in recompute.selective if matches(part.pattern, path)]
    layers = [0] * len(plain[0])
    for chunk, row in enumerate(plain):
        for stage in range(len(row)):
            layers[stage] += max((_beyond(counts, recompute.full, chunk, stage) for counts in chosen), default=0)
    return layers


def _beyond(counts: Counts, full: Counts, chunk: int, stage: int) -> int:
    return max(0, counts[chunk][stage] - (full[chunk][stage] if full else 0))


# ---- Pipeline schedules: the time of all micro-batches from that of one per stage, and the micro-batches in flight
#
# The closed form is exact for equal stages: ``m`` micro-batches on ``p`` ranks with ``v`` chunks take
# ``(m + (p - 1) / v)`` stage times. With unequal numbers of layers, the schedule is simulated.

FORWARD_SHARE = 1 / 3
"""Share of the forward pass in a stage's time (without recompute, which lengthens the backward pass)."""
ZBV = 3
"""Code of the zero-bubble schedule in ``SCHEDULES``."""

Operation = tuple[int, int, int, int]
"""Rank, 0 for forward or 1 for backward, chunk, micro-batch."""


def pipeline_seconds(x: CostInputs, stage_total_s: Array) -> Array:
    """Return the time from the first forward to the last backward pass, shape (n,), from stage times (n, stages)."""
    seconds = closed_form_seconds(x, stage_total_s)
    used = np.arange(x.stage_layers.shape[1])[None, :] < x.pp[:, None]
    most = np.max(x.stage_layers, axis=1)
    least = np.min(np.where(used, x.stage_layers, np.inf), axis=1)
    uneven = (most - least > 1) & (x.pp > 1) & (x.schedule != ZBV)
    if uneven.any():
        seconds[uneven] = simulated_seconds(x.take(uneven), stage_total_s[uneven])
    return seconds


def closed_form_seconds(x: CostInputs, stage_total_s: Array) -> Array:
    """Return ``m`` times the slowest stage, plus every other stage once (a ``v``-th of it with ``v`` chunks).

    Zero bubble (Qi et al., arXiv 2401.10241) fills the waiting with weight gradients; a third of the bubble stays.
    """
    slowest = np.max(stage_total_s, axis=1)
    others = np.sum(stage_total_s, axis=1) - slowest
    bubble = others / x.num_virtual_stages * np.where(x.schedule == ZBV, 1 / 3, 1.0)
    return np.asarray(x.num_microbatches * slowest + bubble)


def simulated_seconds(x: CostInputs, stage_total_s: Array) -> Array:
    """Return the times by simulating each candidate's schedule; candidates with equal schedules run together.

    Only the first micro-batches, twice the number of stages, are simulated. In the steady state each further one adds
    the slowest stage's time (within 2% of the whole simulation).
    """
    seconds = np.zeros(len(x))
    limit = np.minimum(x.num_microbatches, 2 * x.pp)
    keys = np.stack([x.schedule, x.pp, x.num_virtual_stages, limit], axis=1).astype(np.int64)
    kinds, members = np.unique(keys, axis=0, return_inverse=True)
    for i, (schedule, pp, chunks, num) in enumerate(kinds):
        rows = np.flatnonzero(members.reshape(-1) == i)
        stage = stage_total_s[rows][:, :pp] / chunks
        span = _simulate(_operations(int(schedule), int(pp), int(chunks), int(num)), stage, int(pp), int(chunks))
        more = x.num_microbatches[rows] - num
        seconds[rows] = span + more * np.max(stage_total_s[rows], axis=1)
    return seconds


def _simulate(operations: tuple[Operation, ...], chunk_s: Array, pp: int, chunks: int) -> Array:
    """Return the end of the last operation. ``chunk_s``: seconds of one chunk on each rank, shape (n, pp)."""
    free = [np.zeros(len(chunk_s)) for _ in range(pp)]
    spans = [[share * chunk_s[:, rank] for rank in range(pp)] for share in (FORWARD_SHARE, 1 - FORWARD_SHARE)]
    done: dict[tuple[int, int, int], Array] = {}
    last = chunks * pp - 1
    for rank, kind, chunk, microbatch in operations:
        stage = chunk * pp + rank
        start = free[rank]
        before = _dependency(kind, stage, last, microbatch)
        if before is not None:
            start = np.maximum(start, done[before])
        end = start + spans[kind][rank]
        free[rank] = done[(kind, stage, microbatch)] = end
    return np.asarray(np.max(free, axis=0))


def _dependency(kind: int, stage: int, last: int, microbatch: int) -> tuple[int, int, int] | None:
    """Return the operation that must end before this one: forward that of the previous stage, backward that of the next
    one, on the last stage its own forward."""
    if kind == 0:
        return (0, stage - 1, microbatch) if stage else None
    return (1, stage + 1, microbatch) if stage < last else (0, stage, microbatch)


@functools.lru_cache(maxsize=256)
def _operations(schedule: int, pp: int, chunks: int, num_microbatches: int) -> tuple[Operation, ...]:
    """Return all operations in dependency order."""
    queues = [_rank_order(schedule, pp, chunks, num_microbatches, rank) for rank in range(pp)]
    position = [0] * pp
    done: set[tuple[int, int, int]] = set()
    ordered: list[Operation] = []
    last = chunks * pp - 1
    while len(ordered) < sum(map(len, queues)):
        before_round = len(ordered)
        for rank, queue in enumerate(queues):
            while position[rank] < len(queue):
                kind, chunk, microbatch = queue[position[rank]]
                stage = chunk * pp + rank
                before = _dependency(kind, stage, last, microbatch)
                if before is not None and before not in done:
                    break
                done.add((kind, stage, microbatch))
                ordered.append((rank, kind, chunk, microbatch))
                position[rank] += 1
        assert len(ordered) > before_round, "the schedule waits for itself"
    return tuple(ordered)


def _rank_order(schedule: int, pp: int, chunks: int, num: int, rank: int) -> list[tuple[int, int, int]]:
    """Return (kind, chunk, micro-batch) in the order in which ``rank`` runs them.

    1F1B: Narayanan et al., arXiv 2104.04473; with chunks, groups of :func:`per_round` micro-batches pass one chunk at a
    time. GPipe: all forwards, then all backwards.
    """
    total = num * chunks
    slots = [_slot(i, pp, chunks, num) for i in range(total)]
    forward = [(0, chunk, microbatch) for chunk, microbatch in slots]
    backward = [(1, chunks - 1 - chunk, microbatch) for chunk, microbatch in slots]
    if schedule == 0:
        warmup = total
    elif chunks > 1:
        warmup = min(total, 2 * (pp - rank - 1) + (chunks - 1) * per_round(pp, num))
    else:
        warmup = min(total, pp - rank - 1)
    order = forward[:warmup]
    for i in range(total - warmup):
        order += [forward[warmup + i], backward[i]]
    return order + backward[total - warmup :]


def _slot(i: int, pp: int, chunks: int, num: int) -> tuple[int, int]:
    """Return chunk and micro-batch of the ``i``-th forward pass; the last group may be smaller."""
    each = per_round(pp, num)
    group, rest = divmod(i, each * chunks)
    size = min(each, num - group * each)
    return rest // size, group * each + rest % size


def per_round(pp: int, num: int) -> int:
    """Return how many of ``num`` micro-batches pass a chunk before the next chunk begins, as in torch."""
    return num // max(1, num // pp)


Peaks = tuple[tuple[int, ...], ...]
"""The worst moments of one pipeline rank: micro-batches in flight per chunk at each of them. No entry is dominated by
another, so the largest moment is among them for any activation sizes."""


def in_flight_peaks(
    schedule: Schedule, *, pp: int, num_virtual_stages: int, num_microbatches: int
) -> tuple[Peaks, ...]:
    """Return the worst moments of every pipeline rank.

    ``gpipe`` holds every micro-batch; ``1f1b`` rank s holds ``min(m, pp - s)`` (Narayanan et al., arXiv 2104.04473);
    ``interleaved`` is simulated step by step, warm-up ``(v - 1) pp + 2 (pp - s - 1)`` forwards as in the same paper;
    ``zbv`` keeps ``2 pp`` chunks in all: ``2 pp - 1 - s`` of the first and ``s + 1`` of the second (arXiv 2401.10241).
    """
    v, m = num_virtual_stages, num_microbatches
    if schedule == "gpipe":
        return ((((m,) * v),),) * pp
    if schedule == "zbv":
        return tuple(((min(m, 2 * pp - 1 - stage), min(m, stage + 1)),) for stage in range(pp))
    if schedule == "1f1b" and v == 1:
        return tuple(((min(m, pp - stage),),) for stage in range(pp))
    return tuple(_interleaved(stage, pp=pp, v=v, m=m) for stage in range(pp))


def _interleaved(stage: int, *, pp: int, v: int, m: int) -> Peaks:
    """Simulate one rank: warm-up forwards, then alternating forward and backward; chunks in rounds of micro-batches."""
    each = per_round(pp, m)
    num_warmup = min(m * v, (v - 1) * each + 2 * (pp - stage - 1))
    held = [0] * v
    moments = set()
    for forward in range(m * v):
        held[forward // each % v] += 1
        moments.add(tuple(held))
        backward = forward - num_warmup
        if backward >= 0:
            held[v - 1 - backward // each % v] -= 1
    return tuple(sorted(_maximal(moments)))


def _maximal(vectors: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [a for a in vectors if not any(a != b and _covers(b, a) for b in vectors)]


def _covers(large: tuple[int, ...], small: tuple[int, ...]) -> bool:
    return all(x >= y for x, y in zip(large, small, strict=True))


def in_flight(x: CostInputs) -> Array:
    """Return the micro-batches that a pipeline rank holds at its worst moment, shape (n, stages); a chunk counts 1 / v.

    This is the largest sum of ``in_flight_peaks`` over chunks; for interleaving ``min(m v, 2 (p - s - 1) + (v - 1) r +
    1) / v`` with r of :func:`per_round`.
    """
    stage = np.arange(x.stage_layers.shape[1])[None, :]
    m, p, v = x.num_microbatches[:, None], x.pp[:, None], x.num_virtual_stages[:, None]
    plain = np.minimum(m, x.stage_buffers[:, None] * (p - stage))
    each = np.floor(m / np.maximum(1.0, np.floor(m / p)))
    chunked = np.minimum(m * v, 2 * (p - stage - 1) + (v - 1) * each + 1) / v
    zbv = (np.minimum(m, 2 * p - 1 - stage) + np.minimum(m, stage + 1)) / 2
    code = x.schedule[:, None]
    held = np.select(
        [code == SCHEDULES.index("gpipe"), code == SCHEDULES.index("zbv"), v > 1], [m, zbv, chunked], default=plain
    )
    return np.asarray(np.maximum(held, 0.0))
