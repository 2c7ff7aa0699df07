"""Environment variables of all ranks (``cluster.env``): refused, known by, shown, launched with and exported."""

import subprocess

import pytest
import yaml

from cluster.hardware.topology import Device, Node, Placement, Topology
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.controller.runtime import make_launcher
from orchestrator.errors import ConfigError
from orchestrator.frameworks.shell import ENV_FILE, assignments, variables_of, with_exports
from orchestrator.planning.dry_runs import fingerprint, profile_key
from orchestrator.planning.planner import make_plan
from orchestrator.sweep.state import Trial
from tests.support import ROOT

NODE = Node(
    name="n",
    address="127.0.0.1",
    num_devices=2,
    device_kind="cpu",
    device_name="core",
    device_memory_bytes=1 << 30,
    threads_per_device=1,
)
ENV = {"NCCL_ALGO": "Ring", "WORDS": "two 'words'"}


def load(tmp_path, env):
    content = yaml.safe_load((ROOT / "configs/sweeps/quickstart.yaml").read_text())
    content["workload"]["model"] = str(ROOT / "configs/models/llama-tiny.yaml")
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(content | {"cluster": content["cluster"] | {"env": env}}))
    return load_sweep(path)


@pytest.mark.parametrize(
    ("env", "key", "words"),
    [
        ({"RANK": "0"}, "cluster.env.RANK", "is set by the launcher of the ranks"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0"}, "cluster.env.ASCEND_RT_VISIBLE_DEVICES", "by the placement of ranks"),
        ({"TUNE_CLUSTER_RENDEZVOUS": "x"}, "cluster.env.TUNE_CLUSTER_RENDEZVOUS", "tune-cluster or torchrun"),
        ({"A-B": "1"}, "cluster.env.A-B", "not a valid environment variable name"),
        ({"A": [1]}, "cluster.env.A", "expected a string or a number"),
        ({"MY_TOKEN": "abcdefgh"}, "cluster.env.MY_TOKEN", "must not contain secrets"),
        ({"AWS_SECRET_ACCESS_KEY": "abcdefgh"}, "cluster.env.AWS_SECRET_ACCESS_KEY", "must not contain secrets"),
    ],
)
def test_reserved_variables_are_refused_with_their_line(tmp_path, env, key, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path, env)
    assert caught.value.key == key
    assert caught.value.line is not None


def test_variables_are_part_of_the_identity_of_a_sweep_and_reach_its_ranks(tmp_path):
    spec, plain = load(tmp_path, {**ENV, "SMALL": 1e-3}), load(tmp_path, {})
    given = {**ENV, "SMALL": "0.001"}
    assert spec.cluster.env == given
    assert spec.spec_hash != plain.spec_hash
    assert SweepSpec.from_json(spec.to_json()).cluster.env == given
    topology = Topology(nodes=(NODE,))
    prints = fingerprint(topology, env=spec.cluster.env)
    assert variables_of(prints) == given
    assert "variables" not in fingerprint(topology, env=plain.cluster.env), "ledgers of old stay comparable"
    assert profile_key(spec, topology) != profile_key(plain, topology)
    trial = Trial(number=0, candidate=spec.baseline_candidate, origin="baseline", reason="", proposed_at_s=0.0)
    placement = Placement(ranks=tuple(Device(node="n", index=i) for i in range(2)), reserved=())
    launch = make_launcher(spec, topology, tmp_path).build(trial, "a", "t", placement)
    assert launch.env == given


def test_the_plan_shows_the_variables_of_ranks(tmp_path):
    plan = make_plan(load(tmp_path, ENV), Topology(nodes=(NODE,)))
    environment = plan.to_json()["environment"]
    assert environment["variables"] == ENV
    assert [one["name"] for one in environment["defaults"]] == ["GLOO_SOCKET_IFNAME"]
    assert all(one["reason"] for one in environment["defaults"])


def test_exported_scripts_set_them_before_the_start(tmp_path):
    script = "#!/bin/sh\n# Starts it.\nset -eu\necho $NCCL_ALGO/$WORDS\n"
    known = {"variables": assignments(ENV)}
    files = with_exports({"run.sh": script, "spec.json": "{}"}, known)
    assert files["spec.json"] == "{}"
    (tmp_path / "run.sh").write_text(files["run.sh"])
    parsed = subprocess.run(["sh", tmp_path / "run.sh"], capture_output=True, text=True, check=True).stdout
    assert parsed == "Ring/two 'words'\n"
    only = with_exports({"ds.json": "{}"}, known)
    assert "export NCCL_ALGO=Ring\n" in only[ENV_FILE]
    assert with_exports({"run.sh": script}, {}) == {"run.sh": script}
    assert variables_of(known) == ENV


def test_exported_scripts_set_the_number_of_threads():
    """torchrun gives each one. What is no script, and may be all that goes to stdout, stays alone."""
    known = {"threads_per_device": "12"}
    assert "\nexport OMP_NUM_THREADS=12\n" in with_exports({"run.sh": "#!/bin/sh\nx\n"}, known)["run.sh"]
    own = known | {"variables": "OMP_NUM_THREADS=3"}
    assert "\nexport OMP_NUM_THREADS=3\n" in with_exports({"run.sh": "#!/bin/sh\nx\n"}, own)["run.sh"]
    assert with_exports({"ds.json": "{}"}, known) == {"ds.json": "{}"}
