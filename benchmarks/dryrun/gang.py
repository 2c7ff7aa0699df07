"""Runs real gangs of gloo ranks on this machine, to hold dry runs against."""

from __future__ import annotations

import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.runner.gang import RankError, gang, receive
from trials.files import from_json, to_json
from trials.spec import TrialSpec


def measured_peaks(spec: TrialSpec, *, of: Literal["step", "build"] = "step", timeout_s: float = 300.0) -> list[int]:
    """Peak bytes of every rank in one step of a real run, or while it is built.

    Raises:
        RankError: with the words of the first rank that failed or kept silent.
    """
    world_size = spec.candidate.layout.world_size
    with (
        tempfile.TemporaryDirectory() as folder,
        gang(_measure, world_size, Path(folder, "rendezvous"), to_json(spec), of) as pipes,
    ):
        answers = [receive(pipe, timeout_s) for pipe in pipes]
    for answer in answers:
        if isinstance(answer, str):
            raise RankError(answer)
    return answers


def _measure(pipe: Connection, encoded: Any, of: Literal["step", "build"]) -> None:
    from benchmarks.dryrun.allocator import measure_build, measure_rank

    try:
        pipe.send((measure_build if of == "build" else measure_rank)(from_json(TrialSpec, encoded)))
    except BaseException as error:
        pipe.send("".join(traceback.format_exception(error))[-3000:])
