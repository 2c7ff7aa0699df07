"""Real gangs of gloo ranks on this machine, to hold dry runs against."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection, wait
from typing import Any

from trials.codec import from_json, to_json
from trials.spec import TrialSpec

_START = multiprocessing.get_context("forkserver")
_START.set_forkserver_preload(["trials.dryrun.actual"])


def measured_peaks(spec: TrialSpec, *, timeout_s: float = 300.0) -> list[int]:
    """Peak bytes of every rank in one step of a real run.

    Raises:
        RuntimeError: with the words of the first rank that failed or kept silent.
    """
    world_size = spec.candidate.layout.world_size
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = _START.Pipe(duplex=False)
            process = _START.Process(target=_rank_main, args=(rank, to_json(spec), folder, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [_receive(pipe, timeout_s) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _receive(pipe: Connection, timeout_s: float) -> int:
    if not wait([pipe], timeout_s):
        raise RuntimeError(f"a rank said nothing within {timeout_s} s")
    try:
        answer = pipe.recv()
    except EOFError:
        raise RuntimeError("a rank ended without a word") from None
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return int(answer)


def _rank_main(rank: int, encoded: Any, folder: str, pipe: Connection) -> None:
    import traceback

    import torch

    from trials.dryrun.actual import measure_rank

    torch.set_num_threads(1)
    spec: TrialSpec = from_json(TrialSpec, encoded)
    world_size = spec.candidate.layout.world_size
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["TUNE_CLUSTER_RENDEZVOUS"] = f"file://{folder}/rendezvous"
    try:
        pipe.send(measure_rank(spec))
    except BaseException as error:
        pipe.send("".join(traceback.format_exception(error))[-3000:])
