"""Reads torch.compile's counters: graphs, recompilations and graph breaks with reason and place, compile time."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any, Callable

from .steps import STEPS, guarded, is_compiling

MAX_REASON = 200
MAX_ENTRIES = 4096
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


class Compiler:
    """Reads the compiler's log, if the program has loaded the compiler."""

    def __init__(self) -> None:
        self._reported = 0
        """Entries of the log that were already reported."""
        self._frames = -1

    @guarded("compiler")
    def take(self) -> dict[str, float]:
        """Return seconds of compilation since the last call; empty if nothing was compiled."""
        log = self._log()
        new, self._reported = log[self._reported :], len(log)
        seconds = sum((entry.duration_us or 0) / 1e6 for entry in new)
        return {"compiling_s": seconds} if seconds else {}

    @guarded("compiler")
    def read(self) -> dict[str, Any]:
        """Return facts after a step; empty if nothing was compiled since the last one."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        counters: Any = getattr(utils, "counters", None)
        frames = counters.get("frames", {}).get("total", 0) if counters else 0
        if not frames or frames == self._frames:
            return {}
        self._frames = frames
        again = [str(entry.recompile_reason) for entry in self._log() if entry.recompile_reason]
        breaks = {reason: number for reason, number in counters["graph_break"].items() if number}
        found: dict[str, Any] = {
            "graphs": int(counters["stats"]["unique_graphs"]),
            "recompilations": len(again),
            "graph_breaks": int(sum(breaks.values())),
        }
        if again:
            found["recompile_reason"] = _first_line(again[-1])
        if breaks:
            found["break_reason"] = _break(max(breaks, key=lambda reason: breaks[reason]))
        return found

    def _log(self) -> list[Any]:
        utils: Any = sys.modules.get("torch._dynamo.utils")
        read = getattr(utils, "get_compilation_metrics", None)
        return list(read()) if read is not None else []


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:MAX_REASON]


def _break(reason: str) -> str:
    """Return the first line of a reason, with the innermost line of the program if it names one."""
    places = _PLACE.findall(reason)
    where = f" ({places[-1][0].rpartition('/')[2]}:{places[-1][1]})" if places else ""
    return _first_line(reason) + where


def keep_log(module: Any) -> None:
    """Hook for ``torch._dynamo.utils``: keep every entry of the log, which would drop the oldest of more than 64."""
    limit = getattr(module, "set_compilation_metrics_limit", None)
    if limit is not None:
        limit(MAX_ENTRIES)


def before_compile(callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` when the program calls ``torch.compile``. Return a function that ends this."""
    torch: Any = sys.modules["torch"]
    original = getattr(torch, "compile", None)
    if original is None:  # before PyTorch 2.0
        return lambda: None

    @functools.wraps(original)
    def compile_(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            callback()
        return original(*args, **kwargs)

    def put_back() -> None:
        if torch.compile is compile_:
            torch.compile = original

    torch.compile = compile_
    return put_back


COMPILER = Compiler()
STEPS.compiler = COMPILER
