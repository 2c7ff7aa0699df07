"""Gangs of gloo ranks for tests: forked from a server that has torch imported, many trials per gang."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import time
import traceback
import warnings

from benchmarks.runner.gang import RankError, gang, receive
from trials.failure import classify
from trials.files import from_json, to_json
from trials.outcome import RankReport


@dataclasses.dataclass(frozen=True)
class RankFailure:
    kind: str
    type_name: str
    message: str
    rank: int = -1
    collateral: tuple[str, ...] = ()
    """Kinds of the other ranks' failures."""
    other_messages: tuple[str, ...] = ()
    """Ends of their messages."""


Result = RankReport | RankFailure


def run_gang(specs, tmp_path, *, timeout_s=120.0, **options):
    """Run trials of one world size one after the other in one gang; per trial rank 0's report, or the root cause.

    A failed trial ends its gang, as in production; the next trial starts with a fresh one. Reports of all ranks must
    agree on losses and norms. ``counts_peaks=True`` takes the extra step that counts live tensors.
    """
    results = []
    while len(results) < len(specs):
        results += _run_until_failure(specs[len(results) :], tmp_path / f"from-{len(results)}", timeout_s, options)
    return results


def differences(result, baseline):
    """Largest loss difference and largest relative gradient-norm difference over all steps."""
    assert isinstance(baseline, RankReport), baseline
    assert isinstance(result, RankReport), result
    assert len(result.losses) == len(baseline.losses) >= 3
    loss = max(abs(a - b) for a, b in zip(result.losses, baseline.losses, strict=True))
    norm = max(abs(a - b) / b for a, b in zip(result.grad_norms, baseline.grad_norms, strict=True))
    return loss, norm


def _run_until_failure(specs, folder, timeout_s, options):
    folder.mkdir(parents=True)
    world_size = specs[0].candidate.layout.world_size
    with gang(_rank_main, world_size, folder / "0", [to_json(spec) for spec in specs], folder, options) as pipes:
        return _collect(pipes, len(specs), folder, timeout_s)


def _collect(pipes, num_specs, folder, timeout_s):
    results = []
    for _ in range(num_specs):
        result = _fold([_receive(pipe, timeout_s, rank, folder) for rank, pipe in enumerate(pipes)])
        results.append(result)
        if isinstance(result, RankFailure):
            break
    return results


def _receive(pipe, timeout_s, rank, folder):
    try:
        outcome, value = receive(pipe, timeout_s)
    except RankError as error:
        return RankFailure("connection", "Silent", f"{error}\n{_end_of_log(folder, rank)}", rank)
    if outcome == "report":
        return from_json(RankReport, value)
    return RankFailure(*value, rank)


def _fold(results):
    failures = [result for result in results if isinstance(result, RankFailure)]
    if failures:
        root = min(failures, key=lambda failure: failure.kind == "connection")
        others = [failure for failure in failures if failure is not root]
        return dataclasses.replace(
            root,
            collateral=tuple(other.kind for other in others),
            other_messages=tuple(f"rank {other.rank}: {other.message[-3000:]}" for other in others),
        )
    first = results[0]
    for other in results:
        assert isinstance(first, RankReport) and isinstance(other, RankReport)
        assert (other.losses, other.grad_norms) == (first.losses, first.grad_norms)
    return first


def _log(folder, rank):
    return folder / f"rank{rank}.log"


def _end_of_log(folder, rank):
    """What the rank wrote to stderr; empty if it died before it had a log."""
    log = _log(folder, rank)
    return log.read_text(errors="replace")[-3000:] if log.exists() else ""


def _rank_main(pipe, specs, folder, options):
    from trials import worker

    with _log(folder, os.environ["RANK"]).open("wb") as log:
        os.dup2(log.fileno(), 2)
    faulthandler.enable(file=2)
    if "before" in options:
        options["before"]()
    if not options.get("counts_peaks"):
        worker.MAX_PASSES = 0
    for i, spec in enumerate(specs):
        os.environ["TUNE_CLUSTER_RENDEZVOUS"] = f"file://{folder}/{i}"
        # Dynamo warns of what it does to itself while tracing.
        warnings.simplefilter("error" if spec["candidate"]["kernels"]["compile"] == "off" else "ignore")
        around = options["around"][i] if "around" in options else contextlib.nullcontext
        try:
            with around():
                report = worker.run_rank(spec, lambda phase, **_: None)
            pipe.send(("report", report))
        except BaseException as error:
            message = "".join(traceback.format_exception(error))[-3000:]
            pipe.send(("failure", (classify(error), type(error).__name__, message)))
            time.sleep(1.0)  # lets the peers report their own errors before this process is gone
            os._exit(1)
