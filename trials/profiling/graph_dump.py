"""Writes the FX graphs of what torch.compile compiles as text, with the shapes of every value."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.compiler.config

from trials.files import write_atomically

logger = logging.getLogger(__name__)

_TRACE = "torch.__trace"
"""The logger that torch tells what it compiles, in as much detail as there is, if anybody listens."""
_GRAPHS = {
    "dynamo_output_graph": "traced",
    "aot_forward_graph": "forward",
    "aot_backward_graph": "backward",
    "aot_inference_graph": "inference",
}
MAX_GRAPHS = 100
"""Most files per rank: recompilations may have no end."""


class _Writer(logging.Handler):
    """Graphs of one compilation share its number: ``rank0.graph-0-0.forward.txt``, ``rank0.graph-0-0.backward.txt``.

    Where DDP has one cut to pieces, at its buckets, the later ones are ``rank0.graph-0-0-part2.forward.txt`` and so on.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        super().__init__(logging.DEBUG)
        self._folder = folder
        self._prefix = prefix
        self.num_graphs = 0
        self._parts: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        told = getattr(record, "metadata", {})
        what = next((word for name, word in _GRAPHS.items() if name in told), None)
        text = getattr(record, "payload", None)
        if what is None or not isinstance(text, str):
            return
        self.num_graphs += 1
        if self.num_graphs > MAX_GRAPHS:
            return
        number = f"{told.get('frame_id', 0)}-{told.get('frame_compile_id', 0)}"
        self._parts[number, what] += 1
        if (part := self._parts[number, what]) > 1:
            number = f"{number}-part{part}"
        try:
            write_atomically(self._folder / f"{self._prefix}.graph-{number}.{what}.txt", [text.encode()], mode=0o600)
        except OSError as error:  # training goes on without
            logger.warning("cannot write a graph: %s", error)


@contextlib.contextmanager
def dumped_graphs(folder: Path, prefix: str) -> Iterator[_Writer]:
    """Write the graphs that are compiled inside to ``folder``.

    The compiler's caches are off inside: what comes from them has no graphs.
    """
    writer = _Writer(folder, prefix)
    trace = logging.getLogger(_TRACE)
    trace.addHandler(writer)
    try:
        with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
            yield writer
    finally:
        trace.removeHandler(writer)
