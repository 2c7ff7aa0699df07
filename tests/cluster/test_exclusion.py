"""Which nodes a lease on a Ray cluster takes, and which not. What Ray makes of it is tested in test_ray_nodes.py."""

import pytest

from cluster.base import ClusterError
from cluster.ray_nodes import Wanted, names_by_id, selector


def node(identity, host="host", *, alive=True, **resources):
    return {"NodeID": identity, "NodeManagerHostname": host, "Alive": alive, "Resources": resources}


HEAD, SMALL, LARGE, LARGER = (
    node("0"),
    node("1", "small", CPU=2.0),
    node("2", "large", CPU=8.0, GPU=4.0),
    node("3", "larger", CPU=8.0, GPU=8.0),
)
NODES = [HEAD, SMALL, LARGE, LARGER]


def test_other_nodes_take_the_place_of_those_left_out_as_far_as_there_are_others():
    one = Wanted(num_nodes=1)
    assert one.bundles(NODES) == [{"CPU": 8.0, "GPU": 8.0}]
    assert one.bundles(NODES, {"3"}) == [{"CPU": 8.0, "GPU": 4.0}]
    assert Wanted(num_nodes=2).bundles(NODES, {"2"}) == [{"CPU": 8.0, "GPU": 8.0}]
    assert one.devices(one.bundles(NODES)[0]) == ("cuda", 8)
    assert Wanted(num_nodes=1, devices_per_node=2).devices({"CPU": 8.0}) == ("cpu", 2)


@pytest.mark.parametrize(
    ("wanted", "left_out", "words"),
    [
        (Wanted(num_nodes=1), {"2", "3"}, r"every node of the Ray cluster with GPUs is excluded \(2\)"),
        (Wanted(num_nodes=3), {"2"}, "3 nodes are asked for; the Ray cluster has 2 with GPUs"),
        (Wanted(num_nodes=2, devices_per_node=8), set(), "devices_per_node is 8; the nodes have 4 GPUs"),
    ],
)
def test_what_cannot_be_leased_is_told(wanted, left_out, words):
    with pytest.raises(ClusterError, match=words):
        wanted.bundles(NODES, left_out)


def test_a_cluster_without_gpus_gives_cores_and_dead_nodes_give_nothing():
    cores = [SMALL, node("4", CPU=4.0, alive=False)]
    assert Wanted(num_nodes=1).bundles(cores) == [{"CPU": 2.0}]
    with pytest.raises(ClusterError, match="no node of the Ray cluster has a GPU"):
        Wanted(num_nodes=1, device="cuda").bundles(cores)


def test_names_are_unique_and_the_same_whatever_is_leased():
    alike = [node("b", "x y"), node("a", "x y"), node("c", "other")]
    assert names_by_id(alike) == names_by_id(alike[::-1]) == {"a": "x-y", "b": "x-y-n1", "c": "other"}


def test_the_selector_names_every_node_left_out():
    assert selector(()) == {}
    assert selector({"b", "a"}) == {"ray.io/node-id": "!in(a,b)"}
