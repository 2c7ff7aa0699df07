"""Arguments that a script's own parser declares, read from its text: what a knob is called there, and its default."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from orchestrator.recipes.arguments import Argument, Words, either_dash, is_given

MICRO_BATCH = (
    "per_device_train_batch_size",
    "micro_batch_size",
    "train_micro_batch_size",
    "train_batch_size",
    "per_gpu_train_batch_size",
    "batch_size",
    "batch",
    "bs",
)
"""Names for the samples of a forward pass on a rank, the surest first."""
ACCUMULATION = (
    "gradient_accumulation_steps",
    "accumulation_steps",
    "grad_accum_steps",
    "accumulation",
    "grad_accum",
    "accum",
)
WORKERS = ("dataloader_num_workers", "num_workers", "workers")
SEED = ("seed",)


@functools.lru_cache(maxsize=8)
def declared(text: str) -> Mapping[str, tuple[str, Any]]:
    """Every ``add_argument`` in a Python text, by its name with underscores: how it is spelled there, and its default,
    None where that is no constant."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return MappingProxyType({})
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return MappingProxyType(dict(found for call in calls for found in _arguments(call)))


def _arguments(call: ast.Call) -> Iterator[tuple[str, tuple[str, Any]]]:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
        return
    defaults = [word.value for word in call.keywords if word.arg == "default"]
    default = defaults[0].value if defaults and isinstance(defaults[0], ast.Constant) else None
    for word in call.args:
        if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value.startswith("--"):
            yield word.value.lstrip("-").replace("-", "_"), (word.value, default)


def named(words: Words, text: str, names: Iterable[str]) -> tuple[Argument, Any] | None:
    """The first of these arguments that the words give, or the script declares; with its default."""
    known = declared(text)
    given = next((name for name in names if is_given(words, either_dash(f"--{name}"))), None)
    name = given or next((name for name in names if name in known), None)
    if name is None:
        return None
    spelled, default = known.get(name, (f"--{name}", None))
    return either_dash(spelled), default
