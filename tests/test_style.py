"""Texts keep to the style page of CONTRIBUTING.md, as far as a program can check it.

``python -m tests.test_style PHRASE...`` prints how often patterns occur, by scope.
"""

import ast
import functools
import io
import re
import sys
import tokenize

import pytest

from tests.support import ROOT

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "measured" not in path.parts),
]
PAGES = sorted(path for ending in ("*.j2", "*.js") for path in (ROOT / "orchestrator").rglob(ending))
CODE = sorted(path for package in ("orchestrator", "cluster", "trials") for path in (ROOT / package).rglob("*.py"))

# Phrases that occur nowhere, as patterns, and what to write instead. A phrase is added once its count is zero.
COMMENTS = {
    r"anew|once more": "again",
    r"mends?|mended": "fix",
    r"of old": "earlier",
    r"heed\w*|hearkens?|hears?|heard": "receives, respects",
    r"nobody (?:knows|looks|said)": "unknown, not checked, not set",
    r"somebody": "a user, another process, or the passive",
    r"of the user's own": "a user's, custom",
    r"one's own|own knobs?": "custom",
    r"besides|by now|whence": "in addition, so far, from where",
    r"not told from|for sure|to be had|amiss": "not distinguishable from, certainly, available, wrong",
    r"simply|obviously|in order to|utili[sz]e\w*|leverag(?:e|es|ed|ing)": "nothing, to, use",
}
"""In docstrings and comments."""
TEXTS = COMMENTS | {
    r"said": "configured, reported, recorded",
    r"nobody": "unknown, or the passive",
    r"by force": "with --force",
    r"our|ours": "tune-cluster's, the built-in runner's",
    r"go(?:es)? without|leaves out": "disables, omits",
    r"stays? as (?:it is|they are)": "is unchanged",
}
"""In what users read, too: messages, help, pages, documents."""
NAMES = {
    r"told|said|saying|heed|anew|nobody|somebody|besides?": "reported, recorded, configured, requested, unknown",
}
"""As a part of names."""
SPACED_PERCENT = r"[0-9}] %(?![\w(}])"


@functools.cache
def parsed(path):
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def documentation(path):
    """The string literals of a module that are statements: docstrings, and descriptions of fields and constants."""
    return [node.value for node in parsed(path) if isinstance(node, ast.Expr) and is_text(node.value)]


@functools.cache
def texts():
    """Text by place of what users read."""
    found = {}
    for path in DOCUMENTS:
        prose = re.sub(r"^```.*?^```|`[^`\n]*`|https?://\S+", "", path.read_text("utf-8"), flags=re.M | re.S)
        found |= {f"{path.relative_to(ROOT)}: {line[:60]}": line for line in prose.splitlines()}
    for path in PAGES:
        found[str(path.relative_to(ROOT))] = re.sub(r"\{#.*?#\}|^\s*//.*$", "", path.read_text("utf-8"), flags=re.M)
    for path in CODE:
        silent = {id(node) for node in documentation(path)}
        said = [node for node in parsed(path) if is_text(node) and " " in node.value and id(node) not in silent]
        found |= {f"{path.relative_to(ROOT)}:{node.lineno}": node.value for node in said}
    return found


@functools.cache
def comments():
    """Text by place of docstrings and comments, without the names that they quote."""
    found = {}
    for path in CODE:
        place = path.relative_to(ROOT)
        found |= {f"{place}:{node.lineno}": re.sub(r"``[^`]*``", "", node.value) for node in documentation(path)}
        source = path.read_text("utf-8")
        if "#" in source:
            tokens = tokenize.generate_tokens(io.StringIO(source).readline)
            found |= {f"{place}:{one.start[0]}": one.string for one in tokens if one.type == tokenize.COMMENT}
    return found


@functools.cache
def names():
    """The words of the names of functions, classes, arguments and attributes, by place."""
    found = {}
    for path in CODE:
        for node in parsed(path):
            name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
            if isinstance(name, str):
                words = re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", name)
                found[f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}"] = words
    return found


def places_of(pattern, found):
    compiled = re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE)
    return [place for place, text in found.items() if compiled.search(text)]


@pytest.mark.parametrize(("read", "phrases"), [(texts, TEXTS), (comments, COMMENTS), (names, NAMES)])
def test_phrases_with_a_plainer_word_are_not_used(read, phrases):
    found = {f"{phrase}; write {instead}": places_of(phrase, read()) for phrase, instead in phrases.items()}
    assert {phrase: places for phrase, places in found.items() if places} == {}


def test_percentages_have_one_format():
    spaced = re.compile(SPACED_PERCENT)
    assert [place for place, text in (texts() | comments()).items() if spaced.search(text)] == []


if __name__ == "__main__":
    for phrase in sys.argv[1:]:
        print(phrase, *(f"{read.__name__} {len(places_of(phrase, read()))}" for read in (texts, comments, names)))
