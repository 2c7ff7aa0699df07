"""Python imports this at start when its folder is on PYTHONPATH: an unchanged training program reports, and is tuned.

Silent unless ``TUNE_CLUSTER_REPORT`` names a folder or ``TUNE_CLUSTER_KNOBS`` a file. A ``sitecustomize`` that this one
hides is run as if this one were not there. Runs in whatever Python (3.8 or later) the program has, without any package
of ours or of others.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _install() -> None:
    """Whatever goes wrong here must not keep the program from training."""
    try:
        if _HERE not in sys.path:
            sys.path.insert(0, _HERE)
        importlib.import_module("tune_cluster_hook.install").install()
    except Exception as error:
        if os.environ.get("TUNE_CLUSTER_HOOK_DEBUG"):
            print(f"tune-cluster's hook is disabled: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201


def _run_hidden() -> None:
    """Python imports one module of this name only: run the one that it would have found without us.

    Raises:
        Exception: What that module raises; Python says so and goes on, as it would have without us.
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
