import json
import os
import shutil
import sqlite3
import subprocess
import sys

import pytest

from cluster.base import GangProgress
from orchestrator.sweep.events import ControllerStarted
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import (
    _INSERT_EVENT,
    Controller,
    DiskFullError,
    FencedError,
    HeldNodes,
    Ledger,
    LedgerError,
    LiveProgress,
    SweepBusyError,
    Tracking,
)
from orchestrator.sweep.snapshot import Home
from tests.support import ROOT
from tests.support.disks import fill, small_disk
from tests.support.story import created, ended, failures, launched, measured, proposed

STORY = [created(), proposed(0), launched(0), ended(0, measured()), proposed(1), launched(1)]


def test_events_come_back_as_they_were_in_order(tmp_path):
    story = [*STORY, *(ended(1, outcome) for outcome in failures().values())]
    with Ledger(tmp_path) as ledger:
        entries = [ledger.append(event) for event in story]
    with Ledger.open_existing(tmp_path) as again:
        assert [entry.seq for entry in again.entries()] == [entry.seq for entry in entries]
        assert list(again.events()) == story
        assert [entry.event for entry in again.entries(after=3)] == story[3:]


def test_non_finite_numbers_survive(tmp_path):
    outcome = measured(grad_norms=(float("inf"), 1.0))
    with Ledger(tmp_path) as ledger:
        ledger.append(ended(0, outcome))
        assert next(ledger.events()).outcome == outcome


def test_events_cannot_be_changed_or_deleted(tmp_path):
    with Ledger(tmp_path) as ledger:
        ledger.append(created())
        for statement in ("UPDATE events SET kind = 'x'", "DELETE FROM events"):
            with pytest.raises(sqlite3.IntegrityError), sqlite3.connect(ledger.path) as db:
                db.execute(statement)
            db.close()
        assert len(list(ledger.events())) == 1


def test_readers_see_what_is_stored_by_any_writer(tmp_path):
    with Ledger(tmp_path) as ledger, Ledger(tmp_path) as other:
        for writer in (ledger, ledger, other, ledger, ledger, other):
            writer.append(STORY[len(list(ledger.entries()))])
            for reader in (ledger, other):
                for after in range(8):
                    assert list(reader.following(after)) == list(reader.entries(after))


def test_a_sweep_that_replaced_another_is_not_folded_onto_it(tmp_path):
    """Even in the same inode, and with as many events."""
    home = Home(tmp_path)
    with Ledger(home.sweep_folder("story")) as ledger:
        assert home.read("story").birth is None
        for event in (created(), proposed(0), launched(0)):
            ledger.append(event)
    old = home.read("story", home.read("story"))
    shutil.rmtree(home.sweep_folder("story"))
    with Ledger(home.sweep_folder("story")) as ledger:
        for event in (created(at_s=1.0), proposed(0), launched(0), ended(0, measured())):
            ledger.append(event)
        new = home.read("story", old)
        assert new.state == fold(ledger.events()) and new.birth not in (None, old.birth)
        ledger.append(proposed(1))
        assert home.read("story", new).news == (proposed(1),)


def test_cursors_and_documents(tmp_path):
    with Ledger(tmp_path) as ledger:
        assert ledger.cursor("mlflow") == 0
        ledger.advance("mlflow", 4)
        ledger.advance("mlflow", 7)
        assert ledger.cursor("mlflow") == 7
        assert ledger.document("spec") is None
        ledger.put_document("spec", {"a": [1]})
        assert ledger.document("spec") == {"a": [1]}


def test_only_one_process_holds_a_sweep(tmp_path):
    with Ledger(tmp_path) as ledger, ledger.hold():
        code = (
            "import sys; from pathlib import Path; from orchestrator.sweep.ledger import Ledger, SweepBusyError\n"
            "try:\n    with Ledger(Path(sys.argv[1])).hold(): print('held')\n"
            "except SweepBusyError as e: print(e)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        assert str(os.getpid()) in done.stdout
    with Ledger(tmp_path) as ledger, ledger.hold():
        pass


def test_a_second_ledger_object_in_this_process_is_refused_too(tmp_path):
    with Ledger(tmp_path) as ledger, ledger.hold():
        other = Ledger(tmp_path)
        with pytest.raises(SweepBusyError), other.hold():
            pass
        other.close()


def test_reading_does_not_create_missing_ledgers(tmp_path):
    with pytest.raises(LookupError):
        Ledger.open_existing(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_ledger_whose_controller_died_before_the_first_event_is_no_sweep_yet(tmp_path):
    Ledger(tmp_path / "sweeps" / "begun").close()
    with pytest.raises(LookupError):
        Ledger.open_existing(tmp_path / "sweeps" / "begun")
    assert Home(tmp_path).sweeps() == []


def test_a_writer_killed_at_any_moment_leaves_whole_events_only(tmp_path):
    code = (
        "import sys; from pathlib import Path; from orchestrator.sweep.ledger import Ledger\n"
        "from tests.support.story import created\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "for n in range(10**6):\n    ledger.append(created()); print(n, flush=True)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert writer.stdout is not None
    for _ in range(20):
        last = int(writer.stdout.readline())
    writer.kill()
    last = max([last, *(int(line) for line in writer.stdout if line.strip().isdigit())])
    writer.wait()
    writer.stdout.close()
    with Ledger(tmp_path) as ledger:
        num_events = len(list(ledger.events()))
        assert num_events in (last + 1, last + 2)
        ledger.append(proposed(0))
        assert fold(ledger.events()).trials


def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path):
    with Ledger(tmp_path) as ledger:
        for event in STORY:
            ledger.append(event)
        pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(LedgerError, match="free space"):
            for _ in range(1000):
                ledger.append(ended(0, measured(losses=tuple(float(i) for i in range(500)))))
        assert list(ledger.events())[: len(STORY)] == STORY


def test_an_unknown_event_in_the_file_is_named(tmp_path):
    with Ledger(tmp_path) as ledger:
        ledger._db.execute(_INSERT_EVENT, ("x", json.dumps({"kind": "x"}), None))
        with pytest.raises(LedgerError, match="unknown kind 'x'"):
            list(ledger.events())


def test_requests_wait_until_taken(tmp_path):
    with Ledger(tmp_path) as controller, Ledger(tmp_path) as other:
        assert controller.requests(0) == []
        first = other.add_request({"action": "pause"}, by="eve@host", at_s=1.0)
        second = other.add_request({"action": "cancel"}, by="adam@host", at_s=2.0)
        assert [(request.id, request.by) for request in controller.requests(0)] == [
            (first, "eve@host"),
            (second, "adam@host"),
        ]
        assert [request.body for request in controller.requests(first)] == [{"action": "cancel"}]


def started(epoch):
    return ControllerStarted(at_s=1.0, epoch=epoch, pid=1, host="host")


def test_a_replaced_controller_can_store_nothing_more(tmp_path):
    with Ledger(tmp_path) as old, Ledger(tmp_path) as new:
        old.append(created())
        old.append(started(1))
        old.append(proposed(0))
        new.append(started(2))
        with pytest.raises(FencedError, match="taken over"):
            old.append(launched(0))
        with pytest.raises(FencedError, match="epoch 2"):
            old.append(started(2))
        new.append(launched(0))
        assert [type(event).__name__ for event in new.events()][-2:] == ["ControllerStarted", "AttemptLaunched"]
        assert [entry.seq for entry in new.entries()] == [1, 2, 3, 4, 5], "what is refused leaves no gap"


def test_holders_of_a_ledger_are_visible_from_outside(tmp_path):
    with Ledger(tmp_path) as ledger, Ledger(tmp_path) as other:
        assert not other.is_held()
        with ledger.hold():
            assert other.is_held()
        assert not other.is_held()


def test_a_ledger_can_be_read_while_it_is_written_and_on_a_read_only_disk(tmp_path):
    folder = tmp_path / "disk"
    with Ledger(folder) as ledger:
        ledger.append(created())
        with Ledger.open_existing(folder, read_only=True) as reader:
            ledger.append(proposed(0))
            assert len(list(reader.events())) == 2
            with pytest.raises(LedgerError):
                reader.append(launched(0))
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    made = subprocess.run(["mount", "--bind", "-o", "ro", folder, mounted], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount: {made.stderr.decode()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", mounted], check=True)
        with Ledger.open_existing(mounted, read_only=True) as reader:
            assert len(list(reader.events())) == 2
    finally:
        subprocess.run(["umount", mounted], check=True)


@pytest.mark.parametrize("is_left", [False, True], ids=["closed", "controller killed"])
def test_a_ledger_on_a_full_disk_can_be_read(tmp_path, is_left):
    """SQLite itself needs room for an index next to the file, and to take in what a controller has left in the log."""
    with small_disk(tmp_path / "disk") as disk:
        folder = disk / "sweep"
        ledger = Ledger(folder)
        for event in STORY:
            ledger.append(event)
        copies = {path.name: path.read_bytes() for path in folder.iterdir()}
        ledger.close()
        if is_left:  # what there was before the log was taken in; its index went with the machine
            for name, content in copies.items():
                if not name.endswith("-shm"):
                    (folder / name).write_bytes(content)
        fill(disk)
        with Ledger.open_existing(folder, read_only=True) as reader:
            assert list(reader.events()) == STORY
        with pytest.raises(DiskFullError, match="free space"), Ledger(folder) as writer:
            for _ in range(100):
                writer.append(ended(0, measured(losses=tuple(float(i) for i in range(500)))))


def test_documents_come_back_as_they_were_and_lacking_keys_have_their_defaults(tmp_path):
    with Ledger(tmp_path) as ledger:
        assert Controller.read(ledger) is None
        for document in (
            Controller(host="head", pid=7, mode="ray job", job="tune-x", address="head:6379", started_at_s=3.0),
            HeldNodes(nodes=("n1", "n2"), waiting="one more is busy", at_s=4.0),
            LiveProgress(trials={"5": GangProgress(attempt_id="a", token="t", phase="measuring", step=7)}),
            Tracking(uri="http://host:5000"),
        ):
            document.put(ledger)
            assert type(document).read(ledger) == document
        ledger.put_document("controller", {"host": "head"})
        assert Controller.read(ledger) == Controller(host="head")
        ledger.put_document("lease", {"nodes": ["n1"], "of_tomorrow": 1})
        with pytest.raises(LedgerError, match=r"lease of .* cannot be parsed; it was written by another version"):
            HeldNodes.read(ledger)


def test_reading_backwards_reads_no_further_than_requested(tmp_path, monkeypatch):
    decoded, decode = [], Ledger._decode
    monkeypatch.setattr(Ledger, "_decode", lambda self, seq, body: (decoded.append(seq), decode(self, seq, body))[1])
    with Ledger(tmp_path) as ledger:
        for number in range(200):
            ledger.append(proposed(number))
        assert next(ledger.backwards(151)).seq == 150
        assert decoded == [150]
        assert [entry.seq for entry in ledger.backwards(201)] == list(range(200, 0, -1))
        assert list(ledger.backwards(1)) == []
