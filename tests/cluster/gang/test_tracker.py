"""The controller's bookkeeping: exactly one end per launch, whatever the nodes report."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.base import GangEnded, GangLaunch, GangProgress
from cluster.gang.gang_outcome import GangTracker
from cluster.gang.messages import NodeCompiling, NodeFailing, NodeGone, PeerCompiles, RankFailure, StopGang
from cluster.hardware.topology import Device, Placement
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


def test_the_gang_ends_when_its_last_node_has():
    made, _ = tracker()
    assert made.handle("a", gone(failed("error")), now_s=11.0) == []
    (end,) = made.handle("b", gone(failed("connection", 1)), now_s=12.5)
    assert isinstance(end, GangEnded)
    assert isinstance(end.outcome, Crashed)
    assert (end.device_seconds, end.log_dir) == (5.0, "/logs")
    assert made.running == ()


def test_a_failing_node_stops_the_others_without_being_the_cause():
    made, stops = tracker()
    assert made.handle("a", NodeFailing(attempt_id="x", token="t", reason="boom"), now_s=11.0) == []
    assert stops == [("b", "x", False)]


def test_a_hang_and_a_compilation_on_one_node_are_told_to_the_others():
    """Whose ranks may be to blame for the one, and wait for the other."""
    orders = []
    made = GangTracker(order=lambda node, attempt_id, order: orders.append((node, order)))
    made.launched(LAUNCH, log_dir="/logs", now_s=10.0)
    made.handle("a", NodeCompiling(attempt_id="x", token="t", seconds=5.0), now_s=11.0)
    made.handle("b", NodeFailing(attempt_id="x", token="t", reason="no progress", is_hang=True), now_s=11.0)
    stop = StopGang(reason="b: no progress", is_cause=False, is_hang=True)
    assert orders == [("b", PeerCompiles(seconds=5.0)), ("a", stop)]


def test_a_lost_node_stops_the_others_and_is_the_cause():
    made, stops = tracker()
    assert made.node_lost("b", "no answer", now_s=11.0) == []
    assert stops == [("a", "x", False)]
    (end,) = made.handle("a", gone(failed("connection")), now_s=12.0)
    assert isinstance(end.outcome, GangLost)
    assert end.outcome.evidence.message == "no answer"


def test_kill_tells_every_node_and_names_the_cause():
    made, stops = tracker()
    made.kill("x", "enough")
    made.kill("unknown", "enough")
    assert stops == [("a", "x", True), ("b", "x", True)]


def test_late_reports_with_another_token_are_dropped():
    made, _ = tracker()
    assert made.handle("a", gone(failed("error"), token="old"), now_s=11.0) == []
    assert made.handle("b", gone(failed("error"), token="old"), now_s=11.0) == []
    assert made.running == ("x",)


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
def test_no_story_ends_twice_or_goes_backwards(story):
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
