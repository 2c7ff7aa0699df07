"""The file ``metrics.csv`` of Lightning's CSVLogger, as of release 2.6::

    epoch,step,train_loss
    0,0,5.69

Steps count from 0. Columns are called as the user's module logs them, rows of validation among them, and the file is
written again as a whole when a column is added. There is no time of a step.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

from trials.script.logs.base import LogRecord, number, present, whole

_VALIDATION = ("val", "test", "eval")


class LightningLog:
    """Reads rows by the names of the header that came last."""

    needles: tuple[bytes, ...] | None = (b",",)

    def __init__(self) -> None:
        self._names: list[str] = []

    def feed(self, line: str) -> Iterator[LogRecord]:
        if line.count(",") > 200:
            return
        try:
            cells = [cell.strip() for cell in next(csv.reader([line]), [])]
        except csv.Error:
            return
        if "step" in cells:
            self._names = cells
            return
        if not self._names or len(cells) != len(self._names):
            return
        row = dict(zip(self._names, cells, strict=True))
        step, loss = whole(row["step"]), number(row.get(self._loss_name(), ""))
        if step is not None and loss is not None:
            grad_norm = number(row.get("grad_norm", ""))
            yield LogRecord(step=step, values=present(loss=loss, grad_norm=grad_norm), is_structured=True)

    def _loss_name(self) -> str:
        """The column of the training loss: per step rather than per epoch."""
        names = [name for name in self._names if "loss" in name.lower() and not name.lower().startswith(_VALIDATION)]
        names.sort(key=lambda name: (name.endswith("_epoch"), not name.endswith("_step"), len(name)))
        return names[0] if names else ""
