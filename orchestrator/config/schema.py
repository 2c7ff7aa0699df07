"""JSON Schema and reference table of sweep files, made from the models, and the table of the short notation.

``python -m orchestrator.config.schema`` rewrites ``configs/sweeps/sweep.schema.json`` and the tables in
``docs/sweep-file.md`` and ``docs/knobs.md``; tests fail when they are out of date.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs import CONFIGS
from orchestrator.config.sweep import SweepSpec
from orchestrator.space.notation import notation_table

SCHEMA_FILE = "configs/sweeps/sweep.schema.json"
DOCS_FILE = "docs/sweep-file.md"
NOTATION_FILE = "docs/knobs.md"
HUGE = 10**5
"""Upper bounds this large are guards; the table omits them."""
TABLE_START = "<!-- keys: written by python -m orchestrator.config.schema -->\n"
TABLE_END = "<!-- end of keys -->\n"
SIGNS_START = "<!-- signs: written by python -m orchestrator.config.schema -->\n"
SIGNS_END = "<!-- end of signs -->\n"


def sweep_schema() -> dict[str, Any]:
    """The JSON Schema of a sweep file, for editors (``# yaml-language-server: $schema=``)."""
    schema = SweepSpec.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "tune-cluster sweep"}


def schema_text() -> str:
    return json.dumps(sweep_schema(), indent=2) + "\n"


def key_table() -> str:
    """One Markdown table per section: every key with type, default and meaning. The keys of a section that only one
    other section contains stand in that one's table, with dotted names."""
    return "\n".join(_tables(sweep_schema())) + "\n"


def with_table(docs: str) -> str:
    """``docs`` with the table between the markers updated."""
    return _between(docs, TABLE_START, key_table(), TABLE_END)


def with_signs(docs: str) -> str:
    """``docs`` with the table of the short notation updated."""
    return _between(docs, SIGNS_START, notation_table(), SIGNS_END)


def _between(docs: str, start: str, table: str, end: str) -> str:
    before, rest = docs.split(start)
    _, after = rest.split(end)
    return f"{before}{start}\n{table}\n{end}{after}"


def _tables(schema: dict[str, Any]) -> Iterator[str]:
    definitions = schema["$defs"]
    yield from _table("Top level", schema, definitions, {})
    paths: dict[int, list[str]] = {}
    sections: dict[int, dict[str, Any]] = {}
    for path, definition in _sections(schema, definitions, ""):
        paths.setdefault(id(definition), []).append(path)
        sections[id(definition)] = definition
    num_alike = collections.Counter(found[0] for found in paths.values())
    inner = {key: found[0] for key, found in paths.items() if _is_inner(found, num_alike)}
    for key, definition in sections.items():
        if key in inner:
            continue
        yield ""
        title = ", ".join(f"`{path}`" for path in dict.fromkeys(paths[key]))
        node = _without_knobs(definition, definitions)
        if num_alike[paths[key][0]] > 1:
            title += _kind(definition["properties"])
            node = {**node, "properties": {name: value for name, value in node["properties"].items() if name != "kind"}}
        yield from _table(title, node, definitions, inner, paths[key][0])


def _is_inner(paths: list[str], num_alike: collections.Counter[str]) -> bool:
    """Whether a section is part of one other section, and the only one of its kind there."""
    return len(paths) == 1 and "." in paths[0] and num_alike[paths[0]] == 1


def _without_knobs(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The section ``space`` without the knobs, which the table of ``baseline`` describes."""
    if node is not definitions["SpaceSection"]:
        return node
    knobs = definitions["BaselineSection"]["properties"].keys() - {"own"}
    rest = {key: value for key, value in node["properties"].items() if key not in knobs}
    return {
        **node,
        "properties": rest,
        "description": f"{node['description']} The knobs are those of `baseline`; also:",
    }


def _kind(properties: dict[str, Any]) -> str:
    """What distinguishes a section from others at the same path."""
    if "kind" in properties:
        return f", `kind: {properties['kind']['const']}`"
    return ", your training program" if "recipe" in properties else ", a built-in model"


def _sections(node: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Sections below ``node`` with their dotted paths; the mappings of knobs are described once, under ``baseline``."""
    for key, value in node["properties"].items():
        if prefix.startswith("space.") and prefix + key != "space.inside":  # the knobs of the baseline
            continue
        for section in _sections_of(value, definitions):
            yield prefix + key, section
            yield from _sections(section, definitions, f"{prefix}{key}.")


def _sections_of(value: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """The sections that a key may hold."""
    text = json.dumps(_without_lists(value))
    return [section for name, section in definitions.items() if f'/{name}"' in text]


def _without_lists(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key != "items"}


def _table(
    title: str, node: dict[str, Any], definitions: dict[str, Any], inner: dict[int, str], path: str = ""
) -> Iterator[str]:
    yield f"### {title}"
    yield ""
    description = "" if title == "Top level" else node.get("description", "").replace("\n", " ")
    if description:
        yield description
    if not node["properties"]:
        return
    if description:
        yield ""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    yield from _rows(title, node, definitions, inner, path, "")


def _rows(
    title: str, node: dict[str, Any], definitions: dict[str, Any], inner: dict[int, str], path: str, prefix: str
) -> Iterator[str]:
    """One row per key, each followed by the rows of the section inside it; ``inner`` has the paths of such sections."""
    for key, value in node["properties"].items():
        place = f"{path}.{key}"
        sections = [section for section in _sections_of(value, definitions) if inner.get(id(section)) == place]
        default = "required" if key in node.get("required", []) else _default(value, title)
        meaning = _description(value, definitions)
        more = [text for section in sections if (text := section.get("description", "")) not in meaning]
        yield f"| `{prefix}{key}` | {_type(value)} | {default} | {_cell(' '.join([meaning, *more]))} |"
        for section in sections:
            yield from _rows("", section, definitions, inner, place, f"{prefix}{key}.")


def _description(value: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Description of a key, or of its section if pydantic omits an identical one."""
    section = definitions.get(value.get("$ref", "").rpartition("/")[2], {})
    return str(value.get("description") or section.get("description", ""))


def _default(value: dict[str, Any], title: str) -> str:
    if "default" not in value:
        return ""
    default = value["default"]
    if isinstance(default, dict):
        return "see below" if default else "none"
    if default is None and {"type": "null"} not in value.get("anyOf", []):
        return {"`space`": "the baseline's", "`workload`": "by model"}.get(title.partition(",")[0], "none")
    return f"`{json.dumps(default)}`"


def _type(value: dict[str, Any]) -> str:
    """Short words for a type: ``integer ≥ 1 or list``."""
    if options := value.get("anyOf") or value.get("oneOf"):
        kinds = [_type(option) for option in options]
        return " or ".join(dict.fromkeys(kind for kind in " or ".join(kinds).split(" or ")))
    if "$ref" in value:
        return "mapping"
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{json.dumps(option).strip(chr(34))}`" for option in value["enum"])
    if value.get("type") == "array":
        return "list of mappings" if "$ref" in value.get("items", {}) and "minItems" not in value else "list"
    if value.get("type") == "object":
        return "mapping"
    return _scalar(value)


def _scalar(value: dict[str, Any]) -> str:
    names = {"integer": "integer", "number": "number", "string": "string", "boolean": "boolean"}
    kind = names.get(value.get("type", ""), str(value.get("type", "any")))
    bounds = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    shown = [f"{sign} {value[name]:g}" for name, sign in bounds if name in value and value[name] < HUGE]
    return " ".join([kind, ", ".join(shown)]).strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write(root: Path) -> None:
    """Write schema and tables into the repository at ``root``."""
    (root / SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")
    for name, brought_up_to_date in ((DOCS_FILE, with_table), (NOTATION_FILE, with_signs)):
        docs = root / name
        docs.write_text(brought_up_to_date(docs.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(CONFIGS.parent)
