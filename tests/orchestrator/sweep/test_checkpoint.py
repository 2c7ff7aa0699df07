"""The copy of the folded state in a ledger: as good as folding every event, and what it saves."""

import dataclasses
import itertools
import random
import sqlite3
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.controller.observer import CHECKPOINT_PERIOD_S, Heartbeat
from orchestrator.status.overview import detail
from orchestrator.sweep import checkpoint
from orchestrator.sweep.events import (
    Annotated,
    AttemptStopped,
    Budget,
    ChecksRequested,
    ControllerStarted,
    FinishCause,
    LeaseChanged,
    LedgerEvent,
    SweepFinished,
    SweepPaused,
    TrialsRetried,
)
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import FencedError, Ledger
from orchestrator.sweep.snapshot import Home, read_snapshot
from orchestrator.sweep.state import BLOCK_SIZE, MAX_FASTEST, SweepState
from tests.support import long_story
from tests.support.proof_story import proof_events
from tests.support.story import created, ended, evidence, failures, launched, measured, proposed
from trials.outcome import Measured, Outcome, StoppedEarly


def story(rng: random.Random, num_trials: int) -> Iterator[LedgerEvent]:
    """Trials that end in every way, are launched again, retried and stopped early; pauses, and a new controller."""
    yield created(budget=Budget(max_trials=10_000, lost_attempts_per_trial=2))
    yield ControllerStarted(at_s=0.0, epoch=1, pid=1, host="host")
    yield LeaseChanged(at_s=0.5, nodes=("n1", "n2"))
    stopped = StoppedEarly(
        step_times_s=(1.5,), evidence=evidence(), incumbent=0, at_least_s=1.5, saved_device_seconds=0.1
    )
    outcomes: list[Outcome] = [*failures().values(), measured(0.1), measured(0.07), measured(0.08), stopped]
    attempts: dict[int, int] = {}
    at_s, epochs = 1.0, itertools.count(2)
    for number in range(num_trials):
        yield proposed(number, at_s=(at_s := at_s + rng.random()))
        for again in rng.sample(sorted(attempts), min(len(attempts), rng.choice((0, 0, 0, 1)))):
            yield TrialsRetried(at_s=at_s, request=number, trials=(again,), by="anna@desk")
            yield from _launch(again, attempts, rng.choice(outcomes), at_s)
        if rng.random() < 0.95:
            yield from _launch(number, attempts, rng.choice(outcomes), at_s)
        if rng.random() < 0.1:
            yield annotated(rng, number, at_s)
        if rng.random() < 0.02:
            yield SweepPaused(at_s=at_s, reason="paused")
            yield ControllerStarted(at_s=at_s + 9.0, epoch=next(epochs), pid=1, host="host")
            yield ChecksRequested(at_s=at_s + 9.0, request=number, by="anna@desk", profile=(0,))


def annotated(rng: random.Random, num_trials: int, at_s: float) -> Annotated:
    """A note on the sweep, on a trial, or on one that does not exist: new, changed or removed."""
    return Annotated(
        at_s=at_s,
        request=rng.randrange(1000),
        by="anna@desk",
        written_at_s=rng.random(),
        trial=rng.choice((None, rng.randrange(num_trials + 2))),
        text=rng.choice((None, "", "slow switch", "again")),
        tags={key: rng.choice("xyz") for key in rng.sample("abc", rng.randrange(3))},
        removed_tags=tuple(rng.sample("abc", rng.randrange(3))),
    )


def _launch(number: int, attempts: dict[int, int], outcome: Outcome, at_s: float) -> Iterator[LedgerEvent]:
    attempt = attempts[number] = attempts.get(number, -1) + 1
    if isinstance(outcome, Measured):
        del attempts[number]  # it is not launched again
    yield launched(number, attempt, at_s=at_s)
    if isinstance(outcome, StoppedEarly):
        yield AttemptStopped(at_s=at_s, trial=number, token=f"token-{number}-{attempt}", outcome=outcome)
    if number % 7:
        yield ended(number, outcome, attempt, at_s=at_s + 1.0)


def keep(ledger: Ledger, events: list[LedgerEvent], cuts: list[int], *, restarts: bool = False) -> None:
    """Append the events; make a copy of the state after each of ``cuts`` of them."""
    writer = checkpoint.CheckpointWriter(ledger)
    for i, event in enumerate(events, 1):
        ledger.append(event)
        if i in cuts:
            writer.write_if_due(min_events=1)
            writer = checkpoint.CheckpointWriter(ledger) if restarts else writer


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the events that were decoded from here on."""
    found: list[int] = []
    decode = Ledger._decode
    monkeypatch.setattr(Ledger, "_decode", lambda self, seq, body: (found.append(seq), decode(self, seq, body))[1])
    return found


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), restarts=st.booleans())
def test_a_copy_and_later_events_give_the_state_of_all_events(
    tmp_path_factory: pytest.TempPathFactory, seed: int, share: list[float], restarts: bool
) -> None:
    rng = random.Random(seed)
    events = list(story(rng, rng.choice((3, BLOCK_SIZE - 1, 2 * BLOCK_SIZE + 5))))
    with Ledger(tmp_path_factory.mktemp("sweep")) as ledger:
        keep(ledger, events, [max(1, int(part * len(events))) for part in share], restarts=restarts)
        seq, copied = checkpoint.read(ledger)
        assert seq == max(max(1, int(part * len(events))) for part in share)
        assert copied == fold(events[:seq])
        assert hash(copied.trials) == hash(fold(events[:seq]).trials)
        assert read_snapshot(ledger).state == fold(events)


@pytest.mark.parametrize("conclusion", ["confirmed", "keep", "unconfirmed"])
def test_a_proof_survives_being_copied(tmp_path: Path, conclusion: typing.Any) -> None:
    events = [*proof_events(conclusion, is_promoted=True)]
    for cut in (len(events) // 2, len(events)):
        with Ledger(tmp_path / str(cut)) as ledger:
            keep(ledger, events, [cut])
            assert checkpoint.read(ledger) == (cut, fold(events[:cut]))
            assert read_snapshot(ledger).state == fold(events)


def test_figures_shown_at_every_look_are_counted_incrementally() -> None:
    state = fold(story(random.Random(4), 200))
    counts: dict[str, int] = {}
    for trial in state.searched():
        counts[trial.status] = counts.get(trial.status, 0) + 1
    assert state.counts() == counts
    saved = [t.outcome.saved_device_seconds for t in state.searched() if isinstance(t.outcome, StoppedEarly)]
    assert saved and state.saved_device_seconds == pytest.approx(sum(saved))
    speeds = {t.number: t.measurement.tokens_per_s_per_device for t in state.searched() if t.measurement}
    by_speed = sorted(speeds, key=lambda number: (-speeds[number], number))
    assert [ranked.number for ranked in state.fastest] == by_speed[:MAX_FASTEST]
    assert [trial.number for trial in state.checks()] == [t.number for t in state.trials if t.check is not None]


def test_a_look_decodes_the_events_after_the_copy_and_the_next_one_only_new_events(
    tmp_path: Path, decoded: list[int]
) -> None:
    home, events = Home(tmp_path), list(story(random.Random(1), 300))
    with Ledger(home.sweep_folder("long")) as ledger:
        keep(ledger, events, [len(events) - 20])
        first = home.read("long")
        assert decoded == list(range(len(events) - 19, len(events) + 1)) and len(first.news) == 20
        decoded.clear()
        second = home.read("long", first)
        assert decoded == [] and second.state == first.state
        ledger.append(proposed(300))
        assert home.read("long", second).news == (proposed(300),)
        assert decoded == [len(events) + 1]


def test_status_unpacks_only_the_trials_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    events = long_story.events(long_story.speeds(*[0.1] * 10 * BLOCK_SIZE), finished=False)
    with Ledger(home.sweep_folder("story")) as ledger:
        keep(ledger, events, [len(events)])
    unpacked = []
    decompress = checkpoint.zlib.decompress
    monkeypatch.setattr(checkpoint.zlib, "decompress", lambda body: (unpacked.append(body), decompress(body))[1])
    assert detail(home.read("story"), home)["trials"]["measured"] == 10 * BLOCK_SIZE
    assert len(unpacked) == 2, "the baseline's block, and the last one for the faults in a row"


def test_only_changed_blocks_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[int]] = []
    put = Ledger.put_checkpoint
    monkeypatch.setattr(
        Ledger, "put_checkpoint", lambda self, parts, n: (written.append(sorted(parts)), put(self, parts, n))[1]
    )
    events = long_story.events(long_story.speeds(*[0.1] * 3 * BLOCK_SIZE), finished=False)
    with Ledger(tmp_path) as ledger:
        keep(ledger, events, [len(events) - 6, len(events) - 3, len(events)], restarts=True)
        writer = checkpoint.CheckpointWriter(ledger)
        ledger.append(SweepFinished(at_s=1e10, status="finished", reason="enough", cause=FinishCause.EXHAUSTED))
        writer.write_if_due()
        assert written == [[0, 1, 2, 3], [0, 3], [0, 3]], "one event is not worth a copy"
        writer.write_if_due(min_events=1)
        assert written[3:] == [[0]]


def test_a_controller_writes_a_copy_now_and_then(tmp_path: Path) -> None:
    events, now_s = list(story(random.Random(3), 150)), [0.0]
    with Ledger(tmp_path) as ledger:
        beat = Heartbeat(ledger, address=None, clock=lambda: now_s[0])
        for event in events:
            ledger.append(event)
        beat.on_state(fold(events))
        assert checkpoint.read(ledger)[0] == 0, "it has just begun"
        now_s[0] += CHECKPOINT_PERIOD_S
        beat.on_state(fold(events))
        assert checkpoint.read(ledger) == (len(events), fold(events))


def test_a_copy_by_other_code_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[int]) -> None:
    events = list(story(random.Random(2), 20))
    with Ledger(tmp_path) as ledger:
        keep(ledger, events, [len(events)])
        monkeypatch.setattr(checkpoint, "_code_version", lambda: "other")
        assert read_snapshot(ledger).state == fold(events)
        assert len(decoded) == len(events)
        checkpoint.CheckpointWriter(ledger).write_if_due(min_events=1)
        assert checkpoint.read(ledger)[0] == len(events), "the next controller makes its own"


@pytest.mark.parametrize("part", [0, 1])
def test_a_copy_that_is_damaged_is_not_read(tmp_path: Path, part: int) -> None:
    events = list(story(random.Random(3), 20))
    with Ledger(tmp_path) as ledger:
        keep(ledger, events, [len(events)])
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("UPDATE checkpoint SET body = substr(body, 1, 100) WHERE part = ?", (part,))
    with Ledger(tmp_path, read_only=True) as damaged:
        assert checkpoint.read(damaged) == (0, SweepState())
        assert read_snapshot(damaged).state == fold(events)


KEEPS_LATE = """
import sys
from pathlib import Path

from orchestrator.sweep import checkpoint
from orchestrator.sweep.ledger import Ledger

Path.read_bytes = lambda path: b"updated since"
with Ledger(Path(sys.argv[1])) as ledger:
    checkpoint.CheckpointWriter(ledger).write_if_due(min_events=1)
"""


def test_a_copy_has_the_version_of_its_code_even_after_an_update(tmp_path: Path) -> None:
    events = list(story(random.Random(4), 5))
    with Ledger(tmp_path) as ledger:
        for event in events:
            ledger.append(event)
        subprocess.run([sys.executable, "-c", KEEPS_LATE, tmp_path], check=True)
        assert checkpoint.read(ledger)[0] == len(events)


def test_a_replaced_controller_does_not_change_the_copy_of_its_successor(tmp_path: Path) -> None:
    events = list(story(random.Random(5), 2 * BLOCK_SIZE))
    cut = len(events) // 2
    epoch = max(event.epoch for event in events if isinstance(event, ControllerStarted)) + 1
    with Ledger(tmp_path) as old, Ledger(tmp_path) as new:
        replaced = checkpoint.CheckpointWriter(old)
        for event in events[:cut]:
            old.append(event)
        replaced.write_if_due(min_events=1)
        new.append(ControllerStarted(at_s=1e6, epoch=epoch, pid=2, host="other"))
        for event in events[cut:]:
            if not isinstance(event, ControllerStarted):
                new.append(event)
        checkpoint.CheckpointWriter(new).write_if_due(min_events=1)
        kept = new.checkpoint()
        with pytest.raises(FencedError, match="taken over"):
            replaced.write_if_due(min_events=1)
        assert new.checkpoint() == kept
        assert read_snapshot(new).state == fold(new.events())


def test_the_version_covers_every_module_whose_types_a_state_is_made_of() -> None:
    assert _modules(SweepState) <= set(checkpoint.CODE)


def _modules(hint: typing.Any, seen: set[typing.Any] | None = None) -> set[str]:
    """Modules of the dataclasses in a type, and in the types of their fields."""
    seen = set() if seen is None else seen
    if hint in seen:
        return set()
    seen.add(hint)
    found = {name for part in typing.get_args(hint) for name in _modules(part, seen)}
    if dataclasses.is_dataclass(hint):
        found.add(typing.cast(type, hint).__module__)
        hints = typing.get_type_hints(hint)
        found |= {name for field in dataclasses.fields(hint) for name in _modules(hints[field.name], seen)}
    return found
