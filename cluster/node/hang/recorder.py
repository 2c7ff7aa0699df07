"""The warden's side of the Flight Recorder: asks ranks for their records.

Ranks of ours have a thread that tells it (:mod:`cluster.node.hang.flight`). Programs of the user's own have none; for
them NCCL has a named pipe, which a thread of C++ looks at about once a second: its dump is a pickle, and is read by an
unpickler that knows no class. Both need the interpreter, NCCL to name the Python frames in its dump: where C code
holds it there is no record, and the stack alone tells.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.gang.sights import FlightRecord
from cluster.node.hang.flight import BUFFER_SIZE, summary
from trials.codec import CodecError, from_json

ANSWER_S = 2.0
"""How long a rank's thread may take to answer: it has to get at the interpreter."""
PIPE_S = 10.0
"""How long NCCL's thread may take to notice and to write. A process's first dump takes 1.5 s of CPU time to name frames
(torch 2.13)."""
POLL_S = 0.02
MAX_BYTES = 32 << 20
"""A dump that is larger is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRank:
    """Where the record of a rank can be had."""

    rank: int
    folder: Path
    asking: int
    """Descriptor of the pipe to the rank's thread; below 0 where there is none."""

    @property
    def answer(self) -> Path:
        return self.folder / f"rank{self.rank}.flight.json"

    @property
    def dump(self) -> Path:
        """Where NCCL dumps to."""
        return self.folder / f"{DUMP_PREFIX}{self.rank}"

    @property
    def pipe(self) -> Path:
        """NCCL's named pipe."""
        return self.folder / f"{DUMP_PREFIX}{self.rank}.pipe"


DUMP_PREFIX = "nccl-flight-rank"
_BUFFERS = (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), ("TORCH_HCCL_TRACE_BUFFER_SIZE",))
_FILES = (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), ("TORCH_HCCL_DEBUG_INFO_TEMP_FILE",))
_PIPES = (("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",), ("TORCH_HCCL_DEBUG_INFO_PIPE_FILE",))
"""Variables of NCCL's recorder and of HCCL's, each with the names that versions of torch have for it."""


def recorder_env(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which torch keeps and dumps records in ``folder``, as far as ``environment`` does not say otherwise.

    torch reads the names of one variable in an order of its own, and versions know different ones: a value that the
    environment has under one name is given under all, so that ours never goes over it. The pipe is left out where the
    file system has none: NCCL would refuse to start.
    """
    prefix = str(folder / DUMP_PREFIX)
    wanted = {**dict.fromkeys(_BUFFERS, str(BUFFER_SIZE)), **dict.fromkeys(_FILES, prefix)}
    if _has_pipes(folder):
        wanted |= dict.fromkeys(_PIPES, prefix)
    found = {}
    for names, ours in wanted.items():
        value = next((environment[name] for name in names if name in environment), ours)
        found.update({name: value for name in names if name not in environment})
    return found


def listening(folder: Path) -> list[int]:
    """The ranks on this host that listen on a pipe in ``folder``, in order; nodes may share the folder."""
    found = []
    for path in folder.glob(f"{DUMP_PREFIX}*.pipe"):
        number = path.name.removeprefix(DUMP_PREFIX).removesuffix(".pipe")
        if number.isdigit():
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                found.append(int(number))
    return sorted(found)


def _has_pipes(folder: Path) -> bool:
    probe = folder / f".pipe-{os.getpid()}"
    try:
        os.mkfifo(probe, 0o600)
        probe.unlink()
    except OSError:
        return False
    return True


def records(ranks: Sequence[RecordedRank]) -> dict[int, FlightRecord]:
    """The records of those ranks that give one. Takes up to :data:`ANSWER_S` and :data:`PIPE_S`."""
    found = _collected([rank for rank in ranks if _ask(rank)], _answer, ANSWER_S)
    without_thread = [rank for rank in ranks if rank.asking < 0 and _ask_nccl(rank)]
    return {**found, **_collected(without_thread, _dumped, PIPE_S)}


def _ask(rank: RecordedRank) -> bool:
    if rank.asking < 0:
        return False
    rank.answer.unlink(missing_ok=True)
    try:
        os.write(rank.asking, b"?")
    except OSError:
        return False
    return True


def _ask_nccl(rank: RecordedRank) -> bool:
    """Write to the rank's named pipe, if NCCL has made one and listens."""
    rank.dump.unlink(missing_ok=True)
    try:
        pipe = os.open(rank.pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(pipe, b"?")
    except OSError:
        return False
    finally:
        os.close(pipe)
    return True


def _collected(
    ranks: Sequence[RecordedRank], read: Callable[[RecordedRank], FlightRecord | None], patience_s: float
) -> dict[int, FlightRecord]:
    give_up_s = time.monotonic() + patience_s
    found: dict[int, FlightRecord] = {}
    while len(found) < len(ranks):
        for rank in ranks:
            if rank.rank not in found and (record := read(rank)) is not None:
                found[rank.rank] = record
        if time.monotonic() >= give_up_s:
            break
        time.sleep(POLL_S)
    return found


def _answer(rank: RecordedRank) -> FlightRecord | None:
    with contextlib.suppress(ValueError, CodecError):
        if content := _content(rank.answer):
            record: FlightRecord = from_json(FlightRecord, json.loads(content))
            return record
    return None


def _dumped(rank: RecordedRank) -> FlightRecord | None:
    """What NCCL wrote; None while it is not all there."""
    if not (content := _content(rank.dump)):
        return None
    try:
        return summary(unpickled(content), {})
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError:
        return b""
    return content if len(content) <= MAX_BYTES else b""


class _PlainUnpickler(pickle.Unpickler):
    """Builds dictionaries, lists, texts and numbers, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a record names the class {module}.{name}")


def unpickled(content: bytes) -> dict[str, Any]:
    """The dump of a recorder as torch pickles it.

    Raises:
        pickle.UnpicklingError: it is no plain data.
    """
    found = _PlainUnpickler(io.BytesIO(content)).load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError("a record is a dictionary")
    return found
