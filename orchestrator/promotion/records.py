"""Append-only records of what was in production: runs in the experiment ``promotions``, one per change.

A record is begun before anything is changed (status RUNNING) and ended after everything is (FINISHED); one whose change
never came about is FAILED. The finished ones of a name form a chain: each begins where the one before ended.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import artifact_folder
from orchestrator.tracking.registry import Registry
from trials.codec import from_json
from trials.secrets import redact

if TYPE_CHECKING:
    from mlflow.entities import Run

EXPERIMENT = "promotions"
RECIPE_FOLDER = "recipe"
RECORD_FILE = "record.json"
_PREFIX = "tc."
_SOURCE = {"mlflow.source.name": "tune-cluster", "mlflow.source.type": "LOCAL"}
_MAX_TAG_CHARS = 5000
_ALL_RUNS = 3
"""MLflow's ``ViewType.ALL``: records that somebody deleted on a page are still part of the history."""

Action = Literal["promote", "rollback", "external", "candidate"]
"""Kinds of change; ``candidate``: a version was registered, and production stayed what it was;
``external``: the alias was moved past this program, whose next command found and recorded it."""
State = Literal["begun", "done", "void"]
_STATES: dict[str, State] = {"RUNNING": "begun", "SCHEDULED": "begun", "FINISHED": "done"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One change of what is in production under ``name``. Versions are ``""`` where there was, or is, none."""

    name: str
    number: int
    """Position in the history of the name, from 1, void records counted."""
    action: Action
    from_version: str
    to_version: str
    """Version in production afterwards; empty for a begun promotion until the version exists, and for none."""
    by: str
    at_s: float
    reason: str = ""
    forced: bool = False
    missing: tuple[str, ...] = ()
    """What was missing when it was forced."""
    sweep: str = ""
    """Sweep that ``to_version`` comes from; the four fields that follow are about that version, too."""
    sweep_id: str = ""
    trial: str = ""
    short_name: str = ""
    speedup: str = ""
    from_sweep: str = ""
    from_sweep_id: str = ""
    recipe_sha256: str = ""
    files_sha256: str = ""
    """Digest of the digests of all files of ``to_version``."""
    record_id: str = ""
    """MLflow run that holds the record."""
    state: State = "begun"
    note: str = ""
    """Why it is void, or who settled it."""

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"missing": list(self.missing)}

    def for_ledger(self) -> dict[str, str]:
        """The texts that :class:`orchestrator.sweep.events.Promoted` keeps."""
        names = ("action", "name", "from_version", "to_version", "sweep", "from_sweep", "trial", "by", "reason")
        texts = {name: str(getattr(self, name)) for name in (*names, "recipe_sha256", "files_sha256", "record_id")}
        return texts | {"forced": str(self.forced).lower(), "number": str(self.number), "at_s": f"{self.at_s:.3f}"}

    def to_tags(self) -> dict[str, str]:
        """Tags of the run that holds the record, without what the run itself holds."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for held in ("record_id", "state"):
            del values[held]
        return {f"{_PREFIX}{key}": _text(value) for key, value in values.items()}

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """The record that a run of MLflow holds.

        Raises:
            ConfigError: its tags are not those of a record: somebody altered them.
        """
        tags = {key.removeprefix(_PREFIX): text for key, text in run.data.tags.items() if key.startswith(_PREFIX)}
        texts: dict[str, Any] = {f.name: tags.get(f.name, "") for f in fields(cls) if f.type == "str"}
        try:
            for name in ("from_version", "to_version", "trial"):
                if texts[name] and not texts[name].isdigit():
                    raise ValueError(f"{name} is {texts[name]!r}")
            found = cls(
                **texts | {"record_id": run.info.run_id},
                action=from_json(Action, tags["action"]),
                number=int(tags["number"]),
                at_s=float(tags["at_s"]),
                forced=tags.get("forced") == "true",
                missing=from_json(tuple[str, ...], json.loads(tags.get("missing") or "[]")),
                state=_STATES.get(run.info.status, "void"),
            )
            time.localtime(found.at_s)
        except (KeyError, ValueError, OverflowError, RecursionError) as error:
            why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"a record of {tags.get('name', 'a promotion')} was altered (run {run.info.run_id} of the experiment"
                f" {EXPERIMENT}): {why}",
                remedy="Put its tags right in MLflow; record.json among its artifacts tells what they were.",
            ) from None
        return found


class Records:
    """The records in the store at ``uri``, which ``registry`` speaks to. Raises what MLflow raises."""

    def __init__(self, registry: Registry, uri: str) -> None:
        self._client = registry.client
        self._registry = registry
        self._uri = uri

    @cached_property
    def _experiment_id(self) -> str:
        folder = artifact_folder(self._uri)
        return self._registry.ensure_experiment(EXPERIMENT, (folder / EXPERIMENT).as_uri() if folder else None)

    def of(self, name: str) -> list[Record]:
        """All records of a name, in order."""
        found = self._client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            return []
        records, token = [], None
        wanted = f"tags.`tc.kind` = 'promotion' AND tags.`tc.name` = '{name}'"
        while True:
            page = self._client.search_runs([found.experiment_id], wanted, _ALL_RUNS, 1000, page_token=token)
            records += [Record.from_run(run) for run in page]
            token = page.token
            if not token:
                return sorted(records, key=lambda record: (record.number, record.at_s))

    def begin(self, record: Record) -> Record:
        """Write a record down as begun; returns it with its id."""
        tags = record.to_tags() | _SOURCE | {"tc.kind": "promotion"}
        run = self._client.create_run(
            self._experiment_id, round(1000 * record.at_s), fit(tags), run_name=_run_name(record)
        )
        return replace(record, record_id=run.info.run_id)

    def put_files(self, record: Record, files: Mapping[str, str]) -> None:
        """Store the files of the version that the record leads to."""
        for path, text in files.items():
            self._client.log_text(record.record_id, text, f"{RECIPE_FOLDER}/{path}")

    def lead_to(self, record: Record, version: str) -> Record:
        """Note the version that a begun promotion has led to; returns the record with it."""
        self._client.set_tag(record.record_id, f"{_PREFIX}to_version", version)
        found = replace(record, to_version=version)
        self._client.update_run(record.record_id, name=_run_name(found))
        return found

    def finish(self, record: Record, *, note: str = "") -> Record:
        """End the record: the last act of a change."""
        done = replace(record, state="done", note=note or record.note)
        self._describe(done)
        self._client.set_terminated(record.record_id, "FINISHED", round(1000 * time.time()))
        return done

    def void(self, record: Record, why: str) -> Record:
        """End the record as void: it has changed nothing."""
        done = replace(record, state="void", note=why)
        self._describe(done)
        self._client.set_terminated(record.record_id, "FAILED", round(1000 * time.time()))
        return done

    def _describe(self, record: Record) -> None:
        self._client.set_tag(record.record_id, f"{_PREFIX}note", record.note)
        self._client.set_tag(record.record_id, "mlflow.note.content", redact(_markdown(record)))
        self._client.log_text(record.record_id, json.dumps(record.to_json(), indent=1) + "\n", RECORD_FILE)

    def put_verification(self, name: str, tags: Mapping[str, str], metrics: Mapping[str, float], report: str) -> str:
        """Write down what a verification found, as a run of its own; returns its id."""
        tags = {**tags, **_SOURCE, "tc.kind": "verification"}
        run = self._client.create_run(self._experiment_id, tags=fit(tags), run_name=name)
        run_id = str(run.info.run_id)
        for key, value in metrics.items():
            self._client.log_metric(run_id, key, value)
        self._client.log_text(run_id, redact(report), "verification.json")
        self._client.set_terminated(run_id)
        return run_id


def gaps(records: list[Record]) -> list[Record]:
    """Changes that do not begin where the one before ended: a record between them is gone, or was altered."""
    done = chain(records)
    return [record for before, record in itertools.pairwise(done) if record.from_version != before.to_version]


def chain(records: list[Record]) -> list[Record]:
    """The changes of production that came about, in order."""
    return [record for record in records if record.state == "done" and record.action != "candidate"]


def fit(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags made fit for MLflow: redacted, and cut to the length it takes."""
    return {key: redact(text)[:_MAX_TAG_CHARS] for key, text in tags.items()}


def _text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return json.dumps(list(value))
        case float():
            return f"{value:.3f}"
        case _:
            return str(value)


def _run_name(record: Record) -> str:
    """``llama 3 → 4 promote``: what MLflow's default table shows."""
    what = f" {record.short_name}" if record.short_name else ""
    return f"{record.name} {_arrow(record)} {record.action}{what}"[:200]


def _arrow(record: Record) -> str:
    to = f"v{record.to_version}" if record.to_version else ("?" if record.state == "begun" else "none")
    return f"{f'v{record.from_version}' if record.from_version else 'none'} → {to}"


def _markdown(record: Record) -> str:
    is_candidate = record.action == "candidate"
    alias, force = ("candidate", "registered without proof") if is_candidate else ("production", "promoted by force")
    head = f"**{record.name}@{alias} {_arrow(record)}** — {record.action} by {record.by}"
    facts = {
        "reason": record.reason,
        "configuration": record.short_name and f"`{record.short_name}`, {record.speedup}",
        "from": record.sweep and f"trial {record.trial} of sweep {record.sweep}",
        force: "; ".join(record.missing) if record.forced else "",
        "did not come about" if record.state == "void" else "note": record.note,
    }
    return "\n".join([head, "", *(f"- {what}: {text}" for what, text in facts.items() if text)])
