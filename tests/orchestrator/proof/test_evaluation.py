"""The user's evaluation: real commands, a real controller that is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.proof.evaluation import EvaluationProcess, facts
from orchestrator.proof.loss_gate import ROUNDING
from orchestrator.proof.progress import gate_report
from orchestrator.sweep.events import Evaluation, Event, FinalistsChosen, FinishCause, GateRun, GateSettings
from orchestrator.sweep.fold import fold
from orchestrator.sweep.state import SweepState, attempt_id
from tests.support.story import created, ended, launched, measured, proposed
from trials.files import to_json
from trials.spec import Candidate

FACTS = {"trial": 4, "speedup": 1.25}
SECRET = "hunter2-hunter2"


def run(
    command: list[str], folder: Path, timeout_s: float = 60.0, given_facts: dict[str, Any] | None = None
) -> Evaluation:
    process = EvaluationProcess()
    process.start(tuple(command), given_facts or FACTS, folder, timeout_s)
    return wait_for(process.poll)


def wait_for(look: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    give_up_s = time.monotonic() + timeout_s
    while (found := look()) in (None, False):
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
    return found


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_gets_the_facts_and_passes_by_exiting_with_0(tmp_path: Path) -> None:
    code = (
        "import json, os, sys\n"
        "reported = json.load(open(sys.argv[1]))\n"
        "assert sys.argv[1] == os.environ['TUNE_CLUSTER_FACTS'] and sys.argv[2] == '--of=' + sys.argv[1]\n"
        "assert sys.stdin.read() == ''\n"
        "assert os.getsid(0) == os.getpid()\n"
        "print('speed-up', reported['speedup'])"
    )
    found = run(python(code, "{facts}", "--of={facts}"), tmp_path / "t0004")
    assert found == Evaluation(trial=4, passed=True, exit_code=0, output_tail=("speed-up 1.25",))
    assert (tmp_path / "t0004" / "output.log").read_text() == "speed-up 1.25\n"


def test_fails_by_its_exit_code_and_by_a_signal(tmp_path: Path) -> None:
    found = run(python("import sys; print('perplexity 12.5'); sys.exit('too high')"), tmp_path)
    assert (found.passed, found.exit_code) == (False, 1)
    assert found.output_tail == ("perplexity 12.5", "too high")
    assert run(python("import os; os.kill(os.getpid(), 9)"), tmp_path).exit_code == -9


@pytest.mark.parametrize(("program", "words"), [("./no-such", "No such file"), ("/", "Permission denied")])
def test_fails_where_it_cannot_be_started(program: str, words: str, tmp_path: Path) -> None:
    found = run([program], tmp_path)
    assert (found.passed, found.exit_code) == (False, None)
    assert len(found.output_tail) == 1 and program in found.output_tail[0] and words in found.output_tail[0]


def test_fails_where_its_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run(["true"], tmp_path / "file" / "t0004")
    assert not found.passed and "Not a directory" in found.output_tail[0]


def test_arguments_are_not_interpreted_by_a_shell(tmp_path: Path) -> None:
    found = run(["echo", "$HOME", "; touch x", "{facts}s", "{other}"], tmp_path)
    assert found.output_tail == (f"$HOME ; touch x {tmp_path}/facts.jsons {{other}}",)


STRAY = (
    "import os, subprocess, sys, time\n"
    "stray = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    "print(stray.pid, os.getpid(), flush=True)\n"
    "{then}"
)
"""Starts a process that detaches itself."""


def stray_pids(log: Path) -> list[int]:
    return [int(word) for word in log.read_text().split()[:2]] if log.exists() else []


def test_is_killed_at_its_deadline_with_its_children(tmp_path: Path) -> None:
    found = run(python(STRAY.format(then="time.sleep(1000)")), tmp_path, timeout_s=1.0)
    assert (found.passed, found.exit_code) == (False, None)
    assert found.output_tail[-1] == "killed: not finished after 1 s"
    assert not any(map(is_alive, stray_pids(tmp_path / "output.log")))


def test_leaves_nothing_behind(tmp_path: Path) -> None:
    assert run(python(STRAY.format(then="")), tmp_path).passed
    assert not any(map(is_alive, stray_pids(tmp_path / "output.log")))


def test_is_killed_on_request(tmp_path: Path) -> None:
    process = EvaluationProcess()
    process.start(tuple(python(STRAY.format(then="time.sleep(1000)"))), FACTS, tmp_path, 1000.0)
    pids = wait_for(lambda: stray_pids(tmp_path / "output.log") or None)
    process.kill()
    process.kill()
    assert not any(map(is_alive, pids))


def test_ends_with_its_controller(tmp_path: Path) -> None:
    controller = (
        "import sys, time, pathlib\n"
        "from orchestrator.proof.evaluation import EvaluationProcess\n"
        "process = EvaluationProcess()\n"
        f"process.start((sys.executable, '-c', sys.argv[1]), {FACTS}, pathlib.Path(sys.argv[2]), 1000.0)\n"
        "time.sleep(1000)"
    )
    stray = STRAY.format(then="time.sleep(1000)")
    with subprocess.Popen(python(controller, stray, str(tmp_path))) as running:
        pids = wait_for(lambda: stray_pids(tmp_path / "output.log") or None)
        assert len(pids) == 2 and all(map(is_alive, pids))
        os.kill(running.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(is_alive, pids)))
    assert run(["echo", "again"], tmp_path).output_tail == ("again",)  # as the next controller begins it


def test_sees_no_secrets_of_the_controller_and_shows_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "for-the-controller-only")
    monkeypatch.setenv("TUNE_CLUSTER_LEASE", "1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    show = "import os; print({n: v for n, v in os.environ.items() if n.startswith(('MLFLOW', 'TUNE', 'AWS'))})"
    found = run(python(show), tmp_path)
    (line,) = found.output_tail
    assert "AWS_SECRET_ACCESS_KEY" in line and "TUNE_CLUSTER_FACTS" in line
    assert "MLFLOW" not in line and "LEASE" not in line
    assert SECRET not in line and SECRET not in (tmp_path / "output.log").read_text()
    assert (tmp_path / "output.log").stat().st_mode & 0o077 == 0


def test_much_output_is_cut(tmp_path: Path) -> None:
    found = run(python("for i in range(20000): print(i, 'x' * 1000)"), tmp_path)
    assert found.passed and [line.split()[0] for line in found.output_tail] == [str(n) for n in range(19980, 20000)]
    assert max(map(len, found.output_tail)) <= 300


def story() -> SweepState:
    """A baseline and a finalist that trained for the gate."""
    searched = [proposed(0), launched(0), ended(0, measured()), proposed(1), launched(1), ended(1, measured(0.05))]
    chosen = FinalistsChosen(at_s=4.0, finalists=(1,), reason="test", first_check=2, cause=FinishCause.BUDGET_TRIALS)
    twin = GateRun(of=0, role="twin", perturbation=ROUNDING["float32"])
    checks = (GateRun(of=0, role="baseline"), GateRun(of=1, role="finalist"), twin)
    trained: list[Event] = []
    for trial, check in enumerate(checks, start=2):
        proposal = dataclasses.replace(proposed(trial, Candidate(micro_batch_size=check.of + 1)), check=check)
        trained += [dataclasses.replace(proposal, origin="check"), launched(trial), ended(trial, measured())]
    return fold([created(), *searched, chosen, *trained])


def test_facts_describe_the_findings(tmp_path: Path) -> None:
    state = story()
    report = gate_report(state, 1, GateSettings(num_steps=3))
    assert report is not None and report.passed
    given_facts = facts(state, 1, report, tmp_path)
    assert json.loads(json.dumps(given_facts)) == given_facts
    assert given_facts["candidate"]["micro_batch_size"] == 2 and given_facts["baseline"]["micro_batch_size"] == 1
    assert given_facts["workload"] == to_json(state.sweep.workload) and given_facts["gate"] == to_json(report)
    run_of = given_facts["runs"]["finalist"]
    assert run_of["trial"] == 3 and run_of["trajectory"]["losses"] == [5.5, 5.4, 5.3]
    assert run_of["folder"] == str(tmp_path / "attempts" / attempt_id(3, 0, "token-3-0"))
    assert set(given_facts["runs"]) == {"baseline", "finalist", "twin"}
