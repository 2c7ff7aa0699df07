"""The rules of the queue in the home, and what a sweep file claims."""

from cluster.queue import QueuePolicy
from orchestrator.config.queue_policy import load_policy
from orchestrator.config.sweep import load_sweep
from orchestrator.planning.dry_runs import cluster_request
from orchestrator.sweep.snapshot import Home
from tests.support.sweep_files import SMALL, write


def policy(folder, text):
    (folder / "queue.yaml").write_text(text)
    return load_policy(Home(folder))


def test_quotas_and_weights_are_read_and_may_be_missing(tmp_path):
    assert load_policy(Home(tmp_path)) == QueuePolicy()


def test_a_sweep_on_a_shared_cluster_claims_what_its_file_requests(tmp_path):
    cluster = {"num_nodes": 4, "min_nodes": 2, "queue": "night", "priority": -3, "max_wait": "10m"}
    file = write(tmp_path, {**SMALL, "cluster": {**SMALL.get("cluster", {}), **cluster}})
    home = Home(tmp_path)
    policy(tmp_path, "quotas: {a: 1}")
    request = cluster_request(load_sweep(file), home, address="10.0.0.1:6379")
    claim = request.claim
    assert (request.address, request.min_nodes, request.max_nodes) == ("10.0.0.1:6379", 2, 4)
    assert request.max_wait_s == 600.0
    assert (claim.sweep, claim.queue, claim.priority) == (SMALL["name"], "night", -3)
    assert (claim.min_nodes, claim.max_nodes) == (2, 4)
    assert claim.user
    assert request.policy.quotas == {"a": 1}
    assert request.queue_folder == cluster_request(load_sweep(file), Home(tmp_path / "other")).queue_folder
    assert cluster_request(load_sweep(file)).claim is None
