"""Mixtures of experts: what their layers hold, compute and send, averaged over layers with experts and without.

A token passes ``experts_per_token`` of the routed experts and all shared ones (Fedus et al., arXiv 2101.03961; Dai et
al., arXiv 2401.06066). Experts are spread over ``ep`` ranks; tokens travel to them and back, in forward and backward
passes (Lepikhin et al., arXiv 2006.16668). Routing is taken to be balanced, as auxiliary losses make it. Arrays have
shape (n,).
"""

from __future__ import annotations

import numpy as np

from cluster.cost.inputs import Array, CostInputs


def dense_params(x: CostInputs) -> Array:
    """Feed-forward weights of a layer that every token passes, router included; not divided by tp."""
    matrices = (2 + x.gated) * x.hidden
    of_mixture = matrices * x.shared_ffn + np.where(x.num_experts > 1, x.hidden * x.num_experts, 0.0)
    return np.asarray((1 - x.expert_share) * matrices * x.ffn + x.expert_share * of_mixture)


def routed_params(x: CostInputs) -> Array:
    """Weights of a layer's routed experts on one rank; not divided by tp."""
    return np.asarray(x.expert_share * (2 + x.gated) * x.hidden * x.expert_ffn * x.num_experts / x.ep)


def used_params(x: CostInputs) -> Array:
    """Weights of routed experts that each token passes in a layer; not divided by tp."""
    return np.asarray(x.expert_share * (2 + x.gated) * x.hidden * x.expert_ffn * x.experts_per_token)


def inner_width(x: CostInputs) -> Array:
    """Columns of the feed-forward's inner tensors, per token and layer."""
    of_mixture = x.shared_ffn + x.experts_per_token * x.expert_ffn
    return np.asarray((1 - x.expert_share) * x.ffn + x.expert_share * of_mixture)


def copied_rows(x: CostInputs) -> Array:
    """Copies of a token's hidden vector that go to experts, per layer."""
    return np.asarray(x.expert_share * np.where(x.num_experts > 1, x.experts_per_token, 0.0))


def rows_per_expert(x: CostInputs, tokens: Array) -> Array:
    """Rows that an expert multiplies at a time, of a rank's ``tokens`` per micro-batch: its peers send as many."""
    return np.asarray(tokens * x.experts_per_token * x.ep / np.maximum(x.num_experts, 1.0))


def exchanged_bytes(x: CostInputs, tokens: Array) -> tuple[Array, Array]:
    """Bytes that a rank sends per layer and direction to experts of other ranks: over the fast links, and beyond them.

    Expert-parallel ranks lie side by side, after those of tensor parallelism, each of which sends its share of the
    tokens. A token goes to another fast domain once, however many of its experts are there, and is handed on over the
    fast links (DeepSeek-AI, arXiv 2412.19437, section 3.2.2); experts are chosen independently of where they are.
    """
    vectors = tokens * x.hidden * x.compute_bytes / x.tp * x.expert_share
    inside = np.clip(np.floor(x.domain_size / x.tp), 1, x.ep)
    domains = x.ep / inside
    reached = (domains - 1) * (1 - (1 - 1 / domains) ** x.experts_per_token)
    return np.asarray(vectors * x.experts_per_token * (inside - 1) / inside), np.asarray(vectors * reached)
