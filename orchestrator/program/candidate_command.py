"""A candidate laid over a user's command: whether that is possible, and what a trial runs.

Custom knobs are arguments, keys of configuration files, environment variables or placeholders."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.frameworks.arguments import as_truth, either_dash, read, read_text, remove, write
from orchestrator.frameworks.documents import ABSENT, edited, load, value_at
from orchestrator.frameworks.edit import Overlay, OverlayRequest, Run
from orchestrator.frameworks.spelling import Note
from orchestrator.program.user_program import Script, filled_run, names_in, placeholder_values
from orchestrator.space.knobs import OwnKnob, OwnScalar, argument_text
from orchestrator.space.rules import Case, Rule
from trials import sizes
from trials.script.command import CommandFile, ScriptCommand
from trials.spec import Candidate, Protocol

START, CHANGES = "train.sh", "changes.diff"
"""Files that are exported beside copies: what starts the training, and what differs from the user's own."""


def request_of(script: Script, candidate: Candidate, device: str | None = None) -> OverlayRequest:
    """What the recipe is to lay over the command: own knobs only as far as nobody else can."""
    batch, is_unchanged = script.workload.global_batch_size, candidate == script.unchanged
    left = tuple(choice for choice in candidate.own if not is_settled(choice.name, script))
    return OverlayRequest(
        candidate=dataclasses.replace(candidate, own=left),
        reading=script.reading,
        named=frozenset() if is_unchanged else script.named,
        told=script.told,
        world_size=candidate.layout.world_size,
        global_batch_size=batch,
        num_microbatches=max(1, candidate.num_microbatches(batch)),
        seed=script.seed,
        device=device or script.device,
    )


def render(script: Script, candidate: Candidate, *, last_step: int | None = None, device: str | None = None) -> Overlay:
    """The user's command with the candidate laid over it; with ``last_step`` also in trial mode.

    Its environment is that of the command and what was added to it.

    Args:
        device: kind of device that it runs on, where that is known.

    Raises:
        ConfigError: a file of the user's that cannot be changed.
    """
    values = placeholder_values(candidate, script.workload, last_step=last_step)
    run = filled_run(with_own(script, candidate), values)
    laid = script.training.overlay(run, request_of(script, candidate, device))
    if last_step is not None:
        laid = script.training.trial_mode(laid, last_step)
    env = {**run.env, **laid.env}
    files = {**run.files, **laid.files}
    used = [name for name in names_in((*laid.argv, *env.values())) if name in files]
    return dataclasses.replace(laid, env=env, files={name: files[name] for name in used})


def file_names(script: Script, names: Iterable[str]) -> dict[str, str]:
    """What the copies of configuration files are called, by placeholder: as the user's own, whose suffix programs go
    by, unless several would be called alike, or like a file that is exported beside them."""
    found: dict[str, str] = {}
    for name in sorted(names):
        own = script.run.paths.get(name, name).replace("\\", "/").rpartition("/")[2]
        taken = {*found.values(), START, CHANGES}
        found[name] = own if own not in taken else f"{name}-{own}"
    return found


def problem(script: Script, candidate: Candidate, device: str | None = None) -> str | None:
    """Why the candidate cannot be said in the words of the user's command; None where it can.

    Recipes read back what they laid over, so that nobody finds out on the devices that something else would be trained.
    """
    key = candidate, device
    if key not in script.judged:
        script.judged[key] = _problem(script, candidate, device)
    return script.judged[key]


def _problem(script: Script, candidate: Candidate, device: str | None) -> str | None:
    try:
        laid = render(script, candidate, device=device)
    except ConfigError as error:
        return str(error)
    return next((_sentence(note) for note in laid.notes if note.severity == "error"), None)


def rule_of(script: Script) -> Rule:
    """Legality by :func:`problem`, under the id ``recipe:NAME``."""

    def check(case: Case) -> str | None:
        device = case.topology.nodes[0].device_kind if case.topology is not None else None
        return problem(script, case.candidate, device)

    return Rule(id=script.rule_id, check=check)


def notes_of(script: Script, candidate: Candidate) -> tuple[str, ...]:
    """What was not understood of the command, and what the recipe has to say of this candidate."""
    said = map(_sentence, render(script, candidate).notes)
    return tuple(dict.fromkeys((*script.notes, *said)))


def _sentence(note: Note) -> str:
    return f"{note.knob}: {note.message}" if note.knob else note.message


def is_placeholder(name: str, run: Run) -> bool:
    return name in names_in((*run.argv, *run.env.values(), *run.files.values()))


def is_settled(name: str, script: Script) -> bool:
    """Whether an own knob is laid over the command here; the others are the recipe's."""
    if not script.training.takes_own_names or name.startswith(("-", "$")) or ":" in name:
        return True
    return name in script.placeholders or any(knob.name == name and knob.flag for knob in script.own)


def with_own(script: Script, candidate: Candidate) -> Run:
    """The command with the candidate's own knobs; placeholders are left to be filled in.

    Raises:
        ConfigError: a configuration file that cannot be read, or a key that cannot be set in it.
    """
    run = script.run
    if candidate == script.unchanged:
        return run
    flags = {knob.name: knob.flag for knob in script.own}
    changes: dict[str, dict[str, OwnScalar]] = {}
    for choice in candidate.own:
        name = choice.name
        if name.startswith("$"):
            run = dataclasses.replace(run, env={**run.env, name[1:]: argument_text(choice.value)})
        elif ":" in name:
            file, _, key = name.partition(":")
            changes.setdefault(file, {})[key] = choice.value
        elif is_settled(name, script) and name not in script.placeholders:
            argv = _with_argument(run.argv, flags.get(name) or _argument_name(name), choice.value)
            run = dataclasses.replace(run, argv=argv)
    return _with_changes(run, changes) if changes else run


def said(knob: OwnKnob, run: Run) -> OwnScalar | None:
    """The one of a knob's values that the command has; None where it says something else, or nothing."""
    if knob.name.startswith("$"):
        given: object = run.env.get(knob.name[1:])
    elif ":" in knob.name:
        file, _, key = knob.name.partition(":")
        given = value_at(load(run.files[file], run.paths.get(file, file)), key) if file in run.files else None
        given = None if given is ABSENT else given
    else:
        given = _argument(knob.flag or _argument_name(knob.name), knob, run)
    return next((value for value in knob.values if _is_same(value, given)), None)


def filled_in(knob: OwnKnob, run: Run) -> str | None:
    """The placeholder in the value of the argument that a knob is; None where there is none."""
    if not knob.name.startswith("-"):
        return None
    return next(iter(names_in([read_text(run.argv, either_dash(knob.name)) or ""])), None)


def _argument_name(name: str) -> str:
    """The argument that a name stands for which is neither placeholder, key nor variable."""
    return name if name.startswith("-") else f"--{name}"


def _argument(name: str, knob: OwnKnob, run: Run) -> object:
    if all(isinstance(value, bool) for value in knob.values):
        found = as_truth(read(run.argv, either_dash(name, "switch")))
        return False if found is None else found
    return read(run.argv, either_dash(name))


def _is_same(value: OwnScalar, given: object) -> bool:
    if isinstance(given, str) and not isinstance(value, str):
        return argument_text(value) == given
    return given == value and isinstance(given, bool) == isinstance(value, bool)


def _with_argument(argv: tuple[str, ...], name: str, value: OwnScalar) -> tuple[str, ...]:
    """The words with an argument; true and false put it in without a value, or leave it out."""
    if value is False:
        return remove(argv, either_dash(name, "switch"))
    if value is True:
        return argv if read(argv, either_dash(name, "switch")) is True else write(argv, either_dash(name, "flag"), True)
    return write(argv, either_dash(name), argument_text(value))


def _with_changes(run: Run, changes: Mapping[str, Mapping[str, OwnScalar]]) -> Run:
    """The command with changed copies of files, which its words name by placeholders; other files stay in place."""
    texts = dict(run.files)
    for file, values in changes.items():
        texts[file] = edited(texts[file], run.paths.get(file, file), values)
    changed = [file for file in changes if texts[file] != run.files[file]]
    argv = tuple(_with_placeholder(word, run, changed) for word in run.argv)
    return dataclasses.replace(run, argv=argv, files=texts)


def _with_placeholder(word: str, run: Run, names: list[str]) -> str:
    """The word with the placeholder of a file in the place of its path."""
    head, equals, path = word.rpartition("=")
    for name in names:
        if name in run.paths and os.path.normpath(Path(run.cwd) / path) == run.paths[name]:
            return f"{head}{equals}{{{name}}}"
    return word


RUNNER = "trials.script.runner:run_rank"
"""Function that every rank of such a trial runs."""
MARGIN_STEPS = 4
"""Steps that a program is asked for beyond those that are needed: it shall not begin to end while it is measured."""


def last_step(protocol: Protocol) -> int:
    """The step at which a trial's program is asked to end."""
    return protocol.min_warmup_steps + protocol.num_steps + MARGIN_STEPS


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
) -> ScriptCommand:
    """The command of one trial: the candidate laid over the user's own, in trial mode.

    Args:
        env_pass: variables of the ranks' environment that the program sees besides those that the file names.
        fewest_steps: measured steps that are enough where the program ends by itself; None: all that it should run.

    Raises:
        ConfigError: a file of the user's that cannot be changed.
    """
    workload, shape = script.workload, script.model.shape
    laid = render(script, candidate, last_step=last_step(protocol), device=device)
    names = file_names(script, laid.files)
    return ScriptCommand(
        argv=laid.argv,
        cwd=script.run.cwd,
        env=tuple(sorted(laid.env.items())),
        env_pass=(*script.env_pass, *env_pass),
        files=tuple(CommandFile(name=name, file_name=names[name], text=text) for name, text in laid.files.items()),
        launcher=script.model.launcher,
        log=script.log,
        hook=script.hook,
        protocol=protocol,
        fewest_steps=fewest_steps,
        num_devices=candidate.layout.world_size,
        tokens_per_step=workload.tokens_per_step,
        samples_per_step=workload.global_batch_size,
        expected=script.training.expected(request_of(script, candidate, device)),
        device=device,
        memory_limit_bytes=memory_limit_bytes,
        model_flops_per_token=0.0 if shape is None else sizes.model_flops_per_token(shape, workload.seq_length),
        cache_dir=cache_dir,
    )
