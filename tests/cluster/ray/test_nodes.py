"""Which nodes a lease on a Ray cluster takes, and which not, without Ray; ``test_backend.py`` uses a real one."""

import os

import pytest

from cluster.base import ClusterError
from cluster.ray.connection import locked_folder, remove_stale_folders
from cluster.ray.leases import ClusterView, NoSuchNodesError, Wanted, _host, bundle, names_by_id


def node(identity, host="host", *, alive=True, **resources):
    return {"NodeID": identity, "NodeManagerHostname": host, "Alive": alive, "Resources": resources}


HEAD, SMALL, LARGE, LARGER = (
    node("0"),
    node("1", "small", CPU=2.0),
    node("2", "large", CPU=8.0, GPU=4.0),
    node("3", "larger", CPU=8.0, GPU=8.0),
)
NODES = [HEAD, SMALL, LARGE, LARGER]


def fitting(wanted, num_nodes, left_out=()):
    shape = wanted.shape(NODES, num_nodes, left_out)
    view = ClusterView(nodes={node["NodeID"]: node for node in NODES})
    return shape.num_devices, [node["NodeID"] for node in view.able(shape)]


def test_a_lease_has_equal_nodes_the_best_that_are_not_excluded():
    assert fitting(Wanted(), 1) == (8, ["3"])
    assert fitting(Wanted(), 1, {"3"}) == (4, ["3", "2"])
    assert fitting(Wanted(), 2) == (4, ["3", "2"])
    assert fitting(Wanted(devices_per_node=2), 2) == (2, ["3", "2"])
    assert fitting(Wanted(device="cpu"), 3) == (2, ["2", "3", "1"])
    assert bundle(LARGE) == {"CPU": 8.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("wanted", "left_out", "words"),
    [
        (Wanted(), {"2", "3"}, r"all nodes of the Ray cluster with GPUs are excluded \(2\)"),
        (Wanted(devices_per_node=8), set(), "devices_per_node is 8; the nodes have 4 GPUs"),
    ],
)
def test_impossible_leases_are_rejected_with_a_reason(wanted, left_out, words):
    with pytest.raises(ClusterError, match=words):
        wanted.shape(NODES, 2, left_out)


def test_a_cluster_without_gpus_offers_cores_and_dead_nodes_offer_nothing():
    cores = [SMALL, node("4", CPU=4.0, alive=False)]
    assert Wanted().shape(cores, 2).label == "2 CPUs"
    with pytest.raises(NoSuchNodesError, match="no node of the Ray cluster has a GPU"):
        Wanted(device="cuda").shape(cores, 1)


def test_partly_held_nodes_are_not_free_and_draining_nodes_not_usable():
    view = ClusterView(
        nodes={node["NodeID"]: node for node in NODES},
        available={"2": {"CPU": 8.0, "GPU": 4.0}, "3": {"CPU": 8.0, "GPU": 7.0}},
        draining=frozenset({"2"}),
    )
    assert [view.is_free(node) for node in (SMALL, LARGE, LARGER)] == [False, True, False]
    assert [node["NodeID"] for node in view.able(Wanted().shape(NODES, 2))] == ["3"]


def test_names_are_unique_the_same_for_every_lease_and_stay_with_their_nodes():
    alike = [node("b", "x y"), node("a", "x y"), node("c", "other")]
    names = names_by_id(alike, {})
    assert names == names_by_id(alike[::-1], {}) == {"a": "x-y", "b": "x-y-n1", "c": "other"}
    rebooted = [node("a", "x y", alive=False), node("0", "x y"), *alike[::2]]
    assert names_by_id(rebooted, names) == {**names, "0": "x-y-n2"}
    assert names_by_id(rebooted, {}) == {"0": "x-y", "b": "x-y-n1", "c": "other"}


def test_npus_are_leased_by_the_name_that_ray_counts_them_under():
    nodes = [node("1", "cores", CPU=8.0), node("2", "ascend", CPU=8.0, NPU=8.0)]
    for device in ("auto", "npu"):
        shape = Wanted(device=device).shape(nodes, 1)
        assert (shape.resource, shape.num_devices, shape.device) == ("NPU", 8, "npu")
    assert bundle(nodes[1]) == {"CPU": 8.0, "NPU": 8.0}
    assert Wanted(device="rocm").shape(NODES, 1).device == "rocm", "Ray does not report the vendor of GPUs"
    assert Wanted().shape(NODES, 1).device == "auto", "so the node's agent finds out"


def test_a_survey_detects_the_kind_of_devices():
    kinds = {"H100": "cuda", "AMD-Instinct-MI300X-OAM": "rocm", "Intel-GPU-Max-1550": "xpu"}
    for name, kind in kinds.items():
        host = _host(node("1", CPU=8.0, GPU=4.0, **{f"accelerator_type:{name}": 1.0}))
        assert (host.num_gpus, host.accelerator, host.device) == (4, name, kind)
    assert _host(node("1", CPU=8.0, NPU=2.0)).device == "npu"
    assert _host(node("1", CPU=8.0)).device == "cpu"


def test_folders_of_dead_controllers_are_removed_and_those_of_living_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living, lock = locked_folder()
    dead, gone = locked_folder()
    (dead / "token").write_text("secret")
    gone.close()
    (tmp_path / "tune-other").mkdir()
    assert remove_stale_folders() == [], "they may be about to be locked"
    for folder in (living, dead):
        os.utime(folder / "controller.lock", (0.0, 0.0))
    assert remove_stale_folders() == [dead]
    assert {path.name for path in tmp_path.iterdir()} == {living.name, "tune-other"}
    lock.close()
