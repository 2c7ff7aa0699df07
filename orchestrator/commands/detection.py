"""Runs a training command before a sweep is drafted: for a few steps, then once per option to test."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.commands.short_run import run_once
from orchestrator.config.sweep import load_sweep
from orchestrator.draft.command_draft import DraftedScript
from orchestrator.draft.inside_draft import TORCH_MODULES
from orchestrator.draft.machine import DraftedMachine
from orchestrator.draft.observed import Detected, Filled, OptionChange, Proof, changes, files_of, found_options, proof
from orchestrator.draft.program_reading import runnable
from orchestrator.errors import ConfigError
from orchestrator.sweep.snapshot import Home
from trials.files import write_atomically
from trials.outcome import Measured
from trials.reports import ScriptFacts, SeenOption

DETECTION_S = 180.0
"""Default time limit of these runs, in seconds."""
TIME_MARGIN = 1.3
"""Expected time of a further run, as a multiple of the first one's."""
Notify = Callable[[str], None]


class NotSeenError(Exception):
    """The program made no usable steps; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionRun:
    """Facts and options recorded in one run."""

    facts: ScriptFacts
    options: tuple[SeenOption, ...]


class Detector:
    """Runs a command as a trial does, with the reporting hook, in its own ranks.

    Args:
        script: the command, as read.
        machine: where it runs.
        folder: for files of the runs; empty again afterwards.
    """

    def __init__(self, script: DraftedScript, machine: DraftedMachine, folder: Path, notify: Notify) -> None:
        self._script = script
        self._machine = machine
        self._folder = folder
        self._files = files_of(script.command.argv, Path(script.run.cwd))
        self._notify = notify
        self.spent_s = 0.0
        """Seconds that its runs have taken, without the time spent waiting for devices."""

    def observe(self, variant: Filled, within_s: float) -> DetectionRun:
        """Run a variant of the command.

        Raises:
            NotSeenError: it failed, or took longer.
        """
        file = self._folder / "look.yaml"
        write_atomically(file, [json.dumps(self._sweep(variant)).encode()])  # JSON is YAML
        try:
            spec = load_sweep(file)
        except ConfigError as error:
            raise NotSeenError(error.message) from None
        begun_s = time.monotonic()
        ran = run_once(spec, spec.baseline_candidate, Home(self._folder), self._waits, step_within_s=within_s)
        self.spent_s += time.monotonic() - begun_s - ran.waited_s
        if not isinstance(ran.outcome, Measured):
            raise NotSeenError(ran.outcome.evidence.message)
        found = ran.outcome.measurement.findings.script
        if found is None or found.facts.samples_per_step is None:
            raise NotSeenError("its steps were detected, but not its batch size")
        return DetectionRun(facts=replace(found.facts, seq_length=found.sample_length), options=found.options)

    def _waits(self, line: str) -> None:
        """Forward reasons for waiting, but not progress."""
        if not line.startswith("first step"):
            self._notify(line)

    def _sweep(self, variant: Filled) -> dict[str, object]:
        """A sweep of the command alone; its arguments are not checked."""
        script, devices = self._script, self._machine.devices_per_node
        starts_itself = script.command.starts_ranks or (script.command.launcher is None and devices == 1)
        changed = {word: text for word, text in variant.files.items() if text != self._files.get(word)}
        copies = {word: self._folder / f"{place}-{Path(word).name}" for place, word in enumerate(changed)}
        for word, copy in copies.items():
            write_atomically(copy, [changed[word].encode()])
        source = script.source
        # In a PyTorch program the hook counts steps; lines of a log may be micro-batches, and would end the run early.
        pattern = source.log_pattern if source is not None and not source.modules & TORCH_MODULES else None
        return {
            "name": "detection",
            "workload": {
                "recipe": "custom",
                "run": [_escaped(str(copies.get(word, word))) for word in variant.argv],
                "cwd": script.run.cwd,
                "env": {name: _escaped(text) for name, text in variant.env.items()},
                "launcher": "own" if starts_itself else "env",
                "global_batch_size": devices,
                **({"metrics": {"log": pattern}} if pattern else {}),
            },
            "cluster": {
                "kind": "local",
                "device": self._machine.topology.nodes[0].device_kind,
                "devices_per_node": devices,
            },
            "baseline": {"dp_replicate": devices},
            "space": {"dp_replicate": [devices]},
        }


def _escaped(word: str) -> str:
    """The word with all braces escaped, except for the placeholders of the trial's folder and its last step."""
    doubled = word.replace("{", "{{").replace("}", "}}")
    return doubled.replace("{{out}}", "{out}").replace("{{steps}}", "{steps}")


def detect(script: DraftedScript, machine: DraftedMachine, *, budget_s: float, notify: Notify) -> Detected:
    """Run the command, then once per option that may be worth tuning, as long as the budget lasts."""
    as_typed = _as_typed(script)
    with tempfile.TemporaryDirectory(prefix="tune-cluster-look-") as folder:
        detector = Detector(script, machine, Path(folder), notify)
        notify("running the command for three steps")
        try:
            first = detector.observe(as_typed, budget_s)
        except NotSeenError as reason:
            return Detected(problem=str(reason))
        detected = Detected(
            facts=first.facts,
            options=tuple(found_options(as_typed, script.source, first.options)),
            files=as_typed.files,
            starts_ranks=_starts_ranks(script, machine, first.facts),
        )
        notify(f"detected after {detector.spent_s:.0f} s: {detected.words}")
        if not script.uses_placeholders and script.framework.name != "accelerate":  # whose options are the script's
            return detected
        return _with_proofs(detected, script, machine, detector, budget_s, notify)


def _as_typed(script: DraftedScript) -> Filled:
    """The command with its variables and files."""
    files = files_of(script.command.argv, Path(script.run.cwd))
    return Filled(argv=runnable(script.command.argv, script.source), env=dict(script.command.env), files=files)


def _starts_ranks(script: DraftedScript, machine: DraftedMachine, facts: ScriptFacts) -> bool:
    return script.command.launcher is None and (facts.world_size or 1) > machine.topology.num_devices


def _with_proofs(
    detected: Detected,
    script: DraftedScript,
    machine: DraftedMachine,
    detector: Detector,
    budget_s: float,
    notify: Notify,
) -> Detected:
    """Add the result of one changed run per option, and the options for which no time was left."""
    as_typed = _as_typed(script)
    run_s = detector.spent_s * TIME_MARGIN
    declared = script.source.options if script.source is not None else ()
    changed = tuple(changes(as_typed.argv, (*declared, *detected.options), detected.facts, is_gpu=machine.is_gpu))
    proofs: dict[str, Proof] = {}
    refuted: set[str] = set()
    late: list[str] = []
    for change in changed:
        name = change.option.names[0]
        if change.role in proofs or any(done.option.names[0] == name for done in proofs.values()):
            continue
        if detector.spent_s + run_s > budget_s:
            late.append(name)
            continue
        found = _tried(change, detector, as_typed, budget_s, detected.facts)
        if isinstance(found, Proof):
            proofs[change.role] = found
            notify(f"{change.words}: {found.before} became {found.after}")
        else:
            refuted.add(name)
            notify(f"{change.words}: {found}")
    problem = f"no time left to test {', '.join(dict.fromkeys(late))}: see --run-time" if late else ""
    proven = {one.option.names[0] for one in proofs.values()}
    return replace(detected, proofs=proofs, refuted=frozenset(refuted - proven), problem=problem)


def _tried(
    change: OptionChange, detector: Detector, as_typed: Filled, budget_s: float, before: ScriptFacts
) -> Proof | str:
    """The proof from a changed run, or why there is none."""
    try:
        after = detector.observe(change.applied(as_typed), budget_s - detector.spent_s)
    except NotSeenError as reason:
        return f"does not run: {reason}"
    unread = [one for one in after.options if change.option.names[0] in (*one.flags, one.name) and one.is_unread]
    if unread:
        return "the program never reads it"
    return proof(change, before, after.facts) or "no such effect"
