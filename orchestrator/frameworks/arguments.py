"""Reads and changes command lines as typed, and leaves all other words unchanged.

If an argument is given several times, the last one counts, as in argparse. A change replaces it in place, in its own
spelling (``--a b`` or ``--a=b``), and removes the earlier ones, which had no effect; a missing argument is appended.
Words after ``--`` are not arguments.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Words = tuple[str, ...]
ArgumentValue = str | bool | Words
"""Value of an argument: text for a ``value`` or ``assignment``, True or False for a ``flag``, either for a ``switch``
(text only if it is not a truth value), texts for a ``list``."""
_NUMBER = re.compile(r"-(\d|\.\d)[\w.+-]*")
_TRUE, _FALSE = ("true", "t", "yes", "y", "1", "on"), ("false", "f", "no", "n", "0", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """The spelling of one argument.

    ``value`` takes one word: ``--a b``, ``--a=b``, ``-ab``. ``flag`` takes none: ``--a``. ``switch`` takes at most one:
    ``--a``, ``--a true``, like booleans in transformers. ``list`` takes all words up to the next option. ``assignment``
    is one word without dashes: ``a.b=c``, as in Hydra and OmegaConf.
    """

    name: str
    """Spelling for a command that does not have it: ``--micro-batch-size``, ``trainer.lr``."""
    aliases: Words = ()
    negative: Words = ()
    """Negative spellings: ``--no-bias``; a flag without one is false if absent."""
    takes: Literal["value", "flag", "switch", "list", "assignment"] = "value"

    @property
    def spellings(self) -> Words:
        return (self.name, *self.aliases)


@functools.lru_cache(maxsize=4096)
def either_dash(
    name: str,
    takes: Literal["value", "flag", "switch", "list", "assignment"] = "value",
    *,
    negative: Words = (),
    aliases: Words = (),
) -> Argument:
    """An argument whose parser treats hyphens and underscores alike, as those of transformers and torch do."""
    others = tuple(dict.fromkeys(other for word in (name, *aliases) for other in _both_dashes(word)))
    refusals = tuple(dict.fromkeys(other for word in negative for other in _both_dashes(word)))
    kept = tuple(other for other in others if other != name)
    return Argument(name=name, aliases=kept, negative=refusals, takes=takes)


@dataclass(frozen=True, slots=True)
class _Place:
    """Words from ``start`` up to ``stop`` that give an argument."""

    start: int
    stop: int
    spelling: str
    given: ArgumentValue
    is_joined: bool
    """Whether name and value are one word."""


# ---- reading ----


def read(words: Sequence[str], argument: Argument) -> ArgumentValue | None:
    """The value of an argument in the command; the last one counts. None if absent."""
    places = list(_places(tuple(words), argument))
    return places[-1].given if places else None


def is_specified(words: Sequence[str], argument: Argument) -> bool:
    return any(True for _ in _places(tuple(words), argument))


def read_text(words: Sequence[str], argument: Argument) -> str | None:
    """The single word that an argument was given; None if there is none."""
    given = read(words, argument)
    if isinstance(given, tuple):
        return " ".join(given)
    return given if isinstance(given, str) else None


def as_truth(given: ArgumentValue | None) -> bool | None:
    """The truth value of a flag or switch, in any spelling that argparse-like parsers accept; None if it has none."""
    if isinstance(given, str):
        word = given.lower()
        return True if word in _TRUE else False if word in _FALSE else None
    return given if isinstance(given, bool) else None


def expanded(words: Sequence[str], text_of: Callable[[str], str | None]) -> Words:
    """The words with argument files (``@path``, one word per line, as read by argparse) replaced by their words.

    ``text_of`` returns a file's text by path, or None if there is no such file; the word is then kept.
    """
    found: list[str] = []
    for word in words:
        text = text_of(word[1:]) if word.startswith("@") and len(word) > 1 else None
        found += [word] if text is None else text.splitlines()
    return tuple(found)


def is_option(word: str) -> bool:
    """Whether argparse treats a word as the name of an option: it starts with a dash, and is not a negative number."""
    return len(word) > 1 and word.startswith("-") and not _NUMBER.fullmatch(word)


# ---- writing ----


def write(words: Sequence[str], argument: Argument, value: ArgumentValue) -> Words:
    """The words with the argument set to this value.

    Raises:
        ValueError: the argument does not take a value of this kind.
    """
    given = tuple(words)
    places = list(_places(given, argument))
    if places and places[-1].given == value and not _is_overruled(given, places[-1]):
        return given
    if not places or _is_overruled(given, places[-1]):
        return _appended(_without(given, places), _spelled_out(argument, value, None))
    last = places[-1]
    replaced = (*given[: last.start], *_spelled_out(argument, value, last), *given[last.stop :])
    return _without(replaced, places[:-1])


def spelled_out(words: Sequence[str], argument: Argument, value: ArgumentValue) -> Words:
    """The words that set an argument, spelled as the command spells it."""
    places = list(_places(tuple(words), argument))
    return _spelled_out(argument, value, places[-1] if places else None)


def with_settings(words: Sequence[str], settings: Sequence[str]) -> Words:
    """The words with these settings, each in its place or at the end: ``--a b``, ``--a=b``, ``a.b=c``, the flag
    ``--a``, or a word without a name, which is appended."""
    found, rest = tuple(words), list(settings)
    while rest:
        word = rest.pop(0)
        name, is_joined, value = word.partition("=")
        if is_joined:
            found = write(found, _joined_argument(found, name), value)
        elif not is_option(word):
            found = _appended(found, (word,))
        elif rest and not is_option(rest[0]):
            found = write(found, Argument(name=word), rest.pop(0))
        else:
            found = write(found, Argument(name=word, takes="flag"), True)
    return found


def _joined_argument(words: Words, name: str) -> Argument:
    """The argument that ``NAME=VALUE`` sets: one word, unless the command has it as ``--a b``."""
    is_separate = is_option(name) and read(words, Argument(name=name))
    return Argument(name=name, takes="value" if is_separate else "assignment")


def remove(words: Sequence[str], *arguments: Argument) -> Words:
    """The words without these arguments."""
    found = tuple(words)
    for argument in arguments:
        found = _without(found, list(_places(found, argument)))
    return found


def _appended(words: Words, added: Words) -> Words:
    end = words.index("--") if "--" in words else len(words)
    return (*words[:end], *added, *words[end:])


def _is_overruled(words: Words, place: _Place) -> bool:
    """Whether an argument file after a place may override it."""
    return any(len(word) > 1 and word.startswith("@") for word in words[place.stop :])


def _without(words: Words, places: Sequence[_Place]) -> Words:
    dropped = {index for place in places for index in range(place.start, place.stop)}
    return tuple(word for index, word in enumerate(words) if index not in dropped)


def _spelled_out(argument: Argument, value: ArgumentValue, old: _Place | None) -> Words:
    """The words that give an argument, in the former spelling if it is equivalent."""
    name = old.spelling if old and old.spelling not in argument.negative else argument.name
    if argument.takes == "flag":
        return _flag(argument, name, value)
    if argument.takes == "list":
        return (name, *_texts(argument, value))
    text = str(value).lower() if isinstance(value, bool) else value
    if not isinstance(text, str):
        raise ValueError(f"{argument.name} takes one value, got {value!r}")
    if argument.takes == "assignment":
        return (f"{name}={text}",)
    is_joined = (old is not None and old.is_joined) or is_option(text)
    if not is_joined:
        return (name, text)
    return (f"{name}={text}",)


def _flag(argument: Argument, name: str, value: ArgumentValue) -> Words:
    if not isinstance(value, bool):
        raise ValueError(f"{argument.name} takes no value, got {value!r}")
    if value:
        return (name,)
    return argument.negative[:1]


def _texts(argument: Argument, value: ArgumentValue) -> Words:
    if not isinstance(value, tuple) or any(is_option(text) for text in value):
        raise ValueError(f"{argument.name} takes values that do not start like options, got {value!r}")
    return value


# ---- finding ----


def _places(words: Words, argument: Argument) -> Iterator[_Place]:
    """All places of an argument, in order."""
    end = words.index("--") if "--" in words else len(words)
    given, spelled = words[:end], (*argument.spellings, *argument.negative)
    index = 0
    while index < end:
        place = _place_at(given, index, argument) if given[index].startswith(spelled) else None
        if place is not None:
            yield place
        index = place.stop if place is not None else index + 1


def _place_at(words: Words, index: int, argument: Argument) -> _Place | None:
    word = words[index]
    if word in argument.negative:
        return _Place(index, index + 1, word, given=False, is_joined=False)
    for name in argument.spellings:
        if argument.takes == "assignment":
            if word.startswith(f"{name}="):
                return _Place(index, index + 1, name, word.partition("=")[2], is_joined=True)
        elif word == name:
            return _separate(words, index, argument)
        elif (joined := _joined(word, name)) is not None and argument.takes != "flag":
            return _Place(index, index + 1, name, _argument_value(argument, joined), is_joined=True)
    return None


def _joined(word: str, name: str) -> str | None:
    """The value in the same word as the name: ``--a=b``, ``-ab``, ``-a=b``."""
    if word.startswith(f"{name}="):
        return word.partition("=")[2]
    is_short = len(name) == 2 and name[0] == "-" and name[1] != "-"
    return word[2:] if is_short and word.startswith(name) else None


def _separate(words: Words, index: int, argument: Argument) -> _Place:
    """A name with its values in the following words."""
    name, stop = words[index], index + 1
    if argument.takes == "flag":
        return _Place(index, stop, name, given=True, is_joined=False)
    if argument.takes == "list":
        while stop < len(words) and not is_option(words[stop]):
            stop += 1
        return _Place(index, stop, name, words[index + 1 : stop], is_joined=False)
    has_value = stop < len(words) and not is_option(words[stop])
    if has_value and argument.takes == "switch" and as_truth(words[stop]) is None:
        has_value = False
    if not has_value:
        return _Place(index, stop, name, given=argument.takes == "switch" or "", is_joined=False)
    return _Place(index, stop + 1, name, _argument_value(argument, words[stop]), is_joined=False)


def _argument_value(argument: Argument, text: str) -> ArgumentValue:
    """A word as the value of an argument; for a switch, a truth value if it is one."""
    if argument.takes == "list":
        return (text,)
    truth = as_truth(text) if argument.takes == "switch" else None
    return text if truth is None else truth


def _both_dashes(name: str) -> Iterator[str]:
    head = name[: len(name) - len(name.lstrip("-"))]
    rest = name[len(head) :]
    yield from dict.fromkeys((name, head + rest.replace("-", "_"), head + rest.replace("_", "-")))
