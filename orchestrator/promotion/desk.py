"""Changing what is in production: one at a time per name, compare-and-set, and settled after a crash.

The order of writes: the record begins, the files, the version, its number into the record, alias ``previous``, alias
``production``, the record ends. Whoever takes the lock next and finds a record begun but not ended carries it to its
end where the version is complete, or declares it void; production never changes without a record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from orchestrator.errors import ConfigError
from orchestrator.home import check_name
from orchestrator.promotion.lock import RegistryLock
from orchestrator.promotion.recipe import Recipe, check_files, describe, ratio_of, version_tags
from orchestrator.promotion.records import RECIPE_FOLDER, Record, Records, chain
from orchestrator.registry import Registered, Registry
from orchestrator.requests import asker
from orchestrator.tracking import Tracker
from trials.codec import digest

logger = logging.getLogger(__name__)

PRODUCTION, PREVIOUS = "production", "previous"
NONE = "none"
"""How people say that nothing is in production."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a command has done. ``is_new`` is False where it was so already, and nothing was recorded."""

    record: Record
    is_new: bool = True


class Desk:
    """Where changes are made.

    Args:
        on_step: told of every step before it is taken; tests end the process there.
    """

    def __init__(self, tracker: Tracker, on_step: Callable[[str], None] = lambda _: None) -> None:
        self.registry = Registry(tracker.client())
        self.records = Records(tracker.client(), self.registry, tracker.uri)
        self._on_step = on_step

    def promote(self, name: str, recipe: Recipe, *, reason: str = "", expect_current: str | None = None) -> Change:
        """Register ``recipe`` and put it into production.

        Raises:
            ConfigError: another version is in production than expected, or others hold the name for too long.
        """
        check_name(name, "registered name")
        with self._changing(name, expect_current) as (step, last):
            current = self._version(name, last)
            if last is not None and current is not None and current.tags.get("recipe_sha256") == recipe.sha256:
                return Change(record=last, is_new=False)
            step("begin")
            record = self.records.begin(self._promotion(name, recipe, reason, last))
            step("files")
            self.records.put_files(record, recipe.files)
            step("version")
            tags = version_tags(recipe) | {"record": record.record_id, "promoted_by": record.by}
            made = self.registry.create_version(name, record.record_id, RECIPE_FOLDER, tags, describe(recipe))
            step("number")
            record = self.records.lead_to(record, made.version)
            return Change(record=self._complete(record, step))

    def roll_back(
        self, name: str, *, to: str | None = None, reason: str = "", expect_current: str | None = None
    ) -> Change:
        """Put the version that was in production before, or version ``to``, into production.

        Raises:
            ConfigError: as of :meth:`promote`; there is no such version, or its files were altered.
        """
        check_name(name, "registered name")
        with self._changing(name, expect_current) as (step, last):
            target = to or (last.from_version if last else "")
            found = self.registry.find(name, version=target) if target else None
            if last is None or found is None:
                what = f"has no version {target}" if target else "has no version before the one in production"
                raise ConfigError(f"{name} {what}", remedy=f"See which there are: tune-cluster history {name}")
            if last.to_version == target:
                raise ConfigError(f"{name}@production is version {target} already", remedy="There is nothing to do.")
            self.check(found)
            step("begin")
            record = self.records.begin(self._rollback(found, reason, last))
            return Change(record=self._complete(record, step))

    def check(self, registered: Registered) -> None:
        """Raises:
        ConfigError: the files of the version are not those it was registered with.
        """
        try:
            files = self.registry.read_files(registered)
        except LookupError as error:
            where = f"{registered.name} version {registered.version}"
            raise ConfigError(f"{where} cannot be read: {error}", remedy="Promote the sweep again.") from None
        check_files(registered, files)

    # ---- the protocol ----

    @contextmanager
    def _changing(self, name: str, expect_current: str | None) -> Iterator[tuple[Callable[[str], None], Record | None]]:
        """With the lock held, the past settled and the expectation met: a function to call before every write, and
        the last record."""
        lock = RegistryLock(self.registry, name, asker())
        with lock.hold() as renew:

            def step(what: str) -> None:
                renew()
                self._on_step(what)

            last = self._settle(name, step)
            current = last.to_version if last else ""
            if expect_current is not None and expect_current != (current or NONE):
                raise ConfigError(
                    f"{name}@production is {f'version {current}' if current else NONE}, not {expect_current}",
                    remedy=f"Somebody changed it meanwhile: tune-cluster history {name}",
                )
            yield step, last
        self._on_step("end")

    def _complete(self, record: Record, step: Callable[[str], None], note: str = "") -> Record:
        """Point the aliases as the record says, and end it."""
        step("previous")
        self._point(record.name, PREVIOUS, record.from_version)
        step("production")
        self._point(record.name, PRODUCTION, record.to_version)
        step("finish")
        return self.records.finish(record, note=note)

    def _point(self, name: str, alias: str, version: str) -> None:
        if version:
            self.registry.set_alias(name, alias, version)
        elif self.registry.find(name, alias=alias):
            self.registry.delete_alias(name, alias)

    def _settle(self, name: str, step: Callable[[str], None]) -> Record | None:
        """End what others have begun and left; returns the last record that came about."""
        records = self.records.of(name)
        for begun in (record for record in records if record.state == "begun"):
            step("settle")
            self._carry_on(begun, self._last(name), step)
        last = self._last(name)
        found = self.registry.find(name, alias=PRODUCTION)
        if (found.version if found else "") == (last.to_version if last else ""):
            return last
        step("external")
        return self._complete(self.records.begin(self._external(name, last, found)), step)

    def _carry_on(self, begun: Record, last: Record | None, step: Callable[[str], None]) -> None:
        made = self._made(begun)
        if made is None:
            self.records.void(begun, "interrupted before there was a version")
            return
        found = self.registry.find(begun.name, alias=PRODUCTION)
        actual = found.version if found else ""
        if begun.from_version != (last.to_version if last else "") or actual not in (begun.from_version, made.version):
            self.records.void(begun, f"interrupted, and production is {actual or NONE} by now")
            return
        try:
            self.check(made)
        except ConfigError as error:
            self.records.void(begun, error.message)
            return
        if not begun.to_version:
            begun = self.records.lead_to(begun, made.version)
        self._complete(begun, step, note=f"interrupted, carried to its end by {asker()}")

    def _last(self, name: str) -> Record | None:
        return max(chain(self.records.of(name)), key=lambda record: record.number, default=None)

    def _made(self, begun: Record) -> Registered | None:
        """The version that a begun record leads to, if it is there."""
        if begun.to_version:
            return self.registry.find(begun.name, version=begun.to_version)
        versions = self.registry.versions(begun.name)
        return next((version for version in versions if version.tags.get("record") == begun.record_id), None)

    # ---- records to be ----

    def _promotion(self, name: str, recipe: Recipe, reason: str, last: Record | None) -> Record:
        facts, ratio = recipe.content["evidence"], ratio_of(recipe.content["evidence"])
        return replace(
            self._blank(name, last),
            action="promote",
            reason=reason,
            forced=facts["forced"],
            missing=tuple(facts["missing"]),
            sweep=facts["sweep"],
            sweep_id=facts["sweep_id"],
            trial=str(facts["trial"]),
            short_name=recipe.content["short_name"],
            speedup=f"{ratio.value:.2f}x" if ratio else "",
            recipe_sha256=recipe.sha256,
            files_sha256=digest(recipe.file_digests),
        )

    def _rollback(self, target: Registered, reason: str, last: Record) -> Record:
        return replace(self._to(target, last), action="rollback", reason=reason)

    def _external(self, name: str, last: Record | None, found: Registered | None) -> Record:
        record = self._to(found, last) if found else self._blank(name, last)
        reason = f"the alias {PRODUCTION} was moved past tune-cluster"
        return replace(record, action="external", by="unknown", reason=reason)

    def _to(self, target: Registered, last: Record | None) -> Record:
        tags = target.tags
        speedup = f"{float(tags['speedup']):.2f}x" if tags.get("speedup", "unknown") != "unknown" else ""
        return replace(
            self._blank(target.name, last),
            to_version=target.version,
            speedup=speedup,
            sweep=tags.get("sweep", ""),
            sweep_id=tags.get("sweep_id", ""),
            trial=tags.get("trial", ""),
            short_name=tags.get("short_name", ""),
            recipe_sha256=tags.get("recipe_sha256", ""),
            files_sha256=tags.get("files_sha256", ""),
        )

    def _blank(self, name: str, last: Record | None) -> Record:
        return Record(
            name=name,
            number=1 + max((record.number for record in self.records.of(name)), default=0),
            action="promote",
            from_version=last.to_version if last else "",
            to_version="",
            by=asker(),
            at_s=time.time(),
            from_sweep=last.sweep if last else "",
            from_sweep_id=last.sweep_id if last else "",
        )

    def _version(self, name: str, last: Record | None) -> Registered | None:
        return self.registry.find(name, version=last.to_version) if last and last.to_version else None
