"""The Ray backend on a Ray of several nodes: gangs across them, and a lease that grows, shrinks and loses a node."""

import subprocess
import sys
import time

import pytest

from cluster import connect as connecting
from cluster.base import ClusterError, ClusterRequest
from cluster.connect import connect
from cluster.probing import probe
from cluster.queue import Claim
from tests.cluster import scripts
from tests.cluster.gangs import PRELOAD, end_of, launch, living, run, wait_for_pids, wait_until
from trials.outcome import Crashed, GangLost, Measured

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.fault, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """A head without devices and three nodes of four CPUs, with token authentication, over loopback."""
    from ray.cluster_utils import Cluster

    from cluster.ray.connection import fresh_token, loopback_only, settings

    own = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_prestart_worker_first_driver": "0"}
    changes = {**fresh_token(tmp_path_factory.mktemp("token")), **own}
    with settings(changes), loopback_only():
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}, shutdown_at_exit=False
        )
        workers = [cluster.add_node(wait=False, num_cpus=4) for _ in range(3)]
        cluster.wait_for_nodes()
        yield cluster, workers
        cluster.shutdown()


CLAIM = Claim(sweep="patient", user="alice", min_nodes=2, max_nodes=3)


def request(nodes, num_nodes, **rest):
    rest = {"min_nodes": num_nodes, "max_nodes": num_nodes, "device": "cpu", "devices_per_node": 2} | rest
    return ClusterRequest(address=nodes[0].address, **rest)


@pytest.fixture(scope="module")
def lease(nodes, tmp_path_factory):
    requested = request(nodes, 2, claim=CLAIM)
    with connect(requested, workdir=tmp_path_factory.mktemp("nodes"), preload=PRELOAD) as leased:
        leased.resize(2)
        yield leased


def names(lease):
    return [node.name for node in lease.topology.nodes]


def poll_until(lease, condition, what):
    wait_until(lambda: lease.poll(0.2) is not None and condition(), what)


def num_free_cpus():
    import ray

    return ray.available_resources().get("CPU", 0)


def test_unavailable_nodes_are_reported_and_waited_for_until_the_caller_gives_up(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(connecting, "INFEASIBLE_WAIT_S", 0.5)
    words = r"4 nodes requested, each with 4 CPUs; the Ray cluster has 3"
    with pytest.raises(ClusterError, match=words):
        connect(request(nodes, 4), workdir=tmp_path)
    heard = []

    def give_up(reason):
        heard.append(reason)
        if len(heard) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect(request(nodes, 4), workdir=tmp_path, on_wait=give_up)
    assert words in heard[-1]


def test_an_excluded_node_is_not_held_and_another_takes_its_place(nodes, tmp_path):
    """The node excluded is the one that was leased first."""
    leases = []

    def excluded(topology):
        leases.append([node.name for node in topology.nodes])
        return {leases[0][0]} & set(leases[-1])

    with connect(request(nodes, 1, excluded=excluded), workdir=tmp_path, preload=PRELOAD) as leased:
        (kept,) = leased.topology.nodes
        assert [len(seen) for seen in leases] == [1, 1]
        assert kept.name == leases[-1][0] != leases[0][0]
        assert isinstance(run(leased, "ok", devices=kept.devices).outcome, Measured)
        wait_until(lambda: num_free_cpus() == 8.0, "the excluded node to be free")


def test_the_lease_holds_both_nodes(lease):
    assert [node.num_devices for node in lease.topology.nodes] == [2, 2]
    assert len({node.name for node in lease.topology.nodes}) == 2


def test_a_gang_spans_nodes(lease, pids):
    end = run(lease, "ok", world_size=4, spec={"pids": pids})
    assert isinstance(end.outcome, Measured), end.outcome
    assert end.outcome.measurement.model_flops_per_token == 4.0, "the all-reduce saw all ranks"
    assert living(pids) == []


@pytest.mark.parametrize("launcher", ["env", "own"])
def test_a_user_program_spans_nodes_and_gets_the_rendezvous_address(lease, tmp_path, launcher):
    path = scripts.write(tmp_path / "own", scripts.DDP)
    own = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank {node_rank}"
    address = "--master-addr {master_addr} --master-port {master_port}"
    argv = tuple(f"{own} {address}".split()) if launcher == "own" else ()
    spec = scripts.spec(path, argv=argv, launcher=launcher)
    devices = tuple(node.devices[0] for node in lease.topology.nodes)
    end = run(lease, scripts.RUNNER, spec=spec, on=devices, options={"one_rank_per_node": launcher == "own"})
    assert isinstance(end.outcome, Measured), end.outcome
    found = end.outcome.measurement
    assert (found.world_size, len(found.step_times_s), len(found.losses)) == (
        2,
        scripts.NUM_STEPS,
        scripts.NUM_STEPS + 1,
    )
    assert found.places == tuple(f"{device.node}/{device.index}" for device in devices)
    assert found.peak_bytes > 50 << 20, "torch alone takes more"


def test_a_node_that_lacks_the_program_folder_is_named_with_it(lease, tmp_path):
    spec = scripts.spec(scripts.write(tmp_path / "own", scripts.STEPS)) | {"cwd": "/nowhere/at/all"}
    end = run(lease, scripts.RUNNER, spec=spec, world_size=1)
    assert end.outcome.evidence.message.startswith("directory /nowhere/at/all does not exist on node ")
    assert end.outcome.evidence.node in names(lease)


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


def test_it_grows_while_gangs_run_and_gives_back_what_is_idle(lease, pids):
    first, busy = names(lease)[0], lease.topology.nodes[0].devices
    gang = launch(lease, "hangs_at_start", devices=busy, spec={"pids": pids})
    wait_for_pids(pids, 2)
    lease.resize(3)
    assert len(names(lease)) == 2, "nothing is waited for"
    assert lease.waiting
    poll_until(lease, lambda: len(names(lease)) == 3, "a third node")
    assert lease.waiting == ""
    third = lease.topology.nodes[2]
    assert isinstance(run(lease, "ok", devices=third.devices).outcome, Measured)
    lease.resize(1, keep={first, third.name})
    assert names(lease) == [first, third.name]
    lease.resize(1, keep={first})
    assert names(lease) == [first]
    poll_until(lease, lambda: num_free_cpus() == 8.0, "two nodes to be free")
    assert len(living(pids)) == 2
    lease.resize(2)
    poll_until(lease, lambda: len(names(lease)) == 2, "another node")
    lease.kill(gang.attempt_id, "done")
    assert isinstance(end_of(lease, gang).outcome, GangLost)


def test_a_more_important_sweep_gets_the_nodes_and_they_come_back(nodes, lease, tmp_path):
    """Does what the runtime does: beat, follow the grant, poll."""
    seen = []

    def follow():
        held = len(names(lease))
        grant = lease.admission.beat(Claim(sweep=CLAIM.sweep, user=CLAIM.user, min_nodes=2, max_nodes=3, held=held))
        lease.resize(grant.num_nodes, at_least=2)
        lease.poll(0.2)
        seen.append((len(names(lease)), grant.reason))
        return seen[-1][0]

    wait_until(lambda: follow() == 3, "all nodes")
    spoken, command = tmp_path / "spoken", [sys.executable, "-m", "tests.cluster.claimant", nodes[0].address]
    with (
        spoken.open("w") as out,
        subprocess.Popen([*command, str(tmp_path), "2", "5"], stdin=subprocess.PIPE, stdout=out, text=True) as other,
    ):
        try:
            wait_until(lambda: follow() == 0, "the lease to be given up")
            assert "preempted by sweep urgent (priority 5)" in seen[-1][1]
            wait_until(lambda: follow() == 0 and "holds 2" in spoken.read_text(), "the other to have its nodes")
            assert follow() == 0, "one node is free, but two are the least"
            other.communicate("\n")
        finally:
            other.kill()
    wait_until(lambda: follow() == 3, "all nodes to come back")
    assert 1 not in [num for num, _ in seen], "two come together, and go together"


def test_lost_nodes(nodes, lease, tmp_path):
    cluster, workers = nodes
    lease.resize(2)
    folder = tmp_path / "spanning"
    folder.mkdir()
    gang = launch(lease, "hangs_at_start", world_size=4, spec={"pids": str(folder)})
    wait_for_pids(folder, 4)
    before, victim = set(names(lease)), _worker_of(lease, workers)
    cluster.remove_node(victim, allow_graceful=False)
    end = end_of(lease, gang)
    assert isinstance(end.outcome, GangLost)
    assert "is lost" in end.outcome.evidence.message
    wait_until(lambda: living(folder) == [], "the lost node's ranks to end")
    lost = end.outcome.evidence.node
    assert lost in lease.lost_nodes
    assert lost not in names(lease)
    poll_until(lease, lambda: len(names(lease)) == 2, "the third node in its place")
    assert lost not in names(lease)
    lease.resize(3)
    workers.append(cluster.add_node(num_cpus=4))
    poll_until(lease, lambda: len(names(lease)) == 3, "the new node")
    assert before & set(names(lease)) == before - {lost}
    assert isinstance(run(lease, "ok", world_size=6).outcome, Measured)
    released = lease.topology.nodes[0]
    again = launch(lease, "hangs_at_start", devices=released.devices)
    lease.release(released.name)
    assert isinstance(end_of(lease, again).outcome, GangLost)
    assert len(names(lease)) == 2, "there is no other"
    late = run(lease, "ok", on=(*lease.topology.nodes[0].devices, *released.devices))
    assert (type(late.outcome), late.outcome.evidence.node) == (GangLost, released.name)


def test_a_drained_node_is_distinguished_from_a_failed_one(lease):
    """Ray calls this draining: it is announced some time before the node goes. Runs last."""
    import ray
    from ray.core.generated import autoscaler_pb2

    first = lease.topology.nodes[0]
    gang = launch(lease, "hangs_at_start", devices=first.devices)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    head = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    head.drain_node(lease._lease.slots[first.name].node_id, reason, "", int(time.time() + 60) * 1000)
    outcome = end_of(lease, gang).outcome
    assert isinstance(outcome, GangLost)
    assert outcome.cause == "preempted"
    assert first.name not in names(lease)


def _worker_of(lease, workers):
    """Ray's handle of the node that the lease took first."""
    node_ids = {slot.node_id for slot in lease._lease.slots.values()}
    return next(worker for worker in workers if worker.node_id in node_ids)
