"""Damaged ledgers: every command that reads one reports the place, and none ends in a traceback."""

import json
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from orchestrator.errors import ExitCode
from orchestrator.sweep.ledger import FILE_NAME, DamagedError
from orchestrator.sweep.snapshot import Home
from tests.support.cli_homes import controller, keep, run
from tests.support.proof_story import proof_events

READING = (
    ("status", "first"),
    ("report", "first"),
    ("report", "first", "--json"),
    ("explain", "first"),
    ("explain", "first", "t001"),
    ("export", "first", "--format", "json"),
    ("logs", "first", "t001"),
    ("ps",),
)
TELLING = READING[:5]
"""Commands that read all events of the one sweep."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A home with a sweep that was proven."""
    home = tmp_path_factory.mktemp("whole")
    keep(home, "first", proof_events(), controller=controller()).close()
    return home


def spoiled(whole: Path, home: Path, spoil) -> str:
    """A copy of the home in which ``spoil(database, random)`` has changed the ledger; what it returns."""
    ledger = Path("sweeps/first") / FILE_NAME
    (home / ledger).parent.mkdir(parents=True)
    shutil.copyfile(whole / ledger, home / ledger)
    with sqlite3.connect(home / ledger) as db:
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")
        reported = spoil(db)
    db.close()
    return reported


def event(db, rng):
    """Number and body of some event."""
    return rng.choice(db.execute("SELECT seq, body FROM events").fetchall())


def set_body(db, seq, body):
    db.execute("UPDATE events SET body = ? WHERE seq = ?", (body, seq))
    return f"event {seq}"


def drop(db, rng):
    seq, _ = event(db, rng)
    db.execute("DELETE FROM events WHERE seq = ?", (seq,))
    return f"event {seq} is missing"


def swap(db, rng):
    (one, first), (other, second) = sorted(rng.sample(db.execute("SELECT seq, body FROM events").fetchall(), 2))
    set_body(db, other, first)
    return set_body(db, one, second)


def duplicate(db, rng):
    seq, _ = event(db, rng)
    copied = "SELECT kind, body, checksum FROM events WHERE seq = ?"
    return f"event {db.execute(f'INSERT INTO events (kind, body, checksum) {copied}', (seq,)).lastrowid}"


def null(db, rng):
    seq, body = event(db, rng)
    fields = json.loads(body)
    fields[rng.choice([name for name in fields if name != "kind"])] = None
    return set_body(db, seq, json.dumps(fields))


def no_losses(db, rng):
    seq, body = rng.choice(db.execute("SELECT seq, body FROM events WHERE body LIKE '%losses%'").fetchall())
    return set_body(db, seq, body.replace('"losses"', '"lossses"'))


def flip(db, rng):
    seq, body = event(db, rng)
    at = rng.randrange(len(body))
    return set_body(db, seq, body[:at] + chr(ord(body[at]) ^ 1 << rng.randrange(5)) + body[at + 1 :])


def truncate(db, rng):
    seq, body = event(db, rng)
    return set_body(db, seq, body[: rng.randrange(len(body))])


EVENTS = (drop, swap, duplicate, null, no_losses, flip, truncate)


def check_event(whole: Path, home: Path, mutation, seed: int, commands) -> None:
    place = spoiled(whole, home, lambda db: mutation(db, random.Random(seed)))
    for command in commands:
        done = run(*command, "--home", home)
        seen = " ".join(done.output.split())
        assert done.exit_code == ExitCode.INFRASTRUCTURE, (mutation.__name__, seed, command, done.output)
        assert place in seen and FILE_NAME in seen and "Restore the file from a backup" in seen, (command, seen)


@pytest.mark.parametrize("mutation", EVENTS)
def test_a_damaged_event_is_named_with_file_and_remedy(whole, tmp_path, mutation):
    check_event(whole, tmp_path, mutation, seed=0, commands=[("status", "first"), ("explain", "first", "t001")])


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("mutation", EVENTS)
def test_a_damaged_event_is_named_by_every_command(whole, tmp_path, mutation, seed):
    check_event(whole, tmp_path, mutation, seed, TELLING)


@pytest.mark.parametrize("name", ["spec", "controller"])
def test_a_damaged_document_is_named(whole, tmp_path, name):
    def cut(db):
        db.execute("UPDATE documents SET body = substr(body, 1, length(body) / 2) WHERE name = ?", (name,))
        return f"document '{name}'"

    place = spoiled(whole, tmp_path, cut)
    done = run("status", "first", "--home", tmp_path)
    assert done.exit_code == ExitCode.INFRASTRUCTURE and place in " ".join(done.output.split())


def check_bytes(whole: Path, home: Path, seed: int, commands) -> None:
    """Flip some bits anywhere in the file, or cut it off."""
    rng, path = random.Random(seed), home / "sweeps" / "first" / FILE_NAME
    path.parent.mkdir(parents=True)
    content = bytearray((whole / "sweeps" / "first" / FILE_NAME).read_bytes())
    for _ in range(rng.choice((1, 8, 64))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content[: rng.randrange(len(content))] if rng.random() < 0.2 else content)
    for command in commands:
        done = run(*command, "--home", home)
        assert done.exception is None or isinstance(done.exception, SystemExit), (seed, command, repr(done.exception))


@pytest.mark.parametrize("seed", range(8))
def test_damage_anywhere_in_the_file_ends_no_command_in_a_traceback(whole, tmp_path, seed):
    check_bytes(whole, tmp_path, seed, READING[seed % 4 :: 4])


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100, 120))
def test_damage_anywhere_in_the_file_ends_no_command_in_a_traceback_exhaustively(whole, tmp_path, seed):
    check_bytes(whole, tmp_path, seed, READING)


def test_a_ledger_without_its_last_events_is_not_considered_complete(whole, tmp_path):
    def cut(db):
        last = db.execute("SELECT max(seq) FROM events").fetchone()[0]
        db.execute("DELETE FROM events WHERE seq > ?", (last - 2,))
        return f"event {last - 1} is missing"

    lost = spoiled(whole, tmp_path, cut)
    with Home(tmp_path).open("first") as ledger, pytest.raises(DamagedError, match=lost):
        list(ledger.events())
