"""A PyTorch module of the user's from its file to a promoted configuration, with real gangs on two CPU devices."""

import json

import pytest
import yaml
from click.testing import CliRunner

from orchestrator.cli.main import main
from tests.support import ROOT

SWEEPS = ROOT / "configs" / "sweeps"

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(1800)]


def run(*words, home):
    done = CliRunner().invoke(main, [*words, "--home", str(home), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_shipped_example_is_proven_as_far_as_the_machine_allows_and_promoted(tmp_path):
    sweep = yaml.safe_load((SWEEPS / "python.yaml").read_text(encoding="utf-8"))
    sweep["workload"]["cwd"] = str(SWEEPS / sweep["workload"]["cwd"])
    sweep |= {"budget": {"max_trials": 3}, "confirm": {"finalists": 1, "min_rounds": 2, "max_rounds": 2, "soak": "off"}}
    (tmp_path / "python.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")
    result = run("submit", str(tmp_path / "python.yaml"), home=tmp_path)
    proof = result["proof"]
    if proof["conclusion"] == "confirmed":
        assert proof["speedup"]["low"] > 1
        assert [gate["passed"] for gate in proof["gates"]] == [True]
        run("promote", "python", "--name", "encoder", home=tmp_path)
    else:  # on a busy machine the lead may drown in noise, which is no proof of anything
        assert proof["conclusion"] in ("keep", "unconfirmed")
        assert not any(gate["reasons"] for gate in proof["gates"])
        run("promote", "python", "--name", "encoder", "--trial", "1", "--force", home=tmp_path)
    exported = run("export", "encoder@production", "--format", "torchrun", home=tmp_path)
    spec = json.loads(exported["files"]["spec.json"])
    assert spec["workload"]["model"]["model"] == "python_model:build"
    assert "built by your code: python_model:build" in str(exported["notes"])
