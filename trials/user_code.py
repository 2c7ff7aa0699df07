"""Finds functions in the user's code, for processes that train or count it. Standard library only.

Only ranks, dry runs and the counting of a module do so, each in a process of its own: nothing of the user's is ever
imported where sweeps are planned and decided.
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
"""How a function is named: module:function."""
RESERVED = ("cluster", "configs", "orchestrator", "trials")
"""Names of packages that would be found in the user's stead."""


def load_function(name: str, folder: str) -> Callable[..., Any]:
    """The function that ``name`` (``module:function``) stands for, from ``folder`` where no other place has the module.

    Raises:
        InfeasibleSpec: there is no such module or function, or importing it fails; says where and why.
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
    """What the function gives for these arguments.

    Raises:
        InfeasibleSpec: as :func:`load_function`, or the function raises; errors that mean something by themselves, like
            that of missing memory, pass.
    """
    function = load_function(name, folder)
    try:
        return function(*args)
    except Exception as error:
        if classify(error) != "error":
            raise
        raise InfeasibleSpec(f"{name} fails: {described(error)}; run it separately in {folder}") from error


def described(error: BaseException) -> str:
    """The error in one line, with the innermost place in a file."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f for f in frames if not f.filename.startswith(("<", sys.prefix)) and "importlib" not in f.filename]
    place = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"
