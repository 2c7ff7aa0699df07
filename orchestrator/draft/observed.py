"""Observations of a program in a few steps, and of its options in changed runs.

A changed run decides what an option does; names and values only select the options to change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from orchestrator.draft.static_reading import (
    ScriptOption,
    SourceFile,
    argument_of,
    is_assignment,
    leaves,
    number_formats,
    present_number,
)
from orchestrator.errors import ConfigError
from orchestrator.frameworks.arguments import is_specified, read, read_text, write
from orchestrator.frameworks.documents import edited, load
from orchestrator.units import count
from trials.files import fields_json, read_regular
from trials.reports import ScriptFacts, SeenOption

PROVABLE = ("micro_batch_size", "accumulation", "workers", "ep", "dtype", "amp", "checkpointing", "compile")
"""Roles of options that show in what the program does within a step."""
MAX_PER_ROLE = 3
"""Maximum number of options to try for a role."""
NO_ROLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"})
"""Variables that the program must not choose."""
_FACTS = (
    *("micro_batch_size", "micro_batches", "world_size", "dtype", "num_workers", "wrapper", "is_compiled"),
    *("layer_calls_per_forward", "num_optimizers", "loader_batch_size"),
    *("experts", "experts_local", "experts_per_token", "tokens_per_expert"),
)
_WORKERS = re.compile(r"nw|work|proc|thread|load|cpu", re.IGNORECASE)
_QUOTED = re.compile(r"""(["'])(\{[a-z_]+\})\1""")
Way = Literal["as_is", "over_ranks", "balanced", "switched"]
"""How an option acts: its value is the number seen on a rank; the sum over all ranks; the number seen, while the
program keeps its global batch; or something other than a number changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """An option whose effect a changed run has shown."""

    option: ScriptOption
    way: Way
    before: str
    after: str
    """The observation without and with the change, in words."""

    def to_json(self) -> dict[str, str]:
        """The documented JSON form."""
        return {"option": self.option.names[0], "before": self.before, "after": self.after}


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """Result of running a command for a few steps."""

    facts: ScriptFacts = field(default_factory=ScriptFacts)
    options: tuple[ScriptOption, ...] = ()
    """Options that were found only by running it."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Configuration files of the command, by the word that names them."""
    proofs: Mapping[str, Proof] = field(default_factory=dict)
    """By role."""
    refuted: frozenset[str] = frozenset()
    """Options, by their first name, that did not do what their name suggests."""
    problem: str = ""
    """Why something was not detected; empty if all was."""

    starts_ranks: bool = False
    """Whether the program starts its own ranks."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of a run in which the batch was detected."""
        facts = {name: value for name, value in fields_json(self.facts, *_FACTS).items() if value is not None}
        return {**facts, "options": {role: proof.to_json() for role, proof in self.proofs.items()}}

    @property
    def is_seen(self) -> bool:
        """Whether the batch was detected."""
        return self.facts.samples_per_step is not None

    @property
    def words(self) -> str:
        """The recorded facts in one line."""
        facts = self.facts
        parts = [
            f"{count(facts.micro_batch_size or 0, 'sample')} per micro-batch",
            f"{count(facts.micro_batches or 0, 'micro-batch')} per step",
            count(facts.world_size or 1, "rank"),
            facts.dtype,
            None if facts.num_workers is None else count(facts.num_workers, "loader worker"),
            facts.wrapper,
            None if facts.experts is None else f"{facts.experts} experts per layer",
            "recompute" if (facts.layer_calls_per_forward or 0) > 1 else None,
            "compiled" if facts.is_compiled else None,
            f"{facts.num_optimizers} optimisers" if (facts.num_optimizers or 0) > 1 else None,
        ]
        return ", ".join(part for part in parts if part) if self.is_seen else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """One option with another value, to see what it does."""

    role: str
    option: ScriptOption
    value: str | bool

    @property
    def words(self) -> str:
        name = self.option.names[0]
        return name if self.value is True else f"{name} off" if self.value is False else f"{name} {self.value}"

    def applied(self, filled: Filled) -> Filled:
        """The command with the change."""
        return with_value(filled, self.option, self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A command with its variables and its configuration files, some of whose values were changed."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Text by the word of the command that names the file."""


def with_value(filled: Filled, option: ScriptOption, value: str | bool) -> Filled:
    """The command with another value of an option."""
    name = option.names[0]
    if option.is_variable:
        return replace(filled, env={**filled.env, name: str(value)})
    if option.file is None:
        return replace(filled, argv=write(filled.argv, argument_of(option), value))
    number = int(value) if isinstance(value, str) and value.isdigit() else value
    text = edited(filled.files[option.file], option.file, {name: number})
    return replace(filled, files={**filled.files, option.file: text})


def template(text: str) -> str:
    """The text of a file with bare placeholders, since they stand for numbers."""
    return _QUOTED.sub(r"\2", text)


def files_of(argv: tuple[str, ...], cwd: Path) -> dict[str, str]:
    """Text of the JSON and YAML files that the command names, by the word that does."""
    found = {}
    for word in argv:
        if word.endswith((".json", ".yaml", ".yml")) and not word.startswith("-") and (cwd / word).is_file():
            with contextlib.suppress(OSError, ValueError):
                found[word] = read_regular(cwd / word)
    return found


def found_options(filled: Filled, source: SourceFile | None, seen: Sequence[SeenOption]) -> list[ScriptOption]:
    """Options that are not declared in the source: those that the program declares while it runs, variables that it
    reads, keys of configuration files, and arguments of the command that look like options."""
    known = {name for option in (source.options if source else ()) for name in (*option.names, *option.negative)}
    found: list[ScriptOption] = []
    for option in (*_options_seen(seen), *_keys_of_files(filled.files), *_options_typed(filled.argv)):
        if known.isdisjoint(option.names):
            known.update(option.names)
            found.append(option)
    return found


def _options_seen(seen: Sequence[SeenOption]) -> Iterator[ScriptOption]:
    for one in seen:
        if one.kind == "argparse" and one.flags:
            names = tuple(sorted(one.flags, key=lambda flag: (flag.startswith("--no-"), not flag.startswith("--"))))
            is_flag, negative = isinstance(one.value, bool), tuple(name for name in names if name.startswith("--no-"))
            positive = tuple(name for name in names if name not in negative)
            if is_flag and positive:
                yield ScriptOption(names=positive, negative=negative, default=one.value, is_flag=True)
            else:
                yield ScriptOption(names=names, default=one.value, is_flag=is_flag)
        elif one.kind == "omegaconf":
            yield ScriptOption(names=(one.name,), default=one.value, is_assignment=True)
        elif one.kind == "environment" and one.name not in NO_ROLES:
            yield ScriptOption(names=(one.name,), default=one.value, is_variable=True)


def _keys_of_files(files: Mapping[str, str]) -> Iterator[ScriptOption]:
    for file, text in files.items():
        with contextlib.suppress(ConfigError):
            for name, value in leaves(load(text, file)):
                if isinstance(value, int) and not isinstance(value, bool):
                    yield ScriptOption(names=(name,), default=value, file=file)


def _options_typed(argv: tuple[str, ...]) -> Iterator[ScriptOption]:
    for word, following in zip(argv, (*argv[1:], ""), strict=True):
        if is_assignment(word):
            yield ScriptOption(names=(word.partition("=")[0].lstrip("+"),), is_assignment=True)
        elif word.startswith("--") and "=" in word:
            yield ScriptOption(names=(word.partition("=")[0],))
        elif word.startswith("--") and following and not following.startswith("-"):
            yield ScriptOption(names=(word,))


def changes(
    argv: tuple[str, ...], options: Sequence[ScriptOption], facts: ScriptFacts, *, is_gpu: bool
) -> Iterator[OptionChange]:
    """Options to change, most useful first: per role those with a usual name, then those with the recorded number."""
    numbers = {
        "micro_batch_size": facts.micro_batch_size,
        "accumulation": facts.micro_batches,
        "workers": facts.num_workers,
    }
    roles = [role for role in PROVABLE if role != "compile" or is_gpu]
    for role in roles:
        named = [one for one in options if one.role == role and one.is_for_training]
        named.sort(key=lambda one: not is_specified(argv, argument_of(one)))
        number, least = numbers.get(role), 0 if role == "workers" else 2
        alike = [
            one
            for one in options
            if number is not None
            and number >= least
            and one.role is None
            and _now(argv, one) in _spellings(role, facts)
        ]
        if number == 0:  # many options are 0
            alike.sort(key=lambda one: not _WORKERS.search(one.names[0]))
        tried = [one for one in (*named, *alike) if one.file is None or role in numbers]
        for option in tried[:MAX_PER_ROLE]:
            value = _other(argv, option, role, facts)
            if value is not None:
                yield OptionChange(role=role, option=option, value=value)


def _spellings(role: str, facts: ScriptFacts) -> set[int]:
    """Values that an option of a role may have, given the observation."""
    ranks, micro, count = facts.world_size or 1, facts.micro_batch_size or 1, facts.micro_batches or 1
    if role == "micro_batch_size":
        return {micro, micro * ranks}
    return {count, count * ranks} if role == "accumulation" else {facts.num_workers or 0}


def _now(argv: tuple[str, ...], option: ScriptOption) -> int | None:
    if option.is_flag:
        return None
    return option.default if option.is_variable and isinstance(option.default, int) else present_number(argv, option)


def _other(argv: tuple[str, ...], option: ScriptOption, role: str, facts: ScriptFacts) -> str | bool | None:
    """A value that differs from today's; None if none can be tried."""
    if option.is_flag:
        is_on = read(argv, argument_of(option)) if is_specified(argv, argument_of(option)) else option.default is True
        can_change = not is_on or option.negative or is_specified(argv, argument_of(option))
        return not is_on if can_change and role not in ("micro_batch_size", "accumulation", "workers") else None
    if role == "dtype":
        today = read_text(argv, argument_of(option)) or option.default
        return next((one for one in number_formats(today, option.choices) if one != str(today)), None)
    now, ranks = _now(argv, option), facts.world_size or 1
    if role == "micro_batch_size":
        size = now or facts.micro_batch_size or 1
        return str(size // 2 if size % (2 * ranks) == 0 else size * 2)
    if role == "accumulation":
        count = (now or facts.micro_batches or 1) * 2
        return str(count if count % ranks == 0 else count * ranks)
    if role == "workers":
        return "1" if (now if now is not None else facts.num_workers) == 0 else "0"
    if role == "ep":
        return next(map(str, expert_parallel_degrees(now or 1, ranks, facts)[1:]), None)
    return None


def expert_parallel_degrees(present: int, ranks: int, facts: ScriptFacts) -> list[int]:
    """Return the present degree, then all others that divide the ranks and the experts of a layer; none unless a run
    has shown that the present one splits the experts."""
    experts = facts.experts or 0
    if facts.experts_local is None or facts.experts_local * present != experts:
        return []
    return [present, *(n for n in range(1, ranks + 1) if n != present and not (ranks % n or experts % n))]


def proof(change: OptionChange, before: ScriptFacts, after: ScriptFacts) -> Proof | None:
    """The effect of the change; None if it was not that of its role."""
    made = _way(change, before, after)
    if made is None:
        return None
    way, old, new = made
    return Proof(option=change.option, way=way, before=old, after=new)


def _way(change: OptionChange, before: ScriptFacts, after: ScriptFacts) -> tuple[Way, str, str] | None:
    wanted = int(change.value) if isinstance(change.value, str) and change.value.isdigit() else None
    micro, count, ranks = after.micro_batch_size, after.micro_batches, before.world_size or 1
    match change.role:
        case "micro_batch_size" if micro is not None and micro != before.micro_batch_size:
            way: Way | None = None
            if micro == wanted:
                way = "as_is" if count == before.micro_batches else "balanced"
            elif micro * ranks == wanted and count == before.micro_batches:
                way = "over_ranks"
            return None if way is None else (way, f"micro-batch {before.micro_batch_size}", f"{micro}")
        case "accumulation" if count != before.micro_batches and micro == before.micro_batch_size:
            way = "as_is" if count == wanted else "over_ranks" if (count or 0) * ranks == wanted else None
            return None if way is None else (way, f"{before.micro_batches} micro-batches per step", f"{count}")
        case "workers" if after.num_workers == wanted and after.num_workers != before.num_workers:
            return "as_is", f"{before.num_workers} loader workers", f"{after.num_workers}"
        case "ep" if after.experts_local != before.experts_local and after.samples_per_step == before.samples_per_step:
            way = "as_is" if (after.experts_local or 0) * (wanted or 0) == after.experts else None
            held = f"{before.experts_local} of {before.experts} experts per rank"
            return None if way is None else (way, held, f"{after.experts_local}")
        case "dtype" | "amp" if after.dtype is not None and after.dtype != before.dtype:
            return "switched", str(before.dtype), after.dtype
        case "checkpointing" if (after.layer_calls_per_forward or 1) != (before.layer_calls_per_forward or 1):
            calls = before.layer_calls_per_forward or 1, after.layer_calls_per_forward or 1
            return "switched", f"layers run {calls[0]:g} times", f"{calls[1]:g}"
        case "compile" if after.is_compiled != before.is_compiled:
            return "switched", _compiled(before), _compiled(after)
    return None


def _compiled(facts: ScriptFacts) -> str:
    return "compiled" if facts.is_compiled else "not compiled"
