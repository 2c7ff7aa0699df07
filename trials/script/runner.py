"""The entry of a rank whose work is a training program of the user's own: starts it, watches it, reports.

Also runs under plain torchrun::

    torchrun --nproc-per-node 2 -m trials.script.runner --spec spec.json --out report.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trials.codec import from_json, to_json
from trials.failure import NodeFault, of_host
from trials.files import write_json
from trials.outcome import ProgressSink, RankReport, StepBreakdown, ignore_progress
from trials.reports import Findings
from trials.script.child import Child
from trials.script.command import (
    Places,
    ScriptCommand,
    ScriptRank,
    cache_folder,
    child_environment,
    remember_secrets,
    remove_stale_locks,
)
from trials.script.judge import CommandError, Judge, MeasuredSteps
from trials.script.lines import FolderTails
from trials.script.watch import ProgramWatch, log_files


def run_rank(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:
    """Run this rank's program and give its :class:`RankReport` as JSON; one without steps if another rank speaks for
    it.

    ``spec`` is a :class:`ScriptCommand` as JSON. Returns or raises only when no process of the program is left.

    Raises:
        CodecError: the JSON is no ScriptCommand.
        NotApplied, TrainingDiverged, NodeFault: see :mod:`trials.failure`; anything else is what ended the program,
            by its own type, for :func:`trials.failure.classify`.
    """
    command: ScriptCommand = from_json(ScriptCommand, spec)
    remember_secrets(command.env)
    rank = ScriptRank.from_env(os.environ)
    places = Places.from_env(os.environ, rank)
    places.make(command)
    try:
        if rank.local_rank == 0:
            remove_stale_locks(cache_folder(command, os.environ))
        report = _run(command, rank, places, progress)
    finally:
        places.leave()
    return to_json(report)  # type: ignore[no-any-return]


def _run(command: ScriptCommand, rank: ScriptRank, places: Places, progress: ProgressSink) -> RankReport:
    files = _log_files(command, places)
    began_s = time.monotonic()
    child = _start(command, rank, places)
    try:
        watch = ProgramWatch(command, rank, places, child, files, progress)
        try:
            times = watch.follow()
        finally:
            exit_code = child.end()
            watch.close()
    finally:
        child.end()
        child.close()
    contradiction = watch.judge.contradiction(began_s=began_s if exit_code is not None else None)
    report = _report(command, rank, watch.judge, times, exit_code)
    return report if times is None else replace(report, contradiction=contradiction)


def _start(command: ScriptCommand, rank: ScriptRank, places: Places) -> Child:
    argv = [places.fill(argument, command) for argument in command.argv]
    own = tuple((pair[0], places.fill(pair[1], command)) for pair in command.env if len(pair) == 2)
    environment = child_environment(
        replace(command, env=own), rank, os.environ, report=places.report, error_file=places.error_file
    )
    try:
        return Child(argv, cwd=command.cwd, environment=environment)
    except OSError as error:
        if of_host(error) is not None:
            raise NodeFault(f"cannot start the command on {socket.gethostname()}: {error}") from error
        if not Path(command.cwd).is_dir():
            where = f"there is no folder {command.cwd} on node {socket.gethostname()}"
            raise CommandError(f"{where}: a program starts from its own path, which has to be on every node") from error
        reason = error.strerror or type(error).__name__
        raise CommandError(f"cannot start {argv[0]!r} in {command.cwd}: {reason}") from error


def _log_files(command: ScriptCommand, places: Places) -> FolderTails:
    try:
        return log_files(command, places)
    except ValueError as error:  # the log's format
        raise CommandError(str(error)) from None


def _report(
    command: ScriptCommand, rank: ScriptRank, judge: Judge, times: MeasuredSteps | None, exit_code: int | None
) -> RankReport:
    """The rank's report; what nobody told is left out."""
    data_s = judge.mean("data_s") or 0.0
    seconds = times.seconds if times is not None else ()
    rest_s = max(0.0, sum(seconds) / len(seconds) - data_s) if data_s and seconds else 0.0
    script = judge.report(times, exit_code)
    allocated = judge.peak("allocated_bytes") or (judge.peak("rss_bytes") if command.device == "cpu" else 0)
    return RankReport(
        rank=rank.rank,
        world_size=rank.num_slots,
        tokens_per_step=_amount(script.tokens_per_step, command.tokens_per_step),
        step_times_s=seconds,
        breakdown=StepBreakdown(data_s=data_s, other_s=rest_s),
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=judge.peak("reserved_bytes"),
        num_warmup_steps=command.num_warmup_steps,
        losses=judge.per_step("loss"),
        grad_norms=judge.per_step("grad_norm"),
        model_flops_per_token=command.model_flops_per_token,
        samples_per_step=_amount(script.samples_per_step, command.samples_per_step),
        findings=Findings(script=script),
        num_ranks=rank.num_devices if command.launcher == "own" else 1,
        step_time_resolution_s=times.resolution_s if times is not None else 0.0,
    )


def _amount(seen: float | None, said: int) -> int:
    """What a step trained on, by the program's own count where it has one: batches may vary in length."""
    return max(1, round(seen)) if seen is not None else said


def main() -> None:
    """Run one rank under torchrun; rank 0 writes the report."""
    parser = argparse.ArgumentParser(description="Run one rank of a training program of your own under torchrun.")
    parser.add_argument("--spec", type=Path, required=True, help="ScriptCommand as JSON")
    parser.add_argument("--out", type=Path, default=None, help="file for rank 0's report as JSON; stdout by default")
    arguments = parser.parse_args()
    report = run_rank(json.loads(arguments.spec.read_text()), ignore_progress)
    if report["rank"] == 0:
        write_json(report, arguments.out)


if __name__ == "__main__":
    main()
