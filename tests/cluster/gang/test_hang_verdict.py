"""Who is blamed for a hang, by what ranks were seen to do.

Dumps of gloo's recorder are recorded ones (``record_flights.py``), those of NCCL's are made in its format
(``nccl_dumps.py``).
"""

import json

import pytest

from cluster.gang.gang_outcome import fold
from cluster.gang.hang_verdict import RankSight, verdict
from cluster.gang.messages import RankFailure
from cluster.node.hang import summary
from tests.cluster.gang.nccl_dumps import SHAPES, done, dump, recv, send, started, under_way
from tests.cluster.gang.record_flights import CASES, FOLDER
from trials.outcome import GangLost, TimedOut


def sight(rank, *entries, stack="waiting", step=3, known=True):
    record = summary(dump(rank, *entries), {}) if known else None
    return RankSight(rank=rank, stack=stack, where=f"it was in f{rank}", progress=(2, step), record=record)


def recorded(case, stacks=()):
    """What gloo's recorder had of a gang that hung; all ranks wait unless ``stacks`` says otherwise."""
    ranks = json.loads((FOLDER / f"gloo_{case}.json").read_text(encoding="utf-8"))["ranks"]
    return {
        rank: RankSight(
            rank=rank,
            stack=dict(stacks).get(rank, "waiting"),
            where="",
            progress=(2, 3),
            record=summary(recorded_rank["dump"], recorded_rank["members"]),
        )
        for rank, recorded_rank in enumerate(ranks)
    }


@pytest.mark.parametrize(
    ("case", "stacks", "kind", "suspects", "why"),
    [
        ("missing_rank", {2: "elsewhere"}, "rank", (2,), "waits for it in all_reduce number 2 of group default_pg"),
        ("chain", {1: "elsewhere"}, "rank", (1,), "waits for it in all_reduce number 2 of group default_pg"),
        ("crossed", {}, "disagreement", (0, 1), "ranks wait for each other in different operations"),
        ("differing", {}, "disagreement", (0, 1), "its collective 2: all_reduce of [[4]] or gather of [[4]]"),
        ("silent_peer", {1: "elsewhere"}, "rank", (1,), ""),
    ],
)
def test_recorded_hangs_on_gloo(case, stacks, kind, suspects, why):
    found = verdict(recorded(case, stacks))
    assert (found.kind, found.suspects) == (kind, suspects), found
    assert why in found.detail


def test_every_recorded_case_is_judged():
    """And what is made in NCCL's name has the fields that this torch's recorder writes."""
    assert {f"gloo_{case}.json" for case in CASES} == {path.name for path in FOLDER.iterdir()}
    real = json.loads((FOLDER / "gloo_missing_rank.json").read_text(encoding="utf-8"))["ranks"][0]["dump"]
    made = dump(0, done("0", 1))
    assert (made.keys(), made["entries"][0].keys()) == (real.keys(), real["entries"][0].keys())
    assert made["version"] == real["version"]


@pytest.mark.parametrize("shape", SHAPES)
def test_all_shapes_of_a_dump_read_the_same(shape):
    entries = (done("0", 1), send(0, 1), recv(0, 1, "started"), started("1", 1), under_way("0", 2))
    assert summary(dump(0, *entries, shape=shape), {}) == summary(dump(0, *entries), {})
    assert summary(dump(0, shape=shape), {}).places == ()


def test_the_rank_that_has_not_begun_the_collective_is_blamed_even_if_all_wait_for_their_device():
    """On CUDA all stand in ``synchronize``; the host of the one that is behind waits for its device, which hangs."""
    found = verdict(
        {
            0: sight(0, done("0", 1), under_way("0", 2)),
            1: sight(1, done("0", 1), under_way("0", 2)),
            2: sight(2, done("0", 1)),
            3: sight(3, done("0", 1), under_way("0", 2), stack="elsewhere"),
        }
    )
    assert (found.kind, found.suspects) == ("rank", (2,))
    assert "waits for it in all_reduce number 2 of group default_pg" in found.detail


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


def test_a_rank_whose_recorder_wrapped_around_is_not_mistaken_for_a_missing_one():
    """Its buffer has no entry of the group any more: which proves nothing; the stacks decide."""
    forgetful = dump(1, done("1", 900))
    forgetful["entries"][0]["record_id"] = 5000
    one = RankSight(rank=1, stack="waiting", where="", progress=(2, 3), record=summary(forgetful, {}))
    sights = {0: sight(0, done("1", 900), under_way("0", 2)), 1: one}
    assert verdict(sights).kind == "unknown"
    assert verdict({**sights, 1: sight(1, done("1", 900))}).suspects == (1,)


def test_a_rank_without_a_record_is_blamed_unless_its_stack_shows_it_waiting():
    waiting = {rank: sight(rank, under_way("0", 1)) for rank in (0, 1, 2)}
    assert verdict({**waiting, 3: sight(3, stack="elsewhere", known=False)}).suspects == (3,)
    assert verdict({**waiting, 3: sight(3, known=False)}).kind == "link"


def test_a_device_hanging_in_a_kernel_is_identified_by_the_collective_it_has_not_started():
    """Its host ran ahead and has queued what the others are at, and more."""
    ahead = (done("0", 1), under_way("0", 2), under_way("0", 3))
    at_work = {rank: sight(rank, done("0", 1), started("0", 2), under_way("0", 3)) for rank in (0, 1, 3)}
    outcome = hung({**at_work, 2: sight(2, *ahead)}, "aabb")
    assert isinstance(outcome, TimedOut)
    assert (outcome.evidence.rank, outcome.evidence.node) == (2, "b")
    assert "waits for it in all_reduce number 2" in outcome.evidence.message


def test_without_timings_a_hanging_device_looks_like_a_hanging_link():
    ahead = {rank: sight(rank, done("0", 1), under_way("0", 2), under_way("0", 3)) for rank in range(4)}
    assert verdict(ahead).kind == "link"


def test_a_chain_over_two_groups_leads_to_the_device_that_hangs():
    """2 has queued the world's collective behind its pair's, which 3 has not started; 0 and 1 are at the world's."""
    found = verdict(
        {
            0: sight(0, started("0", 2)),
            1: sight(1, started("0", 2)),
            2: sight(2, started("2", 1), under_way("0", 2)),
            3: sight(3, under_way("2", 1), under_way("0", 2)),
        }
    )
    assert (found.kind, found.suspects) == ("rank", (3,))


def test_sends_wait_for_the_rank_that_does_not_receive():
    found = verdict({0: sight(0, send(0, 1)), 1: sight(1, stack="unclear"), 2: sight(2, recv(2, 1))})
    assert (found.kind, found.suspects) == ("rank", (1,))
    assert verdict({0: sight(0, send(0, 1)), 1: sight(1, recv(1, 0))}).kind == "link"


def test_two_sends_do_not_meet():
    for one, other in ((send(0, 1), send(1, 0)), (recv(0, 1), recv(1, 0))):
        found = verdict({0: sight(0, one), 1: sight(1, other)})
        assert found.kind == "disagreement"
        assert "ranks wait for each other in different operations: rank 0 in " in found.detail


def test_neighbours_waiting_for_a_stage_that_does_not_send_do_not_blame_the_link():
    """The middle one of three hangs, with receives posted from both, who receive from it."""
    around = {0: sight(0, recv(0, 1)), 2: sight(2, recv(2, 1))}
    assert verdict({**around, 1: sight(1, recv(1, 0), recv(1, 2))}).kind == "disagreement"
    assert verdict({**around, 1: sight(1)}).suspects == (1,)


def test_a_send_that_a_device_has_queued_but_not_started_is_behind():
    """The middle stage's own kernel hangs before both sends; its neighbours' devices are at the receives."""
    found = verdict(
        {0: sight(0, recv(0, 1, "started")), 1: sight(1, send(1, 0), send(1, 2)), 2: sight(2, recv(2, 1, "started"))}
    )
    assert (found.kind, found.suspects) == ("rank", (1,))


def test_coalesced_nccl_operations_end_with_their_group():
    """As pipelines and FSDP do: the parts are recorded one by one, and none of them is ever marked as ended."""

    def together(state):
        parts = [under_way("0", 0, name="send 0->1", p2p=True), under_way("0", 0, name="recv 0<-1", p2p=True)]
        gathers = [under_way("0", 1, name="_all_gather_base"), under_way("0", 1, name="_all_gather_base")]
        whole = [("0", 0), {"name": "coalesced", "state": state, "p2p": True}]
        return [*parts, tuple(whole), *gathers, (("0", 1), {"name": "coalesced", "state": state})]

    assert sight(0, *together("completed")).record.calls == ()
    assert all(call.is_started for call in sight(0, *together("started")).record.calls), (
        "the parts are never marked as ended"
    )
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
            rank=rank, node=nodes[rank], category="deadline", message="no progress", at_s=1.0 + rank, sights=(seen,)
        )
        for rank, seen in sights.items()
    )


def test_all_ranks_in_one_collective_blame_no_rank_and_not_the_candidate():
    outcome = hung({rank: sight(rank, done("0", 1), under_way("0", 2)) for rank in range(4)})
    assert isinstance(outcome, GangLost) and outcome.is_hang, outcome
    assert (outcome.evidence.rank, outcome.evidence.node) == (None, None)
    assert (
        "no progress; ranks 0, 1, 2, 3 all wait in all_reduce of [[8]] (number 2 of group default_pg): the connection"
        in outcome.evidence.message
    )


def test_ranks_that_disagree_are_the_fault_of_the_candidate_not_of_a_node():
    for other in (under_way("0", 2, name="_all_gather_base"), under_way("0", 2, sizes=(9,))):
        outcome = hung({0: sight(0, done("0", 1), under_way("0", 2)), 1: sight(1, done("0", 1), other)})
        assert isinstance(outcome, TimedOut)
        assert (outcome.evidence.rank, outcome.evidence.node) == (None, None)
        assert "disagree on its collective 2" in outcome.evidence.message
    crossed = {0: sight(0, under_way("1", 1)), 1: sight(1, under_way("0", 1))}
    assert "rank 0 in all_reduce of [[8]]; rank 1 in all_reduce" in hung(crossed).evidence.message


def test_a_node_is_blamed_only_if_its_ranks_differ_from_the_others():
    alike = {rank: sight(rank, stack="elsewhere", known=False) for rank in range(4)}
    assert hung(alike).evidence.node is None
    assert hung(alike, "aaaa").evidence.node is None, "the candidate may hang everywhere"
    one = {**alike, 2: sight(2, stack="stopped")}
    assert (hung(one, "aabb").evidence.rank, hung(one, "aabb").evidence.node) == (2, "b")
    late = {**alike, 0: sight(0, stack="elsewhere", step=9, known=False), 1: sight(1, known=False)}
    assert (hung(late, "aabb").evidence.rank, hung(late, "aabb").evidence.node) == (2, "b")
    assert hung({0: alike[0]}, "a").evidence.node == "a", "there is no other"


def test_a_host_reading_from_its_device_within_the_collective_is_not_blamed():
    """``bool(tensor)`` and ``float(tensor)`` are C, and look like code that does not wait."""
    inside = {rank: sight(rank, done("0", 1), under_way("0", 2)) for rank in range(4)}
    reading = {rank: sight(rank, done("0", 1), under_way("0", 2), stack="elsewhere") for rank in range(4)}
    assert verdict(reading).kind == "link"
    assert isinstance(hung(reading), GangLost), "as where the host stands in tolist()"
    assert verdict({**inside, 0: reading[0]}).kind == "link"


def test_a_collective_with_unseen_ranks_does_not_prove_a_broken_link():
    found = verdict({0: sight(0, under_way("0", 1))})
    assert (found.kind, found.detail) == (
        "unknown",
        "rank 0 is in all_reduce of [[8]] with rank 1, which has no record",
    )


def test_ranks_that_report_no_progress_are_not_considered_behind():
    silent = RankSight(rank=1, stack="elsewhere", where="", progress=None)
    assert verdict({0: sight(0, stack="elsewhere", known=False), 1: silent}).suspects == (0, 1)
    assert verdict({1: silent}).suspects == (1,)


def test_a_slot_that_starts_its_ranks_is_seen_rank_by_rank():
    """Two nodes with two ranks each, started by one process per node: records name ranks, not slots."""

    def slot(number, *sights):
        return RankFailure(
            rank=number, node="ab"[number], category="deadline", message="no progress", at_s=1.0, sights=sights
        )

    waiting = [sight(rank, done("0", 1), under_way("0", 2)) for rank in range(4)]
    lost = fold([slot(0, *waiting[:2]), slot(1, *waiting[2:])])
    assert isinstance(lost, GangLost) and "ranks 0, 1, 2, 3 all wait in all_reduce" in lost.evidence.message
    behind = sight(1, done("0", 1))
    outcome = fold([slot(0, waiting[0], behind), slot(1, *waiting[2:])])
    assert isinstance(outcome, TimedOut)
    assert (outcome.evidence.rank, outcome.evidence.node) == (0, "a"), "whose log it is"
    assert "rank 1: it was in f1; rank 3 waits for it" in outcome.evidence.message
    assert [text.partition(":")[0] for text in outcome.evidence.collateral] == ["rank 0", "rank 2", "rank 3"]
