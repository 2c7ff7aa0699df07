"""Changes of production: one at a time per name, compare-and-set, and recoverable after a crash.

The order of writes: start of the record, files, version, its number in the record, alias ``previous``, alias
``production``, end of the record. The next process that takes the lock and finds a started record completes it if the
version is complete, or declares it void; production never changes without a record.

MLflow has no conditional write, so a process suspended right before it moves an alias, while another takes over its
lock and its record, still moves it. A process that takes over from one that is not known to be gone notes that in the
record. An alias found at the version of such a record is restored to the last record's version: by the resumed
process, which finds that it has lost the lock, or by the next command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from orchestrator.errors import ConfigError
from orchestrator.promotion.manifest import WATERMARK_TAG, Manifest, describe, label_of, version_tags
from orchestrator.promotion.records import RECIPE_FOLDER, STALE_S, LockLostError, Record, Records, RegistryLock, chain
from orchestrator.promotion.references import (
    CANDIDATE,
    PREVIOUS,
    PRODUCTION,
    Past,
    Version,
    candidate_of,
    checked,
    found_moved,
    promotion_of,
    rollback_to,
)
from orchestrator.sweep.checkpoint import requester
from orchestrator.sweep.snapshot import check_name
from orchestrator.tracking.mlflow_store import Registered, Registry
from orchestrator.tracking.mlflow_tracker import Tracker

NEVER = "Such a version cannot go to production."
NONE = "none"
"""User-visible word for nothing in production."""


_HARMLESS = ("begin", "files", "number")
"""Writes invisible to others, which do not require checking the lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseChange:
    """The result of a command; ``is_new`` is False if nothing had to be changed or recorded."""

    record: Record
    is_new: bool = True
    skipped: tuple[str, ...] = ()
    """Versions that a rollback skipped because they were deleted in MLflow."""


class Releases:
    """Changes production in one MLflow store.

    Args:
        on_step: called before every step; tests end the process there.
    """

    def __init__(
        self, tracker: Tracker, on_step: Callable[[str], None] = lambda _: None, *, stale_s: float = STALE_S
    ) -> None:
        self.registry = Registry(tracker.client())
        self.records = Records(self.registry, tracker.uri)
        self._on_step = on_step
        self._stale_s = stale_s
        self._begun: set[str] = set()

    def promote(
        self, name: str, manifest: Manifest, *, reason: str = "", expect_current: str | None = None
    ) -> ReleaseChange:
        """Register ``manifest`` as a version and put it into production.

        Raises:
            ConfigError: the version in production is not the expected one, or others hold the name for too long.
        """
        check_name(name, "registered name")
        with self._changing(name, expect_current) as (step, past):
            current = self.registry.find(name, version=past.current) if past.current else None
            if past.last is not None and current is not None and self._holds(current, manifest):
                return ReleaseChange(record=past.last, is_new=False)
            step("begin")
            record = self._registered(promotion_of(name, manifest, reason, past), manifest, step)
            return ReleaseChange(record=self._complete(record, step))

    def propose(self, name: str, manifest: Manifest, *, reason: str = "") -> ReleaseChange:
        """Register ``manifest`` as a version with the alias ``candidate``, without changing production.

        Raises:
            ConfigError: others hold the name for too long.
        """
        check_name(name, "registered name")
        with self._changing(name, None) as (step, past):
            found = self.registry.find(name, alias=CANDIDATE)
            if found is not None and self._holds(found, manifest):
                records = self.records.of(name)
                made = next((one for one in reversed(records) if one.to_version == found.version), None)
                if made is not None:
                    return ReleaseChange(record=made, is_new=False)
            step("begin")
            record = self._registered(candidate_of(name, manifest, reason, past), manifest, step)
            return ReleaseChange(record=self._complete(record, step))

    def _registered(self, wanted: Record, manifest: Manifest, step: Callable[[str], None]) -> Record:
        """Write the record, and create its version."""
        record = self._begin(wanted)
        step("files")
        self.records.put_files(record, manifest.files)
        step("version")
        tags = version_tags(manifest) | {"record": record.record_id, "promoted_by": record.by}
        made = self.registry.create_version(record.name, record.record_id, RECIPE_FOLDER, tags, describe(manifest))
        step("number")
        return self.records.lead_to(record, made.version)

    def roll_back(
        self, name: str, *, to: str | None = None, reason: str = "", expect_current: str | None = None
    ) -> ReleaseChange:
        """Put the previous version, or version ``to``, into production.

        Raises:
            ConfigError: as for :meth:`promote`; the version does not exist, or its files were altered.
        """
        check_name(name, "registered name")
        with self._changing(name, expect_current) as (step, past):
            if past.carried is not None and past.carried.action == "rollback" and to in (None, past.current):
                return ReleaseChange(record=past.carried)  # the rollback was interrupted: another one would undo it
            found, skipped = self._target(name, to, past)
            if past.current == found.version:
                raise ConfigError(f"{name}@production is already version {to}", remedy="There is nothing to do.")
            version = self._usable(found)
            step("begin")
            record = self._begin(rollback_to(version, reason, past))
            return ReleaseChange(record=self._complete(record, step), skipped=skipped)

    def _target(self, name: str, to: str | None, past: Past) -> tuple[Registered, tuple[str, ...]]:
        """The version to go back to, and the deleted ones before it.

        If the production version was deleted, it is the newest existing one that was in production. Otherwise a deleted
        previous version is not skipped: an older one was not requested.

        Raises:
            ConfigError: there is none.
        """
        listed = f"To list versions: tune-cluster history {name}"
        if to is not None:
            if found := self.registry.find(name, version=to):
                return found, ()
            raise ConfigError(f"{name} has no version {to}", remedy=listed)
        before = [past.last.from_version] if past.last else []
        done = chain(self.records.of(name))
        earlier = dict.fromkeys(v for v in (*before, *(one.to_version for one in reversed(done))) if v != past.current)
        deleted: list[str] = []
        for version in filter(None, earlier):
            found = self.registry.find(name, version=version)
            if found is None:
                deleted.append(version)
            elif deleted and past.current:
                raise ConfigError(
                    f"version {deleted[0]}, the previous one in production, was deleted in MLflow",
                    remedy=f"Version {version} still exists: tune-cluster rollback {name} --to {version}",
                )
            else:
                return found, tuple(deleted)
        if deleted:
            raise ConfigError(f"all previous production versions of {name} were deleted", remedy=listed)
        raise ConfigError(f"{name} has no version before the one in production", remedy=listed)

    def _usable(self, registered: Registered) -> Version:
        """The version, if it may go to production.

        Raises:
            ConfigError: its files were altered, or it is from a simulated cluster.
        """
        version = checked(self.registry, registered)
        if mark := registered.tags.get(WATERMARK_TAG):
            raise ConfigError(f"{label_of(registered)} is {mark}: nothing was measured", remedy=NEVER)
        return version

    def _begin(self, wanted: Record) -> Record:
        record = self.records.begin(wanted)
        self._begun.add(record.record_id)
        return record

    def check(self, registered: Registered) -> None:
        """Check that the files of the version are unchanged since its registration.

        Raises:
            ConfigError: they are not.
        """
        checked(self.registry, registered)

    def _holds(self, registered: Registered, manifest: Manifest) -> bool:
        """Whether the version is this manifest, with unchanged files."""
        if registered.tags.get("recipe_sha256") != manifest.sha256:
            return False
        try:
            self.check(registered)
        except ConfigError:
            return False
        return True

    # ---- the protocol ----

    @contextmanager
    def _changing(self, name: str, expect_current: str | None) -> Iterator[tuple[Callable[[str], None], Past]]:
        """Hold the lock with the history resolved and the expectation met.

        Yields a function to call before every write, and the history.
        """
        try:
            with self._locked(name) as (step, past):
                current = past.current
                if expect_current is not None and expect_current != (current or NONE):
                    raise ConfigError(
                        f"{name}@production is {f'version {current}' if current else NONE}, not {expect_current}",
                        remedy=f"To see what changed, run: tune-cluster history {name}",
                    )
                yield step, past
        except LockLostError as lost:
            raise self._give_way(name, lost) from None
        self._on_step("end")

    @contextmanager
    def _locked(self, name: str) -> Iterator[tuple[Callable[[str], None], Past]]:
        lock = RegistryLock(self.registry, name, requester(), stale_s=self._stale_s)
        with lock.hold() as renew:

            def step(what: str) -> None:
                if what not in _HARMLESS:
                    renew()
                self._on_step(what)

            yield step, self._finish_pending(name, step, overtook=lock.overtook)

    def _give_way(self, name: str, lost: LockLostError) -> LockLostError:
        """Undo writes of this process after it lost the lock; returns the error with the current production."""
        with self._locked(name) as (step, past):
            for record in self.records.of(name):
                if record.record_id in self._begun and record.taken_over:
                    step("settle")
                    self.records.no_longer_late(record)
        now = f"version {past.current}" if past.current else NONE
        return LockLostError(f"{lost.message}; {name}@production is {now}", remedy=lost.remedy)

    def _complete(self, record: Record, step: Callable[[str], None], note: str = "") -> Record:
        """Set the aliases according to the record, and end it."""
        if record.action == "candidate":
            step("candidate")
            self._point(record.name, CANDIDATE, record.to_version)
            step("finish")
            return self.records.finish(record, note=note)
        step("previous")
        self._point(record.name, PREVIOUS, record.from_version)
        step("production")
        self._point(record.name, PRODUCTION, record.to_version)
        step("finish")
        return self.records.finish(record, note=note)

    def _point(self, name: str, alias: str, version: str) -> None:
        """Set the alias to the version; delete it if there is none, or it was deleted."""
        if version and self.registry.find(name, version=version):
            self.registry.set_alias(name, alias, version)
        elif self.registry.find(name, alias=alias):
            self.registry.delete_alias(name, alias)

    def _finish_pending(self, name: str, step: Callable[[str], None], *, overtook: bool) -> Past:
        """Complete interrupted changes of others, and record changes outside this program.

        Args:
            overtook: whether they may only be suspended.
        """
        past, left = self._past(name)
        carried = None
        for begun in left:
            step("settle")
            self._carry_on(self.records.take_over(begun) if overtook else begun, past, step)
            past, _ = self._past(name)
            carried = past.last if past.last and past.last.record_id == begun.record_id else carried
        self._undo_late_writes(name, past, step)
        found = self.registry.find(name, alias=PRODUCTION)
        if (found.version if found else "") == past.current:
            return replace(past, carried=carried)
        step("external")
        self._complete(self.records.begin(found_moved(name, found, past)), step)
        return self._past(name)[0]

    def _undo_late_writes(self, name: str, past: Past, step: Callable[[str], None]) -> None:
        """Restore aliases that a process moved after another had taken over from it."""
        late = [record for record in self.records.of(name) if record.taken_over]
        last = past.last
        if last is None or all(record.record_id == last.record_id for record in late):
            return
        for alias, wanted in ((PRODUCTION, last.to_version), (PREVIOUS, last.from_version)):
            found = self.registry.find(name, alias=alias)
            at = found.version if found else ""
            writers = [one for one in late if at == (one.to_version if alias == PRODUCTION else one.from_version)]
            if at == wanted or not writers:
                continue
            step("late")
            self._point(name, alias, wanted)
            if alias == PRODUCTION:
                step("settle")
                self.records.no_longer_late(
                    writers[-1], f"its process moved {PRODUCTION} to version {at} after another had taken over: undone"
                )

    def _past(self, name: str) -> tuple[Past, list[Record]]:
        """The history of a name, and its unfinished records."""
        records = self.records.of(name)
        done, last_number = chain(records), max((record.number for record in records), default=0)
        past = Past(last=done[-1] if done else None, last_number=last_number)
        return past, [record for record in records if record.state == "begun"]

    def _carry_on(self, begun: Record, past: Past, step: Callable[[str], None]) -> None:
        made = self._made(begun)
        if made is None:
            self.records.void(begun, "interrupted before there was a version")
            return
        found = self.registry.find(begun.name, alias=PRODUCTION)
        actual = found.version if found else ""
        is_overtaken = begun.from_version != past.current or actual not in (begun.from_version, made.version)
        if is_overtaken and begun.action != "candidate":
            self.records.void(begun, f"interrupted, and production is now {actual or NONE}")
            return
        try:
            self.check(made)
        except ConfigError as error:
            self.records.void(begun, error.message)
            return
        if not begun.to_version:
            begun = self.records.lead_to(begun, made.version)
        self._complete(begun, step, note=f"interrupted, completed by {requester()}")

    def _made(self, begun: Record) -> Registered | None:
        """The version of a started record, if it exists."""
        if begun.to_version:
            return self.registry.find(begun.name, version=begun.to_version)
        versions = self.registry.versions(begun.name)
        return next((version for version in versions if version.tags.get("record") == begun.record_id), None)
