"""What a configuration function of torchtitan sets, read from its Python text: nothing of it is run.

Understood are calls of ``*.Config`` constructors with literals, functions of the same file that they start from, and
assignments like ``config.training.steps = 10``; a value that is computed stays unknown.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
"""A value that is computed, or set where it cannot be told whether."""
ELSEWHERE = "*"
"""Name in settings that start from a function of another file: what they do not set is unknown, not the default."""
MODEL = "model_spec"
ACTIVATION_CHECKPOINT = "activation_checkpoint"
_POLICIES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory-budget"}
_MAX_BYTES = 1 << 20


def find(module: str, cwd: str, python: str) -> str | None:
    """Absolute path of the file with the functions of ``--module``: below ``cwd``, or where the program's Python has
    torchtitan."""
    short = "." not in module and Path(module).name == module
    names = [f"{module}.config_registry", module]
    if short:
        names = [f"torchtitan.models.{module}.config_registry", *names]
    for root in (Path(cwd), *_site_packages(cwd, python)):
        for name in names:
            path = root / (name.replace(".", "/") + ".py")
            if path.is_file() and path.stat().st_size < _MAX_BYTES:
                return str(path)
    return None


def _site_packages(cwd: str, python: str) -> list[Path]:
    """Folders of packages of that interpreter, and of ours."""
    found = shutil.which(python, path=None) if "/" not in python else str(Path(cwd, python))
    folders = sorted(Path(found).parent.parent.glob("lib/python3*/site-packages")) if found else []
    ours = importlib.util.find_spec("torchtitan")
    return [*folders, *([Path(ours.origin).parent.parent] if ours and ours.origin else [])]


def settings_of(text: str, function: str, base: str = "") -> Mapping[str, Any] | None:
    """Value by dotted name of what a function of this text sets, which may start from functions of the text ``base``;
    None where that cannot be told."""
    try:
        nodes = [*ast.parse(base).body, *ast.parse(text).body]
    except SyntaxError:
        return None
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    return _returned(functions, function, ())


def base_of(path: str, cwd: str, python: str) -> str | None:
    """Absolute path of the registry whose functions a file imports to start from; None where it imports none."""
    try:
        nodes = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    modules = (node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module)
    names = (module for module in modules if module.endswith(".config_registry"))
    return next((found for name in names if (found := find(name, cwd, python))), None)


def _returned(functions: Mapping[str, ast.FunctionDef], name: str, above: tuple[str, ...]) -> dict[str, Any] | None:
    if name not in functions or name in above:
        return None
    variables: dict[str, Any] = {}
    for statement in functions[name].body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=variable)], value=value):
                variables[variable] = _value(value, functions, variables, (*above, name))
            case ast.Assign(targets=[ast.Attribute() as target], value=value):
                _assign(variables, ast.unparse(target), _value(value, functions, variables, (*above, name)))
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=parts)) if all(
                isinstance(target, ast.Attribute) for target in targets
            ):
                for goal, part in zip(targets, parts, strict=False):
                    _assign(variables, ast.unparse(goal), _value(part, functions, variables, (*above, name)))
            case ast.Return(value=value) if value is not None:
                found = _value(value, functions, variables, (*above, name))
                return found if isinstance(found, dict) else None
            case ast.Expr() | ast.Assert() | ast.Import() | ast.ImportFrom():
                continue
            case _:
                _forget(statement, variables)
    return None


def _value(
    node: ast.expr, functions: Mapping[str, ast.FunctionDef], variables: Mapping[str, Any], above: tuple[str, ...]
) -> Any:
    """A literal, the settings of a part by dotted name, or :data:`UNKNOWN`."""
    if isinstance(node, ast.Name):
        return variables.get(node.id, UNKNOWN)
    if not isinstance(node, ast.Call):
        try:
            return ast.literal_eval(node)
        except ValueError:
            return UNKNOWN
    called = ast.unparse(node.func)
    if called in functions and not node.args and not node.keywords:
        return _returned(functions, called, above) or UNKNOWN
    if isinstance(node.func, ast.Name) and not node.args and not node.keywords:
        return {ELSEWHERE: UNKNOWN}
    if called == "model_registry":
        return ast.literal_eval(node.args[0]) if node.args and isinstance(node.args[0], ast.Constant) else UNKNOWN
    owner = called.removesuffix(".Config")
    if owner in _POLICIES:
        return _POLICIES[owner]
    if not called.endswith("Config"):
        return UNKNOWN
    made: dict[str, Any] = {}
    for keyword in node.keywords:
        _assign_part(made, str(keyword.arg), _value(keyword.value, functions, variables, above))
    return made


def _assign(variables: dict[str, Any], target: str, value: Any) -> None:
    owner, _, path = target.partition(".")
    if isinstance(variables.get(owner), dict):
        _assign_part(variables[owner], path, value)


def _assign_part(made: dict[str, Any], path: str, value: Any) -> None:
    for known in [known for known in made if known == path or known.startswith(f"{path}.")]:
        del made[known]
    if isinstance(value, dict):
        made |= {f"{path}.{name}": part for name, part in value.items()}
    else:
        made[path] = "none" if path == ACTIVATION_CHECKPOINT and value is None else value


def _forget(statement: ast.stmt, variables: dict[str, Any]) -> None:
    """Make everything unknown that a branch or loop assigns."""
    for node in ast.walk(statement):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute):
                _assign(variables, ast.unparse(target), UNKNOWN)
            elif isinstance(target, ast.Name):
                variables[target.id] = UNKNOWN
