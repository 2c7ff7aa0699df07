"""Records which options the program reads: arguments of argparse, keys of OmegaConf, environment variables.

An option that is never read has no effect. One that is read may still have none, because programs print and log all of
theirs. If a program takes all options at once, as ``vars(args)`` does, its use of each is unknown.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import Any, Callable, Iterator

from .steps import emit, guarded

ARGPARSE, OMEGACONF, ENVIRONMENT = "argparse", "omegaconf", "environment"
AT_ONCE = "*"
"""Name of an option that stands for reading all options of a kind together."""
VARIABLES = "TUNE_CLUSTER_VARIABLES"
"""Names of the variables that the trial sets for the program to read, separated by commas."""
_PREFIXES_ONLY = re.compile(r"[\\/](?:tqdm|torch)[\\/]")
"""Packages that search all variables for those with their own prefix."""
MAX_OPTIONS = 400
MAX_NAME = 200
_LIBRARY = os.path.dirname(os.__file__)
_HERE = os.path.dirname(__file__)
_SCRIPTS = os.path.dirname(os.path.dirname(_HERE))
_GO_BETWEENS = (_HERE, "<frozen ", *(os.path.join(_LIBRARY, name) for name in ("os.py", "_collections_abc.py")))
"""Modules that access options on behalf of their callers."""


class WatchedOptions:
    """Options that the program declares, and those that it has read so far."""

    def __init__(self) -> None:
        self._declared: dict[tuple[str, str], dict[str, Any]] = {}
        self._read: set[tuple[str, str]] = set()
        self._reported = 0

    def declare(self, kind: str, name: str, value: Any, flags: Any = ()) -> None:
        """Record an option that the program could read. Only values that are numbers or truth values are kept; others
        may be secrets."""
        if len(self._declared) < MAX_OPTIONS:
            value = value if isinstance(value, (bool, int, float)) else None
            self._declared[kind, name] = {"kind": kind, "name": name[:MAX_NAME], "value": value, "flags": list(flags)}

    def knows(self, kind: str, name: str) -> bool:
        return (kind, name) in self._declared

    def has_read(self, kind: str, name: str) -> bool:
        return (kind, name) in self._read

    def read(self, kind: str, name: str = AT_ONCE) -> None:
        """Record that an option was read."""
        if len(self._read) < 4 * MAX_OPTIONS:
            self._read.add((kind, name))

    def report(self, source: str) -> bool:
        """Write what is known, if that is more than last time; return whether it was."""
        seen = len(self._declared) + len(self._read)
        if seen == self._reported:
            return False
        self._reported = seen
        self._write(source)
        return True

    @guarded("options")
    def _write(self, source: str) -> None:
        read, declared = self._read.copy(), self._declared.copy()  # other threads continue reading
        at_once = {kind for kind, name in read if name == AT_ONCE}
        options = [{**one, "is_read": key in read, "at_once": key[0] in at_once} for key, one in declared.items()]
        if options:
            emit(source, event="options", options=options)


OPTIONS = WatchedOptions()


def _reader() -> Any:
    """Return the code that reads an option, without go-betweens."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_GO_BETWEENS):
        frame = frame.f_back
    return frame.f_code


# ---- argparse: attributes of its Namespace


def argparse(module: Any) -> None:
    """Hook for ``argparse``. It watches the class itself, so that copies and pickles of a Namespace stay unchanged;
    copying one does not count as reading."""
    namespace, parser = module.Namespace, module.ArgumentParser
    parse, own = parser.parse_known_args, module.__file__

    copied: list[bool] = []

    def read(self: Any, name: str) -> Any:
        is_option = name[:1] != "_" or (name == "__dict__" and not copied and object.__getattribute__(self, name))
        if is_option and not sys._getframe(1).f_code.co_filename.startswith((own, _HERE)):
            OPTIONS.read(ARGPARSE, AT_ONCE if name == "__dict__" else name)
        return object.__getattribute__(self, name)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        copied.append(True)
        try:
            return object.__reduce_ex__(self, protocol)
        finally:
            copied.pop()

    @functools.wraps(parse)
    def parse_known_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = parse(self, *args, **kwargs)
        _declare(self, result[0], namespace)
        return result

    namespace.__getattribute__, namespace.__reduce_ex__ = read, reduce_ex
    parser.parse_known_args = parse_known_args


@guarded("arguments")
def _declare(parser: Any, result: Any, namespace: type) -> None:
    if type(result) is not namespace:  # a program's own class may use its attributes in unobserved ways
        OPTIONS.read(ARGPARSE)
        return
    values = object.__getattribute__(result, "__dict__")
    for action in _actions(parser):
        if action.dest in values:
            OPTIONS.declare(ARGPARSE, action.dest, values[action.dest], action.option_strings)


def _actions(parser: Any) -> Iterator[Any]:
    """Yield the actions of a parser and of its subparsers."""
    for action in parser._actions:
        yield action
        choices = getattr(action, "choices", None)
        for other in choices.values() if isinstance(choices, dict) else ():
            yield from _actions(other) if hasattr(other, "_actions") else ()


# ---- the environment: only reads by Python code are visible, not those by C libraries


def environment() -> None:
    """Watch ``os.environ``: the trial's variables, and those that the program's own files read."""
    for name in filter(None, os.environ.get(VARIABLES, "").split(",")):
        OPTIONS.declare(ENVIRONMENT, name, None)
    kind: Any = type(os.environ)
    get, iterate = kind.__getitem__, kind.__iter__

    def getitem(self: Any, key: Any) -> Any:
        _read_variable(self, key)
        return get(self, key)

    def iterated(self: Any) -> Any:
        if not _PREFIXES_ONLY.search(_reader().co_filename):
            OPTIONS.read(ENVIRONMENT)
        return iterate(self)

    kind.__getitem__, kind.__iter__ = getitem, iterated


@guarded("variables")
def _read_variable(environ: Any, key: Any) -> None:
    if not isinstance(key, str) or OPTIONS.has_read(ENVIRONMENT, key):
        return
    OPTIONS.read(ENVIRONMENT, key)
    if not OPTIONS.knows(ENVIRONMENT, key) and _is_own(_reader().co_filename):
        raw = environ._data.get(environ.encodekey(key), b"")
        OPTIONS.declare(ENVIRONMENT, key, int(raw) if raw.isdigit() and len(raw) < 10 else None)


def _is_own(path: str) -> bool:
    """Whether a file belongs neither to Python nor to a package nor to this one."""
    return (
        not path.startswith((_LIBRARY, _SCRIPTS, "<")) and "site-packages" not in path and "dist-packages" not in path
    )


# ---- OmegaConf, and with it Hydra: keys of its mappings


def omegaconf(module: Any) -> None:
    """Hook for ``omegaconf.dictconfig``."""
    kind = module.DictConfig
    packages = (
        os.path.dirname(module.__file__),
        os.path.join(os.path.dirname(os.path.dirname(module.__file__)), "hydra"),
    )

    def keyed(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(self: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            value = method(self, key, *args, **kwargs)
            if not isinstance(value, kind) and not sys._getframe(1).f_code.co_filename.startswith(packages):
                _read_key(self, key)
            return value

        return read

    def whole(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _takes_all(_reader(), packages):
                OPTIONS.read(OMEGACONF)
            return method(self, *args, **kwargs)

        return read

    for name in ("__getattr__", "__getitem__", "get"):
        setattr(kind, name, keyed(getattr(kind, name)))
    for name in ("items", "items_ex", "keys", "__iter__"):
        setattr(kind, name, whole(getattr(kind, name)))


def _takes_all(code: Any, packages: tuple[str, ...]) -> bool:
    """Whether code that takes a whole mapping is the program's own, or builds objects from mappings for it."""
    return code.co_name in ("instantiate", "to_container", "to_object") or not code.co_filename.startswith(packages)


@guarded("keys")
def _read_key(config: Any, key: Any) -> None:
    root = config._get_root()
    if id(root) not in _roots:
        _roots.add(id(root))
        for name, value in _leaves(root, ""):
            OPTIONS.declare(OMEGACONF, name, value)
    OPTIONS.read(OMEGACONF, str(config._get_full_key(key)))


_roots: set[int] = set()


def _leaves(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield scalars of nested mappings by dotted name, with interpolations unresolved."""
    for key, node in config._content.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        content = getattr(node, "_content", None)
        if isinstance(content, dict):
            yield from _leaves(node, name)
        elif not isinstance(content, list):
            yield name, getattr(node, "_val", None)
