"""Where hooks write, and the guard around each of them."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from typing import Any, Callable

FOLDER_VARIABLE = "TUNE_CLUSTER_REPORT"
MAX_MESSAGE = 1500


def _load_api() -> Any:
    """Our own copy of the report API, whichever one the program has."""
    scripts = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.path.join(scripts, "api", "tune_cluster_report.py")
    spec = importlib.util.spec_from_file_location("tune_cluster_hook.report_api", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no report API at {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_api = _load_api()
_channel = _api.Channel()
_noted: set[str] = set()


def emit(source: str, **values: Any) -> None:
    """Appends one line to this rank's file.

    Raises:
        OSError: The folder is gone, or the disk is full.
    """
    _channel.write(source, **values)


def note(text: str, source: str = "hook:torch") -> None:
    """Tells the tuner something, once."""
    if text in _noted:
        return
    _noted.add(text)
    try:
        emit(source, event="note", text=text)
    except Exception:
        _noted.add("silent")


def error(kind: str, message: str, **values: Any) -> None:
    """The error that ends this process."""
    try:
        emit("hook:torch", event="error", type=kind, message=message[:MAX_MESSAGE], pid=os.getpid(), **values)
    except Exception:
        _noted.add("silent")


def stop_at() -> int | None:
    """The last step that is wanted, None if that is not decided yet."""
    try:
        with open(os.path.join(os.environ[FOLDER_VARIABLE], "stop"), encoding="ascii") as file:
            return int(file.read(32))
    except (OSError, ValueError, KeyError):
        return None


_given_up: dict[str, bool] = {}


def guarded(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a hook: if it fails, that is noted, its result is None, and it is not called again.

    Args:
        what: Its name; hooks of one name give up together.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if what in _given_up:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as failure:
                _given_up[what] = True
                note(f"hook {what}: {type(failure).__name__}: {str(failure)[:300]}")
                return None

        return call

    return decorate


def is_compiling() -> bool:
    """Whether torch.compile is tracing this very code: hooks then are to leave no trace in the graph."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and hasattr(compiler, "is_compiling") and bool(compiler.is_compiling())
