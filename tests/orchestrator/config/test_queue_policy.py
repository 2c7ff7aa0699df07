"""The rules of the queue in the home, and what a sweep file claims."""

import pytest

from cluster.queue import QueuePolicy
from orchestrator.config.queue_policy import load_policy
from orchestrator.config.sweep import load_sweep
from orchestrator.errors import ConfigError
from orchestrator.planning.dry_runs import cluster_request
from orchestrator.sweep.snapshot import Home
from tests.support.sweep_files import SMALL, write


def policy(folder, text):
    (folder / "queue.yaml").write_text(text)
    return load_policy(Home(folder))


def test_quotas_and_weights_are_read_and_may_be_missing(tmp_path):
    assert load_policy(Home(tmp_path)) == QueuePolicy()
    found = policy(tmp_path, 'quotas: {alice: 16, "*": 8}\nweights:\n  production: 3\n')
    assert found == QueuePolicy(quotas={"alice": 16, "*": 8}, weights={"production": 3.0})
    assert policy(tmp_path, "quotas:\n") == QueuePolicy()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n", "queue.yaml:1: expected sections. Write quotas and weights"),
        ("qoutas: {}\n", "queue.yaml:1: qoutas: no such section. There are quotas and weights"),
        ("quotas: 3\n", "queue.yaml:1: quotas: expected names with numbers"),
        ("quotas:\n  bob: many\n", "queue.yaml:2: quotas.bob: expected a number of devices, 0 or more, got 'many'"),
        ("quotas:\n  bob: -1\n", "quotas.bob: expected a number of devices"),
        ("quotas:\n  bob: true\n", "quotas.bob: expected a number of devices"),
        ("weights:\n  x: 0\n", "queue.yaml:2: weights.x: expected a number above 0, got 0"),
        ("weights:\n  x: .nan\n", "weights.x: expected a number above 0"),
        ("quotas: {a: 1}\nquotas: {}\n", "the key stands twice"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        policy(tmp_path, text)
    assert words in str(caught.value)


def test_a_sweep_on_a_shared_cluster_claims_what_its_file_says(tmp_path):
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
