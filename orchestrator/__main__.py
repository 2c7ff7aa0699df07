"""``python -m orchestrator``: the command line, even if the program ``tune-cluster`` is not on PATH.

Without ``-P``, Python first imports from the folder it is started in. That folder is the user's, and may contain files
with the names of our packages or of the standard library. So it is removed from the path, unless this package is in it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def leave_working_folder(path: list[str]) -> None:
    """Remove the folder this process was started in from ``path``, a ``sys.path`` as set up by ``python -m``."""
    here, own = Path.cwd().resolve(), Path(__file__).resolve().parent.parent
    if not sys.flags.safe_path and path and here not in (own, Path(sys.prefix)) and Path(path[0]).resolve() == here:
        del path[0]


def main() -> None:
    """Run the command line on this process's arguments."""
    from orchestrator.cli.main import main as command_line

    command_line(prog_name="tune-cluster")


if __name__ == "__main__":
    leave_working_folder(sys.path)
    main()
