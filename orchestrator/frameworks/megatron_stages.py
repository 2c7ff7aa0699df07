"""Number of layers in each pipeline stage of a Megatron-LM command, by the five ways to set it."""

from __future__ import annotations

import re

from orchestrator.frameworks.spelling import Found

CHUNKS, STAGES = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
CHUNK_LAYERS = "--num-layers-per-virtual-pipeline-stage"
UNEVEN = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
EXTRA = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


def stage_layers(found: Found, pp: int) -> list[int] | None:
    """Layers of every virtual stage in the order of the model."""
    text, num_layers = found.get(STAGES), found.num_layers
    if text is not None:
        counts = stages_of(text)
        if counts is None or len(counts) % pp or (num_layers and sum(counts) != num_layers):
            found.unread("layout.stage_layers", f"{STAGES} {text}")
            return None
        return counts
    if num_layers is None:
        found.unread("layout.stage_layers", "stages of a model whose number of layers is not in the arguments")
        return None
    chunks = _chunks(found, num_layers, pp)
    if chunks is None:
        return None
    if any(found.is_on(name) for name in EXTRA):
        return _padded(found, num_layers, pp * chunks)
    if any(found.get(name) for name in UNEVEN):
        return _uneven(found, num_layers, pp, chunks)
    if num_layers % (pp * chunks):
        found.refuse("layout.pp", f"{num_layers} layers are not divisible into {pp * chunks} stages")
        return None
    return [num_layers // (pp * chunks)] * (pp * chunks)


def _chunks(found: Found, num_layers: int, pp: int) -> int | None:
    """Chunks of layers per rank, by either way to set them."""
    knob = "layout.num_virtual_stages"
    size = found.whole(knob, CHUNK_LAYERS, 0)
    if size:
        layers = num_layers + sum(found.is_on(extra) for extra in EXTRA)
        if layers % (pp * size):
            found.refuse(knob, f"{CHUNK_LAYERS} {size} does not divide {layers} layers on {pp} stages")
            return None
        return layers // (pp * size)
    return found.whole(knob, CHUNKS, 1)


def _padded(found: Found, num_layers: int, stages: int) -> list[int] | None:
    """Even stages, where the first counts the embedding as a layer, and the last the head."""
    first, last = (int(found.is_on(name)) for name in EXTRA)
    share, left = divmod(num_layers + first + last, stages)
    if left:
        found.refuse(
            "layout.pp", f"{num_layers} layers, plus embedding and head if counted, are not divisible into {stages}"
        )
        return None
    counts = [share] * stages
    counts[0] -= first
    counts[-1] -= last
    return counts


def _uneven(found: Found, num_layers: int, pp: int, chunks: int) -> list[int] | None:
    """Stages whose first or last rank has a different number of layers, spread over its chunks."""
    first, last = (found.whole("layout.stage_layers", name, 0) for name in UNEVEN)
    if first is None or last is None:
        return None
    middle = pp - bool(first) - bool(last)
    rest = num_layers - first - last
    if middle < 0 or rest < 0 or (middle and rest % (middle * chunks)) or first % chunks or last % chunks:
        found.refuse("layout.stage_layers", f"{' and '.join(UNEVEN)}: {num_layers} layers cannot be divided this way")
        return None
    share = rest // middle if middle else 0
    stages = ([first] if first else []) + [share] * middle + ([last] if last else [])
    return [count // chunks for count in stages] * chunks


def stages_of(text: str) -> list[int] | None:
    """Decoder layers of every stage of a layout like ``E|(t|)*3,m|m||L`` or ``Et*3|t*4|t*4|t*3L``."""
    plain = text.replace(",", "").replace(" ", "")
    while found := re.search(r"\(([^()]*)\)(?:\*(\d+))?", plain):
        plain = plain[: found.start()] + found[1] * int(found[2] or 1) + plain[found.end() :]
    plain = re.sub(r"([EtmL|])\*(\d+)", lambda match: match[1] * int(match[2]), plain)
    return [stage.count("t") for stage in plain.split("|")] if re.fullmatch(r"[EtmL|]+", plain) else None
