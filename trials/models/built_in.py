"""The built-in models: a Llama-style decoder, ResNet, and chains of linear layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.attention import causal_attention
from trials.models.experts import MixtureOfExperts, routers_in
from trials.models.model import Initial, TrainModel
from trials.operators import in_backward
from trials.sizes import Chunk
from trials.spec import LatentAttention, LinearModel, LlamaModel, ResNetModel

# ---- A Llama-style decoder: RMSNorm before each sub-layer, rotary positions, grouped-query attention, SwiGLU
#
# Shape letters: B sequences, S positions (of this rank under context parallelism), D hidden size, H heads (of this rank
# under tensor parallelism), V vocabulary.

AttentionCore = Callable[..., Tensor]
"""Causal attention of ``q [B, H, S, head_size]``, ``k`` and ``v`` (possibly fewer heads), and a mask ``[B, 1, S, S]``
if rows are packed; shaped like ``q``."""

Positions = Tensor | tuple[Tensor, Tensor]
"""Rotary table of every row's positions; of packed rows that of each row, and the mask of attention."""


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


Piece = Literal["first", "second", "leave"]


def unchanged(x: Tensor) -> Tensor:
    """Return ``x``: the identity if nothing is split, as a boundary or as the selection of a rank's positions."""
    return x


class SubLayer(nn.Module):
    """Attention or feed-forward, in two segments of similar cost.

    Tensor parallelism communicates in ``enter`` and ``leave``, which may continue a collective started earlier. A
    schedule that runs the pieces separately does so through the module's own call, so that hooks see which module runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter: Callable[..., Tensor] = unchanged
        self.leave: Callable[..., Tensor] = unchanged

    def forward(self, x: Any, *args: Any, piece: Piece | None = None, pending: Any = None) -> Any:
        """Run all, or one piece: ``first`` enters with what is ``pending``, ``second`` stops before leaving."""
        if piece == "first":
            return self.first(self.enter(x, pending), *args)
        if piece == "second":
            return self.second(x, *args)
        if piece == "leave":
            return self.leave(x, pending)
        return self.leave(self.second(*self.first(self.enter(x), *args)))

    def first(self, *args: Any) -> tuple[Tensor, ...]:
        """Compute the inputs of the second segment from the input ``[B, S, D]``."""
        raise NotImplementedError

    def second(self, *args: Any) -> Tensor:
        """Compute the output ``[B, S, D]`` from the first segment's outputs."""
        raise NotImplementedError


class Attention(SubLayer):
    """Causal grouped-query attention. The head count follows from the projections: tensor parallelism splits them.

    One matrix computes queries, keys and values. Its rows are in groups of the heads that share a key, then that key
    and its value. So equal parts of the matrix are parts of the heads.
    """

    def __init__(self, shape: LlamaModel) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.num_sharing = shape.num_heads // shape.num_kv_heads
        self.core: AttentionCore = causal_attention
        size = (shape.num_heads + 2 * shape.num_kv_heads) * self.head_size
        self.wqkv = nn.Linear(shape.hidden_size, size, bias=False)
        self.wo = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def first(self, x: Any, positions: Positions) -> tuple[Tensor, ...]:
        """Compute projections and rotary positions: ``q``, ``k`` and ``v`` as ``[B, H, S, head_size]``; then the mask
        of packed rows, if any."""
        rope, *mask = positions if isinstance(positions, tuple) else (positions,)
        groups = self.wqkv(x).unflatten(-1, (-1, self.num_sharing + 2, self.head_size))
        q, k, v = groups.split([self.num_sharing, 1, 1], dim=3)
        # A view would keep the whole projection for the backward pass.
        q, k, v = rotate(q, rope), rotate(k, rope), v.contiguous()
        return *(t.flatten(2, 3).transpose(1, 2) for t in (q, k, v)), *mask

    def second(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        """Compute attention and the output projection."""
        projected: Tensor = self.wo(self.core(q, k, v, *mask).transpose(1, 2).flatten(2))
        return projected


class MultiHeadLatentAttention(SubLayer):
    """Causal attention whose keys and values come of a narrow vector (:class:`~trials.spec.LatentAttention`).

    ``wq_b`` and ``wkv_b`` have their rows head by head, so equal parts are parts of the heads. Tensor parallelism
    leaves the projections to narrow vectors whole. Values are padded with zeros to the size of keys, which all kernels
    take.
    """

    def __init__(self, shape: LlamaModel, latent: LatentAttention) -> None:
        super().__init__()
        self.shape = latent
        self.head_size = shape.head_size
        self.core: AttentionCore = causal_attention
        hidden, heads, rank = shape.hidden_size, shape.num_heads, latent.q_lora_rank
        self.wq_a = nn.Linear(hidden, rank, bias=False) if rank else None
        self.q_norm = RMSNorm(rank, shape.norm_eps) if rank else None
        self.wq_b = nn.Linear(rank or hidden, heads * self.head_size, bias=False)
        self.wkv_a = nn.Linear(hidden, latent.kv_lora_rank + latent.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(latent.kv_lora_rank, shape.norm_eps)
        width = latent.qk_nope_head_dim + latent.v_head_dim
        self.wkv_b = nn.Linear(latent.kv_lora_rank, heads * width, bias=False)
        self.wo = nn.Linear(heads * latent.v_head_dim, hidden, bias=False)

    def first(self, x: Tensor, positions: Positions) -> tuple[Tensor, ...]:
        """Compute ``q``, ``k`` and padded ``v`` as ``[B, H, S, head_size]``; then the mask of packed rows, if any."""
        rope, *mask = positions if isinstance(positions, tuple) else (positions,)
        shape = self.shape
        narrow = x if self.wq_a is None or self.q_norm is None else self.q_norm(self.wq_a(x))
        q = self.wq_b(narrow).unflatten(-1, (1, -1, self.head_size))
        q_plain, q_turned = q.split([shape.qk_nope_head_dim, shape.qk_rope_head_dim], dim=-1)
        common, k_turned = self.wkv_a(x).split([shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1)
        kv = self.wkv_b(self.kv_norm(common)).unflatten(-1, (1, -1, shape.qk_nope_head_dim + shape.v_head_dim))
        k_plain, v = kv.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=-1)
        k_turned = rotate(k_turned.unflatten(-1, (1, 1, -1)), rope).expand(*k_plain.shape[:-1], -1)
        q = torch.cat([q_plain, rotate(q_turned, rope)], dim=-1)
        k = torch.cat([k_plain, k_turned], dim=-1)
        v = F.pad(v, (0, self.head_size - shape.v_head_dim))
        return *(t.flatten(2, 3).transpose(1, 2) for t in (q, k, v)), *mask

    def second(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        """Compute attention and the output projection."""
        out = self.core(q, k, v, *mask)[..., : self.shape.v_head_dim]
        projected: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return projected


class FeedForward(SubLayer):
    """SwiGLU (Shazeer, arXiv 2002.05202).

    One matrix computes the gate and the gated values. Its rows are in groups, each a part of the gate and the same part
    of the values. There are as many groups as tensor parallelism can split the model into, so equal parts are parts of
    both.
    """

    def __init__(self, shape: LlamaModel) -> None:
        super().__init__()
        self.group_size = shape.ffn_hidden_size // math.gcd(shape.ffn_hidden_size, shape.num_kv_heads)
        self.w13 = nn.Linear(shape.hidden_size, 2 * shape.ffn_hidden_size, bias=False)
        self.w2 = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def first(self, x: Any) -> tuple[Tensor, ...]:
        """Compute the gate before its activation, and the gated values, both ``[B, S, groups, group_size]``."""
        gate, up = self.w13(x).unflatten(-1, (-1, 2, self.group_size)).unbind(-2)
        return gate, up

    def second(self, gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = self.w2((F.silu(gate) * up).flatten(2))
        return out


class Block(nn.Module):
    """One decoder layer; ``schedule`` runs its sub-layers."""

    def __init__(self, shape: LlamaModel, number: int) -> None:
        """``number`` is that of the layer in the whole model."""
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.attention: Attention | MultiHeadLatentAttention = (
            Attention(shape) if shape.latent is None else MultiHeadLatentAttention(shape, shape.latent)
        )
        self.feed_forward_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.feed_forward: FeedForward | MixtureOfExperts = (
            FeedForward(shape)
            if shape.experts is None or number < shape.experts.num_dense_layers
            else MixtureOfExperts(shape.hidden_size, shape.experts, number)
        )
        self.schedule: BlockSchedule = one_after_the_other

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        return self.schedule(self, x, positions)


BlockSchedule = Callable[[Block, Tensor, Any], Tensor]
"""Function from a block, hidden states ``[B, S, D]`` and :data:`Positions` to the next hidden states."""


def one_after_the_other(block: Block, x: Tensor, positions: Positions) -> Tensor:
    """Run a whole micro-batch through one sub-layer after the other; a :data:`BlockSchedule`."""
    h = x + block.attention(block.attention_norm(x), positions)
    out: Tensor = h + block.feed_forward(block.feed_forward_norm(h))
    return out


class Head(nn.Linear):
    """Maps hidden states ``[B, S, D]`` to logits or, given the next tokens, to the mean loss.

    Both are in one module, so that splitting the vocabulary or the positions avoids computing all logits at once.
    """

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.loss: Callable[[Tensor, Tensor, Tensor], Tensor] = projected_loss

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return F.linear(x, self.weight)
        return self.loss(x, self.weight, targets)


class Llama(TrainModel):
    """Maps tokens ``[B, S]`` to logits ``[B, S, V]`` or, given the next tokens, to the mean loss.

    Tokens of packed rows come with their positions in their document, as ``[B, 2, S]``. A virtual stage other than the
    first takes hidden states ``[B, S, D]`` instead; one other than the last returns them.
    """

    computes_loss = True

    def __init__(self, shape: LlamaModel, seq_length: int, chunk: Chunk) -> None:
        super().__init__()
        self.shape = shape
        self.seq_length = seq_length
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size) if chunk.is_first else None
        self.layers = nn.ModuleDict({str(i): Block(shape, i) for i in chunk.layer_ids})
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps) if chunk.is_last else None
        self.output = Head(shape.hidden_size, shape.vocab_size) if chunk.is_last else None
        # A plain attribute, not a buffer: DDP broadcasts buffers in every step.
        self.rope: Tensor | None = None
        self.held_positions: Callable[[Tensor], Tensor] = unchanged
        """Function that selects, along dimension 1, this rank's positions of every sequence."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        assert self.rope is not None, "materialize() comes before the first forward pass"
        h, positions = x, self.rope
        if self.tok_embeddings is not None:
            x, positions = self._placed(x, self.rope)
            h = self.tok_embeddings(x)
        for layer in self.layers.values():
            h = layer(h, positions)
        if self.norm is None or self.output is None:
            return h
        outputs: Tensor = self.output(self.norm(h), targets=targets)
        return outputs

    def _placed(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Any]:
        """Return the tokens and their :data:`Positions`."""
        if x.dim() == 3:
            tokens, places = x.unbind(1)
            return tokens, (rope[:, places], document_mask(places))
        return x, rope if x.shape[1] == rope.shape[1] else rope[:, : x.shape[1]]

    def attend_by(self, core: AttentionCore) -> None:
        """Use ``core`` for attention in all layers."""
        for layer in self.layers.values():
            assert isinstance(layer, Block)
            layer.attention.core = core

    def materialize(self, device: torch.device) -> None:
        table = rotary_table(self.seq_length, self.shape.rotary_size, self.shape.rope_theta)
        self.rope = self.held_positions(table).to(device)
        for router in routers_in([self]):
            router.materialize(device)

    def initial(self, name: str) -> Initial:
        """Scale projections into the residual stream down by ``sqrt(2 L)`` as in GPT-2 (Radford et al., 2019)."""
        if name.endswith("norm.weight"):
            return Initial(mean=1.0)
        if name.endswith(("wo.weight", "w2.weight", "experts.w2")):
            return Initial(std=0.02 / math.sqrt(2 * self.shape.num_layers))
        return Initial(std=0.02)


def next_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in fp32 of logits ``[B, S, V]`` against the tokens ``[B, S]``.

    Negative targets (:data:`~trials.lengths.IGNORED`) are padding: they count in the mean, with a loss of 0.
    """
    return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten(), reduction="sum") / targets.numel()


def document_mask(positions: Tensor) -> Tensor:
    """Return which positions ``[B, 1, S, S]`` attend to which, of packed rows with these ``positions [B, S]`` in their
    documents: block-diagonal and causal."""
    document = (positions == 0).cumsum(1)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def projected_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return :func:`next_token_loss` of hidden states ``[B, S, D]``, computing all logits at once."""
    return next_token_loss(F.linear(x, weight), targets)


def rotary_table(seq_length: int, head_size: int, theta: float) -> Tensor:
    """Return cosines and sines ``[2, S, head_size]`` of rotary positions (Su et al., arXiv 2104.09864)."""
    inverse_frequency = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(seq_length, dtype=torch.float32), inverse_frequency)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the pairs ``(i, i + head_size / 2)`` of ``x [B, S, groups, H, head_size]`` by their position's angles."""
    cos, sin = (table[..., None, None, :].to(x.dtype) for table in rope)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return torch.addcmul(x * cos, turned, sin)


# ---- ResNet v1.5 for images (He et al., arXiv 1512.03385): a block's stride is in its 3x3 convolution
#
# Shape letters: B images, C channels, H and W pixels, K classes.


class BatchNorm(nn.Module):
    """Batch norm with running statistics, always computed with fp32 statistics and gains.

    The kernels support a 16-bit input with fp32 parameters, but not 16-bit parameters with fp32 statistics, which
    sharded mixed precision would require.
    """

    momentum = 0.1

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.empty(size))
        self.register_buffer("running_var", torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        # Recomputing a layer in the backward pass must not count its batch twice.
        momentum = 0.0 if not torch.compiler.is_compiling() and in_backward() else self.momentum
        weight, bias = self.weight.float(), self.bias.float()
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, training=True, momentum=momentum)

    def reset_statistics(self, device: torch.device) -> None:
        """Initialise the running statistics, in fp32 for every type of parameters."""
        size = self.running_mean.shape
        self.running_mean = torch.zeros(size, device=device)
        self.running_var = torch.ones(size, device=device)


def _conv(channels_in: int, channels_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2, bias=False)


class Shortcut(nn.Module):
    """Converts a block's input to the shape of its output."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv = _conv(channels_in, channels_out, 1, stride)
        self.bn = BatchNorm(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(self.conv(x))
        return out


class BasicBlock(nn.Module):
    """The block of ResNet-18: two 3x3 convolutions."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels_in, channels, 3, stride)
        self.bn1 = BatchNorm(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = BatchNorm(channels)
        self.downsample = Shortcut(channels_in, channels, stride) if stride > 1 or channels_in != channels else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class BottleneckBlock(nn.Module):
    """The block of ResNet-50: 1x1, 3x3 and 1x1 convolutions; the last one widens fourfold."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        wide = channels * self.expansion
        self.conv1 = _conv(channels_in, channels, 1)
        self.bn1 = BatchNorm(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.bn2 = BatchNorm(channels)
        self.conv3 = _conv(channels, wide, 1)
        self.bn3 = BatchNorm(wide)
        self.downsample = Shortcut(channels_in, wide, stride) if stride > 1 or channels_in != wide else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


def build_block(shape: ResNetModel, number: int) -> nn.Module:
    """Build the residual block of this global number."""
    kind = BasicBlock if shape.depth == 18 else BottleneckBlock
    stage, place = place_in_stage(shape, number)
    channels = shape.width << stage
    is_first = place == 0
    if not is_first:
        return kind(channels * kind.expansion, channels, 1)
    channels_in = shape.width if stage == 0 else (channels // 2) * kind.expansion
    return kind(channels_in, channels, 1 if stage == 0 else 2)


def place_in_stage(shape: ResNetModel, number: int) -> tuple[int, int]:
    """Return the stage (0..3) of block ``number``, and its index in it."""
    for stage, num_blocks in enumerate(shape.blocks_per_stage):
        if number < num_blocks:
            return stage, number
        number -= num_blocks
    raise IndexError(number)


class ResNet(TrainModel):
    """Maps images ``[B, 3, H, W]`` to logits ``[B, K]``."""

    def __init__(self, shape: ResNetModel, chunk: Chunk) -> None:
        super().__init__()
        self.conv1 = _conv(3, shape.width, 7, 2)
        self.bn1 = BatchNorm(shape.width)
        self.layers = nn.ModuleDict({str(i): build_block(shape, i) for i in chunk.layer_ids})
        expansion = BasicBlock.expansion if shape.depth == 18 else BottleneckBlock.expansion
        self.fc = nn.Linear((shape.width << 3) * expansion, shape.num_classes)
        convolutions = {name: module for name, module in self.named_modules() if isinstance(module, nn.Conv2d)}
        self._fan_out = {
            f"{name}.weight": module.out_channels * math.prod(module.kernel_size)
            for name, module in convolutions.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        # The images are fp32, whatever the type of the weights.
        h = F.relu(self.bn1(self.conv1(x.to(self.conv1.weight.dtype))))
        h = F.max_pool2d(h, 3, stride=2, padding=1)
        for layer in self.layers.values():
            h = layer(h)
        logits: Tensor = self.fc(h.mean(dim=(2, 3)))
        return logits

    def materialize(self, device: torch.device) -> None:
        for module in self.modules():
            if isinstance(module, BatchNorm):
                module.reset_statistics(device)

    def initial(self, name: str) -> Initial:
        """Convolutions normal by fan-out (He et al., arXiv 1502.01852), gains 1, biases 0; the head as a Linear."""
        if name.endswith("bias"):
            return Initial()
        if name == "fc.weight":
            return Initial(std=1.0 / math.sqrt(3.0 * self.fc.in_features))
        fan_out = self._fan_out.get(name)
        return Initial(mean=1.0) if fan_out is None else Initial(std=math.sqrt(2.0 / fan_out))


def class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in fp32 of logits ``[B, K]`` against class numbers ``[B]``."""
    return F.cross_entropy(outputs.float(), targets)


# A model that is a chain of square Linear layers: pure matrix multiplication.


class Layer(nn.Linear):
    """A Linear layer that block-wise compilation finds: Dynamo skips frames of torch's own modules."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LinearChain(TrainModel):
    """Maps vectors ``[B, size]`` to vectors ``[B, size]``."""

    def __init__(self, shape: LinearModel, chunk: Chunk) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleDict({str(i): Layer(shape.size, shape.size, bias=False) for i in chunk.layer_ids})

    def forward(self, x: Tensor) -> Tensor:
        # The vectors are fp32, whatever the type of the weights.
        x = x.to(next(self.parameters()).dtype)
        for layer in self.layers.values():
            x = layer(x)
        return x

    def initial(self, name: str) -> Initial:  # noqa: ARG002  # all alike
        """Use the standard deviation that preserves the variance from layer to layer."""
        return Initial(std=1.0 / math.sqrt(self.shape.size))


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error in fp32."""
    return F.mse_loss(outputs.float(), targets)
