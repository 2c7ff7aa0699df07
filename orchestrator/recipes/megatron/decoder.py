"""The decoder that a command of the user's own trains with Megatron-LM, as the cost model needs it."""

from __future__ import annotations

import math
from typing import Any

from orchestrator.recipes.overlays.edit import Options
from orchestrator.recipes.overlays.findings import ReadingDraft
from trials.spec import LlamaModel

_KNOB = "workload.model"
_OTHER = ("--num-experts", "--hybrid-layer-pattern")
_REQUIRED = ("--num-layers", "--hidden-size", "--num-attention-heads")
_GPT2_VOCAB = 50257


def read_decoder(given: Options, found: ReadingDraft) -> LlamaModel | None:
    """Its dimensions, or None, with a note, where the arguments do not give them or it is no plain decoder."""
    other = [name for name in _OTHER if given.text(name)]
    other += ["--multi-latent-attention"] if given.is_on("--multi-latent-attention") else []
    if other:
        found.warn(_KNOB, f"{', '.join(other)}: no plain decoder; without its dimensions nothing is predicted")
        return None
    numbers = {name: found.whole(_KNOB, name, given.text(name)) for name in _REQUIRED}
    vocab = _vocab(given, found)
    missing = [name for name, number in numbers.items() if number is None]
    if missing or vocab is None:
        absent = ", ".join([*missing, *(["the size of the vocabulary"] if vocab is None else [])])
        found.warn(_KNOB, f"not among the arguments: {absent}; without it nothing is predicted")
        return None
    layers, hidden, heads = (int(numbers[name] or 0) for name in _REQUIRED)
    if hidden % heads or given.text("--kv-channels") not in (None, str(hidden // heads)):
        found.warn(_KNOB, "--kv-channels is not the hidden size by heads: nothing is predicted")
        return None
    return LlamaModel(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_groups(given, found) or heads,
        ffn_hidden_size=_ffn(given, found, hidden),
        vocab_size=vocab,
        rope_theta=float(given.text("--rotary-base") or 10000),
        norm_eps=float(given.text("--norm-epsilon") or 1e-5),
    )


def _groups(given: Options, found: ReadingDraft) -> int | None:
    if not given.is_on("--group-query-attention"):
        return None
    return found.whole(_KNOB, "--num-query-groups", given.text("--num-query-groups"), 1)


def _ffn(given: Options, found: ReadingDraft, hidden: int) -> int:
    """Width of the feed-forward part; of one with two matrices, that of one with three of the same size."""
    gated = given.is_on("--swiglu")
    default = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    width = found.whole(_KNOB, "--ffn-hidden-size", given.text("--ffn-hidden-size"), default) or default
    if not gated:
        found.warn(_KNOB, "predicted as a Llama of the same number of weights: the feed-forward part has no gate")
    return width if gated else 2 * width // 3


def _vocab(given: Options, found: ReadingDraft) -> int | None:
    """Rows of the embedding, padded as Megatron-LM pads them."""
    padded = found.whole(_KNOB, "--padded-vocab-size", given.text("--padded-vocab-size"))
    if padded:
        return padded
    size = found.whole(_KNOB, "--vocab-size", given.text("--vocab-size"))
    if size is None and given.text("--tokenizer-type") in (None, "GPT2BPETokenizer"):
        size = _GPT2_VOCAB
    if size is None:
        return None
    step = found.whole(_KNOB, "--make-vocab-size-divisible-by", given.text("--make-vocab-size-divisible-by"), 128)
    multiple = (step or 128) * int(found.values.get("layout.tp", 1))
    return math.ceil(size / multiple) * multiple


def padding_note(given: Options, tp: int, shape: LlamaModel | None) -> str | None:
    """What tensor parallelism of another degree does to the embedding's rows, where it changes them."""
    found = ReadingDraft()
    found.say({"layout.tp": tp})
    rows: Any = _vocab(given, found)
    if shape is None or rows in (None, shape.vocab_size):
        return None
    return f"the vocabulary is padded to {rows} rows instead of {shape.vocab_size}: losses are not quite the same"
