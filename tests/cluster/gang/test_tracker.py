"""The controller's bookkeeping: exactly one end per launch, and only the attempt's own words count, whatever arrives
late, twice or from elsewhere."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cluster.base import GangEnded, GangLaunch, GangProgress
from cluster.gang.gang_outcome import GangTracker, recover
from cluster.gang.messages import NodeCompiling, NodeFailing, NodeGone, PeerCompiles, RankFailure, StopGang, line
from cluster.hardware.topology import Device, Placement
from trials.files import to_json
from trials.outcome import Crashed, GangLost

DEVICES = (Device(node="a", index=0), Device(node="b", index=0))
LAUNCH = GangLaunch(
    attempt_id="x", token="t", runner="m:f", spec={}, placement=Placement(ranks=DEVICES, reserved=DEVICES)
)


def tracker():
    stops = []
    made = GangTracker(order=lambda node, attempt_id, order: stops.append((node, attempt_id, order.is_cause)))
    made.launched(LAUNCH, log_dir="/logs", now_s=10.0)
    return made, stops


def gone(*results, token="t"):
    return NodeGone(attempt_id="x", token=token, results=results)


def failed(category, rank=0):
    return RankFailure(rank=rank, node="a", category=category, message=category, at_s=1.0)


def progress(step, phase="measuring"):
    return GangProgress(attempt_id="x", token="t", phase=phase, step=step, step_time_s=0.5)


def test_events_of_one_node_are_forwarded_to_the_others_and_kills_to_all():
    """Their ranks may be to blame for a hang, and wait for a compilation."""
    orders = []
    made = GangTracker(order=lambda node, attempt_id, order: orders.append((node, order)))
    made.launched(LAUNCH, log_dir="/logs", now_s=10.0)
    made.handle("a", NodeCompiling(attempt_id="x", token="t", seconds=5.0), now_s=11.0)
    made.handle("b", NodeFailing(attempt_id="x", token="t", reason="no progress", is_hang=True), now_s=11.0)
    stop = StopGang(reason="b: no progress", is_cause=False, is_hang=True)
    assert orders == [("b", PeerCompiles(seconds=5.0)), ("a", stop)]
    orders.clear()
    made.kill("x", "enough")
    made.kill("unknown", "enough")
    assert orders == [(node, StopGang(reason="enough", is_cause=True)) for node in "ab"]


def test_a_lost_node_stops_the_others_and_is_the_cause():
    made, stops = tracker()
    assert made.node_lost("b", "no answer", now_s=11.0) == []
    assert stops == [("a", "x", False)]
    (end,) = made.handle("a", gone(failed("connection")), now_s=12.0)
    assert isinstance(end.outcome, GangLost)
    assert end.outcome.evidence.message == "no answer"


def test_progress_is_the_slowest_nodes():
    made, _ = tracker()
    assert made.handle("a", progress(3), now_s=11.0) == []
    (event,) = made.handle("b", progress(1), now_s=11.0)
    assert (event.phase, event.step) == ("measuring", 1)
    assert made.handle("a", progress(4), now_s=11.0) == []
    (event,) = made.handle("b", progress(9), now_s=11.0)
    assert event.step == 4


reports = st.one_of(
    st.builds(progress, st.integers(0, 5), st.sampled_from(["starting", "warmup", "measuring"])),
    st.just(NodeFailing(attempt_id="x", token="t", reason="r")),
    st.builds(lambda category: gone(failed(category)), st.sampled_from(["error", "stopped", "connection"])),
    st.just("lost"),
)


@given(st.lists(st.tuples(st.sampled_from("ab"), reports), max_size=12))
def test_no_gang_ends_twice_or_goes_backwards(story):
    made, _ = tracker()
    events = []
    for node, report in [*story, ("a", gone()), ("b", gone())]:
        events += (
            made.node_lost(node, "lost", now_s=11.0) if report == "lost" else made.handle(node, report, now_s=11.0)
        )
    assert isinstance(events[-1], GangEnded)
    assert sum(isinstance(event, GangEnded) for event in events) == 1
    order = ["starting", "warmup", "measuring"]
    positions = [(order.index(e.phase), e.step) for e in events if isinstance(e, GangProgress)]
    assert positions == sorted(set(positions))


NODES = ("a", "b")
STALE_TOKENS_DEVICES = tuple(Device(node=node, index=0) for node in NODES)
tokens = st.builds("{}{}".format, st.sampled_from(["aaaaaaaa", "bbbbbbbb"]), st.sampled_from(["", "0", "1"]))
"""Tokens: few enough to be drawn twice, and some with the same eight first letters, which name a folder."""
attempts = st.sampled_from(["x", "y", "x-1"])


def failure(message):
    return RankFailure(rank=0, node="a", category="error", message=message, at_s=1.0)


@st.composite
def node_events(draw):
    identity = {"attempt_id": draw(attempts), "token": draw(tokens)}
    kind = draw(st.sampled_from(["progress", "failing", "gone"]))
    if kind == "progress":
        return GangProgress(**identity, phase="measuring", step=draw(st.integers(1, 9)), step_time_s=0.1)
    if kind == "failing":
        return NodeFailing(**identity, reason="stale or not")
    return NodeGone(**identity, results=(failure(f"{identity['attempt_id']} {identity['token']}"),))


@given(st.dictionaries(attempts, tokens, min_size=1), st.lists(st.tuples(st.sampled_from("abc"), node_events())))
def test_only_reports_of_the_current_launch_reach_its_end(launched, story):
    stops = []
    tracker = GangTracker(order=lambda node, attempt_id, order: stops.append((node, attempt_id)))
    for attempt_id, token in launched.items():
        placement = Placement(ranks=STALE_TOKENS_DEVICES, reserved=STALE_TOKENS_DEVICES)
        launch = GangLaunch(attempt_id=attempt_id, token=token, runner="m:f", spec={}, placement=placement)
        tracker.launched(launch, log_dir="", now_s=0.0)
    gone_of = {attempt_id: set() for attempt_id in launched}
    for node, event in story:
        is_own = launched.get(event.attempt_id) == event.token and node in NODES
        is_own = is_own and node not in gone_of[event.attempt_id]
        stops.clear()
        answers = tracker.handle(node, event, now_s=1.0)
        if not is_own:
            assert (answers, stops) == ([], []), "nothing comes of it"
            continue
        if isinstance(event, NodeGone):
            gone_of[event.attempt_id].add(node)
        is_end = gone_of[event.attempt_id] == set(NODES)
        assert [isinstance(answer, GangEnded) for answer in answers if not isinstance(answer, GangProgress)] == (
            [True] if is_end else []
        )
        for answer in answers:
            assert (answer.attempt_id, answer.token) == (event.attempt_id, event.token)
        if is_end:
            assert answers[0].outcome.evidence.message == f"{event.attempt_id} {event.token}"
    assert set(tracker.running) == {attempt_id for attempt_id, gone in gone_of.items() if gone != set(NODES)}


@given(st.dictionaries(tokens, tokens, max_size=4), tokens)
def test_recovery_takes_results_stored_under_the_same_token_only(stored, wanted):
    """``stored``: for each launch's token the one its result carries, another one where a late rank wrote it."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (token, written) in enumerate(stored.items()):
            attempt = Path(folder) / f"a{number}-{token[:8]}"
            attempt.mkdir(exist_ok=True)
            result = line({"token": written, "result": to_json(failure(written))})
            (attempt / "rank0.json").write_bytes(result)
        outcome = recover(Path(folder), wanted, world_size=1).outcome
    candidates = [written for token, written in stored.items() if token[:8] == wanted[:8]]
    assert isinstance(outcome, GangLost) or outcome.evidence.message == wanted
    if candidates == [wanted]:
        assert isinstance(outcome, Crashed), "and its own is found"
