"""Which patterns of selective recompute are accepted: regular expressions that match fast. Standard library only."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from re import _parser  # type: ignore[attr-defined]  # the only way to see what a pattern repeats
from typing import Any

MAX_PATTERN_CHARS = 200
MAX_WAYS = 64**4
"""Most ways to match one path: those of four open repeats like ``.*`` in a row."""
_PATH_CHARS = 64
"""Repeats that an open one counts for: about the length of an operator's path."""


class _NestedRepeatError(Exception):
    """Something is repeated that itself can match in several ways, so that their number grows exponentially."""


@functools.lru_cache(maxsize=1024)  # the same few patterns are asked for with every candidate
def pattern_problem(pattern: str) -> str | None:
    """What is wrong with a selective-recompute pattern; None for a good one."""
    if not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        return f"a pattern has 1 to {MAX_PATTERN_CHARS} characters, not {len(pattern)}"
    try:
        re.compile(pattern)
        num_ways = _ways(_parser.parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        return f"the pattern {pattern!r} is no regular expression: {error}"
    except _NestedRepeatError:
        return f"the pattern {pattern!r} repeats a part that repeats or branches itself, which can take for ever"
    if num_ways > MAX_WAYS:
        return f"the pattern {pattern!r} has too many repeats in a row to be matched fast"
    return None


def _ways(nodes: Iterable[Any]) -> int:
    """Upper bound on the ways in which a sequence of parsed nodes can match one path.

    Raises:
        _NestedRepeatError: their number grows exponentially.
    """
    return math.prod(_ways_of_node(str(code), argument) for code, argument in nodes)


def _ways_of_node(code: str, argument: Any) -> int:
    match code:
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, body = argument
            num_ways = _ways(body)
            if int(most) > 1 and num_ways > 1:
                raise _NestedRepeatError
            return 1 + int(min(int(most), least + _PATH_CHARS) - least) * num_ways
        case "BRANCH":
            return sum(map(_ways, argument[1]))
        case "SUBPATTERN":
            return _ways(argument[3])
        case "ATOMIC_GROUP":
            return _ways(argument)
        case "ASSERT" | "ASSERT_NOT":
            return _ways(argument[1])
        case "GROUPREF_EXISTS":
            _, yes, no = argument
            return _ways(yes) + (_ways(no) if no is not None else 1)
        case _:
            return 1
