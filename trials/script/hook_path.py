"""What goes first on the PYTHONPATH of a training program, so that it can report. Standard library only.

``api/`` holds one file, ``tune_cluster_report.py``, for programs that import it; whichever virtual environment they run
in, nothing else of ours becomes visible to them. ``hook/`` makes unchanged programs report: Python imports its
``sitecustomize`` at start, which is silent unless ``TUNE_CLUSTER_REPORT`` names a folder.
"""

from __future__ import annotations

import os
from pathlib import Path

API_FOLDER = Path(__file__).parent / "api"
HOOK_FOLDER = Path(__file__).parent / "hook"

REPORT_VARIABLE = "TUNE_CLUSTER_REPORT"
"""Folder of the lines and of ``stop``."""
COUNT_FLOPS_VARIABLE = "TUNE_CLUSTER_COUNT_FLOPS"
"""``1``: the hook counts the floating-point operations of one step."""
MEMORY_LIMIT_VARIABLE = "TUNE_CLUSTER_MEMORY_LIMIT_BYTES"
"""How much memory a process may take on a CUDA device."""


def hook_path(*, hook: bool = True) -> tuple[str, ...]:
    """Entries for the front of PYTHONPATH.

    Args:
        hook: Whether programs report without being changed; otherwise only those do that import the report API.
    """
    return (str(HOOK_FOLDER), str(API_FOLDER)) if hook else (str(API_FOLDER),)


def with_hook(python_path: str | None, *, hook: bool = True) -> str:
    """The value of PYTHONPATH for a training program.

    Args:
        python_path: What it would be otherwise; kept behind ours.
        hook: As for :func:`hook_path`.
    """
    return os.pathsep.join([*hook_path(hook=hook), *filter(None, [python_path])])
