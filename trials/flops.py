"""FLOPs of a model and dense peaks of devices. Standard library only."""

from __future__ import annotations

from trials.spec import LlamaModel


def num_parameters(model: LlamaModel) -> int:
    """Parameters of the decoder: embedding, blocks, final norm and the untied head."""
    embedding = model.vocab_size * model.hidden_size
    return 2 * embedding + model.num_layers * _num_block_parameters(model) + model.hidden_size


def model_flops_per_token(model: LlamaModel, seq_length: int) -> float:
    """Forward and backward FLOPs of one token, recomputed ones excluded: ``6 N + 12 L H Q T``.

    Chowdhery et al., arXiv 2204.02311, appendix B: N parameters cost 2 FLOPs each forward and 4 backward; attention's
    two matmuls cost ``12 L H Q T`` more, for L layers, ``H Q = hidden_size`` and T = ``seq_length`` (the causal half is
    not discounted, as there). N leaves out the embedding table, which is looked up, not multiplied.
    """
    multiplied = num_parameters(model) - model.vocab_size * model.hidden_size
    return 6.0 * multiplied + 12.0 * model.num_layers * model.hidden_size * seq_length


def peak_flops_per_s(device_name: str, dtype: str) -> float | None:
    """Dense matmul peak of a device for ``dtype``, or None when unknown; it is never guessed.

    ``device_name`` is what ``torch.cuda.get_device_name`` says. float32 is the peak without TF32. Figures are those of
    the vendor's data sheets, which double tensor-core figures for structured sparsity from the A100 on; halved here.
    """
    for parts, peaks in _PEAKS:
        if all(part in device_name for part in parts):
            return peaks.get(dtype)
    return None


_HOPPER_SXM = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12}
_HOPPER_NVL = {"bfloat16": 835.5e12, "float16": 835.5e12, "float32": 60.0e12}

_PEAKS: tuple[tuple[tuple[str, ...], dict[str, float]], ...] = (
    (("H200", "NVL"), _HOPPER_NVL),
    (("H200",), _HOPPER_SXM),
    (("H100", "NVL"), _HOPPER_NVL),
    (("H100", "PCIe"), {"bfloat16": 756.0e12, "float16": 756.0e12, "float32": 51.0e12}),
    (("H100", "HBM3"), _HOPPER_SXM),
    (("A100",), {"bfloat16": 312.0e12, "float16": 312.0e12, "float32": 19.5e12}),
    (("V100", "SXM2"), {"float16": 125.0e12, "float32": 15.7e12}),
    (("V100", "PCIE"), {"float16": 112.0e12, "float32": 14.0e12}),
)
"""Parts a device name must contain, first match wins."""


def _num_block_parameters(model: LlamaModel) -> int:
    """Query, key, value and output projections, the three SwiGLU matrices, two norms."""
    hidden = model.hidden_size
    kv_size = hidden // model.num_heads * model.num_kv_heads
    return 2 * hidden * hidden + 2 * hidden * kv_size + 3 * hidden * model.ffn_hidden_size + 2 * hidden
