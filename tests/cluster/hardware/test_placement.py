"""Placement against its rules, and against brute force on small clusters."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.hardware.topology import Device, Node, Pool, Topology


def node(name, num_devices):
    return Node(
        name=name,
        address="127.0.0.1",
        num_devices=num_devices,
        device_kind="cpu",
        device_name="core",
        device_memory_bytes=1,
        threads_per_device=1,
    )


def topology(*sizes):
    return Topology(nodes=tuple(node(f"n{i}", size) for i, size in enumerate(sizes)))


def place(cluster, free, **wanted):
    """Where a gang goes on a cluster of which only ``free`` is free."""
    pool = Pool(cluster)
    pool.take(device for device in cluster.devices if device not in free)
    return pool.place(**wanted)


def free_but(cluster, *taken):
    return frozenset(cluster.devices) - {Device(node=name, index=i) for name, i in taken}


@st.composite
def problems(draw):
    cluster = topology(*draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    free = frozenset(device for device in cluster.devices if draw(st.booleans()))
    tp = draw(st.integers(1, 3))
    return (
        cluster,
        free,
        {"world_size": tp * draw(st.integers(1, 6)), "tp": tp, "isolation": draw(st.sampled_from(["node", "device"]))},
    )


def fewest_nodes(room, world_size):
    """By trying every set of nodes; None if not even all of them will do."""
    for count in range(1, len(room) + 1):
        if any(sum(chosen) >= world_size for chosen in itertools.combinations(room, count)):
            return count
    return None


@given(problems())
def test_what_is_placed_keeps_the_rules(problem):
    cluster, free, wanted = problem
    placement = place(cluster, free, **wanted)
    if placement is None:
        return
    assert len(placement.ranks) == len(set(placement.ranks)) == wanted["world_size"]
    assert set(placement.ranks) <= set(placement.reserved) <= free
    assert len(set(placement.reserved)) == len(placement.reserved)
    per_node = [name for name, _ in itertools.groupby(device.node for device in placement.ranks)]
    assert len(per_node) == len(set(per_node)), "ranks are consecutive on a node"
    for start in range(0, wanted["world_size"], wanted["tp"]):
        assert len({device.node for device in placement.ranks[start : start + wanted["tp"]]}) == 1
    if wanted["isolation"] == "node":
        whole = {device for name in placement.nodes for device in cluster.node(name).devices}
        assert set(placement.reserved) == whole
    else:
        assert placement.reserved == placement.ranks


@given(problems())
def test_a_gang_waits_exactly_when_it_must(problem):
    cluster, free, wanted = problem
    usable = {item: sum(device in free for device in item.devices) for item in cluster.nodes}
    if wanted["isolation"] == "node":
        usable = {item: count for item, count in usable.items() if count == item.num_devices}
    tp = wanted["tp"]
    now = fewest_nodes([count // tp * tp for count in usable.values()], wanted["world_size"])
    ever = fewest_nodes([item.num_devices // tp * tp for item in cluster.nodes], wanted["world_size"])
    placement = place(cluster, free, **wanted)
    assert (placement is not None) == (now is not None and now == ever)
    if placement is not None:
        assert len(placement.nodes) == now


def test_a_small_gang_takes_the_tightest_node():
    cluster = topology(4, 4)
    placement = place(cluster, free_but(cluster, ("n1", 0), ("n1", 1)), world_size=2, tp=1, isolation="device")
    assert placement is not None
    assert placement.ranks == (Device(node="n1", index=2), Device(node="n1", index=3))


def test_a_gang_that_fits_a_node_waits_rather_than_span_two():
    cluster = topology(2, 2)
    free = free_but(cluster, ("n0", 0), ("n1", 0))
    assert place(cluster, free, world_size=2, tp=1, isolation="device") is None


def test_a_whole_node_is_reserved_for_one_rank():
    placement = place(topology(4), frozenset(topology(4).devices), world_size=1, tp=1, isolation="node")
    assert placement is not None
    assert (len(placement.ranks), len(placement.reserved)) == (1, 4)


def test_devices_in_a_row_are_preferred():
    cluster = topology(4)
    placement = place(cluster, free_but(cluster, ("n0", 0)), world_size=2, tp=2, isolation="device")
    assert placement is not None
    assert [device.index for device in placement.ranks] == [2, 3]


@pytest.mark.parametrize("wrong", [{"tp": 2}, {"tp": 0}, {"world_size": 0}, {"isolation": "rack"}])
def test_nonsense_is_refused(wrong):
    cluster = topology(4)
    with pytest.raises(ValueError, match=r"world_size|isolation"):
        place(cluster, frozenset(cluster.devices), **{"world_size": 3, "tp": 1, "isolation": "node", **wrong})


@given(problems(), st.randoms())
def test_a_pool_places_as_if_counted_anew(problem, rng):
    cluster, free, wanted = problem
    pool = Pool(cluster)
    taken = [device for device in cluster.devices if rng.random() < 0.5]
    pool.take(taken)
    lost = {cluster.nodes[0].name} if rng.random() < 0.5 else set()
    pool.set_nodes(cluster, lost)
    pool.give_back(taken)
    pool.take(device for device in cluster.devices if device not in free)
    assert pool.place(**wanted) == place(cluster, frozenset(d for d in free if d.node not in lost), **wanted)
