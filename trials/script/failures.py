"""Why a program ended before its steps were measured: from what it told, printed and left behind.

Out of memory is believed of an error's type, or of the very words in which allocators fail; "out of memory" somewhere
in what a program prints is none of them. The errors raised here carry the program's own type, by which
:func:`trials.failure.classify` judges as it does for our own training.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from trials.failure import InfeasibleSpec, NodeFault, NonFiniteLoss, classify
from trials.script.book import ToldError

NEEDLES = (
    b"Error",
    b"Exception",
    b"Exit",
    b"Interrupt",
    b"lloc",
    b"emory",
    b"above exception",
    b"Traceback",
    b"in use",
    b"Ignoring",
    b"terminate called",
    b"atchdog",
)
"""One of these stands in every line that :class:`OutputWatch` looks at."""
MAX_CHARS = 2000

_ERROR = re.compile(
    r"^(?:\[rank\d+\]:\s?)?(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit))(?::\s*(?P<message>.*))?$"
)
_MEMORY = re.compile(
    r"\b(?:CUDA|HIP|NPU|XPU|MPS|MUSA|MLU|GCU) out of memory\b|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Cuda failure (?:2 )?'out of memory'|ResourceExhaustedError|Out of memory error on \w+ \d|Memory not enough:"
    r"|memory isn't enough and alloc failed|Allocate memory failed"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|std::bad_alloc",
)
_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError", "ResourceExhaustedError")
_SURVIVED = re.compile(r"Ignoring this choice|terminate called|watchdog (?:caught|thread terminated)", re.IGNORECASE)
"""What a program says that has survived what it said of memory before: a kernel was tuned, or an abort begins."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_UNHANDLED = "unhandled cuda error"
_LAUNCHERS = re.compile(
    r"ChildFailedError|CalledProcessError|ProcessExitedException|Distributed job exited with exception"
)
_AMBIGUOUS = ("InfeasibleSpec", "DataError", "NonFiniteLoss", "NodeFault")
"""Names of errors of ours: a program's own by these names mean something else."""
NODE_FAULT_CODES = {16: "asks to be run again elsewhere", 17: "found wrong results that do not repeat"}
"""Exit codes of Megatron-LM's rerun state machine, which suspects the hardware."""


class CommandError(RuntimeError):
    """The command failed, and gave no better reason than how it ended."""


class NoMetricsError(RuntimeError):
    """The command ended well, but said nothing of its steps."""


class TooFewStepsError(RuntimeError):
    """The command ended well, but before the steps that a trial needs."""


class NotApplied(InfeasibleSpec):  # named like the outcome it leads to
    """What the program does is not what the candidate says: its times would be those of something else."""


class TrainingDiverged(NonFiniteLoss):  # says what was found
    """The program's loss or gradient norm became inf or nan."""


def is_of_program(error: BaseException) -> bool:
    """Whether an error is about a program of the user's own: where in our code it was found tells nobody anything."""
    told = CommandError | NoMetricsError | TooFewStepsError | NotApplied | TrainingDiverged | NodeFault
    return isinstance(error, told)


class OutputWatch:
    """Remembers what a program's output says of its failure; at most some dozens of lines."""

    def __init__(self) -> None:
        self._errors: deque[tuple[int, ToldError]] = deque(maxlen=64)
        self._chain = 0
        self._is_chained = False
        self._memory = ""
        self._is_aborting = False
        self.is_port_taken = False

    def feed(self, line: str) -> None:
        """Look at one line."""
        line = line[:MAX_CHARS]
        if "above exception" in line:
            self._is_chained = True
        elif "Traceback (most recent call last)" in line:
            self._chain += not self._is_chained
            self._is_chained = False
        elif (match := _ERROR.match(line)) and not _LAUNCHERS.search(line):
            self._errors.append((self._chain, ToldError(match["type"], match["message"] or "")))
        if not self._is_aborting and (match := _SURVIVED.search(line)):  # from then on, other ranks follow the first
            self._memory, self._is_aborting = "", not match[0].startswith("Ignoring")
        if not self._memory and _MEMORY.search(line):
            self._memory = line.strip()
        self.is_port_taken = self.is_port_taken or _PORT_TAKEN.search(line) is not None

    def cause(self) -> ToldError | None:
        """The error that ended the program, as far as its output tells."""
        roots = [entry for entry in self._errors if not _is_collateral(entry[1])]
        if self._memory and all(_UNHANDLED in error.message for _, error in roots):  # NCCL says why in another line
            return ToldError("OutOfMemoryError", self._memory)
        roots = roots or list(self._errors)
        if not roots:
            return None
        chain, last = roots[-1]
        return next((error for number, error in roots if number == chain and is_out_of_memory(error)), last)


def is_out_of_memory(error: ToldError) -> bool:
    """Whether an error says by type or words that an allocation failed."""
    return error.type_name.rpartition(".")[2] in _MEMORY_TYPES or _MEMORY.search(error.message) is not None


def _is_collateral(error: ToldError) -> bool:
    return classify(raised(error)) == "connection"


def raised(error: ToldError, suffix: str = "") -> Exception:
    """The program's error as an exception of ours, whose class is called like the program's."""
    module, _, name = error.type_name.rpartition(".")
    name = "OutOfMemoryError" if is_out_of_memory(error) and name != "MemoryError" else name or "Error"
    if name in _AMBIGUOUS:
        module, name = module or "program", f"Program{name}"
    kind = type(name, (CommandError,), {"__module__": module or "builtins"})
    made: Exception = kind((error.message or name) + suffix)
    return made


def left_behind(path: Path) -> ToldError | None:
    """The error in the file that torch's ``record`` writes; None where there is none."""
    try:
        message = json.loads(path.read_bytes()[: 1 << 20])["message"]
        text = str(message["message"] if isinstance(message, dict) else message)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    match = _ERROR.match(text[:MAX_CHARS].partition("\n")[0])
    return ToldError(match["type"], match["message"] or "") if match else ToldError("RuntimeError", text[:MAX_CHARS])


def failure(
    *, told: Iterable[ToldError], file: Path, output: OutputWatch, exit_code: int | None, where: str, is_megatron: bool
) -> Exception | None:
    """What to raise for a program that ended before its steps were measured; None where only its exit code speaks.

    Args:
        where: how far it had come, as a clause: ``after 3 of 10 steps``.
    """
    suffix = f" (the command {how_it_ended(exit_code)} {where})"
    if is_megatron and exit_code in NODE_FAULT_CODES:
        return NodeFault(f"Megatron-LM {NODE_FAULT_CODES[exit_code]}{suffix}")
    errors = [error for error in told if error.type_name not in ("SystemExit", "KeyboardInterrupt")]
    errors = [error for error in errors if not _is_collateral(error)] or errors
    cause = next((error for error in reversed(errors) if is_out_of_memory(error)), errors[-1] if errors else None)
    cause = cause or left_behind(file) or output.cause()
    if output.is_port_taken and (cause is None or _is_collateral(cause)):
        return NodeFault(f"the port at which ranks were to meet: address already in use{suffix}")
    if cause is not None:
        return raised(cause, suffix)
    if exit_code:
        return CommandError(f"the command {how_it_ended(exit_code)} {where}")
    return None


def how_it_ended(exit_code: int | None) -> str:
    """The exit code in words, as a predicate."""
    if exit_code is None:
        return "was still running"
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
