"""A candidate laid over a training command, as it is stored, exported and pasted: a script to start it, copies of its
configuration files, and what differs from the user's own command."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.frameworks.edit import Overlay
from orchestrator.program.candidate_command import CHANGES, START, file_names, render
from orchestrator.program.user_program import OUT, Script, filled
from trials.spec import Candidate

_OPTION = re.compile(r"--?[A-Za-z]")
_PYTHON = frozenset({"python", "python3"})
_HEAD = """\
#!/bin/sh
# {title}: {name}, on {world_size} devices.
# {how}
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd {cwd}
"""
_GIVEN = {OUT: '"${OUT:-out}"', "steps": '"${STEPS:?number of optimiser steps}"'}
"""What whoever starts it says in the environment, by the placeholder."""
_HOW_ENV = "NNODES: hosts, each running this; NODE_RANK: number of this one; MASTER_ADDR, MASTER_PORT: where rank 0 is."
_HOW_OWN = "The command starts its own ranks: run it as you run your own, on every host."


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptArtifact:
    """What is kept of a training program with a candidate laid over it."""

    argv: tuple[str, ...]
    """``{name}`` stands for the copy of a configuration file."""
    env: Mapping[str, str]
    files: Mapping[str, str]
    """Text by file name: the script that starts it, copies of configuration files, the diff."""
    changes: str
    """The diff against the user's own command and files; empty where nothing is changed."""
    notes: tuple[str, ...] = ()
    """What the recipe has to say, as sentences."""

    def to_json(self, script: Script) -> dict[str, Any]:
        """What a version's manifest keeps, beside the files themselves."""
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


def artifact(script: Script, candidate: Candidate, name: str) -> ScriptArtifact:
    """The user's command with the candidate laid over it, without anything that only a trial needs.

    Args:
        name: what to call it in the script that starts it.

    Raises:
        ConfigError: a configuration file that cannot be changed.
    """
    laid = render(script, candidate)
    names = file_names(script, laid.files)
    changes = _changes(script, laid)
    copies = {names[name]: text for name, text in laid.files.items()}
    files = {START: start_script(script, laid, names, candidate, name), **copies, CHANGES: changes}
    return ScriptArtifact(
        argv=laid.argv,
        env=laid.env,
        files={name: text for name, text in files.items() if text},
        changes=changes,
        notes=tuple(f"{note.knob}: {note.message}" if note.knob else note.message for note in laid.notes),
    )


def start_script(script: Script, laid: Overlay, names: Mapping[str, str], candidate: Candidate, name: str) -> str:
    """A shell script that starts the training from the folder in which it lies with the copies of the files."""
    is_env = script.model.launcher == "env"
    head = _HEAD.format(
        title=script.training.title,
        name=name,
        world_size=candidate.layout.world_size,
        how=_HOW_ENV if is_env else _HOW_OWN,
        cwd=shlex.quote(script.run.cwd),
    )
    exports = [f"export {key}={_word(value, names)}" for key, value in sorted(laid.env.items())]
    words = [_word(word, names) for word in laid.argv]
    command = [*_launcher(words, candidate.layout.world_size), ""] if is_env else [" ".join(words), ""]
    return head + "\n".join([*exports, *command])


def _launcher(words: list[str], world_size: int) -> list[str]:
    """torchrun in front of a command whose ranks it starts."""
    program = words[1:] if words and Path(words[0]).name in _PYTHON else ["--no-python", *words]
    python = words[0] if words and Path(words[0]).name in _PYTHON else "python3"
    return [
        ': "${NNODES:=1}" "${NODE_RANK:=0}" "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=29500}"',
        f'exec {python} -m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE_RANK" \\',
        f'  --nproc-per-node $(({world_size} / NNODES)) --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\',
        f"  {' '.join(program)}",
    ]


def _word(word: str, names: Mapping[str, str]) -> str:
    """The word for a shell: copies lie beside the script, and what it writes goes into ``$OUT``."""
    marks = {name: f"\0here/{file}\0" for name, file in names.items()} | {name: f"\0{name}\0" for name in _GIVEN}
    parts = filled(word, marks).split("\0")  # text, mark, text, mark, ..., text
    texts = (_marked(part) if place % 2 else part and shlex.quote(part) for place, part in enumerate(parts))
    return "".join(texts) or "''"


def _marked(mark: str) -> str:
    return _GIVEN[mark] if mark in _GIVEN else f'"$here"/{shlex.quote(mark.removeprefix("here/"))}'


def _changes(script: Script, laid: Overlay) -> str:
    """A unified diff of arguments, environment and files; one argument with its values a line.

    What starts the ranks is no change of the candidate's: where the command can run as it stands, both are shown
    without its launcher.
    """
    run = script.run
    today = run if script.unchanged is None else render(script, script.unchanged)
    parts = [("command", "\n".join(_arguments(today.argv)), "\n".join(_arguments(laid.argv)))]
    before, after = (_assignments(env) for env in (today.env, laid.env))
    parts.append(("environment", before, after))
    names = file_names(script, laid.files)
    for name, text in sorted(laid.files.items()):
        parts.append((names[name], _one_key_a_line(run.files.get(name, "")), _one_key_a_line(text)))
    return "".join(_diff(name, old, new) for name, old, new in parts if old != new)


def _one_key_a_line(text: str) -> str:
    """JSON as it is compared, however it is spaced; any other text as it is."""
    try:
        return json.dumps(json.loads(text), indent=2)
    except ValueError:
        return text


def _arguments(argv: Sequence[str]) -> list[str]:
    """The words, an option and its values joined."""
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
