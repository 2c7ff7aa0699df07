"""The line that a script prints per step, as a regular expression: made from its own print, where that is simple."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

_PRINTERS = {"print", "info", "log", "write", "warning", "print_rank_0", "rank_zero_info", "rank0_print", "echo"}
_NUMBER = r"[\w.+-]+"
_STEP = re.compile(r"\b(global_?step|step|iter|iteration|iter_num|it|batch|batch_idx|i)\b", re.IGNORECASE)
_SIGNS = (
    ("loss", re.compile(r"\b(train_?)?loss\b", re.IGNORECASE)),
    ("grad_norm", re.compile(r"\b(grad_?norm|gnorm)\b", re.IGNORECASE)),
    ("step_ms", re.compile(r"\bms/(batch|step|it|iter|iteration)\b", re.IGNORECASE)),
)
_MILLISECONDS = re.compile(r"^\s*(ms|msec|milliseconds)\b", re.IGNORECASE)
_SECONDS = re.compile(r"^\s*(s|sec|secs|seconds)(/(it|step|iter))?\b", re.IGNORECASE)
_PERCENT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[diouxXeEfFgGsra]")


def log_pattern(tree: ast.AST) -> str | None:
    """A regular expression with the groups ``step`` and ``loss``, and others where they can be told; None: no print
    of the script shows a step and a loss in a simple way."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _PRINTERS and node.args and (pattern := _pattern(list(_pieces(node)))) is not None:
                found.append(pattern)
    return max(found, key=lambda pattern: (pattern.count("(?P<"), "val" not in pattern), default=None)


def _pieces(call: ast.Call) -> Iterator[str | ast.expr]:
    """Text and expressions in the order in which the call prints them."""
    for position, argument in enumerate(call.args):
        if position:
            yield " "
        yield from _parts(argument)


def _parts(node: ast.expr) -> Iterator[str | ast.expr]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                yield value.value
            elif isinstance(value, ast.Constant):
                yield str(value.value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _parts(node.left)
        yield from _parts(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
        values = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        yield from _filled(re.split(f"({_PERCENT.pattern})", str(node.left.value)), values)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        if isinstance(node.func.value, ast.Constant):
            yield from _filled(re.split(r"(\{[^{}]*\})", str(node.func.value.value)), node.args)
    else:
        yield node


def _filled(texts: Sequence[str], values: Sequence[ast.expr]) -> Iterator[str | ast.expr]:
    """Texts with each placeholder, every other one of them, replaced by its value."""
    rest = list(values)
    for position, text in enumerate(texts):
        if position % 2 == 0:
            yield text.replace("%%", "%")
        elif rest:
            yield rest.pop(0)


def _pattern(pieces: list[str | ast.expr]) -> str | None:
    found: dict[str, int] = {}
    parts: list[str] = []
    for position, piece in enumerate(pieces):
        if isinstance(piece, str):
            parts.append(_escaped(piece))
            continue
        before = pieces[position - 1] if position and isinstance(pieces[position - 1], str) else ""
        after = pieces[position + 1] if position + 1 < len(pieces) else ""
        group = _group(piece, str(before), after if isinstance(after, str) else "")
        if group is None or group in found:
            parts.append(r"\s*\S+?" if isinstance(after, str) and after.strip() else r"\s*\S+")
        else:
            found[group] = position
            parts.append(rf"\s*(?P<{group}>\d+)" if group == "step" else rf"\s*(?P<{group}>{_NUMBER})")
    if not {"step", "loss"} <= set(found):
        return None
    return "".join(parts[: max(found.values()) + 2]).replace(r"\s*\s*", r"\s*").strip()


def _group(value: ast.expr, before: str, after: str) -> str | None:
    """What a printed value is, by the words beside it and the names in it."""
    if _MILLISECONDS.match(after):
        return "step_ms"
    names = " ".join(node.id for node in ast.walk(value) if isinstance(node, ast.Name))
    label = re.split(r"[,|;\[\]]", before.rstrip(" :=([{#"))[-1]
    for text in (label, names):
        for group, sign in _SIGNS:
            if sign.search(text):
                return group
        if _STEP.search(text) and not _SECONDS.match(after) and _counts(value):
            return "step"
    return None


def _counts(value: ast.expr) -> bool:
    """Whether an expression may be the number of a step: a name, or one with a constant added."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and isinstance(value.right, ast.Constant):
        return _counts(value.left)
    return isinstance(value, ast.Name | ast.Attribute)


def _escaped(text: str) -> str:
    """The text for a regular expression, with any amount of white space where it has some."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))
