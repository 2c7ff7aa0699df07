"""What pydantic found wrong, told to the user: file, line, key, and how to put it right."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.config.yaml_source import KeyPath, YamlSource
from orchestrator.errors import ConfigError
from trials.secrets import is_secret_name, is_secret_option, literal_secret, redactor, variable_in

SEE_DOCS = "See docs/sweep-file.md."
_REMEDY = "Keep secrets in the environment, not in files."
_REMEDY_COMMAND = (
    "Keep it in an environment variable, name that in env_pass, and have the program read it: every user of the host "
    "can see command lines."
)


def refuse_secrets(source: YamlSource) -> None:
    """Raise a :class:`ConfigError`, which does not repeat the secret, where the file seems to hold one.

    That is a value or key which has the form of a credential or holds what a secret variable of this process holds,
    anything under a key named like a secret, or the value of an option named like one in a command.
    """
    redact = redactor()
    for path, value in _leaves(source.data, ()):
        for i, part in enumerate(path):
            if isinstance(part, str) and redact(part) != part:
                raise source.error(path[:i], "a key holds a credential", _REMEDY)
            if isinstance(part, str) and _names_a_secret(path[:i], part) and value is not None:
                raise source.error(path[: i + 1], "secrets do not belong here", _REMEDY)
        if isinstance(value, str) and redact(value) != value:
            raise _holds_credential(source, path, value)
    for path, words, is_list in _commands(source.data, ()):
        if (place := literal_secret(words)) is not None:
            option = words[place].partition("=")[0] if words[place].startswith("-") else words[place - 1]
            message = f"the value of {option} is a secret written out"
            raise source.error((*path, place) if is_list else path, message, _REMEDY_COMMAND)


def _holds_credential(source: YamlSource, path: KeyPath, value: str) -> ConfigError:
    variable = variable_in(value)
    if variable is None:
        return source.error(path, "the value holds a credential", _REMEDY)
    remedy = f"{_REMEDY} If {variable} is no secret, set it under env instead of env_pass."
    return source.error(
        path,
        f"the value holds that of the environment variable {variable}, which is treated as a secret",
        _REMEDY if is_secret_name(variable) else remedy,
    )


def _commands(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, list[str], bool]]:
    """Whatever may be a command line, as words: lists of scalars, and texts with options; whether it is a list."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _commands(item, (*path, key))
    elif isinstance(value, list):
        if value and not any(isinstance(item, dict | list) for item in value):
            yield path, [str(item) for item in value], True
        for i, item in enumerate(value):
            yield from _commands(item, (*path, i))
    elif isinstance(value, str) and " -" in f" {value}" and " " in value.strip():
        yield path, value.split(), False


def _names_a_secret(path: KeyPath, name: str) -> bool:
    """Whether the key ``name`` below ``path`` is called like a secret; variables are so in more ways than keys."""
    is_variable = path[-1:] == ("env",)
    return is_secret_option(name) or (is_variable and is_secret_name(name))


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """All leaves with their paths, empty mappings and lists among them: their keys count."""
    if isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def to_config_error(error: ValidationError, source: YamlSource, model: type[BaseModel]) -> ConfigError:
    """The first problem of the file, in the order of lines, carrying the others."""
    found: dict[tuple[int, str, str], ConfigError] = {}
    for details in error.errors(include_url=False):
        one = _translate(details, source, model)
        found.setdefault((one.line or 0, one.key or "", one.message), one)
    first, *others = (found[order] for order in sorted(found))
    return ConfigError(
        first.message, file=first.file, line=first.line, key=first.key, remedy=first.remedy, others=others
    )


def _translate(details: ErrorDetails, source: YamlSource, model: type[BaseModel]) -> ConfigError:
    kind, context = details["type"], details.get("ctx", {})
    path = _in_file(details["loc"], source)
    if kind == "sweep_fault":
        path, _ = source.locate(path)
        key = [int(part) if part.isdigit() else part for part in context["key"].split(".") if part]
        return source.error((*path, *key), context["text"], context["remedy"])
    if kind == "missing":
        return source.error(path, "missing", f"Add {path[-1]!r}.")
    if kind == "extra_forbidden":
        return source.error(path, "unknown key", _nearest(str(path[-1]), _keys_at(model, details["loc"][:-1])))
    if kind == "union_tag_not_found":
        return source.error((*path, "kind"), "missing", "Add 'kind'.")
    if kind == "union_tag_invalid":
        message = f"expected {context['expected_tags']}, got {_show(context['tag'])}"
        return source.error((*path, "kind"), message, "Use one of these.")
    path, _ = source.locate(path)
    return source.error(path, *_describe(details))


def _in_file(path: KeyPath, source: YamlSource) -> KeyPath:
    """``path`` as the file has it: without the kinds of workloads, models and data that pydantic puts after the section
    they stand in, and without the places of single values that stand for a list of one."""
    if path[:1] == ("workload",):
        path = (*path[:1], *path[2:])
    if path[:2] in (("workload", "model"), ("workload", "data")):
        path = (*path[:2], *path[3:])
    kept: KeyPath = ()
    for part in path:
        if isinstance(part, str) or (*kept, part) in source.lines:
            kept = (*kept, part)
    return kept


def _nearest(key: str, valid: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key.lower(), valid, n=1, cutoff=0.5)
    suggestion = f"Did you mean {close[0]!r}? " if close else ""
    return f"{suggestion}Keys here: {', '.join(valid)}."


def _keys_at(model: type[BaseModel], path: KeyPath) -> tuple[str, ...]:
    """Keys allowed in the section at ``path``, which may pass through lists and name kinds."""
    sections = [model]
    for part in path:
        fields = [f for s in sections for name, f in s.model_fields.items() if part in (name, f.alias)]
        if fields:
            sections = list(_sections_in(fields[0].annotation)) or sections
        elif isinstance(part, str):
            sections = [s for s in sections if _kind_of(s) == part] or sections
    return tuple(field.alias or name for name, field in sections[0].model_fields.items())


def _kind_of(section: type[BaseModel]) -> str | None:
    if (tag := getattr(section, "TAG", None)) is not None:
        return str(tag)
    kind = section.model_fields.get("kind")
    return next(iter(typing.get_args(kind.annotation)), None) if kind is not None else None


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes inside a type such as ``Annotated[tuple[Section, ...]] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections_in(argument)


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def _describe(details: ErrorDetails) -> tuple[str, str]:
    """Message and remedy of one of pydantic's own errors."""
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    shown = _show(value)
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{shown} is out of range", f"Use {words} {context[name]}."
    if kind == "literal_error":
        return f"expected {context['expected']}, got {shown}", "Use one of these."
    if kind not in _EXPECTED:
        return f"{details['msg'][:1].lower()}{details['msg'][1:]}, got {shown}", SEE_DOCS
    message = f"expected {_EXPECTED[kind]}, got {shown}"
    if kind == "string_type":
        return message, "Put text in quotes."
    return message, "Write it without quotes." if _is_quoted(value) else SEE_DOCS


def _is_quoted(value: Any) -> bool:
    """Whether text would be a number or a truth value without its quotes."""
    return isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?|true|false", value.strip()) is not None


def _show(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
