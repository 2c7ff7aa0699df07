"""A Ray of several nodes: gangs across them, a node that dies, a lease that cannot be had."""

import pytest

from cluster.base import ClusterError
from cluster.probe import probe
from tests.cluster.gangs import PRELOAD, end_of, launch, living, run, wait_for_pids, wait_until
from trials.outcome import Crashed, GangLost, Measured

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.fault]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """A head without devices and two nodes of two CPUs, with token authentication, over loopback."""
    from ray.cluster_utils import Cluster

    from cluster.ray_cluster import _loopback_only, _settings
    from cluster.ray_settings import fresh_token

    with _settings(fresh_token(tmp_path_factory.mktemp("token"))), _loopback_only():
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}, shutdown_at_exit=False
        )
        workers = [cluster.add_node(num_cpus=2) for _ in range(2)]
        yield cluster, workers
        cluster.shutdown()


@pytest.fixture(scope="module")
def lease(nodes, tmp_path_factory):
    from cluster.ray_cluster import RayCluster

    cluster, _ = nodes
    with RayCluster(
        tmp_path_factory.mktemp("nodes"), address=cluster.address, num_nodes=2, device="cpu", preload=PRELOAD
    ) as leased:
        yield leased


def test_more_nodes_than_there_are_is_an_error(nodes, tmp_path):
    from cluster.ray_cluster import RayCluster

    with pytest.raises(ClusterError, match="3 nodes are asked for"):
        RayCluster(tmp_path, address=nodes[0].address, num_nodes=3, device="cpu")


def test_an_excluded_node_is_not_held_and_another_takes_its_place(nodes, tmp_path):
    """The node excluded is the one that was leased first."""
    import ray

    from cluster.ray_cluster import RayCluster

    leases = []

    def excluded(topology):
        leases.append([node.name for node in topology.nodes])
        return {leases[0][0]} & set(leases[-1])

    with RayCluster(
        tmp_path, address=nodes[0].address, num_nodes=1, device="cpu", preload=PRELOAD, excluded=excluded
    ) as leased:
        (kept,) = leased.topology.nodes
        assert [len(names) for names in leases] == [1, 1]
        assert kept.name == leases[-1][0] != leases[0][0]
        assert isinstance(run(leased, "ok", devices=kept.devices).outcome, Measured)
        wait_until(lambda: ray.available_resources().get("CPU") == 2.0, "the excluded node to be free")


def test_the_lease_holds_both_nodes(lease):
    assert [node.num_devices for node in lease.topology.nodes] == [2, 2]
    assert len({node.name for node in lease.topology.nodes}) == 2


def test_a_gang_spans_nodes(lease, pids):
    end = run(lease, "ok", world_size=4, spec={"pids": pids})
    assert isinstance(end.outcome, Measured), end.outcome
    assert end.outcome.measurement.model_flops_per_token == 4.0, "the all-reduce saw all ranks"
    assert living(pids) == []


def test_a_probe_measures_both_nodes_and_the_network_between(lease):
    profile = probe(lease, at_s=0.0)
    assert [node.node for node in profile.measured] == [node.name for node in lease.topology.nodes]
    assert profile.network.all_reduce.world_size == 2
    for node in profile.nodes:
        assert node.matmul_flops_per_s["float32"].per_s > 1e6
        assert node.all_reduce.world_size == 2
        assert node.transfer.bytes_per_s > 1e4


def test_a_failure_on_one_node_ends_the_gang_on_the_other(lease, pids):
    gang = launch(lease, "raises", world_size=4, spec={"pids": pids, "rank": 3})
    end = end_of(lease, gang)
    assert living(pids) == []
    assert isinstance(end.outcome, Crashed)
    assert end.outcome.evidence.rank == 3
    assert end.outcome.evidence.node == gang.placement.ranks[3].node


def test_a_lost_node_loses_its_gangs_only(nodes, lease, tmp_path):
    """Runs last: the node does not come back."""
    cluster, workers = nodes
    folders = [tmp_path / "spanning", tmp_path / "after"]
    for folder in folders:
        folder.mkdir()
    gang = launch(lease, "hangs_at_start", world_size=4, spec={"pids": str(folders[0])})
    wait_for_pids(folders[0], 4)
    cluster.remove_node(workers[1], allow_graceful=False)
    end = end_of(lease, gang)
    assert isinstance(end.outcome, GangLost)
    assert "is lost" in end.outcome.evidence.message
    wait_until(lambda: living(folders[0]) == [], "the lost node's ranks to end")

    lost = end.outcome.evidence.node
    (alive,) = [node for node in lease.topology.nodes if node.name != lost]
    assert isinstance(run(lease, "ok", devices=alive.devices).outcome, Measured)
    again = launch(lease, "hangs_at_start", devices=lease.topology.node(lost).devices)
    assert isinstance(end_of(lease, again).outcome, GangLost)
