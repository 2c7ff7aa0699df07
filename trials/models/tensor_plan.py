"""Plans of tensor parallelism: patterns of module paths, and how each module is split. Splits nothing itself.

Styles have the names that transformers gives them in ``base_model_tp_plan``. Activations between a ``colwise`` module
and the next ``rowwise`` one are plain tensors, so the code between has to take sizes from them: a number of heads that
it knows from elsewhere is wrong by a factor of tp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

SUM_GRADIENTS = "replicated_with_grad_allreduce"
"""Style of a module that every rank has whole, but which works on a part of the heads: its gradients are summed."""
STYLES = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", SUM_GRADIENTS)
"""``colwise`` splits outputs, ``rowwise`` inputs; ``colwise_gather_output`` puts the outputs together again;
``embedding_rowwise`` splits the rows of an embedding table."""


def matches(module: nn.Module, plan: Sequence[Sequence[str]]) -> Iterator[tuple[str, nn.Module, str]]:
    """Path, module and style of every module with weights that a pattern names; the first pattern counts."""
    expressions = [(re.compile(re.escape(pattern).replace(r"\*", "[^.]+")), style) for pattern, style in plan]
    for path, one in module.named_modules():
        style = next((style for expression, style in expressions if expression.fullmatch(path)), None)
        if style is not None and next(one.parameters(), None) is not None:
            yield path, one, style


def plan_problem(module: nn.Module, plan: Sequence[Sequence[str]]) -> str | None:
    """Why the plan cannot split the module; None where it can."""
    if not plan:
        return "tensor parallelism needs a plan of what it splits: set workload.tensor_parallel"
    found = list(matches(module, plan))
    named = {style for _, _, style in found}
    if unknown := sorted(named - set(STYLES)):
        return f"the plan splits by {unknown[0]!r}, which is none of {', '.join(STYLES)}"
    for pattern, _ in plan:
        if not any(True for _ in matches(module, [(pattern, "")])):
            return f"the plan names {pattern!r}, but no module with weights has such a path"
    uses = Counter(id(p) for one in module.modules() for p in one.parameters(recurse=False))
    for path, one, style in found:
        if style == SUM_GRADIENTS:
            continue
        if not isinstance(one, nn.Linear | nn.Embedding):
            return f"the plan splits {path}, a {type(one).__name__}; only Linear and Embedding can be split"
        if any(uses[id(parameter)] > 1 for parameter in one.parameters()):
            return f"the plan splits {path}, which shares its weights with another module"
    return None
