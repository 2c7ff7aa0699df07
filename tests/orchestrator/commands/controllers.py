"""A stand-in for a controller, to be supervised: ``python -m tests.orchestrator.commands.controllers FOLDER WORD...``

The n-th one that a supervisor starts obeys the n-th word, and has an entry in FOLDER/started with its pid.
"""

import os
import signal
import sys
import time
from pathlib import Path

from orchestrator.commands.supervisor import supervised_run
from orchestrator.process_support import interruptible
from orchestrator.sweep.events import ControllerStarted, FinishCause, SweepFinished
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from tests.support.story import created, ended, launched, measured, proposed


def take(ledger: Ledger) -> None:
    """Begin an epoch of the sweep."""
    state = fold(ledger.events())
    if state.created is None:
        ledger.append(created())
    ledger.append(ControllerStarted(at_s=1.0, epoch=state.epoch + 1, pid=os.getpid(), host="here"))


def measure(ledger: Ledger) -> None:
    """Bring one trial to its end."""
    number = len(fold(ledger.events()).trials)
    for event in (proposed(number), launched(number), ended(number, measured())):
        ledger.append(event)


def obey(word: str, ledger: Ledger) -> int:
    """Untaken words act before the controller has taken the sweep."""
    if not word.startswith("untaken-"):
        take(ledger)
    match word.removeprefix("untaken-"):
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "measured-killed":
            measure(ledger)
            os.kill(os.getpid(), signal.SIGKILL)
        case "failed":
            ledger.append(SweepFinished(at_s=2.0, status="failed", reason="test", cause=FinishCause.FAULTS_IN_A_ROW))
            return 1
        case "wait":
            with interruptible():
                (ledger.folder / "waiting").touch()
                try:
                    time.sleep(120)
                except KeyboardInterrupt:
                    with (ledger.folder / "interrupted").open("a") as file:
                        file.write("once\n")
                    time.sleep(0.5)  # a second signal would come now
            return 130
        case code:
            return int(code)
    return 0


def main(folder: str, *words: str) -> int:
    run = supervised_run()
    with (Path(folder) / "started").open("a") as file:
        file.write(f"{os.getpid()}\n")
    with Ledger(Path(folder)) as ledger, ledger.hold():
        return obey(words[run - 1], ledger)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
