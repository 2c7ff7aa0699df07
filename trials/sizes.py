"""Sizes that follow from a model and a layout: layers of stages, places of ranks, parameters, FLOPs.

Pure arithmetic, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trials.spec import (
    AXES,
    Candidate,
    Counts,
    HuggingFaceModel,
    Layout,
    LinearModel,
    LlamaModel,
    Model,
    PythonModel,
    ResNetModel,
    ScriptModel,
)

# ---- Layers of each pipeline stage, and positions of ranks in the mesh: pure arithmetic on a layout
#
# A *virtual stage* is a run of consecutive layers; number 0 holds the embedding, the last one the head. Each pipeline
# rank (*stage*) holds ``num_virtual_stages`` of them, its *chunks*::
#
#     looped (gpipe, 1f1b, interleaved)   virtual stage = chunk * pp + stage
#     V-shaped (zbv)                      chunk 0: stage,  chunk 1: 2 pp - 1 - stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place on every mesh axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Return the position of ``rank`` in the mesh; ``tp`` varies fastest."""
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, getattr(layout, axis))
    return Coordinates(**place)


def data_parallel_rank(layout: Layout, rank: int) -> int:
    """Return which part of the global batch ``rank`` reads; peers in pp, cp and tp read the same part."""
    place = coordinates(layout, rank)
    return place.dp_replicate * layout.dp_shard + place.dp_shard


def virtual_stage(layout: Layout, chunk: int, stage: int) -> int:
    """Return the number, in model order, of the virtual stage that pipeline rank ``stage`` holds as ``chunk``."""
    if layout.schedule == "zbv" and chunk == 1:
        return 2 * layout.pp - 1 - stage
    return chunk * layout.pp + stage


def num_virtual_stages_total(layout: Layout) -> int:
    """Return the number of virtual stages of all pipeline ranks together."""
    return layout.pp * layout.num_virtual_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part of the model in one virtual stage."""

    chunk: int
    stage: int
    virtual_stage: int
    layer_ids: tuple[int, ...]
    """Indices of its layers in the whole model."""
    is_first: bool
    """Whether it holds the embedding."""
    is_last: bool
    """Whether it holds the final norm, the head and the loss."""


def chunks_of_stage(layout: Layout, stage: int, num_layers: int) -> tuple[Chunk, ...]:
    """Return the virtual stages of pipeline rank ``stage``, by chunk; the whole model if there is no pipeline."""
    by_number = {chunk.virtual_stage: chunk for chunk in all_chunks(layout, num_layers)}
    return tuple(by_number[virtual_stage(layout, chunk, stage)] for chunk in range(layout.num_virtual_stages))


def all_chunks(layout: Layout, num_layers: int) -> tuple[Chunk, ...]:
    """Return all virtual stages in model order."""
    counts = layout.stage_layers or ((num_layers,),)
    places = {
        virtual_stage(layout, chunk, stage): (chunk, stage)
        for chunk in range(layout.num_virtual_stages)
        for stage in range(layout.pp)
    }
    made: list[Chunk] = []
    start = 0
    for number in sorted(places):
        chunk, stage = places[number]
        end = start + counts[chunk][stage]
        made.append(
            Chunk(
                chunk=chunk,
                stage=stage,
                virtual_stage=number,
                layer_ids=tuple(range(start, end)),
                is_first=number == 0,
                is_last=number == len(places) - 1,
            )
        )
        start = end
    return tuple(made)


def count_at(counts: Counts, chunk: int, stage: int) -> int:
    """Return the count for this chunk and stage; 0 if there are no counts."""
    return counts[chunk][stage] if counts else 0


# ---- Parameters, FLOPs and activations of a model, and the number format of its matrix products

NumberFormat = Literal["float32", "tf32", "float16", "bfloat16", "float8"]


def num_parameters(model: Model) -> int:
    """Return the number of trained parameters; 0 for a training program of unknown shape."""
    match model:
        case LlamaModel():
            return _num_decoder_parameters(model)
        case ResNetModel():
            return _num_resnet_parameters(model)
        case LinearModel():
            return model.num_layers * model.size**2
        case PythonModel() | HuggingFaceModel():
            return model.facts.num_parameters
        case ScriptModel():
            return num_parameters(model.shape) if model.shape else 0


def _num_decoder_parameters(model: LlamaModel) -> int:
    """Count embedding, blocks, final norm and the untied head."""
    embedding = model.vocab_size * model.hidden_size
    return (
        2 * embedding + model.num_layers * _num_block_parameters(model) + _num_expert_weights(model) + model.hidden_size
    )


def num_active_parameters(model: LlamaModel) -> int:
    """Parameters that each token passes: all of a dense model; of routed experts the chosen ones."""
    experts = model.experts
    if experts is None:
        return _num_decoder_parameters(model)
    idle = experts.num_experts - experts.top_k
    per_expert = 3 * model.hidden_size * experts.ffn_hidden_size
    return _num_decoder_parameters(model) - (model.num_layers - experts.num_dense_layers) * idle * per_expert


def expert_flops_share(model: LlamaModel, seq_length: int) -> float:
    """Share of the model's FLOPs that routed experts compute; 0 for a dense model."""
    experts = model.experts
    if experts is None:
        return 0.0
    weights = 3 * model.hidden_size * experts.ffn_hidden_size * experts.top_k
    layers = model.num_layers - experts.num_dense_layers
    return 6.0 * layers * weights / _decoder_flops_per_token(model, seq_length)


def _num_expert_weights(model: LlamaModel) -> int:
    """Weights of routers and experts, less those of the feed-forward that they replace."""
    experts, hidden = model.experts, model.hidden_size
    if experts is None:
        return 0
    widths = experts.num_experts * experts.ffn_hidden_size + experts.shared_ffn_hidden_size - model.ffn_hidden_size
    layers = model.num_layers - experts.num_dense_layers
    return layers * (3 * hidden * widths + hidden * experts.num_experts)


def model_flops_per_token(model: Model, seq_length: int, attended_length: float | None = None) -> float:
    """Return forward and backward FLOPs per token (per sample if samples are not sequences), without recomputation.

    ``attended_length`` is the length of an average token's sample, if it is not ``seq_length``. A multiply-add is 2
    FLOPs forward and 4 backward. The result is 0 if the model's shape is unknown.
    """
    match model:
        case LlamaModel():
            return _decoder_flops_per_token(model, attended_length or seq_length)
        case ResNetModel():
            return 6.0 * _num_resnet_multiplications(model)
        case LinearModel():
            return 6.0 * num_parameters(model)
        case PythonModel() | HuggingFaceModel():
            return model.facts.flops_per_sample / seq_length
        case ScriptModel():
            return model_flops_per_token(model.shape, seq_length) if model.shape else 0.0


def _decoder_flops_per_token(model: LlamaModel, seq_length: float) -> float:
    """Return ``6 N + 12 L H Q T`` FLOPs.

    Chowdhery et al., arXiv 2204.02311, appendix B: N parameters cost 2 FLOPs each forward and 4 backward. Attention's
    two matmuls add ``12 L H Q T`` for L layers, H heads of size Q (on average over keys and values, which differ in
    size with latent attention) and T = ``seq_length``; as in the paper,
    causality is not discounted. N excludes the embedding table, which is looked up, not multiplied, and the experts
    that a token does not pass.
    """
    multiplied = num_active_parameters(model) - model.vocab_size * model.hidden_size
    width = model.num_heads * (model.head_size + model.value_size)
    return 6.0 * multiplied + 6.0 * model.num_layers * width * seq_length


@dataclass(frozen=True, slots=True)
class _Convolution:
    channels_in: int
    channels_out: int
    kernel_size: int
    output_size: int
    """Height and width of the output."""

    @property
    def num_weights(self) -> int:
        return self.channels_in * self.channels_out * self.kernel_size**2


def _convolutions(model: ResNetModel) -> Iterator[_Convolution]:
    """Yield every convolution of a ResNet v1.5 in model order; a batch norm follows each."""
    expansion = 1 if model.depth == 18 else 4
    size = _halved(model.image_size)
    yield _Convolution(3, model.width, 7, size)
    size = _halved(size)  # the pooling
    channels_in = model.width
    for stage, num_blocks in enumerate(model.blocks_per_stage):
        channels = model.width << stage
        for block in range(num_blocks):
            size_in, size = size, _halved(size) if stage and block == 0 else size
            if model.depth == 18:
                yield _Convolution(channels_in, channels, 3, size)
                yield _Convolution(channels, channels, 3, size)
            else:
                yield _Convolution(channels_in, channels, 1, size_in)
                yield _Convolution(channels, channels, 3, size)
                yield _Convolution(channels, channels * expansion, 1, size)
            if block == 0 and (stage or channels_in != channels * expansion):
                yield _Convolution(channels_in, channels * expansion, 1, size)
            channels_in = channels * expansion


def activation_elements(model: ResNetModel | LinearModel | PythonModel | HuggingFaceModel) -> int:
    """Return the number of elements per sample that the forward pass keeps for the backward pass.

    A Linear layer keeps its input. A convolution keeps its input (the output of the preceding ReLU) and its output (the
    input of its batch norm).
    """
    match model:
        case LinearModel():
            return model.num_layers * model.size
        case PythonModel() | HuggingFaceModel():
            return model.facts.activation_elements
        case ResNetModel():
            return sum(2 * conv.channels_out * conv.output_size**2 for conv in _convolutions(model))


def num_kernels(model: Model) -> int:
    """Estimate the kernels of a forward pass: 3 per convolution with batch norm and ReLU; 20 per decoder layer."""
    match model:
        case LlamaModel():
            return 20 * model.num_layers
        case ResNetModel():
            return 3 * len(list(_convolutions(model)))
        case LinearModel():
            return model.num_layers
        case PythonModel() | HuggingFaceModel():
            return model.facts.num_kernels
        case ScriptModel():
            return num_kernels(model.shape) if model.shape else 0


def _halved(size: int) -> int:
    return (size + 1) // 2


def _num_head_weights(model: ResNetModel) -> int:
    return (model.width << 3) * (1 if model.depth == 18 else 4) * model.num_classes


def _num_resnet_parameters(model: ResNetModel) -> int:
    """Count convolution weights, two per channel of their batch norms, and the head with its biases."""
    convolutions = sum(conv.num_weights + 2 * conv.channels_out for conv in _convolutions(model))
    return convolutions + _num_head_weights(model) + model.num_classes


def _num_resnet_multiplications(model: ResNetModel) -> int:
    """Count the multiplications of one image's forward pass: every weight at every output position."""
    return sum(conv.num_weights * conv.output_size**2 for conv in _convolutions(model)) + _num_head_weights(model)


def matmul_format(candidate: Candidate) -> NumberFormat:
    """Return the number format of the candidate's matrix products; a device has a peak for each."""
    precision = candidate.precision
    if precision.level == "O0":
        # "medium" allows bfloat16 on devices with such kernels for float32; CUDA has none and uses TF32.
        return "float32" if candidate.kernels.matmul_precision == "highest" else "tf32"
    return "float8" if precision.is_fp8 else precision.dtype


def _num_block_parameters(model: LlamaModel) -> int:
    """Count query, key, value and output projections, the three SwiGLU matrices and two norms."""
    hidden = model.hidden_size
    return num_attention_weights(model) + 3 * hidden * model.ffn_hidden_size + 2 * hidden


def num_attention_weights(model: LlamaModel) -> int:
    """Count the weights of a layer's attention."""
    hidden, heads, latent = model.hidden_size, model.num_heads, model.latent
    if latent is None:
        return 2 * hidden * hidden + 2 * hidden * model.head_size * model.num_kv_heads
    queries = (latent.q_lora_rank or hidden) * heads * model.head_size
    keys_and_values = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    return queries + keys_and_values + heads * latent.v_head_dim * hidden + num_narrowing_weights(model)


def num_narrowing_weights(model: LlamaModel) -> int:
    """Count the weights of latent attention before and in its narrow vectors, which tensor parallelism leaves whole."""
    hidden, latent = model.hidden_size, model.latent
    if latent is None:
        return 0
    narrow = latent.q_lora_rank + latent.kv_lora_rank
    return hidden * (narrow + latent.qk_rope_head_dim) + narrow
