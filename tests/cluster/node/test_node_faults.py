"""What goes wrong on one node and what its warden makes of it: real processes, really stopped, frozen and signalled."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from cluster.base import Deadlines, GangEnded, GangLaunch
from cluster.gang.environment import single_node_env
from cluster.gang.gang_outcome import GangTracker, fold
from cluster.gang.hang_verdict import StackState
from cluster.gang.messages import NodeGone, NodeLaunch, RankSlot
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import Device, Placement
from cluster.local import LocalCluster
from cluster.node.agent import Agent
from cluster.node.hang import judge, main_thread
from tests.cluster.gangs import (
    PRELOAD,
    end_of,
    events_until_end,
    launch,
    living,
    parent,
    run,
    wait_for_pids,
    wait_until,
)
from tests.trials.tiny import tiny_spec
from trials.files import to_json
from trials.outcome import GangLost, Measured, TimedOut
from trials.spec import Kernels, Layout

pytestmark = [pytest.mark.slow, pytest.mark.fault]


@pytest.mark.representative("c")
@pytest.mark.parametrize(
    ("how", "where", "innermost"),
    [
        ("sleep", "it was in sleep_in_python (runners.py:", "in sleep_in_python"),
        ("stop", "it was stopped by a signal", None),
        ("c", "it was in hold_the_interpreter (runners.py:", "in hold_the_interpreter"),
    ],
    ids=["sleep", "stop", "c"],
)
def test_the_hanging_rank_of_one_step_is_blamed_with_its_stack(local_cluster, pids, how, where, innermost):
    spec = {"pids": pids, "rank": 1, "how": how}
    end = run(local_cluster, "hangs_in_step", world_size=3, spec=spec, deadlines=Deadlines(stall_s=1.0))
    assert living(pids) == []
    assert isinstance(end.outcome, TimedOut)
    evidence = end.outcome.evidence
    assert evidence.rank == 1, evidence
    assert f"no progress for 1 s in phase measuring at step 1; {where}" in evidence.message
    if innermost is not None:
        header = next(i for i, text in enumerate(evidence.log_tail) if "most recent call first" in text)
        assert innermost in evidence.log_tail[header + 1]
    waiting = Path(end.log_dir, "rank0.log").read_text()
    assert judge(main_thread(waiting))[0] is StackState.WAITING
    assert "in all_reduce\n" in waiting


@pytest.mark.parametrize(
    ("why", "is_node_blamed"),
    [
        ("[PG 1 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=199) ran for 600 s", False),
        pytest.param(
            "[PG 1 Rank 1] watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered",
            True,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_an_abort_by_the_watchdog_is_classified_by_its_log(local_cluster, why, is_node_blamed):
    """NCCL's watchdog ends the process by SIGABRT: no fault of the candidate, by the line that it writes before."""
    end = run(local_cluster, "aborts_as_the_watchdog_does", spec={"rank": "1", "why": why})
    assert isinstance(end.outcome, GangLost), end.outcome
    evidence = end.outcome.evidence
    assert (evidence.rank, evidence.exit_code, evidence.node is not None) == (1, -signal.SIGABRT, is_node_blamed)
    assert why in evidence.message


ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.representative("late")
@pytest.mark.parametrize(
    ("words", "rank", "is_node_blamed"),
    [
        (["CUDA error: unspecified launch failure", "Connection closed by peer [127.0.0.1]:4242", ECC], 2, True),
        (["CUDA error: unspecified launch failure", ECC, ""], 1, True),
        (["CUDA error: unspecified launch failure", "", ""], 0, False),
    ],
    ids=["late", "soon", "never"],
)
def test_a_failed_kernel_waits_for_device_errors_of_peers(local_cluster, words, rank, is_node_blamed):
    end = run(local_cluster, "raises_one_after_the_other", world_size=3, spec={"words": words})
    assert isinstance(end.outcome, GangLost), end.outcome
    evidence = end.outcome.evidence
    assert (evidence.rank, evidence.node is not None) == (rank, is_node_blamed)
    assert words[rank] in evidence.message
    assert len(evidence.collateral) == sum(map(bool, words)) - 1


STALL_S = 15.0
"""More than a rank takes from one report to the next on a busy machine."""


@pytest.mark.exhaustive
def test_a_slow_compilation_is_no_stall(tmp_path):
    """Of rank 1; rank 0 waits for it in a collective. A hang after it is found, and one that never ends as well."""
    trial = to_json(tiny_spec(Layout(dp_replicate=2), kernels=Kernels(compile="block", backend="slow")))
    cases = (
        (2 * STALL_S, False, Deadlines(stall_s=STALL_S, warmup_s=STALL_S)),
        (2 * STALL_S, True, Deadlines(stall_s=STALL_S)),
        (600, False, Deadlines(stall_s=STALL_S, compile_s=STALL_S)),
    )
    with LocalCluster(tmp_path, discover_node(num_devices=2 * len(cases)), preload=PRELOAD) as cluster:
        gangs = []
        for i, (compile_s, hangs, deadlines) in enumerate(cases):
            spec = {"trial": trial, "compile_s": compile_s, "hangs": hangs}
            on = cluster.topology.devices[2 * i : 2 * i + 2]
            gangs.append(launch(cluster, "compiles_slowly", spec=spec, deadlines=deadlines, on=on))
        events = events_until_end(cluster, *gangs)
    ends = {event.attempt_id: event.outcome for event in events if isinstance(event, GangEnded)}
    slow, hanging, endless = (ends[gang.attempt_id] for gang in gangs)
    assert isinstance(slow, Measured), slow
    assert slow.measurement.compile_s > 2 * STALL_S
    for outcome, why in (
        (hanging, f"no progress for {STALL_S:g} s in phase warmup"),
        (endless, f"compiling took longer than {STALL_S:g} s"),
    ):
        assert isinstance(outcome, TimedOut), outcome
        assert why in outcome.evidence.message
        assert outcome.evidence.rank == 1, outcome.evidence


@pytest.mark.exhaustive
def test_a_result_survives_a_process_group_that_cannot_be_left(local_cluster):
    """The report is sent before, and leaving has a separate deadline."""
    spec = to_json(tiny_spec(Layout(dp_replicate=2)))
    end = run(local_cluster, "cannot_leave", spec=spec, deadlines=Deadlines(stall_s=40.0))
    assert isinstance(end.outcome, Measured), end.outcome
    assert "could not be destroyed within 10 s" in Path(end.log_dir, "rank1.log").read_text()


def test_sigterm_to_one_rank_alone_is_no_preemption(local_cluster, pids):
    end = run(local_cluster, "ends_by_sigterm", spec={"pids": pids, "rank": "1"})
    assert living(pids) == []
    assert isinstance(end.outcome, GangLost)
    assert end.outcome.cause == "killed"
    assert (end.outcome.evidence.rank, end.outcome.evidence.exit_code) == (1, -signal.SIGTERM)


@pytest.mark.representative("True")
@pytest.mark.parametrize("ranks_first", [True, False])
def test_sigterm_to_all_of_a_nodes_processes_is_a_preemption(local_cluster, pids, ranks_first):
    gang = launch(local_cluster, "hangs_at_start", spec={"pids": pids})
    wait_for_pids(pids, 2)
    ranks = living(pids)
    for pid in [*ranks, parent(ranks[0])] if ranks_first else [parent(ranks[0]), *ranks]:
        with contextlib.suppress(ProcessLookupError):  # the warden may have ended its ranks by now
            os.kill(pid, signal.SIGTERM)
    end = end_of(local_cluster, gang)
    assert living(pids) == []
    assert isinstance(end.outcome, GangLost)
    assert end.outcome.cause == "preempted"


def test_ranks_report_where_they_ran(local_cluster):
    end = run(local_cluster, "ok", devices=local_cluster.topology.devices[1:3])
    assert isinstance(end.outcome, Measured)
    name = local_cluster.topology.nodes[0].name
    assert end.outcome.measurement.places == (f"{name}/1", f"{name}/2")


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """An agent whose controller may be silent for a second."""
    agent = Agent(
        node="n", workdir=tmp_path_factory.mktemp("agent"), preload=PRELOAD, search_path=sys.path, silence_s=1.0
    )
    yield agent
    agent.close()


def start(agent, runner, folder, **options):
    """Two ranks on the agent's node, running when this returns."""
    agent.launch(part(runner, folder, ranks=(0, 1), **options))
    wait_for_pids(folder, 2)


def part(runner, folder, *, ranks, **options):
    directory = str(Path(folder).parent / "attempt")
    values = {
        "attempt_id": "x",
        "token": "t",
        "runner": f"tests.cluster.runners:{runner}",
        "spec": {"pids": folder},
        "node": "n",
        "directory": directory,
        "slots": tuple(RankSlot(rank=rank, local_rank=i, index=i) for i, rank in enumerate(ranks)),
        "world_size": 2,
        "deadlines": Deadlines(),
        "env": single_node_env(directory),
    }
    return NodeLaunch(**{**values, **options})


def gone(agent):
    """What the agent reports when the attempt has ended."""
    events = []
    wait_until(lambda: events.extend(agent.poll(0.1)) or any(isinstance(e, NodeGone) for e in events), "the end")
    return events[-1].results


def test_ranks_end_when_the_controller_goes_silent_and_report_it_later(agent, pids):
    start(agent, "hangs_at_start", pids)
    for _ in range(20):
        agent.poll(0.1)
    assert len(living(pids)) == 2, "it is heard"
    wait_until(lambda: living(pids) == [], "the ranks to end by themselves")
    outcome = fold(gone(agent))
    assert isinstance(outcome, GangLost)
    assert outcome.cause == "controller"
    assert "lost contact with the controller" in outcome.evidence.message


def test_the_node_with_the_hanging_rank_is_blamed_although_its_deadline_has_not_passed(agent, tmp_path, pids):
    """Node "n" sees its deadline, but its rank only waits in a collective for the one on "m", which is then seen."""
    spec = {"pids": pids, "rank": 1, "how": "sleep"}
    other = Agent(node="m", workdir=tmp_path / "m", preload=PRELOAD, search_path=sys.path)
    agents = {"n": agent, "m": other}
    tracker = GangTracker(order=lambda node, attempt_id, order: agents[node].order(attempt_id, order))
    ranks = tuple(Device(node=name, index=0) for name in agents)
    placement = Placement(ranks=ranks, reserved=ranks)
    gang = GangLaunch(attempt_id="x", token="t", runner="", spec={}, placement=placement)
    tracker.launched(gang, log_dir="", now_s=0.0)
    try:
        for rank, (name, stall_s) in enumerate([("n", 1.0), ("m", 60.0)]):
            deadlines = Deadlines(stall_s=stall_s)
            agents[name].launch(part("hangs_in_step", pids, ranks=(rank,), spec=spec, node=name, deadlines=deadlines))
        seen = []
        wait_until(
            lambda: seen.extend(poll_all(agents, tracker)) or (seen and isinstance(seen[-1], GangEnded)), "the end"
        )
    finally:
        other.close()
    outcome = seen[-1].outcome
    assert isinstance(outcome, TimedOut)
    assert (outcome.evidence.node, outcome.evidence.rank) == ("m", 1)
    assert "sleep_in_python" in outcome.evidence.message
    assert "rank 0 waits for it in all_reduce number 2 of group default_pg" in outcome.evidence.message


def poll_all(agents, tracker):
    """The outcome of the gang from the events of its nodes."""
    node_events = [(name, event) for name, agent in agents.items() for event in agent.poll(0.05)]
    return [found for name, event in node_events for found in tracker.handle(name, event, now_s=1.0)]


@pytest.fixture
def freezer():
    """A control group in which processes can be frozen, so that not even SIGKILL ends them."""
    folder = Path(f"/sys/fs/cgroup/freezer/tune-cluster-test-{os.getpid()}")
    try:
        folder.mkdir()
        state = folder / "freezer.state"
        state.write_text("THAWED")
    except OSError as error:
        pytest.skip(f"no freezer control group can be made here: {error}")
    yield folder
    state.write_text("THAWED")
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), "the frozen processes to end")
    folder.rmdir()


def test_a_gang_ends_although_a_process_of_it_cannot_be_killed(agent, freezer, pids):
    start(agent, "hangs_at_start", pids, release_s=0.5)
    held, other = living(pids)
    (freezer / "cgroup.procs").write_text(str(held))
    (freezer / "freezer.state").write_text("FROZEN")
    os.kill(other, signal.SIGKILL)
    *_, crash, note = gone(agent)
    assert living(pids) == [held]
    assert (crash.category, crash.exit_code) == ("killed", -signal.SIGKILL)
    assert note.category == "lost"
    assert f"[{held}]" in note.message
    (freezer / "freezer.state").write_text("THAWED")
    wait_until(lambda: living(pids) == [], "the held process to end when it can")
