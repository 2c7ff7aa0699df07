"""Append-only history of production: runs in the experiment ``promotions``, one per change.

A record is started before any change (status RUNNING) and ended after all changes (FINISHED); a change that did not
take effect is FAILED. The finished ones of a name form a chain: each continues the one before.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from uuid import uuid4

from cluster.processes import process_info
from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import artifact_folder
from orchestrator.process_support import pause_s
from orchestrator.tracking.mlflow_store import Registry
from trials.files import digest, from_json
from trials.secrets import redact

if TYPE_CHECKING:
    from mlflow.entities import Run


logger = logging.getLogger(__name__)

EXPERIMENT = "promotions"
RECIPE_FOLDER = "recipe"
RECORD_FILE = "record.json"
_PREFIX = "tc."
_SOURCE = {"mlflow.source.name": "tune-cluster", "mlflow.source.type": "LOCAL"}
_MAX_TAG_CHARS = 5000
_DIGEST = "tc.digest"
_CHANGING = ("to_version", "record_id", "state", "note", "taken_over", "altered")
"""Fields of a record that change after its start, or are not among its tags."""
_ALL_RUNS = 3
"""MLflow's ``ViewType.ALL``: records deleted on a page are still part of the history."""

Action = Literal["promote", "rollback", "external", "candidate"]
"""Kinds of change; ``candidate``: a version was registered without changing production; ``external``: the alias was
moved outside this program, whose next command recorded it."""
State = Literal["begun", "done", "void"]
_STATES: dict[str, State] = {"RUNNING": "begun", "SCHEDULED": "begun", "FINISHED": "done"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One change of production for ``name``. Versions are ``""`` for none."""

    name: str
    number: int
    """Position in the history of the name, from 1, including void records."""
    action: Action
    from_version: str
    to_version: str
    """Version in production afterwards; empty for none, and for a started promotion until the version exists."""
    by: str
    at_s: float
    reason: str = ""
    forced: bool = False
    missing: tuple[str, ...] = ()
    """Missing evidence of a forced promotion."""
    sweep: str = ""
    """Sweep of ``to_version``; the following four fields also describe that version."""
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
    """MLflow run of the record."""
    state: State = "begun"
    note: str = ""
    """Why it is void, or who resolved it."""
    taken_over: bool = False
    """Whether another process ended it while its own may have been suspended, and may still write once."""
    altered: bool = False
    """Whether its tags in MLflow were edited; its content then comes from its file."""

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"missing": list(self.missing)}

    def for_ledger(self) -> dict[str, str]:
        """The texts that :class:`orchestrator.sweep.events.Promoted` keeps."""
        names = ("action", "name", "from_version", "to_version", "sweep", "from_sweep", "trial", "by", "reason")
        texts = {name: str(getattr(self, name)) for name in (*names, "recipe_sha256", "files_sha256", "record_id")}
        return texts | {"forced": str(self.forced).lower(), "number": str(self.number), "at_s": f"{self.at_s:.3f}"}

    def to_tags(self) -> dict[str, str]:
        """Tags of the record's run, without the run's own fields."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for held in ("record_id", "state", "altered"):
            del values[held]
        return fit({f"{_PREFIX}{key}": _text(value) for key, value in values.items()})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Back from :meth:`to_json`.

        Raises:
            ValueError: it is of another form.
        """
        found: Self = from_json(cls, {**content, "missing": tuple(content.get("missing", ()))})
        return found

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """The record of an MLflow run.

        Raises:
            ConfigError: its tags are not those of a record: they were altered.
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
                taken_over=tags.get("taken_over") == "true",
                missing=from_json(tuple[str, ...], json.loads(tags.get("missing") or "[]")),
                state=_STATES.get(run.info.status, "void"),
            )
            time.localtime(found.at_s)
        except (KeyError, ValueError, OverflowError, RecursionError) as error:
            why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise _altered(run, why) from None
        return found


class Records:
    """The records in the store at ``uri``, through ``registry``. Raises MLflow's errors."""

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
            records += [self._read(run) for run in page]
            token = page.token
            if not token:
                return sorted(records, key=lambda record: (record.number, record.at_s))

    def _read(self, run: Run) -> Record:
        """The record of a run; if its tags were edited, from its file.

        Raises:
            ConfigError: its tags were edited, and its file does not have the originals.
        """
        try:
            record, altered = Record.from_run(run), None
            if run.data.tags.get(_DIGEST) == _digest(run.data.tags):
                return record
        except ConfigError as error:
            altered = error
        kept = self._kept(run)
        if kept is None:
            raise altered or _altered(run, "its tags were edited")
        return replace(kept, record_id=run.info.run_id, state=_STATES.get(run.info.status, "void"), altered=True)

    def _kept(self, run: Run) -> Record | None:
        """The record from its file; None if there is none, or it does not match these tags either."""
        from mlflow.exceptions import MlflowException

        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(self._client.download_artifacts(run.info.run_id, RECORD_FILE, folder))
                kept = Record.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (MlflowException, OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None
        written = run.data.tags.get(_DIGEST)
        return kept if written in (None, _digest(kept.to_tags())) else None

    def begin(self, record: Record) -> Record:
        """Create a started record; returns it with its id."""
        tags = record.to_tags() | _SOURCE | {"tc.kind": "promotion"}
        tags[_DIGEST] = _digest(tags)
        run = self._client.create_run(
            self._experiment_id, round(1000 * record.at_s), fit(tags), run_name=_run_name(record)
        )
        return replace(record, record_id=run.info.run_id)

    def put_files(self, record: Record, files: Mapping[str, str]) -> None:
        """Store the files of the record's version."""
        for path, text in files.items():
            self._client.log_text(record.record_id, text, f"{RECIPE_FOLDER}/{path}")

    def lead_to(self, record: Record, version: str) -> Record:
        """Add the version of a started promotion; returns the record with it."""
        self._client.set_tag(record.record_id, f"{_PREFIX}to_version", version)
        found = replace(record, to_version=version)
        self._client.update_run(record.record_id, name=_run_name(found))
        return found

    def finish(self, record: Record, *, note: str = "") -> Record:
        """End the record: the last step of a change. Does nothing if another process has ended it."""
        if not self._is_open(record):
            return replace(record, state="done")
        done = replace(record, state="done", note=note or record.note)
        self._describe(done)
        self._client.set_terminated(record.record_id, "FINISHED", round(1000 * time.time()))
        return done

    def void(self, record: Record, why: str) -> Record:
        """End the record as void, without changes. Does nothing if another process has ended it."""
        if not self._is_open(record):
            return record
        done = replace(record, state="void", note=why)
        self._describe(done)
        self._client.set_terminated(record.record_id, "FAILED", round(1000 * time.time()))
        return done

    def take_over(self, record: Record) -> Record:
        """Note that the record is ended by another process while its own may still write once."""
        self._client.set_tag(record.record_id, f"{_PREFIX}taken_over", "true")
        return replace(record, taken_over=True)

    def no_longer_late(self, record: Record, note: str = "") -> None:
        """Note that the record's former process no longer writes, or that its late write was undone."""
        self._client.set_tag(record.record_id, f"{_PREFIX}taken_over", "false")
        if note:
            self._describe(replace(record, note="; ".join(filter(None, (record.note, note))), taken_over=False))

    def _is_open(self, record: Record) -> bool:
        return _STATES.get(self._client.get_run(record.record_id).info.status) == "begun"

    def _describe(self, record: Record) -> None:
        self._client.set_tag(record.record_id, f"{_PREFIX}note", record.note)
        self._client.set_tag(record.record_id, "mlflow.note.content", redact(_markdown(record)))
        try:
            self._client.log_text(record.record_id, json.dumps(record.to_json(), indent=1) + "\n", RECORD_FILE)
        except OSError as error:  # a folder of another user, who started it: its tags have the same content
            logger.warning("cannot write %s of record %d of %s: %s", RECORD_FILE, record.number, record.name, error)

    def put_verification(self, name: str, tags: Mapping[str, str], metrics: Mapping[str, float], report: str) -> str:
        """Record the result of a verification as a run; returns its id."""
        tags = {**tags, **_SOURCE, "tc.kind": "verification"}
        run = self._client.create_run(self._experiment_id, tags=fit(tags), run_name=name)
        run_id = str(run.info.run_id)
        for key, value in metrics.items():
            self._client.log_metric(run_id, key, value)
        self._client.log_text(run_id, redact(report), "verification.json")
        self._client.set_terminated(run_id)
        return run_id


def _altered(run: Run, why: str) -> ConfigError:
    name = run.data.tags.get(f"{_PREFIX}name", "a promotion")
    return ConfigError(
        f"a record of {name} was altered (run {run.info.run_id} of the experiment {EXPERIMENT}): {why}",
        remedy=f"Restore its tags in MLflow; its artifact {RECORD_FILE}, if it exists, has the original values.",
    )


def _digest(tags: Mapping[str, str]) -> str:
    """Digest of the tags of a record that never change after its start."""
    names = (f"{_PREFIX}{f.name}" for f in fields(Record) if f.name not in _CHANGING)
    return digest({name: tags.get(name, "") for name in names})


def gaps(records: list[Record]) -> list[Record]:
    """Changes that do not continue the one before: a record between them is missing or was altered."""
    done = chain(records)
    return [record for before, record in itertools.pairwise(done) if record.from_version != before.to_version]


def chain(records: list[Record]) -> list[Record]:
    """The changes of production that took effect, in order."""
    return [record for record in records if record.state == "done" and record.action != "candidate"]


def fit(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags for MLflow: redacted, and cut to its maximum length."""
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
    """``llama 3 → 4 promote``: the run's name in MLflow's table."""
    what = f" {record.short_name}" if record.short_name else ""
    return f"{record.name} {_arrow(record)} {record.action}{what}"[:200]


def _arrow(record: Record) -> str:
    to = f"v{record.to_version}" if record.to_version else ("?" if record.state == "begun" else "none")
    return f"{f'v{record.from_version}' if record.from_version else 'none'} → {to}"


def _markdown(record: Record) -> str:
    is_candidate = record.action == "candidate"
    alias, force = ("candidate", "registered without proof") if is_candidate else ("production", "promoted, forced")
    head = f"**{record.name}@{alias} {_arrow(record)}** — {record.action} by {record.by}"
    facts = {
        "reason": record.reason,
        "configuration": record.short_name and f"`{record.short_name}`, {record.speedup}",
        "from": record.sweep and f"trial {record.trial} of sweep {record.sweep}",
        force: "; ".join(record.missing) if record.forced else "",
        "did not take effect" if record.state == "void" else "note": record.note,
    }
    return "\n".join([head, "", *(f"- {what}: {text}" for what, text in facts.items() if text)])


# A lock in the registry itself, for processes of any host that share nothing else.
#
# To take it, a process creates its own entry, a registered model with a unique name, and then lists all entries: if it
# is alone, it has the lock; otherwise it deletes its entry and tries again. Of two concurrent processes at least one
# sees the other, since each creates its entry before listing; so two never have it. Entries are deleted by their unique
# names, so that no other entry than the listed one can be deleted.
#
# An entry is stale when its process is known to be gone, or when it has not changed for ``STALE_S`` while another
# process watched: clocks of hosts are not compared. An owner that was only suspended finds it missing before its next
# write; the one write that it may still make is undone, see :mod:`orchestrator.promotion.release`.


STALE_S = 60.0


WAIT_S = 150.0
"""Seconds to wait for the lock: longer than it takes an entry of a lost host to become stale."""


_POLL_S = 0.05


_MAX_PAUSE_S = 0.4


class LockLostError(ConfigError):
    """Another process took over the lock, assuming that this one was gone; the next command completes its work."""


class RegistryLock:
    """The exclusive right to change production of ``name``; see :meth:`hold`."""

    def __init__(self, registry: Registry, name: str, owner: str, *, stale_s: float = STALE_S) -> None:
        self._registry = registry
        self._name = name
        self._prefix = f"{name} (being changed) "  # valid names contain no space
        self._entry = f"{self._prefix}{uuid4().hex}"
        self._tags = {"owner": owner, "place": own_place(), "process": own_identity()}
        self._stale_s = stale_s
        self._num_renewals = 0
        self._watched: dict[str, tuple[Mapping[str, str], float]] = {}
        self.overtook = False
        """Whether it was taken from a process that may only be suspended, and may still write once."""

    @contextmanager
    def hold(self, wait_s: float = WAIT_S) -> Iterator[Callable[[], None]]:
        """Hold the lock; yields a function to call before every write, which raises LockLostError if it was lost.

        Raises:
            ConfigError: others have held it for ``wait_s``.
        """
        self._acquire(time.monotonic() + wait_s)
        try:
            yield self.renew
        finally:
            self._registry.delete_entry(self._entry)

    def renew(self) -> None:
        """Show that this process is still alive, if it still has the lock."""
        self._num_renewals += 1
        if not self._registry.tag_entry(self._entry, "renewals", str(self._num_renewals)):
            raise LockLostError(
                f"another process took over {self._name}, as this one had not responded for {self._stale_s:.0f} s",
                remedy=f"To see the result, run: tune-cluster history {self._name}",
            )

    def _acquire(self, deadline_s: float) -> None:
        num_tries = 0
        while others := self._others() or self._collision():
            if time.monotonic() > deadline_s:
                raise self._busy(others)
            self._remove_stale(others)
            time.sleep(random.uniform(0.2, 1.0) * pause_s(num_tries, first_s=_POLL_S, last_s=_MAX_PAUSE_S))
            num_tries += 1

    def _collision(self) -> dict[str, dict[str, str]]:
        """Other processes that want the lock at the same time; empty: this one has it."""
        about = f"{self._tags['owner']} is changing {self._name}@production. This entry is temporary."
        try:
            self._registry.create_entry(self._entry, self._tags, about)
            others = self._others()
        except BaseException:
            self._registry.delete_entry(self._entry)
            raise
        if others:
            self._registry.delete_entry(self._entry)
        return others

    def _others(self) -> dict[str, dict[str, str]]:
        return {name: tags for name, tags in self._registry.entries(self._prefix).items() if name != self._entry}

    def _remove_stale(self, others: Mapping[str, Mapping[str, str]]) -> None:
        now_s = time.monotonic()
        for entry, tags in others.items():
            seen, since_s = self._watched.get(entry, (None, now_s))
            if seen != tags:
                self._watched[entry] = (tags, now_s)
                since_s = now_s
            gone = is_gone(tags.get("place", ""), tags.get("process", ""))
            if gone or now_s - since_s > self._stale_s:
                self.overtook = self.overtook or not gone
                logger.warning(
                    "%s was left locked by %s, which is gone or suspended",
                    self._name,
                    tags.get("owner", "an unknown user"),
                )
                self._registry.delete_entry(entry)

    def _busy(self, others: Mapping[str, Mapping[str, str]]) -> ConfigError:
        owners = " and ".join(sorted({tags.get("owner", "an unknown user") for tags in others.values()}))
        return ConfigError(f"{owners} is changing {self._name}", remedy="Retry in a minute.")


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


_NAMESPACE = Path("/proc/self/ns/pid")


def own_place() -> str:
    """The host's boot and PID namespace; process numbers are comparable if it is equal.

    Empty if unknown.
    """
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return ""


def own_identity() -> str:
    """Process number and start time: the number alone may be reused."""
    return f"{os.getpid()} {_start_time(os.getpid())}"


def is_gone(place: str, identity: str) -> bool:
    """Whether the process is known to have ended. False if it runs elsewhere, or if unknown."""
    if not place or place != own_place():
        return False
    pid, _, started_at = identity.partition(" ")
    return pid.isdigit() and str(_start_time(int(pid))) != started_at


def _start_time(pid: int) -> int:
    """In clock ticks since the host booted; -1 if the process does not exist, or is a zombie."""
    info = process_info(pid)
    return info.started_at if info is not None and info.is_running else -1
