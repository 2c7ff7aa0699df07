"""How this program was called, so that the commands it shows can be typed as they stand."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PROGRAM = "tune-cluster"
HOME_VARIABLE = "TUNE_CLUSTER_HOME"
DEFAULT_HOME = Path("tune-cluster-runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """What to type for this program, and the options every command needs."""

    program: str = PROGRAM
    """As the shell takes it."""
    options: tuple[str, ...] = ()

    @classmethod
    def current(cls, home: Path) -> Self:
        """How this process was called: by its path where it is not on PATH, and with ``--home`` where that matters."""
        path = Path(sys.argv[0])
        is_module = path.name == "__main__.py" and path.parent == Path(__file__).parent
        own = [sys.executable, "-m", __package__ or ""] if is_module else [sys.argv[0]]
        is_on_path = shutil.which(PROGRAM) is not None or (not is_module and path.name != PROGRAM)
        is_implied = str(home) in (str(DEFAULT_HOME), os.environ.get(HOME_VARIABLE))
        return cls(
            program=PROGRAM if is_on_path else shlex.join(own), options=() if is_implied else ("--home", str(home))
        )

    def command(self, *words: str) -> str:
        """One line for the shell."""
        return " ".join([self.program, *words, *(shlex.quote(option) for option in self.options)])


PLAIN = Invocation()
"""The program as the documents call it: by name, without options."""


def user_name() -> str:
    """Whoever runs this process; containers run as users without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"
