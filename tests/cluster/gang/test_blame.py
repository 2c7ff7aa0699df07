"""Who is blamed for a hang, by what ranks were seen to do.

The records are summaries of dumps in NCCL's format, written by hand after ``FlightRecorderDetail.hpp`` of torch 2.13
(version 2.10 of the format); no NCCL ran for them.
"""

from cluster.gang.blame import verdict
from cluster.gang.messages import RankFailure
from cluster.gang.outcome import fold
from cluster.gang.sights import RankSight
from cluster.node.hang.flight import summary
from trials.outcome import GangLost, TimedOut

GROUPS = {"0": ("default_pg", (0, 1, 2, 3)), "1": ("tp", (0, 1)), "2": ("tp", (2, 3))}


def entry(number, group, seq, *, name="all_reduce", state="completed", sizes=(8,), p2p=False):
    label, _ = GROUPS[group]
    return {
        "record_id": number,
        "pg_id": int(group),
        "process_group": [group, label],
        "collective_seq_id": seq,
        "p2p_seq_id": int(p2p),
        "op_id": seq,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1795374022332884082 + number,
        "input_sizes": [list(sizes)],
        "input_dtypes": ["Float"],
        "output_sizes": [list(sizes)],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": int(state == "completed"),
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": p2p,
    }


def dump(rank, *entries):
    """A rank's dump as NCCL's recorder gives it: all of its groups, then its latest operations."""
    config = {
        name: {"name": name, "desc": label, "ranks": str(list(ranks))}
        for name, (label, ranks) in GROUPS.items()
        if rank in ranks
    }
    numbered = [entry(number, *arguments, **options) for number, (arguments, options) in enumerate(entries)]
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "nccl_comm_state": {}, "entries": numbered}


def done(group, seq, **options):
    return (group, seq), options


def under_way(group, seq, **options):
    return (group, seq), {"state": "scheduled", **options}


def sight(rank, *entries, stack="waiting", step=3, known=True):
    record = summary(dump(rank, *entries), {}) if known else None
    return RankSight(stack=stack, where=f"it was in f{rank}", progress=(2, step), record=record)


def test_the_rank_that_has_not_begun_the_collective_is_to_blame_though_all_wait_for_their_device():
    """On CUDA all stand in ``synchronize``; the one that is behind hangs on the device, in a kernel of its own."""
    found = verdict(
        {
            0: sight(0, done("0", 1), under_way("0", 2)),
            1: sight(1, done("0", 1), under_way("0", 2)),
            2: sight(2, done("0", 1)),
            3: sight(3, done("0", 1), under_way("0", 2), stack="elsewhere"),
        }
    )
    assert (found.kind, found.suspects) == ("rank", (2,))
    assert "waits for it in all_reduce number 2 of group default_pg" in found.why


def test_a_chain_of_ranks_that_wait_is_followed_to_its_end():
    """2 and 3 wait for 0, which waits for 1."""
    found = verdict(
        {
            0: sight(0, done("0", 1), under_way("1", 1)),
            1: sight(1, done("0", 1), stack="unclear"),
            2: sight(2, done("2", 1), under_way("0", 2)),
            3: sight(3, done("2", 1), under_way("0", 2)),
        }
    )
    assert (found.kind, found.suspects) == ("rank", (1,))


def test_a_rank_whose_recorder_has_gone_round_is_not_taken_for_one_that_never_came():
    """Its buffer has no entry of the group any more: that says nothing, the stacks decide."""
    forgetful = dump(1, done("1", 900))
    forgetful["entries"][0]["record_id"] = 5000
    one = RankSight(stack="waiting", where="", progress=(2, 3), record=summary(forgetful, {}))
    sights = {0: sight(0, done("1", 900), under_way("0", 2)), 1: one}
    assert verdict(sights).kind == "unknown"
    assert verdict({**sights, 1: sight(1, done("1", 900))}).suspects == (1,)


def test_a_rank_that_gives_no_record_is_to_blame_unless_it_evidently_waits():
    waiting = {rank: sight(rank, under_way("0", 1)) for rank in (0, 1, 2)}
    assert verdict({**waiting, 3: sight(3, stack="elsewhere", known=False)}).suspects == (3,)
    assert verdict({**waiting, 3: sight(3, known=False)}).kind == "link"


def test_a_device_that_has_not_begun_what_the_others_are_at_is_behind():
    """Where NCCL keeps timings, a collective that is only queued tells of a device that hangs before it."""
    started = {rank: sight(rank, under_way("0", 1, state="started")) for rank in (0, 1, 3)}
    found = verdict({**started, 2: sight(2, under_way("0", 1))})
    assert (found.kind, found.suspects) == ("rank", (2,))


def test_sends_wait_for_the_rank_that_does_not_receive():
    found = verdict(
        {
            0: sight(0, under_way("0", 0, name="send 0->1", p2p=True)),
            1: sight(1, stack="unclear"),
            2: sight(2, under_way("0", 0, name="recv 2<-1", p2p=True)),
        }
    )
    assert (found.kind, found.suspects) == ("rank", (1,))
    meeting = {
        0: sight(0, under_way("0", 0, name="send 0->1", p2p=True)),
        1: sight(1, under_way("0", 0, name="recv 1<-0", p2p=True)),
    }
    assert verdict(meeting).kind == "link"


def test_what_nccl_sent_off_together_has_ended_when_the_whole_has():
    """As pipelines and FSDP do: the parts are recorded one by one, and none of them is ever told to have ended."""

    def together(state):
        parts = [under_way("0", 0, name="send 0->1", p2p=True), under_way("0", 0, name="recv 0<-1", p2p=True)]
        gathers = [under_way("0", 1, name="_all_gather_base"), under_way("0", 1, name="_all_gather_base")]
        whole = [("0", 0), {"name": "coalesced", "state": state, "p2p": True}]
        return [*parts, tuple(whole), *gathers, (("0", 1), {"name": "coalesced", "state": state})]

    assert sight(0, *together("completed")).record.calls == ()
    assert [(call.name, call.peer) for call in sight(0, *together("scheduled")).record.calls] == [
        ("coalesced", None),
        ("recv", 1),
        ("send", 1),
    ]
    late = {0: sight(0, *together("completed"), under_way("0", 2)), 1: sight(1, *together("completed"))}
    assert verdict(late).suspects == (1,)


def hung(sights, nodes="abab"):
    """The outcome of a gang whose nodes saw these ranks hang."""
    return fold(
        RankFailure(
            rank=rank, node=nodes[rank], category="deadline", message="no progress", at_s=1.0 + rank, sight=seen
        )
        for rank, seen in sights.items()
    )


def test_all_in_one_collective_blame_nobody_and_do_not_count_against_the_candidate():
    outcome = hung({rank: sight(rank, done("0", 1), under_way("0", 2)) for rank in range(4)})
    assert isinstance(outcome, GangLost), outcome
    assert (outcome.evidence.rank, outcome.evidence.node) == (None, None)
    assert (
        "no progress; ranks 0, 1, 2, 3 all wait in all_reduce of [[8]] (number 2 of group default_pg): what joins them"
        in outcome.evidence.message
    )


def test_ranks_that_disagree_are_the_candidates_fault_and_no_nodes():
    for other in (under_way("0", 2, name="_all_gather_base"), under_way("0", 2, sizes=(9,))):
        outcome = hung({0: sight(0, done("0", 1), under_way("0", 2)), 1: sight(1, done("0", 1), other)})
        assert isinstance(outcome, TimedOut)
        assert (outcome.evidence.rank, outcome.evidence.node) == (None, None)
        assert "disagree on its collective 2" in outcome.evidence.message
    crossed = {0: sight(0, under_way("1", 1)), 1: sight(1, under_way("0", 1))}
    assert "rank 0 in all_reduce of [[8]]; rank 1 in all_reduce" in hung(crossed).evidence.message


def test_a_node_is_blamed_only_where_its_ranks_can_be_told_from_the_others():
    alike = {rank: sight(rank, stack="elsewhere", known=False) for rank in range(4)}
    assert hung(alike).evidence.node is None
    assert hung(alike, "aaaa").evidence.node is None, "the candidate may hang everywhere"
    one = {**alike, 2: sight(2, stack="stopped")}
    assert (hung(one, "aabb").evidence.rank, hung(one, "aabb").evidence.node) == (2, "b")
    late = {**alike, 0: sight(0, stack="elsewhere", step=9, known=False), 1: sight(1, known=False)}
    assert (hung(late, "aabb").evidence.rank, hung(late, "aabb").evidence.node) == (2, "b")
    assert hung({0: alike[0]}, "a").evidence.node == "a", "there is no other"
