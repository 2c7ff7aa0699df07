"""What can be seen to be wrong with a command before anything runs, told at the key it stands under."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.scalars import is_there
from orchestrator.recipes.launchers import program_of, without_launcher
from orchestrator.space.knobs.sections import fault
from trials.secrets import redactor

MAX_FILE_BYTES = 1 << 20
_GROUPS = ("loss", "step_s", "step_ms", "tokens_per_s", "samples_per_s", "grad_norm", "allocated_gib", "reserved_gib")


def check_log(pattern: str | None) -> str | None:
    """The pattern of log lines.

    Raises:
        PydanticCustomError: it is no regular expression, lacks the group ``step``, or has one that nobody knows.
    """
    if pattern is None:
        return None
    try:
        groups = set(re.compile(pattern).groupindex)
    except re.error as error:
        raise fault(None, f"not a regular expression: {error}", "Put a backslash before signs meant as such.") from None
    if "step" not in groups:
        raise fault(None, "no group 'step'", r"Write (?P<step>\d+) where the line has the number of the step.")
    if unknown := sorted(groups - {"step", *_GROUPS}):
        raise fault(None, f"nobody knows what {unknown[0]!r} is", f"Groups besides step: {', '.join(_GROUPS)}.")
    return pattern


def check_command(run: Sequence[str], launcher: str) -> None:
    """Refuse a command that starts ranks itself where we do that.

    Raises:
        PydanticCustomError: it does.
    """
    if launcher == "own":
        return
    launched = without_launcher(tuple(run))
    if launched.launcher is not None:
        listed = ", ".join(f'"{word}"' if "{" in word else word for word in launched.argv)
        remedy = f"Write run: [{listed}]; or launcher: own, if {launched.launcher} has to do it."
        raise fault("run", f"{launched.launcher} would start ranks inside of every rank", remedy)


def check_program(run: Sequence[str], cwd: Path) -> None:
    """Refuse a command that cannot start on this host: its folder, program or script is not there.

    Raises:
        PydanticCustomError: one of them is not.
    """
    if not cwd.is_dir():
        raise fault("cwd", f"there is no folder {cwd}", "The path is relative to the sweep file.")
    program = run[0]
    if "{" not in program and shutil.which(program if os.sep not in program else str(cwd / program)) is None:
        where = "executable file" if os.sep in program else "program on the PATH called"
        raise fault("run.0", f"there is no {where} {program!r}", "Name the program that starts the training.")
    script = program_of(without_launcher(tuple(run)).argv).script
    if script is not None and "{" not in script and not is_there(cwd / script):
        place = list(run).index(script)
        raise fault(f"run.{place}", f"there is no file {cwd / script}", "The path is relative to cwd.")


def read_files(paths: Mapping[str, str], given: set[str]) -> dict[str, tuple[str, str]]:
    """Absolute path and text of every file by name; ``given``: those that the sweep file names.

    Raises:
        PydanticCustomError: one of them cannot be read, is no text, too large, or holds a credential.
    """
    redact = redactor()
    found = {}
    for name, path in paths.items():
        file, key = os.path.normpath(path), f"files.{name}" if name in given else "run"
        try:
            with Path(file).open("rb") as stream:
                text = stream.read(MAX_FILE_BYTES + 1).decode("utf-8")
        except OSError as error:
            message = f"{file} cannot be read: {error.strerror or error}"
            raise fault(key, message, "The path is relative to cwd.") from None
        except UnicodeDecodeError:
            raise fault(key, f"{file} is not UTF-8 text", "Name a configuration file.") from None
        if len(text) > MAX_FILE_BYTES:
            raise fault(key, f"{file} is larger than {MAX_FILE_BYTES >> 20} MiB", "Name a configuration file.")
        if redact(text) != text:
            raise fault(
                key, f"{file} holds a credential", "Keep secrets in the environment, and name them in env_pass."
            )
        found[name] = (file, text)
    return found


def refuse_for_scripts(spec: Any) -> None:
    """Refuse what a sweep file asks for that only our runner, or a cluster that does not exist, can do.

    Raises:
        PydanticCustomError: at the key that asks.
    """
    if spec.cluster.kind in ("simulated", "replay"):
        raise fault("cluster.kind", f"a {spec.cluster.kind} cluster cannot run a program", "Use local or ray.")
    if spec.runner != type(spec).model_fields["runner"].default:
        raise fault("runner", "a training program of your own has no other runner", "Leave it out.")
    if spec.profile is not None:
        raise fault("profile", "the profiler knows models of our runner only", "Leave it out.")
    if spec.space.balance:
        raise fault("space.balance", "the balancer knows models of our runner only", "Leave it out.")
