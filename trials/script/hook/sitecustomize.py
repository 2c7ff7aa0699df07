"""Start-up module that Python imports from PYTHONPATH: makes an unchanged training program report, and tunes it.

It does nothing unless ``TUNE_CLUSTER_REPORT`` names a folder or ``TUNE_CLUSTER_KNOBS`` a file. It also runs the
``sitecustomize`` that it hides, if any. It supports every Python from 3.8 on, and needs no packages.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _install() -> None:
    """Install the hook; errors must not keep the program from training."""
    try:
        if _HERE not in sys.path:
            sys.path.insert(0, _HERE)
        importlib.import_module("tune_cluster_hook.install").install()
    except Exception as error:
        if os.environ.get("TUNE_CLUSTER_HOOK_DEBUG"):
            print(f"tune-cluster's hook is disabled: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201


def _run_hidden() -> None:
    """Run the module of the same name that Python would have found without this one; Python imports only one.

    Raises:
        Exception: raised by that module; Python reports it and continues, as it would have without this one.
    """
    path = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("TUNE_CLUSTER_REPORT") or os.environ.get("TUNE_CLUSTER_KNOBS"):
    _install()
if __name__ == "sitecustomize":
    _run_hidden()
