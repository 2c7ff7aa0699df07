"""Patterns of operators and modules: only regular expressions that match fast are accepted. Standard library only."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from re import _parser  # type: ignore[attr-defined]  # no public way to see what a pattern repeats
from typing import Any

MAX_PATTERN_CHARS = 200
MAX_WAYS = 64**4
"""Maximum number of ways to match one path: that for four unbounded repeats like ``.*`` in a row."""
_PATH_CHARS = 64
"""Length assumed for an unbounded repeat: about that of an operator's path."""


class _NestedRepeatError(Exception):
    """A repeated part can itself match in several ways, so that the number of ways grows exponentially."""


@functools.lru_cache(maxsize=1024)  # every candidate has the same few patterns
def pattern_problem(pattern: str) -> str | None:
    """Return what is wrong with a pattern; None if nothing."""
    if not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        return f"expected a pattern of 1 to {MAX_PATTERN_CHARS} characters, got {len(pattern)}"
    try:
        re.compile(pattern)
        num_ways = _ways(_parser.parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        return f"invalid regular expression {pattern!r}: {error}"
    except _NestedRepeatError:
        return f"the pattern {pattern!r} has nested repeats, so matching can take exponential time"
    if num_ways > MAX_WAYS:
        return f"the pattern {pattern!r} has too many repeats in a row, so matching can be slow"
    return None


def _ways(nodes: Iterable[Any]) -> int:
    """Return an upper bound on the number of ways in which a sequence of parsed nodes can match one path.

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
