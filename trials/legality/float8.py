"""Legality rules on 8-bit float matmuls (precision O1-fp8). Standard library only.

The kernels (cuBLASLt's, reached by ``torch._scaled_mm``) take matrices whose sides are multiples of 16. How many rows a
micro-batch has does not matter: those are padded where need be.
"""

from __future__ import annotations

from collections.abc import Iterator

from trials.legality.layout import make_rules
from trials.spec import Candidate, LinearModel, LlamaModel, ResNetModel, Workload

LEVEL = "O1-fp8"
MULTIPLE = 16


def _dtype(_workload: Workload, candidate: Candidate) -> str | None:
    precision = candidate.precision
    if precision.level != LEVEL or precision.dtype == "bfloat16":
        return None
    return f"precision {LEVEL} computes everything but its matmuls in bfloat16, not in {precision.dtype}"


def _model(workload: Workload, candidate: Candidate) -> str | None:
    if candidate.precision.level != LEVEL or not isinstance(workload.model, ResNetModel):
        return None
    return f"precision {LEVEL} is for linear modules, of which the layers of model kind resnet have none; use O1"


def _sizes(workload: Workload, candidate: Candidate) -> str | None:
    """Sizes of a module of the user's are seen by the rank that builds it."""
    if candidate.precision.level != LEVEL:
        return None
    tp = candidate.layout.tp
    odd = next(((name, size) for name, size in _sides(workload, tp) if size % (MULTIPLE * tp)), None)
    if odd is None:
        return None
    name, size = odd
    each = f" on each of {tp} tensor-parallel ranks" if tp > 1 else ""
    return f"precision {LEVEL}: {name} {size} is not divisible by {MULTIPLE}{each}; use O1"


def _sides(workload: Workload, tp: int) -> Iterator[tuple[str, int]]:
    """Sides of the layers' matrices that tensor parallelism may split, by what they are called."""
    model = workload.model
    if isinstance(model, LlamaModel):
        yield "hidden_size", model.hidden_size
        heads = model.num_heads + 2 * model.num_kv_heads
        yield "size of all queries, keys and values", heads * (model.hidden_size // model.num_heads)
        yield "ffn_hidden_size", model.ffn_hidden_size
    elif isinstance(model, LinearModel) and tp == 1:
        yield "size", model.size


FLOAT8_RULES = make_rules(
    ("fp8-dtype", "precision", _dtype),
    ("fp8-model", "precision.level", _model),
    ("fp8-sizes", "precision.level layout.tp", _sizes),
)
