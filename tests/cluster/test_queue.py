"""Who may hold how many nodes of a shared cluster: cases one can follow, and laws that hold in all."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import queue as host
from cluster.base import ClusterRequest
from cluster.connect import connect
from cluster.queue import (
    EXPIRES_S,
    Claim,
    Grant,
    HostAdmission,
    Queue,
    QueueEntry,
    QueuePolicy,
    Unlimited,
    share,
    strictest,
)
from trials.files import to_json


def host_queue(folder):
    """The sweeps that share this host now and the nodes that they are granted, in the order of submission."""
    entries = sorted(host._read(host._file(folder)).values(), key=lambda entry: entry.claim.submitted_at_s)
    return [(entry.claim.sweep, host.grant(entry, entries).num_nodes) for entry in entries]


def claim(sweep, min_nodes=1, max_nodes=None, **rest):
    rest.setdefault("submitted_at_s", float(ord(sweep[0])))
    return Claim(sweep=sweep, user=rest.pop("user", "u"), min_nodes=min_nodes, max_nodes=max_nodes or min_nodes, **rest)


def numbers(claims, num_nodes, policy=None):
    return {sweep: grant.num_nodes for sweep, grant in share(claims, num_nodes, policy or QueuePolicy()).items()}


def reason(sweep, claims, num_nodes, policy=None):
    return share(claims, num_nodes, policy or QueuePolicy())[sweep].reason


def test_a_single_sweep_gets_its_request_and_shares_with_the_next():
    assert share([claim("a", 1, 4)], 4, QueuePolicy()) == {"a": Grant(4)}
    both = [claim("a", 1, 4, held=4), claim("b", 2)]
    assert numbers(both, 4) == {"a": 2, "b": 2}
    assert reason("a", both, 4) == "waits for 2 nodes held by sweep b"
    assert reason("a", [claim("a", 1, 4)], 2) == "the cluster has 2 nodes"


def test_a_running_sweep_is_never_stopped_for_an_equal_but_for_a_more_important_one():
    running = claim("z", 2, held=2)
    assert numbers([claim("a", 2), running], 3) == {"a": 0, "z": 2}
    assert reason("a", [claim("a", 2), running], 3) == "waits for 1 node held by sweep z"
    urgent = claim("a", 2, priority=5)
    assert numbers([urgent, running], 3) == {"a": 2, "z": 0}
    assert reason("z", [urgent, running], 3) == "preempted by sweep a (priority 5)"
    assert numbers([urgent, running], 4) == {"a": 2, "z": 2}


def test_a_large_sweep_is_not_starved_by_small_equals_but_lower_ones_may_fill_the_gap():
    claims = [claim("a", 2, held=2), claim("b", 3), claim("c", 1), claim("d", 1, priority=-1)]
    assert numbers(claims, 4) == {"a": 2, "b": 0, "c": 0, "d": 1}
    assert reason("c", claims, 4) == "waits behind sweep b, which requests 3 nodes"
    assert numbers(claims[1:], 4) == {"b": 3, "c": 1, "d": 0}


def test_a_claim_that_never_fits_blocks_no_other():
    claims = [claim("a", 9), claim("b", 1)]
    assert numbers(claims, 4) == {"a": 0, "b": 1}
    assert reason("a", claims, 4) == "9 nodes requested; the cluster has 4"


def test_a_lease_that_lost_a_node_goes_on_with_the_rest():
    assert numbers([claim("a", 3, held=2)], 2) == {"a": 2}
    assert numbers([claim("a", 2, held=1), claim("b", 3, held=2)], 3) == {"a": 1, "b": 2}, "in order of arrival"


def test_queues_share_by_weight_and_sweeps_of_a_queue_evenly():
    claims = [claim("a", 1, 9, queue="x"), claim("b", 1, 9, queue="y"), claim("c", 1, 9, queue="y")]
    assert numbers(claims, 9, QueuePolicy(weights={"y": 2.0})) == {"a": 3, "b": 3, "c": 3}
    assert numbers(claims, 8) == {"a": 4, "b": 2, "c": 2}


def test_quotas_are_in_devices_and_for_all_sweeps_of_a_user_together():
    policy = QueuePolicy(quotas={"alice": 8, "*": 4})
    claims = [claim("a", 1, 4, user="alice", devices_per_node=4), claim("b", 1, 4, user="alice", devices_per_node=4)]
    assert numbers(claims, 9, policy) == {"a": 1, "b": 1}
    assert reason("a", claims, 9, policy) == "user alice may hold 8 devices"
    assert numbers([claim("c", 1, 4, user="bob", devices_per_node=4)], 9, policy) == {"c": 1}
    assert numbers([claim("c", 2, user="bob", devices_per_node=4)], 9, policy) == {"c": 0}


def test_of_several_policies_the_strictest_holds():
    found = strictest(
        [QueuePolicy(quotas={"alice": 8, "*": 4}, weights={"x": 2.0}), QueuePolicy(quotas={"bob": 9, "alice": 16})]
    )
    assert found == QueuePolicy(quotas={"alice": 8, "bob": 4, "*": 4}, weights={"x": 2.0})
    assert strictest([]) == QueuePolicy()


def test_without_competition_everything_is_granted():
    queue = Unlimited()
    assert queue.beat(claim("a", 1, 4)) == Grant(4)
    queue.leave()


@st.composite
def situations(draw):
    """Claims that hold no more nodes than there are, and a policy."""
    num_nodes = free = draw(st.integers(0, 10))
    claims = []
    for number in range(draw(st.integers(0, 6))):
        least = draw(st.integers(1, 4))
        most = least + draw(st.integers(0, 4))
        held = draw(st.integers(0, min(most, free)))
        free -= held
        claims.append(
            claim(
                f"s{number}",
                least,
                most,
                held=held,
                user=draw(st.sampled_from("uv")),
                queue=draw(st.sampled_from("xy")),
                priority=draw(st.integers(-1, 1)),
                devices_per_node=draw(st.sampled_from([1, 4])),
                submitted_at_s=float(draw(st.integers(0, 2))),
            )
        )
    quotas = draw(st.dictionaries(st.sampled_from("uv*"), st.integers(0, 20), max_size=2))
    return claims, num_nodes, QueuePolicy(quotas=quotas, weights=draw(st.dictionaries(st.just("x"), st.floats(0.5, 4))))


@given(situations(), st.randoms())
def test_grants_are_disjoint_and_within_quota_and_request(situation, rng):
    claims, num_nodes, policy = situation
    given_ = share(claims, num_nodes, policy)
    shuffled = rng.sample(claims, len(claims))
    assert share(shuffled, num_nodes, policy) == given_, "the order of the claims means nothing"
    assert sum(grant.num_nodes for grant in given_.values()) <= num_nodes
    for user in "uv":
        used = sum(given_[c.sweep].num_nodes * c.devices_per_node for c in claims if c.user == user)
        assert policy.quota(user) is None or used <= policy.quota(user)
    for found in claims:
        grant = given_[found.sweep]
        assert grant.num_nodes == 0 or found.floor <= grant.num_nodes <= found.max_nodes
        assert bool(grant.reason) == (grant.num_nodes < found.max_nodes)
        assert " 0 node" not in grant.reason
        assert "-" not in grant.reason.replace("priority -", "")


@given(situations())
def test_only_higher_priorities_take_the_last_nodes_of_a_running_sweep(situation):
    claims, num_nodes, _ = situation
    given_ = numbers(claims, num_nodes)
    for stopped in (c for c in claims if c.held and not given_[c.sweep]):
        assert any(c.priority > stopped.priority and given_[c.sweep] > min(c.held, c.min_nodes) for c in claims)


@given(situations())
def test_lower_priorities_do_not_affect_the_minimum_of_higher_ones(situation):
    claims, num_nodes, policy = situation
    given_ = numbers(claims, num_nodes, policy)
    for priority in (0, 1):
        above = [c for c in claims if c.priority >= priority]
        alone = numbers(above, num_nodes, policy)
        assert {c.sweep for c in above if alone[c.sweep]} == {c.sweep for c in above if given_[c.sweep]}


@given(situations())
def test_every_claim_gets_its_turn_when_sweeps_end(situation):
    """Let the nodes follow the grants; sweeps that have run end. All that can run at all get their turn."""
    claims, num_nodes, policy = situation
    left = {c.sweep: replace(c, held=0) for c in claims}
    for _ in range(3 * len(claims)):
        given_ = numbers(left.values(), num_nodes, policy)
        for sweep in [sweep for sweep, c in left.items() if c.held and given_[sweep]]:
            del left[sweep]
        left = {sweep: replace(c, held=given_[sweep]) for sweep, c in left.items()}
    for c in left.values():
        quota = policy.quota(c.user)
        assert c.min_nodes > num_nodes or (quota is not None and quota < c.min_nodes * c.devices_per_node)


@pytest.mark.parametrize("others", [0, 1, 4])
def test_a_reason_names_a_few_blocking_sweeps(others):
    claims = [claim("a", 6)] + [claim(f"s{i}", 1, held=1, priority=i) for i in range(others)]
    found = reason("a", claims, 6)
    assert (found == "") == (others == 0)
    assert ("and 1 more" in found) == (others == 4)


def test_claims_that_are_not_renewed_expire():
    now_s = 0.0
    queue = Queue(lambda: now_s)

    def beat(claim, num_nodes=4):
        return queue.beat(to_json(QueueEntry(claim=claim, num_nodes=num_nodes)))["num_nodes"]

    assert beat(claim("a", 1, 4)) == 4
    assert beat(claim("b", 1, 4, priority=1), num_nodes=0) == 3, "all see the cluster that the others see"
    now_s = EXPIRES_S
    assert beat(claim("a", 1, 4, held=4)) == 1
    now_s += 1
    assert beat(claim("a", 1, 4, held=4)) == 4
    assert queue.leave("b") == 1
    assert queue.leave("a") == 0
    assert queue.leave("a") == 0


def test_two_sweeps_of_one_name_are_two():
    one, other = claim("a", held=1, home="x"), claim("a", home="y")
    assert numbers([one, other], 1) == {"x/a": 1, "y/a": 0}


OTHER = """
import sys
from pathlib import Path
from cluster.queue import HostAdmission
from cluster.queue import Claim, QueuePolicy
queue = HostAdmission(Path(sys.argv[1]), QueuePolicy(), devices_per_node=4)
print(queue.beat(Claim(sweep="other", user="u", held=1)).num_nodes, flush=True)
sys.stdin.readline()
"""


def test_a_host_serves_one_sweep_until_it_leaves_or_its_process_dies(tmp_path):
    ours = HostAdmission(tmp_path, QueuePolicy(), devices_per_node=4)
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "1\n"
        assert ours.beat(claim("a")) == Grant(0, "waits for devices held by sweep other")
        assert ours.beat(claim("a", priority=1)).num_nodes == 1
        assert ours.beat(claim("a")).num_nodes == 0
        assert host_queue(tmp_path) == [("other", 1), ("a", 0)]
        other.kill()
    assert ours.beat(claim("a")) == Grant(1)
    ours.leave()
    ours.leave()
    assert host_queue(tmp_path) == []
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_a_quota_counts_the_devices_of_the_host(tmp_path):
    policy = QueuePolicy(quotas={"*": 3})
    assert HostAdmission(tmp_path, policy, devices_per_node=4).beat(claim("a")).num_nodes == 0
    assert HostAdmission(tmp_path, policy, devices_per_node=3).beat(claim("a")).num_nodes == 1


def test_an_unusable_queue_takes_nothing_away_and_a_broken_one_is_replaced(tmp_path):
    (tmp_path / "file").touch()
    queue = HostAdmission(tmp_path / "file", QueuePolicy(), devices_per_node=1)
    assert queue.beat(claim("a", held=1)).num_nodes == 1
    assert "cannot be used" in queue.beat(claim("a")).reason
    queue.leave()
    good = HostAdmission(tmp_path, QueuePolicy(), devices_per_node=1)
    good.beat(claim("a"))
    (file,) = tmp_path.glob("*.json")
    file.write_text("[{}")
    assert good.beat(claim("a")).num_nodes == 1


def test_a_local_sweep_waits_in_the_queue_and_leaves_when_it_gives_up(tmp_path):
    held = HostAdmission(tmp_path, QueuePolicy(), devices_per_node=1)
    held.beat(claim("a", held=1))
    requested = ClusterRequest(kind="local", devices_per_node=1, claim=claim("b"), queue_folder=tmp_path)
    heard, beats = [], itertools.count()

    def on_wait(reason):
        heard.append(reason)
        if next(beats) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect(requested, workdir=tmp_path, on_wait=on_wait)
    assert heard == ["waits for devices held by sweep a"] * 2
    assert host_queue(tmp_path) == [("a", 1)]


def test_sweeps_of_a_host_compete_only_where_their_devices_overlap(tmp_path):
    def queue(*devices, quota=None):
        policy = QueuePolicy() if quota is None else QueuePolicy(quotas={"u": quota})
        return HostAdmission(tmp_path, policy, devices_per_node=len(devices), devices=devices)

    low, high, both = queue("0", "1"), queue("2", "3"), queue("1", "2")
    a, b, c = (claim(name, home=f"host:/{name}") for name in "abc")
    assert low.beat(a) == Grant(1)
    assert high.beat(b) == Grant(1)
    assert both.beat(c) == Grant(0, "waits for devices held by sweep a in /a, sweep b in /b")
    assert low.beat(replace(a, held=1)) == Grant(1), "an equal that waits takes nothing away"
    low.leave()
    assert low.beat(a) == Grant(1), "c waits for b still, but a came first"
    low.leave()
    assert queue("0", "1").beat(claim("d", home="host:/a")).num_nodes == 0, "nor may later ones keep c waiting"
    assert both.beat(replace(c, priority=1)) == Grant(1)
    assert high.beat(replace(b, held=1)) == Grant(0, "preempted by sweep c in /c (priority 1)")
    high.leave()
    assert queue("4", quota=2).beat(claim("e", home="host:/a")).reason == "user u may hold 2 devices and holds 2"


def test_a_grant_is_held_before_its_owner_confirms_it(tmp_path):
    first = HostAdmission(tmp_path, QueuePolicy(), devices_per_node=1)
    assert first.beat(claim("b")) == Grant(1)
    assert HostAdmission(tmp_path, QueuePolicy(), devices_per_node=1).beat(claim("a")).num_nodes == 0, "though earlier"
