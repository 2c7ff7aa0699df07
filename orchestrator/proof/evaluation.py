"""The user's evaluation of a finalist: a command that receives the facts and passes by exiting with 0."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.processes import python_module
from orchestrator.proof.evaluation_process import KILL_S, Ending, EvaluationOrder
from orchestrator.proof.loss_gate import trajectory
from orchestrator.proof.progress import BASELINE, gate_report, gate_runs
from orchestrator.sweep.events import Evaluation, GateReport
from orchestrator.sweep.snapshot import attempt_folder
from orchestrator.sweep.state import SweepState, Trial
from trials.files import from_json, make_private_folder, to_json, write_atomically

logger = logging.getLogger(__name__)

FACTS_PLACEHOLDER = "{facts}"


FACTS_VARIABLE = "TUNE_CLUSTER_FACTS"


FACTS_FILE, LOG_FILE = "facts.json", "output.log"


_GRACE_S = 2 * KILL_S
"""Seconds after the command's deadline before the evaluation process itself is given up."""


class EvaluationProcess:
    """One run of the command, in parallel with the controller. No process outlives its end or the controller's."""

    def __init__(self) -> None:
        self._trial = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._give_up_s = 0.0
        self._failure = ""

    def start(self, command: tuple[str, ...], facts: Mapping[str, Any], folder: Path, timeout_s: float) -> None:
        """Write ``facts``, see :func:`facts`, to ``folder`` and run ``command`` without a shell.

        The file's path replaces ``{facts}`` in any argument, and is in the variable ``TUNE_CLUSTER_FACTS``. The
        command's output goes to ``output.log`` next to it.
        """
        self._trial = facts["trial"]
        self._give_up_s = time.monotonic() + timeout_s + _GRACE_S
        path = folder.absolute() / FACTS_FILE
        order = EvaluationOrder(
            command=tuple(argument.replace(FACTS_PLACEHOLDER, str(path)) for argument in command),
            variables={FACTS_VARIABLE: str(path)},
            log=str(path.with_name(LOG_FILE)),
            timeout_s=timeout_s,
        )
        try:
            make_private_folder(folder)
            write_atomically(path, [json.dumps(facts, indent=1).encode()], mode=0o600)
            self._process = _start_process(order)
        except OSError as error:
            self._failure = f"the evaluation cannot be started: {error}"

    def poll(self) -> Evaluation | None:
        """Return its result; None while it runs. Never waits."""
        if self._process is None:
            return self._ended(Ending(exit_code=None, tail=(self._failure,)))
        if self._process.poll() is None:
            if time.monotonic() < self._give_up_s:
                return None
            self.kill()
            return self._ended(Ending(exit_code=None, tail=("it did not finish and could not be killed in time",)))
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            text = pipe.read().decode()
        _close_input(self._process)
        if self._process.returncode != 0 or not text:
            return self._ended(Ending(exit_code=None, tail=("the process that runs the evaluation was killed",)))
        return self._ended(from_json(Ending, json.loads(text)))

    def kill(self) -> None:
        """End it with everything it started, and wait for the end."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        _close_input(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _ended(self, ending: Ending) -> Evaluation:
        passed = ending.exit_code == 0
        if not passed:
            logger.warning("the evaluation of t%03d failed (exit code %s)", self._trial, ending.exit_code)
        return Evaluation(trial=self._trial, passed=passed, exit_code=ending.exit_code, output_tail=ending.tail)


def _start_process(order: EvaluationOrder) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        python_module("orchestrator.proof.evaluation_process"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # only the sweep handles Ctrl-C
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{json.dumps(to_json(order))}\n".encode())
        process.stdin.flush()
    return process


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def facts(state: SweepState, trial: int, report: GateReport | None, folder: Path | None = None) -> dict[str, Any]:
    """Return the facts about finalist ``trial`` for the command, as JSON.

    ``folder``: the sweep's; if given, the folders of the gate runs are included.
    """
    return {
        "sweep": state.sweep.sweep,
        "trial": trial,
        "candidate": to_json(state.trials[trial].candidate),
        "baseline": to_json(state.trials[BASELINE].candidate),
        "workload": to_json(state.sweep.workload),
        "gate": None if report is None else to_json(report),
        "runs": {role: _run_facts(run, folder) for role, run in gate_runs(state, trial).items()},
    }


def _run_facts(run: Trial, folder: Path | None) -> dict[str, Any]:
    """Return one gate run as JSON: what it trained, its result, and the folder of its last attempt."""
    measurement, number = run.measurement, len(run.attempts) - 1
    where = None
    if folder is not None and run.attempts:
        where = str(attempt_folder(folder, run.number, number, run.attempts[-1].token))
    return {
        "trial": run.number,
        "candidate": to_json(run.candidate),
        "trajectory": None if measurement is None else to_json(trajectory(measurement, run.candidate)),
        "folder": where,
    }


class Evaluator:
    """Runs the evaluations of a proof, one at a time. After a controller's death, the next one starts it again.

    Args:
        folder: folder for facts and output of evaluations.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: EvaluationProcess | None = None
        self._trial: int | None = None

    def poll(self, state: SweepState, trial: int) -> Evaluation | None:
        """Return the result of this finalist's evaluation; None while it runs. The first call starts it."""
        settings = state.sweep.proof.gate
        assert settings is not None and settings.command, "the sweep has no evaluation"
        if self._trial != trial:  # from a withdrawn proof
            self.close()
        if self._process is None:
            self._trial = trial
            report = gate_report(state, trial, settings)
            assert report is not None, "the gate precedes the evaluation"
            self._process = EvaluationProcess()
            self._process.start(
                settings.command,
                facts(state, trial, report, self._folder.parent),
                self._folder / f"t{trial:04d}",
                settings.command_timeout_s,
            )
        ended = self._process.poll()
        if ended is not None:
            self._process = None
        return ended

    def close(self) -> None:
        """End a running evaluation."""
        if self._process is not None:
            self._process.kill()
            self._process = None
