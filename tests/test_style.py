"""Texts keep to the style page of CONTRIBUTING.md, as far as a program can check it.

``python -m tests.test_style`` prints how often each phrase still occurs.
"""

import ast
import functools
import io
import re
import tokenize

import pytest

from tests.support import ROOT

DOCUMENTS = (
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
)
PAGES = sorted(path for ending in ("*.j2", "*.js") for path in (ROOT / "orchestrator").rglob(ending))
CODE = sorted(path for package in ("orchestrator", "cluster", "trials") for path in (ROOT / package).rglob("*.py"))

# A phrase that occurs nowhere, as a pattern, and what to write for it. It grows: add a phrase once its count is zero.
TEXTS = {
    r"anew|once more": "again",
    r"mends?|mended": "fix",
    r"of old": "earlier",
    r"heed\w*|hearkens?": "respects",
    r"what it comes to": "the result",
    r"own knobs?": "custom knob",
}
"""In what users read: messages, help, pages, documents."""
COMMENTS = {
    r"anew|once more": "again",
    r"mends?|mended": "fix",
    r"of old": "earlier",
    r"heed\w*|hearkens?": "respects",
}
"""In docstrings and comments."""
NAMES = {
    r"told|said|saying|heed|anew|nobody|somebody|besides?": "a name of the field: reported, configured, requested",
}
"""As a part of names."""
SPACED_PERCENT = re.compile(r"[0-9}] %(?![\w(])")


@functools.cache
def user_texts():
    """Text by place of what users read."""
    found = {}
    for path in DOCUMENTS:
        text = re.sub(r"^```.*?^```|`[^`\n]*`|https?://\S+", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        found |= {f"{path.relative_to(ROOT)}: {line[:60]}": line for line in text.splitlines() if line.strip()}
    for path in PAGES:
        found[str(path.relative_to(ROOT))] = re.sub(r"\{#.*?#\}|^\s*//.*$", "", path.read_text("utf-8"), flags=re.MULTILINE)
    for path in CODE:
        found |= {f"{path.relative_to(ROOT)}:{line}": text for line, text in messages(path)}
    return found


def messages(path):
    """Strings of several words that are no docstrings, with their lines."""
    tree = ast.parse(path.read_text("utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value and id(node) not in bare:
            yield node.lineno, node.value


@functools.cache
def comments():
    """Text by place of docstrings and comments."""
    found = {}
    for path in CODE:
        text = path.read_text("utf-8")
        place = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                found[f"{place}:{node.lineno}"] = re.sub(r"``[^`]*``", "", node.value.value)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                found[f"{place}:{token.start[0]}"] = token.string
    return found


@functools.cache
def names():
    """The parts of the names of functions, classes, arguments and fields, by place."""
    found = {}
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
            if isinstance(name, str):
                found[f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}"] = re.sub(
                    r"_|(?<=[a-z])(?=[A-Z])", " ", name
                )
    return found


SCOPES = {"texts": (user_texts, TEXTS), "comments": (comments, COMMENTS), "names": (names, NAMES)}


def places_of(pattern, texts):
    compiled = re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE)
    return [place for place, text in texts.items() if compiled.search(text)]


@pytest.mark.parametrize("scope", SCOPES)
def test_phrases_with_a_plainer_word_are_not_used(scope):
    read, phrases = SCOPES[scope]
    found = {f"{pattern} (write: {instead})": places_of(pattern, read()) for pattern, instead in phrases.items()}
    assert {phrase: places for phrase, places in found.items() if places} == {}


def test_percentages_have_one_format():
    texts = user_texts() | comments()
    assert [place for place, text in texts.items() if SPACED_PERCENT.search(text)] == []


if __name__ == "__main__":
    for name, (read, _) in SCOPES.items():
        for word in (
            "told", "tells?", "said", "says", "asked", "asks", "given", "nobody", "somebody", "of the user's own",
            "beside", "besides", "anew", "mend", "once more", "by now", "heard", "hears", "whence", "own knobs?", "what came of",
        ):  # fmt: skip
            print(f"{name:9}{word:20}{len(places_of(word, read())):5}")
