"""The first five minutes: ``init``, ``doctor``, completion, and a client without torch."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import main
from orchestrator.draft.machine import MAX_LINES
from tests.orchestrator.promotion.proven import proven_home
from tests.support import ROOT

LLAMA_13B = {
    "model_type": "llama",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "intermediate_size": 13824,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_13B))
    return tmp_path


def test_a_13b_model_on_64_gpus_from_its_configuration_to_its_plan(folder):
    drafted = run("init", "--model", "config.json", "--cluster", "dgx-h100", "--nodes", 8, "--max-trials", 3, "--json")
    assert drafted.exit_code == 0, drafted.output
    answer = json.loads(drafted.stdout)
    assert answer["simulated"]
    assert answer["expected"]["fits"]
    text = (folder / "sweep.yaml").read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert "kind: ray, address: HOST:PORT" in text
    planned = json.loads(run("plan", "sweep.yaml", "--json").stdout)
    assert planned["forecast"]["num_fitting"] > 100


@pytest.mark.exhaustive
def test_the_draft_of_a_13b_model_runs_to_its_end(folder):
    assert run("init", "--model", "config.json", "--cluster", "dgx-h100", "--nodes", 8).exit_code == 0
    submitted = run("submit", "sweep.yaml", "--json")
    assert submitted.exit_code == 0, submitted.output
    assert json.loads(submitted.stdout)["best_of_search"]["speedup"]["value"] > 1.2


def test_nothing_is_overwritten_unless_forced(folder):
    arguments = ("init", "--parameters", "7B", "--cluster", "dgx-a100")
    assert run(*arguments).exit_code == 0
    before = (folder / "sweep.yaml").read_text()
    again = run(*arguments, "--seq-length", 2048)
    assert again.exit_code == 2
    assert "--force" in again.stderr
    assert (folder / "sweep.yaml").read_text() == before
    assert run(*arguments, "--seq-length", 2048, "--force").exit_code == 0
    assert "seq_length: 2048" in (folder / "sweep.yaml").read_text()
    assert not list(folder.glob(".*"))


def test_a_cluster_is_described_by_a_file_wherever_it_may_be_named(folder):
    (folder / "mine.yaml").write_text("accelerator: h200\nnum_nodes: 2\ndevices_per_node: 4\n")
    assert run("init", "--parameters", "8B", "--cluster", "./mine.yaml").exit_code == 0
    assert "num_nodes: 2, devices_per_node: 4, simulation: {accelerator: h200" in (folder / "sweep.yaml").read_text()
    planned = json.loads(run("plan", "sweep.yaml", "--cluster", "./mine.yaml", "--json").stdout)
    assert planned["forecast"]["accelerator"] == "h200"
    (folder / "mine.yaml").write_text("accelerator: h200\nnum_nodes: [\n")
    broken = run("plan", "sweep.yaml", "--cluster", "./mine.yaml")
    assert broken.exit_code == 2
    assert "mine.yaml:" in broken.stderr


@pytest.mark.representative("quickstart")
@pytest.mark.parametrize("name", ["quickstart", "llama2-13b-ascend"])
def test_examples_can_be_created_side_by_side(folder, name):
    assert name in json.loads(run("init", "--list", "--json").stdout)
    assert run("init", "--example", name).exit_code == 0
    assert run("plan", f"{name}.yaml", "--json").exit_code == 0


COMPLETE = """
import contextlib, io, json, os, sys
from orchestrator.cli.main import main
found = []
for line in sys.argv[1:]:
    words = line.split()
    os.environ |= {"_TUNE_CLUSTER_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    shown = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main(prog_name="tune-cluster")
    found.append([text.partition(",")[2] for text in shown.buffer.getvalue().decode().splitlines() if text])
assert not {"torch", "ray", "mlflow", "numpy"} & set(sys.modules)
print(json.dumps(found))
"""


def completed(*lines, **environment):
    """What the shell offers at the end of each line, from one process."""
    command = [sys.executable, "-c", COMPLETE, *(f"tune-cluster {line}" for line in lines)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_the_shell_completes_names_without_heavy_imports(folder):
    proven_home(folder / "tune-cluster-runs")
    lines = ("do", "status s", "logs story t00", "promote story --trial t00", "export --format mega")
    command, sweep, trials, promoted, format_name = completed(*lines)
    assert (command, sweep, format_name) == (["doctor"], ["story"], ["megatron"])
    assert trials[:2] == ["t000", "t001"]
    assert "t001" in promoted
    assert completed("status s", TUNE_CLUSTER_HOME="/nowhere") == [[]]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_every_shell(shell):
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_TUNE_CLUSTER_COMPLETE" in result.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)


def test_the_module_keeps_the_current_folder_off_its_path(folder):
    """``python -m orchestrator`` in a folder with files called like packages."""
    for name in ("trials", "cluster", "configs"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    (folder / "yaml.py").write_text("raise SystemExit('imported from the user folder')\n")
    done = subprocess.run([sys.executable, "-m", "orchestrator", "ps", "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


NO_TORCH = """
import sys
from importlib import metadata

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Blocked())
find = metadata.version
def version(name):
    if name == "torch":
        raise metadata.PackageNotFoundError(name)
    return find(name)
metadata.version = version
from orchestrator.cli.main import main
for line in sys.argv[2:]:
    try:
        main([*line.split(), "--home", sys.argv[1]], prog_name="tune-cluster")
    except SystemExit as ended:
        print(line.split()[0], ended.code, file=sys.stderr)
"""


def without_torch(home, *lines):
    """Exit codes by command."""
    command = [sys.executable, "-c", NO_TORCH, str(home), *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=home)
    assert "Traceback" not in done.stderr
    codes = dict(line.rsplit(" ", 1) for line in done.stderr.splitlines() if line.rsplit(" ", 1)[0] in main.commands)
    return codes, done


EXPORT = "export m@production --format megatron --allow-lossy"


@pytest.mark.parametrize(
    "lines",
    [
        ("ps", "status story", "report story --json", "explain story"),
        ("promote story --name m", "show m@production", "history m", "diff m@1 m@production", EXPORT),
        ("plan {root}/configs/sweeps/quickstart.yaml", "doctor {root}/configs/sweeps/llama2-13b-ascend.yaml --json"),
    ],
    ids=["look", "promote", "plan"],
)
@pytest.mark.representative("promote")
def test_the_client_runs_without_torch(tmp_path, lines):
    proven_home(tmp_path)
    codes, done = without_torch(tmp_path, *(line.format(root=ROOT) for line in lines))
    assert codes == {line.split()[0]: "0" for line in lines}, done.stderr


def test_a_sweep_that_would_train_here_is_refused_without_torch(tmp_path):
    codes, done = without_torch(tmp_path, f"submit {ROOT}/configs/sweeps/quickstart.yaml")
    assert codes == {"submit": "2"}
    assert "torch is not installed" in done.stderr
    assert "Install torch" in done.stderr
