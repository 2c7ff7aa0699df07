"""A Llama-style decoder: RMSNorm before each sub-layer, rotary positions, grouped-query attention, SwiGLU.

Shape letters: B sequences, S positions, D hidden size, H heads (of this rank under tensor parallelism), V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.spec import LlamaModel


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention. The head count follows from the projections: tensor parallelism splits them."""

    def __init__(self, shape: LlamaModel) -> None:
        super().__init__()
        self.head_size = shape.hidden_size // shape.num_heads
        self.grouped = shape.num_kv_heads < shape.num_heads
        kv_size = shape.num_kv_heads * self.head_size
        self.wq = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.wk = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.wv = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.wo = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        num_sequences, length, _ = x.shape
        q, k, v = (w(x).view(num_sequences, length, -1, self.head_size) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        projected: Tensor = self.wo(out.transpose(1, 2).reshape(num_sequences, length, -1))
        return projected


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, shape: LlamaModel) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.w2 = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)
        self.w3 = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: LlamaModel) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.attention = Attention(shape)
        self.feed_forward_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), rope)
        out: Tensor = h + self.feed_forward(self.feed_forward_norm(h))
        return out


class Llama(nn.Module):
    """Tokens ``[B, S]`` to logits ``[B, S, V]``."""

    def __init__(self, shape: LlamaModel, seq_length: int) -> None:
        super().__init__()
        self.shape = shape
        self.seq_length = seq_length
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in range(shape.num_layers)})
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.output = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        # A plain attribute, not a buffer: DDP sends buffers around at every step.
        self.rope: Tensor | None = None

    @property
    def head_size(self) -> int:
        return self.shape.hidden_size // self.shape.num_heads

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.rope is not None, "build_rotary_table() comes before the first forward pass"
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.rope)
        logits: Tensor = self.output(self.norm(h))
        return logits

    def build_rotary_table(self, device: torch.device) -> None:
        """Compute the rotary table; apart from construction, which happens on the meta device."""
        self.rope = rotary_table(self.seq_length, self.head_size, self.shape.rope_theta).to(device)

    def init_std(self, name: str) -> float:
        """Standard deviation for the initial values of parameter ``name``; 0 stands for a gain of ones.

        Projections into the residual stream are scaled down by ``sqrt(2 L)`` as in GPT-2 (Radford et al., 2019).
        """
        if name.endswith("norm.weight"):
            return 0.0
        if name.endswith(("wo.weight", "w2.weight")):
            return 0.02 / math.sqrt(2 * self.shape.num_layers)
        return 0.02


def rotary_table(seq_length: int, head_size: int, theta: float) -> Tensor:
    """Cosines and sines ``[2, S, head_size]`` of rotary positions (Su et al., arXiv 2104.09864)."""
    inverse_frequency = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(seq_length, dtype=torch.float32), inverse_frequency)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn the pairs ``(i, i + head_size / 2)`` of ``x [B, S, H, head_size]`` by their position's angles."""
    cos, sin = (table[None, :, None].to(x.dtype) for table in rope)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return torch.addcmul(x * cos, turned, sin)
