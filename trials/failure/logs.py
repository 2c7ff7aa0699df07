"""Why a process aborted, and whether one did, from what libraries and launchers printed. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trials.failure.signs import FailureClass, sign_in_log

_CHILD_ABORTED = re.compile(
    "|".join(
        (
            r"\bexitcode\s*: -6\b",  # torchrun, and what is built on it: accelerate, LLaMA-Factory, ms-swift
            r"\bSignal 6 \(SIGABRT\) received by PID\b",
            r"\bexits with return code = -6\b",  # deepspeed
            r"\bdied with <Signals\.SIGABRT\b",  # Python's subprocess: accelerate without torchrun
            r"\bterminated with signal SIGABRT\b",  # torch.multiprocessing.spawn
            r"\bterminated with code -6\b",  # Lightning
            r"\bexited\s+on signal 6\b",  # Open MPI: mpirun, prterun
            r"\bKILLED BY SIGNAL: 6\b",  # Hydra: MPICH, Intel MPI
            r"\bEXIT STRING: Abort(?:ed)? \(signal 6\)",
            r"\bsrun: error: .{0,200}: Aborted\b",
            r"\] code -6 log\b",  # paddle.distributed.launch
            r"\bprocess \d+ exit with exception\b",  # msrun, which does not say by what
            r"\bAborted\s+\(core dumped\)",  # shells
            r"^Fatal Python error: Aborted\b",
        )
    ),
    re.MULTILINE,
)
"""How launchers say that a process which they started has aborted; they themselves end with a code of their own."""
_RESTART = "will restart worker group"
"""What torchrun says before it starts all ranks again: whatever came before was survived."""
_REASONS = ("terminated with exception:", "what():")
"""Words behind which libraries say why they abort."""
_ABORTS = (
    *_REASONS,
    "terminate called",
    "watchdog caught collective operation timeout",
    "watchdog got stuck",
    "heartbeat monitor timed out",
    "find exception when",
    "last error:",
    "nccl error in:",
    "hw exception by gpu node",
    "memory access fault by gpu node",
    "memory critical error by agent node",
    "fatal python error",
    "process abort signal",
)
"""Words with which an abort begins, in lower case."""
_REASON_LINES = 8
"""How many lines behind such words belong to them, unless a stack begins."""
_STACK = ("frame #", "exception raised from")


def tells_of_abort(text: str) -> bool:
    """Whether a launcher says in its output that a process which it started has aborted."""
    return _CHILD_ABORTED.search(text) is not None


def cause_in_log(text: str) -> tuple[FailureClass, str] | None:
    """The class and the line that say why a process aborted, from the end of its log; None where nothing does.

    A device that broke is never survived. What else a program may have survived, such as a kernel under tuning that
    found no memory, counts only from where the first abort begins, and memory only in the reason that an abort gives.
    Where several ranks write to one log, a cause comes before the connections that it broke.
    """
    lines = [line for line in text.rpartition(_RESTART)[2].splitlines() if line.strip()]
    begin = next((at for at, line in enumerate(lines) if _is_abort(line.lower())), None)
    told = list(_told(lines))
    broken = [found for found in told if found[1] == "device_lost"]
    found = told[::-1] if begin is None else [each for each in told if each[0] >= begin]
    causes = [each for each in found if each[1] != "connection"]
    _, kind, line = (broken or causes or found or [(0, None, "")])[0]
    return None if kind is None else (kind, line.strip())


def _told(lines: Sequence[str]) -> Iterator[tuple[int, FailureClass | None, str]]:
    """The lines that tell of a failure, with their numbers and its class; None for the reason of an abort in words that
    nobody knows."""
    left, unknown = 0, None
    for at, line in enumerate((*lines, _STACK[0])):
        lowered = line.lower()
        if _is_abort(lowered):
            left = _REASON_LINES
            unknown = at if unknown is None and _gives_reason(lowered) else unknown
        elif any(words in lowered for words in _STACK):
            left = 0
        sign = sign_in_log(lowered)
        if sign is not None and (left or sign.kind not in ("oom", "host_oom")):
            yield at, sign.kind, line
            unknown = None
        elif not left and unknown is not None:
            yield unknown, None, lines[unknown]
            unknown = None
        left = max(0, left - 1)


def _is_abort(line: str) -> bool:
    return any(words in line for words in _ABORTS)


def _gives_reason(line: str) -> bool:
    return any(line.rpartition(words)[2].strip() for words in _REASONS if words in line)
