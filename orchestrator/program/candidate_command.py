"""A candidate applied to a user's command: whether that is possible, and what a trial runs.

Custom knobs are arguments, keys of configuration files, environment variables or placeholders.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.frameworks.arguments import as_truth, either_dash, read, read_text, remove, with_settings, write
from orchestrator.frameworks.documents import ABSENT, edited, load, value_at
from orchestrator.frameworks.edit import Overlay, OverlayRequest, Run
from orchestrator.frameworks.spelling import Note
from orchestrator.program.source_lines import source_lines
from orchestrator.program.user_program import OUT, Script, filled, filled_run, names_in, placeholder_values
from orchestrator.space.inside import knobs_set
from orchestrator.space.knobs import INSIDE, CustomKnob, CustomScalar, argument_text, is_inside
from orchestrator.space.rules import Case, Rule
from orchestrator.units import count
from trials import sizes
from trials.profiling.traces import long_enough_program, program_ranks
from trials.script.command import KNOBS_VARIABLE, CommandFile, ScriptCommand, hook_files, is_seen_anyway
from trials.spec import Candidate, ProfileSpec, Protocol

START, CHANGES, LINES = "train.sh", "changes.diff", "lines.txt"
"""Files that are exported in addition to copies: the start script, the diff, and, if the hook is not to set knobs
inside the program, the lines to add to it."""
HOOK = "inside"
"""Folder with our hook in an export whose knobs it sets inside the program."""


def request_of(script: Script, candidate: Candidate, device: str | None = None) -> OverlayRequest:
    """The request to the recipe; includes a custom knob only if nothing else can set it."""
    batch, is_unchanged = script.workload.global_batch_size, candidate == script.unchanged
    left = tuple(choice for choice in candidate.own if not is_settled(choice.name, script))
    return OverlayRequest(
        candidate=dataclasses.replace(candidate, own=left),
        reading=script.reading,
        named=frozenset() if is_unchanged else script.named,
        templated=script.templated,
        world_size=candidate.layout.world_size,
        global_batch_size=batch,
        num_microbatches=max(1, candidate.num_microbatches(batch)),
        seed=script.seed,
        device=device or script.device,
    )


def render(
    script: Script,
    candidate: Candidate,
    *,
    last_step: int | None = None,
    device: str | None = None,
    sets_inside: bool = True,
) -> Overlay:
    """The user's command with the candidate applied; with ``last_step`` also in trial mode.

    Its environment is the command's with the added variables.

    Args:
        device: kind of device that it runs on, if known.
        sets_inside: whether our hook sets the candidate's knobs inside the program.

    Raises:
        ConfigError: a configuration file cannot be changed.
    """
    values = placeholder_values(candidate, script.workload, last_step=last_step)
    run = with_custom(script, candidate)
    if last_step is not None:
        run = dataclasses.replace(run, argv=with_settings(run.argv, script.trial_args))
    run = filled_run(run, values)
    overlaid = script.training.overlay(run, request_of(script, candidate, device))
    if last_step is not None:
        overlaid = script.training.trial_mode(overlaid, last_step)
    env = {**run.env, **overlaid.env}
    files = {**run.files, **overlaid.files}
    if sets_inside and (knobs := knobs_set(candidate, script.inside)):
        env |= {KNOBS_VARIABLE: f"{{{INSIDE}}}"}
        files |= {INSIDE: knobs_file(knobs)}
    used = [name for name in names_in((*overlaid.argv, *env.values())) if name in files]
    return dataclasses.replace(overlaid, env=env, files={name: files[name] for name in used})


def knobs_file(knobs: Mapping[str, Any], seen: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The file from which our hook sets knobs inside the program.

    Args:
        seen: ``fingerprint`` of the measured program, which the hook requires, and ``expect``: observations that its
            first steps must match; empty for a trial, whose program is not compared.
    """
    content = {
        "version": 1,
        "knobs": dict(knobs),
        "fingerprint": seen.get("fingerprint"),
        "expect": seen.get("expect"),
        "on_mismatch": "train_unchanged",
    }
    return json.dumps(content, indent=2) + "\n"


def file_names(script: Script, names: Iterable[str]) -> dict[str, str]:
    """Names of the copies of configuration files by placeholder. They are the original names, since programs depend on
    suffixes, unless several would be equal, or equal to that of an exported file."""
    found: dict[str, str] = {}
    for name in sorted(names):
        path = f"{INSIDE}.json" if name == INSIDE else script.run.paths.get(name, name)
        own = path.replace("\\", "/").rpartition("/")[2]
        taken = {*found.values(), START, CHANGES, LINES, HOOK}
        found[name] = own if own not in taken else f"{name}-{own}"
    return found


def problem(script: Script, candidate: Candidate, device: str | None = None) -> str | None:
    """Why the candidate cannot be expressed in the user's command; None if it can.

    Recipes read back what they wrote, so that a wrong configuration is found before it is launched.
    """
    key = candidate, device
    if key not in script.judged:
        script.judged[key] = _problem(script, candidate, device)
    return script.judged[key]


def _problem(script: Script, candidate: Candidate, device: str | None) -> str | None:
    try:
        overlaid = render(script, candidate, device=device)
    except ConfigError as error:
        return str(error)
    return next((_sentence(note) for note in overlaid.notes if note.severity == "error"), None)


def rule_of(script: Script) -> Rule:
    """Legality by :func:`problem`, with the id ``recipe:NAME``."""

    def check(case: Case) -> str | None:
        device = case.topology.nodes[0].device_kind if case.topology is not None else None
        return problem(script, case.candidate, device)

    return Rule(id=script.rule_id, check=check)


def notes_of(script: Script, candidate: Candidate) -> tuple[str, ...]:
    """Parts of the command that were not recognized, and notes of the recipe on this candidate."""
    command_value = map(_sentence, render(script, candidate).notes)
    return tuple(dict.fromkeys((*script.notes, *command_value)))


def _sentence(note: Note) -> str:
    return f"{note.knob}: {note.message}" if note.knob else note.message


def is_placeholder(name: str, run: Run) -> bool:
    return name in names_in((*run.argv, *run.env.values(), *run.files.values()))


def is_settled(name: str, script: Script) -> bool:
    """Whether a custom knob is applied here; the others are applied by the recipe."""
    if not script.training.takes_custom_names or name.startswith(("-", "$")) or ":" in name:
        return True
    return name in script.placeholders or any(knob.name == name and knob.flag for knob in script.own)


def with_custom(script: Script, candidate: Candidate) -> Run:
    """The command with the candidate's custom knobs; placeholders are not filled in yet.

    Raises:
        ConfigError: a configuration file cannot be read, or a key in it cannot be set.
    """
    run = script.run
    if candidate == script.unchanged:
        return run
    flags = {knob.name: knob.flag for knob in script.own}
    changes: dict[str, dict[str, CustomScalar]] = {}
    for choice in candidate.own:
        name = choice.name
        if name.startswith("$"):
            run = dataclasses.replace(run, env={**run.env, name[1:]: argument_text(choice.value)})
        elif is_inside(name):
            continue  # not part of the command, see render
        elif ":" in name:
            file, _, key = name.partition(":")
            changes.setdefault(file, {})[key] = choice.value
        elif is_settled(name, script) and name not in script.placeholders:
            argv = _with_argument(run.argv, flags.get(name) or _argument_name(name), choice.value)
            run = dataclasses.replace(run, argv=argv)
    return _with_changes(run, changes) if changes else run


def command_value(knob: CustomKnob, run: Run) -> CustomScalar | None:
    """The value of the knob that the command has; None if it has another value or none."""
    if knob.name.startswith("$"):
        given: object = run.env.get(knob.name[1:])
    elif ":" in knob.name:
        file, _, key = knob.name.partition(":")
        given = value_at(load(run.files[file], run.paths.get(file, file)), key) if file in run.files else None
        given = None if given is ABSENT else given
    else:
        given = _argument(knob.flag or _argument_name(knob.name), knob, run)
    return next((value for value in knob.values if _is_same(value, given)), None)


def filled_in(knob: CustomKnob, run: Run) -> str | None:
    """The placeholder in the value of the argument that a knob sets; None without one."""
    if not knob.name.startswith("-"):
        return None
    return next(iter(names_in([read_text(run.argv, either_dash(knob.name)) or ""])), None)


def _argument_name(name: str) -> str:
    """The argument for a name that is not a placeholder, key or variable."""
    return name if name.startswith("-") else f"--{name}"


def _argument(name: str, knob: CustomKnob, run: Run) -> object:
    if all(isinstance(value, bool) for value in knob.values):
        found = as_truth(read(run.argv, either_dash(name, "switch")))
        return False if found is None else found
    return read(run.argv, either_dash(name))


def _is_same(value: CustomScalar, given: object) -> bool:
    if isinstance(given, str) and not isinstance(value, str):
        return argument_text(value) == given or (not isinstance(value, bool) and _number(given) == value)
    return given == value and isinstance(given, bool) == isinstance(value, bool)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _with_argument(argv: tuple[str, ...], name: str, value: CustomScalar) -> tuple[str, ...]:
    """The words with an argument added: true adds it without a value, false leaves it out."""
    if value is False:
        return remove(argv, either_dash(name, "switch"))
    if value is True:
        return argv if read(argv, either_dash(name, "switch")) is True else write(argv, either_dash(name, "flag"), True)
    return write(argv, either_dash(name), argument_text(value))


def _with_changes(run: Run, changes: Mapping[str, Mapping[str, CustomScalar]]) -> Run:
    """The command with changed copies of files, named by placeholders; other files stay in place."""
    texts = dict(run.files)
    for file, values in changes.items():
        texts[file] = edited(texts[file], run.paths.get(file, file), values)
    changed = [file for file in changes if texts[file] != run.files[file]]
    argv = tuple(_with_placeholder(word, run, changed) for word in run.argv)
    return dataclasses.replace(run, argv=argv, files=texts)


def _with_placeholder(word: str, run: Run, names: list[str]) -> str:
    """The word with its path replaced by the placeholder of the file."""
    head, equals, path = word.rpartition("=")
    for name in names:
        if name in run.paths and os.path.normpath(Path(run.cwd) / path) == run.paths[name]:
            return f"{head}{equals}{{{name}}}"
    return word


RUNNER = "trials.script.runner:run_rank"
"""Function that every rank of such a trial runs."""
MARGIN_STEPS = 4
"""Steps requested from a program in addition to the required ones, so that it does not shut down while it is
measured."""


def last_step(protocol: Protocol) -> int:
    """The step at which a trial's program is requested to end."""
    return protocol.min_warmup_steps + protocol.num_steps + MARGIN_STEPS


def options_of(script: Script, candidate: Candidate) -> Iterator[str]:
    """The program's names of the candidate's custom knobs: ``--flag``, ``dotted.key`` or ``$NAME``. Keys of files, and
    placeholders inside a word, have no such name."""
    flags = {knob.name: knob.flag for knob in script.own}
    words = script.run.argv
    for name in (choice.name for choice in candidate.own):
        mark = f"{{{name}}}"
        place = next((place for place, word in enumerate(words) if word.endswith(mark)), None)
        if name.startswith("$"):
            yield from () if is_seen_anyway(name[1:]) else [name]  # C libraries read these without a trace
        elif place is not None:
            key, equals, value = words[place].partition("=")
            yield from [key] if value == mark and equals else [words[place - 1]] if words[place] == mark else ()
        elif ":" not in name:
            yield flags.get(name) or _argument_name(name)


def script_command(
    script: Script,
    candidate: Candidate,
    protocol: Protocol,
    *,
    device: str,
    memory_limit_bytes: int | None = None,
    cache_dir: str | None = None,
    env_pass: tuple[str, ...] = (),
    fewest_steps: int | None = None,
    profile: ProfileSpec | None = None,
) -> ScriptCommand:
    """The command of one trial: the user's command with the candidate applied, in trial mode.

    Args:
        env_pass: variables of the ranks' environment that the program gets in addition to those in the file.
        fewest_steps: sufficient measured steps if the program ends by itself; None: all requested steps.
        profile: what the hook records; None: nothing.

    Raises:
        ConfigError: a configuration file cannot be changed.
    """
    workload, shape, world_size = script.workload, script.model.shape, candidate.layout.world_size
    if profile is not None:
        protocol = long_enough_program(protocol, profile)
        profile = dataclasses.replace(profile, ranks=program_ranks(profile, world_size))
    overlaid = render(script, candidate, last_step=last_step(protocol), device=device)
    names = file_names(script, overlaid.files)
    return ScriptCommand(
        argv=overlaid.argv,
        cwd=script.run.cwd,
        env=tuple(sorted(overlaid.env.items())),
        env_pass=(*script.env_pass, *env_pass),
        files=tuple(CommandFile(name=name, file_name=names[name], text=text) for name, text in overlaid.files.items()),
        launcher=script.model.launcher,
        log=script.log,
        hook=script.hook,
        protocol=protocol,
        fewest_steps=fewest_steps,
        profile=profile,
        num_devices=world_size,
        tokens_per_step=workload.tokens_per_step,
        samples_per_step=workload.global_batch_size,
        expected=script.training.expected(request_of(script, candidate, device)),
        options=() if candidate == script.unchanged else tuple(options_of(script, candidate)),
        device=device,
        memory_limit_bytes=memory_limit_bytes,
        model_flops_per_token=0.0 if shape is None else sizes.model_flops_per_token(shape, workload.seq_length),
        cache_dir=cache_dir,
    )


# ---- A candidate applied to a training command, for storing, exporting and pasting: a start script, copies of
# configuration files, and the diff against the user's command.

_OPTION = re.compile(r"--?[A-Za-z]")
_PYTHON = frozenset({"python", "python3"})
_HEAD = """\
#!/bin/sh
# {title}: {name}, on {devices}.
# {how}
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd {cwd}
"""
_SHELL_DEFAULTS = {OUT: '"${OUT:-out}"', "steps": '"${STEPS:?number of optimiser steps}"'}
"""Variables to set when starting the script, by placeholder."""
_HOW_ENV = (
    "NNODES: number of hosts, each of which runs this script; NODE_RANK: index of this host; MASTER_ADDR, MASTER_PORT: "
    "address of rank 0."
)
_HOW_OWN = "The command starts its own ranks: run it on every host, like your original command."


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptArtifact:
    """The stored form of a training program with a candidate applied."""

    argv: tuple[str, ...]
    """``{name}`` stands for the copy of a configuration file."""
    env: Mapping[str, str]
    files: Mapping[str, str]
    """Text by file name: the start script, copies of configuration files, the diff."""
    changes: str
    """The diff against the user's command and files; empty if nothing is changed."""
    notes: tuple[str, ...] = ()
    """Notes of the recipe, as sentences."""

    def to_json(self, script: Script) -> dict[str, Any]:
        """Entries of a version's manifest, in addition to the files."""
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(self.files.items())}
        return {
            "recipe": script.training.name,
            "run": list(script.run.argv),
            "argv": list(self.argv),
            "env": dict(self.env),
            "cwd": script.run.cwd,
            "launcher": script.model.launcher,
            "files": digests,
            "changes": self.changes,
            "notes": list(self.notes),
        }


def artifact(
    script: Script,
    candidate: Candidate,
    name: str,
    *,
    seen: Mapping[str, Any] = MappingProxyType({}),
    as_lines: bool = False,
) -> ScriptArtifact:
    """The user's command with the candidate applied, without settings that only a trial needs.

    Args:
        name: its name in the start script.
        seen: as for :func:`knobs_file`.
        as_lines: list knobs inside the program as lines to add to it, instead of setting them with our hook.

    Raises:
        ConfigError: a configuration file cannot be changed.
    """
    overlaid = render(script, candidate, sets_inside=not as_lines)
    if INSIDE in overlaid.files:
        text = knobs_file(knobs_set(candidate, script.inside), seen)
        overlaid = dataclasses.replace(overlaid, files={**overlaid.files, INSIDE: text})
    names = file_names(script, overlaid.files)
    changes = _changes(script, overlaid)
    copies = {names[name]: text for name, text in overlaid.files.items()}
    files = {START: start_script(script, overlaid, names, candidate, name), **copies, CHANGES: changes}
    if as_lines:
        files[LINES] = source_lines(knobs_set(candidate, script.inside))
    elif INSIDE in overlaid.files:
        files |= {f"{HOOK}/{path}": text for path, text in hook_files().items()}
    return ScriptArtifact(
        argv=overlaid.argv,
        env=overlaid.env,
        files={name: text for name, text in files.items() if text},
        changes=changes,
        notes=tuple(f"{note.knob}: {note.message}" if note.knob else note.message for note in overlaid.notes),
    )


def start_script(script: Script, overlaid: Overlay, names: Mapping[str, str], candidate: Candidate, name: str) -> str:
    """A shell script that starts the training from its own folder, which also has the copies of the files."""
    is_env = script.model.launcher == "env"
    head = _HEAD.format(
        title=script.training.title,
        name=name,
        devices=count(candidate.layout.world_size, "device"),
        how=_HOW_ENV if is_env else _HOW_OWN,
        cwd=shlex.quote(script.run.cwd),
    )
    exports = [f"export {key}={_word(value, names)}" for key, value in sorted(overlaid.env.items())]
    if INSIDE in overlaid.files:
        exports.append(f'export PYTHONPATH="$here"/{HOOK}/hook"${{PYTHONPATH:+:$PYTHONPATH}}"')
    words = [_word(word, names) for word in overlaid.argv]
    command = [*_launcher(words, candidate.layout.world_size), ""] if is_env else [" ".join(words), ""]
    return head + "\n".join([*exports, *command])


def _launcher(words: list[str], world_size: int) -> list[str]:
    """Lines of the start script that run the command under torchrun."""
    is_python = bool(words) and Path(words[0]).name in _PYTHON
    python = words[0] if is_python else "python3"
    starts_with_program = is_python and len(words) > 1 and (words[1] == "-m" or not words[1].startswith("-"))
    program = words[1:] if starts_with_program else ["--no-python", *words]  # torchrun refuses options such as -u
    return [
        ': "${NNODES:=1}" "${NODE_RANK:=0}" "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=29500}"',
        f'exec {python} -m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE_RANK" \\',
        f'  --nproc-per-node $(({world_size} / NNODES)) --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\',
        f"  {' '.join(program)}",
    ]


def _word(word: str, names: Mapping[str, str]) -> str:
    """The word for a shell: copies are next to the script, and output goes into ``$OUT``."""
    marks = {name: f"\0here/{file}\0" for name, file in names.items()} | {
        name: f"\0{name}\0" for name in _SHELL_DEFAULTS
    }
    parts = filled(word, marks).split("\0")  # text, mark, text, mark, ..., text
    texts = (_marked(part) if place % 2 else part and shlex.quote(part) for place, part in enumerate(parts))
    return "".join(texts) or "''"


def _marked(mark: str) -> str:
    return _SHELL_DEFAULTS[mark] if mark in _SHELL_DEFAULTS else f'"$here"/{shlex.quote(mark.removeprefix("here/"))}'


def _changes(script: Script, overlaid: Overlay) -> str:
    """A unified diff of arguments, environment and files, with one argument and its values per line.

    A launcher is not a change by the candidate: if the command can run unmodified, both are shown without it.
    """
    configured = script.unchanged or script.baseline
    today = script.run if configured is None else render(script, configured)
    files = {**script.run.files, **today.files}
    names = file_names(script, overlaid.files)
    before, after = (
        dataclasses.replace(
            run,
            argv=tuple(filled(word, names) for word in run.argv),
            env={name: filled(text, names) for name, text in run.env.items()},
        )
        for run in (today, overlaid)
    )
    parts = [("command", "\n".join(_arguments(before.argv)), "\n".join(_arguments(after.argv)))]
    parts.append(("environment", _assignments(before.env), _assignments(after.env)))
    for name, text in sorted(overlaid.files.items()):
        parts.append((names[name], _one_key_a_line(files.get(name, "")), _one_key_a_line(text)))
    return "".join(_diff(name, old, new) for name, old, new in parts if old != new)


def _one_key_a_line(text: str) -> str:
    """JSON in a form that ignores spacing; any other text unchanged."""
    try:
        return json.dumps(json.loads(text), indent=2)
    except ValueError:
        return text


def _arguments(argv: Sequence[str]) -> list[str]:
    """The words, with each option joined to its values."""
    lines: list[str] = []
    for word in argv:
        if lines and lines[-1].startswith("-") and not _OPTION.match(word):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _assignments(env: Mapping[str, str]) -> str:
    return "\n".join(f"{name}={value}" for name, value in sorted(env.items()))


def _diff(name: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), f"{name} (yours)", f"{name} (promoted)", lineterm="", n=2
    )
    return "\n".join(lines) + "\n"
