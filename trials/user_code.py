"""Import of functions from user code, in processes that train or inspect it. Standard library only.

Only ranks, dry runs and module inspection import user code, each in a separate process. The processes that plan and
control sweeps never do.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trials.failure import InfeasibleSpec, classify

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Syntax of a function's name: module:function."""
RESERVED = ("cluster", "configs", "orchestrator", "trials")
"""Packages of this project that would shadow user modules of the same name."""


def load_function(name: str, folder: str) -> Callable[..., Any]:
    """Import the function ``name`` (``module:function``), with ``folder`` last on the search path.

    Raises:
        InfeasibleSpec: the module or function is missing, or the import fails; the message has the place and the
        reason.
    """
    module, _, function = name.partition(":")
    if module.partition(".")[0] in RESERVED:
        raise InfeasibleSpec(f"{name}: your module must not be called {module.partition('.')[0]!r}; rename the file")
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    try:
        found = importlib.import_module(module)
    except Exception as error:
        if classify(error) != "error":
            raise
        remedy = "check workload.cwd, and that the packages it needs are installed on the nodes"
        raise InfeasibleSpec(f"cannot import {module} from {folder}: {described(error)}; {remedy}") from error
    if not callable(made := getattr(found, function, None)):
        raise InfeasibleSpec(f"{getattr(found, '__file__', module)} has no function {function!r}; check {name!r}")
    return made  # type: ignore[no-any-return]


def call_function(name: str, folder: str, *args: Any) -> Any:
    """Call the function and return its result.

    Raises:
        InfeasibleSpec: see :func:`load_function`; also if the function raises. Errors with a meaning of their own, such
            as out-of-memory errors, pass through.
    """
    function = load_function(name, folder)
    try:
        return function(*args)
    except Exception as error:
        if classify(error) != "error":
            raise
        raise InfeasibleSpec(f"{name} fails: {described(error)}; run it separately in {folder}") from error


def described(error: BaseException) -> str:
    """Format the error in one line, with the innermost place in a file."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f for f in frames if not f.filename.startswith(("<", sys.prefix)) and "importlib" not in f.filename]
    place = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"
