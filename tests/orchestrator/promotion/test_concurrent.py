"""Aliases, records and artifact hashes agree, whatever other process changes them and wherever one dies."""

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from orchestrator.errors import ConfigError
from orchestrator.promotion import commands
from orchestrator.promotion.manifest import Manifest, list_files
from orchestrator.promotion.records import LockLostError, Record, RegistryLock, chain
from orchestrator.promotion.release import Releases
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import Home
from orchestrator.tracking.mlflow_store import Registry
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.orchestrator.promotion.proven import manifest, proven_home
from trials.files import digest

NAME = "llama"
PROMOTING = ("files", "version", "number", "previous", "production", "finish")
ROLLING_BACK = ("previous", "production", "finish")


def releases(home: Home, on_step: Callable[[str], None] = lambda _: None) -> Releases:
    return Releases(Tracker(home.default_tracking_uri), on_step)


def invariants(home: Home) -> list[Record]:
    """Checks that everything agrees; returns the records that came about."""
    at = releases(home)
    records = at.records.of(NAME)
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    assert not [record for record in records if record.state == "begun"]
    done = chain(records)
    assert [record.from_version for record in done] == ["", *(record.to_version for record in done[:-1])]
    client = MlflowClient(tracking_uri=home.default_tracking_uri, registry_uri=home.default_tracking_uri)
    (model,) = client.search_registered_models()  # and no lock is left
    wanted = {"production": done[-1].to_version, "previous": done[-1].from_version}
    assert {alias: str(version) for alias, version in model.aliases.items()} == {a: v for a, v in wanted.items() if v}
    for record in done:
        version = client.get_model_version(NAME, record.to_version)
        with tempfile.TemporaryDirectory() as folder:
            root = Path(client.download_artifacts(version.run_id, "recipe", folder))
            files = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        assert digest(list_files(files)) == version.tags["files_sha256"] == record.files_sha256
        recipe_sha256 = digest(json.loads(files["recipe.json"]))
        assert recipe_sha256 == version.tags["recipe_sha256"] == record.recipe_sha256
    return done


# ---- processes ----


def forked(call: Callable[..., None], args: Sequence[Any]) -> BaseProcess:
    """A process that does the call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "benchmarks.runner.frozen"])
    process = context.Process(target=call, args=args)
    process.start()
    return process


def children(*calls: tuple[Callable[..., None], Sequence[Any]]) -> list[int]:
    """Exit codes of processes that do these calls at the same time."""
    processes = [forked(*one) for one in calls]
    for process in processes:
        process.join(120)
    return [process.exitcode or 0 for process in processes]


def dying_at(step: str) -> Callable[[str], None]:
    def on_step(now: str) -> None:
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_step


def promote_and_die(folder: Path, wanted: Manifest, step: str) -> None:
    releases(Home(folder), dying_at(step)).promote(NAME, wanted)


def roll_back_and_die(folder: Path, step: str) -> None:
    releases(Home(folder), dying_at(step)).roll_back(NAME)


def production(home: Home) -> str:
    found = releases(home).registry.find(NAME, alias="production")
    return found.version if found else ""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_promotion_is_settled_by_the_next_command(tmp_path: Path):
    """It comes about where it had got as far as a version, and leaves no trace in production otherwise."""
    home = proven_home(tmp_path)
    manifests = manifest(home, 1), manifest(home, 2)
    releases(home).promote(NAME, manifests[0])
    for number, step in enumerate(PROMOTING, start=1):
        wanted = manifests[number % 2]
        assert children((promote_and_die, (tmp_path, wanted, step))) == [-signal.SIGKILL]
        found = releases(home).promote(NAME, wanted)  # what the dead one wanted
        assert found.is_new == (step in ("files", "version")), step
        assert production(home) == found.record.to_version
    records = releases(home).records.of(NAME)
    assert [record.state for record in records] == ["done", "void", "done", "void", *["done"] * 5]
    assert len(invariants(home)) == 1 + len(PROMOTING)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_rollback_is_settled_by_the_next_command(tmp_path: Path):
    home = proven_home(tmp_path)
    releases(home).promote(NAME, manifest(home, 1))
    releases(home).promote(NAME, manifest(home, 2))
    for step, expected in zip(ROLLING_BACK, "121", strict=True):
        assert children((roll_back_and_die, (tmp_path, step))) == [-signal.SIGKILL]
        with pytest.raises(ConfigError, match=f"is version {expected}, not 9"):
            releases(home).roll_back(NAME, expect_current="9")  # settles, and goes no further
    assert [record.to_version for record in invariants(home)] == ["1", "2", *"121"]


def promote_and_die_before_the_ledger(folder: Path) -> None:
    commands.promote(NAME, Home(folder), sweep="story", on_step=dying_at("end"))


@pytest.mark.slow
@pytest.mark.fault
def test_a_ledger_learns_later_of_a_promotion_whose_process_was_killed(tmp_path: Path):
    home = proven_home(tmp_path)
    assert children((promote_and_die_before_the_ledger, (tmp_path,))) == [-signal.SIGKILL]
    assert noted(home) == []
    commands.promote(NAME, home, sweep="story", trial="2", force=True)
    assert noted(home) == [("", "1"), ("1", "2")] == [(r.from_version, r.to_version) for r in invariants(home)]


def noted(home: Home) -> list[tuple[str, str]]:
    with home.open("story") as ledger:
        promotions = fold(ledger.events()).promotions
    return [(event.record["from_version"], event.record["to_version"]) for event in promotions]


# ---- at the same time ----


def contend(folder: Path, one: Manifest, two: Manifest, number: int) -> None:
    """Everybody believes that nothing is in production; then everybody goes on as they like."""
    home = Home(folder)
    try:
        releases(home).promote(NAME, one, expect_current="none", reason=f"first {number}")
    except ConfigError:
        pass
    else:
        (folder / f"won-{number}").touch()
    if number == 0:
        releases(home, dying_at("production")).promote(NAME, two, reason="killed")
    if number % 2:
        releases(home).promote(NAME, two, reason=f"second {number}")
    else:
        try:
            releases(home).roll_back(NAME, reason=f"back {number}")
        except ConfigError as error:
            assert "no version before" in str(error)


@pytest.mark.slow
@pytest.mark.fault
def test_concurrent_changes_are_serialised(tmp_path: Path):
    home = proven_home(tmp_path)
    manifests = manifest(home, 1), manifest(home, 2)
    codes = children(*((contend, (tmp_path, *manifests, number)) for number in range(3)))
    assert set(codes[1:]) == {0} and codes[0] in (0, -signal.SIGKILL)
    assert len(list(tmp_path.glob("won-*"))) == 1
    releases(home).promote(NAME, manifests[0])  # settles what the killed one left
    done = invariants(home)
    assert done[0].reason.startswith("first")
    assert not [record for record in releases(home).records.of(NAME) if record.state == "begun"]


# ---- the lock ----


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return releases(proven_home(tmp_path)).registry


def test_a_lock_keeps_others_out_until_it_is_released(registry: Registry):
    first, second = (RegistryLock(registry, NAME, owner) for owner in ("ann@a", "bob@b"))
    with first.hold(), pytest.raises(ConfigError, match="ann@a is changing llama"), second.hold(wait_s=0.2):
        pytest.fail("both have it")
    with second.hold(), RegistryLock(registry, "other", "ann@a").hold(wait_s=0.0):
        pass
    assert registry.entries("") == {}


def test_an_abandoned_lock_is_taken_over_and_its_owner_notices(registry: Registry):
    asleep, waiting = RegistryLock(registry, NAME, "ann@a"), RegistryLock(registry, NAME, "bob@b", stale_s=0.3)
    with asleep.hold() as renew:
        renew()
        with waiting.hold(wait_s=30.0), pytest.raises(LockLostError, match="another process took over"):
            renew()


def wait_until_stopped(process: BaseProcess) -> None:
    """Its parent is the server that forked it, so that it cannot be waited for."""
    stat, until_s = Path(f"/proc/{process.pid}/stat"), time.monotonic() + 60.0
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until_s and process.is_alive(), "it did not stop"
        time.sleep(0.02)


def promote_and_sleep_at(folder: Path, wanted: Manifest, step: str) -> None:
    """Stop right before the write, with the lock just renewed; leave with 3 where it then finds the lock lost."""

    def on_step(now: str) -> None:
        if now == step:
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        releases(Home(folder), on_step).promote(NAME, wanted)
    except LockLostError as error:
        (folder / "lost").write_text(str(error))
        os._exit(3)


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.representative("production")
@pytest.mark.parametrize("step", ["previous", "production", "finish"])
def test_a_promotion_that_slept_does_not_undo_its_successor(tmp_path: Path, step: str):
    """It ends with an error, unless all was written before it slept: then it did come about."""
    home = proven_home(tmp_path)
    releases(home).promote(NAME, manifest(home, 0))
    process = forked(promote_and_sleep_at, (tmp_path, manifest(home, 1), step))
    wait_until_stopped(process)
    successor = Releases(Tracker(home.default_tracking_uri), stale_s=0.5).promote(NAME, manifest(home, 2))
    assert (successor.record.from_version, successor.record.to_version) == ("2", "3")
    os.kill(process.pid, signal.SIGCONT)
    process.join(60)
    assert process.exitcode == (0 if step == "finish" else 3)
    assert step == "finish" or "llama@production is version 3" in (tmp_path / "lost").read_text()
    assert [record.to_version for record in invariants(home)] == ["1", "2", "3"]
    assert commands.history(NAME, home)["is_settled"]
    assert not any(record.taken_over for record in releases(home).records.of(NAME)[-1:])


def test_a_late_write_of_a_process_that_is_gone_is_undone_once(tmp_path: Path):
    home = proven_home(tmp_path)
    at = releases(home)
    for trial in (0, 1, 2):
        at.promote(NAME, manifest(home, trial))
    at.records.take_over(at.records.of(NAME)[1])
    at.registry.set_alias(NAME, "production", "2")  # what it wrote before it died
    with pytest.raises(ConfigError, match="is version 3, not 9"):
        at.roll_back(NAME, expect_current="9")
    assert [record.to_version for record in invariants(home)] == ["1", "2", "3"]
    assert "after another had taken over: undone" in at.records.of(NAME)[1].note
    at.registry.set_alias(NAME, "production", "2")  # by hand, from now on
    with pytest.raises(ConfigError, match="is version 2, not 9"):
        at.roll_back(NAME, expect_current="9")
    assert [record.action for record in invariants(home)] == [*["promote"] * 3, "external"]


def test_external_changes_are_recorded(tmp_path: Path):
    home = proven_home(tmp_path)
    at = releases(home)
    for trial in (1, 2):
        at.promote(NAME, manifest(home, trial))
    at.registry.set_alias(NAME, "production", "1")
    assert commands.history(NAME, home)["is_settled"] is False
    back = at.roll_back(NAME, expect_current="1").record
    assert (back.to_version, back.from_version) == ("2", "1")
    assert [record.action for record in invariants(home)] == ["promote", "promote", "external", "rollback"]
