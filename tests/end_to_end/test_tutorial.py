"""The tutorial's commands, run in its order as a new user would, each in a separate process."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from orchestrator.promotion.records import Records, chain
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import Home
from orchestrator.tracking.mlflow_store import Registry
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.support import ROOT

TUTORIAL = ROOT / "docs" / "tutorial.md"
CHANGES = {
    "max_trials: 12, wall_time: 10m": "max_trials: 8, wall_time: 14m",
    "precision: [O0, O1]": "precision: [O0]",
    "seq_length: 128": "seq_length: 64",
    "finalists: 2, max_rounds: 6, soak: 15s": "finalists: 1, max_rounds: 6, soak: 5s",
}
"""To the quickstart sweep: fewer and shorter trials, enough time on a slow machine, and none of the 16-bit matmuls that
processors without instructions for them compute 40 times slower."""
MAY_DRIFT = (0, 1, 3)
"""Exit codes of ``verify``: other tests run at the same time."""

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.exhaustive, pytest.mark.timeout(1500)]


def commands():
    """Words of every command shown in a ``sh`` block."""
    text = TUTORIAL.read_text(encoding="utf-8").replace("--max-rounds 4", "--max-rounds 2")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def run(words, folder, *more):
    program = [sys.executable, "-m", "orchestrator", *words[1:], *more]
    environment = {**os.environ, "TUNE_CLUSTER_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        program, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def open_pages(words, folder):
    """Serve the UI, read the sweep's report through it as the link leads there, and stop it as Ctrl-C does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = run(words, folder, "--port", str(port), "--json")
    try:
        links = json.loads(server.stdout.readline())
        run_id = re.search(r"/runs/([0-9a-f]{32})", links["report"])[1]
        base = links["report"].partition("/#/")[0]
        with urllib.request.urlopen(f"{base}/get-artifact?path=report.html&run_uuid={run_id}") as answer:
            page = answer.read().decode()
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    return page


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Every command's output; ``ui``'s is the report that it serves."""
    folder = tmp_path_factory.mktemp("tutorial")
    shutil.copytree(ROOT / "configs", folder / "configs")
    sweep = folder / "configs/sweeps/quickstart.yaml"
    text = sweep.read_text(encoding="utf-8")
    for line, here in CHANGES.items():
        assert line in text
        text = text.replace(line, here)
    sweep.write_text(text, encoding="utf-8")
    outputs = {}
    for words in commands():
        if words[1] == "ui":
            outputs["ui"] = open_pages(words, folder)
            continue
        process = run(words, folder)
        try:
            out, err = process.communicate(timeout=900)
        finally:
            process.kill()
        expected = MAY_DRIFT if words[1] == "verify" else (0,)
        assert process.returncode in expected, f"{shlex.join(words)}\n{out}\n{err}"
        outputs.setdefault(words[1], []).append(out)
    return folder, outputs


def test_it_shows_the_commands_to_production_and_back():
    shown = [words[1] for words in commands()]
    order = ["submit", "explain", "ui", "promote", "export", "verify", "promote", "rollback", "history"]
    found = iter(shown)
    assert all(name in found for name in order), shown


def test_the_winner_is_confirmed_explained_and_shown(done):
    folder, outputs = done
    assert "Confirmed:" in outputs["submit"][0]
    assert "Where the step time goes" in outputs["explain"][0] and "Effect of each knob" in outputs["explain"][0]
    with Home(folder / "home").open("quickstart") as ledger:
        winner = fold(ledger.events()).winner
    collectives = "Collectives of one step" if winner.candidate.layout.world_size > 1 else "no communication"
    for shown in ("Step time breakdown", collectives, "rank0.trace.json.gz"):
        assert shown in outputs["profile"][0]
    page = (folder / "quickstart.html").read_text(encoding="utf-8")
    for text in (page, outputs["ui"]):
        assert "Confirmed" in text and "<svg" in text


def test_it_is_exported_and_verified(done):
    folder, outputs = done
    spec = json.loads((folder / "exported" / "torchrun" / "spec.json").read_text(encoding="utf-8"))
    recipe = json.loads((folder / "exported" / "deepspeed" / "deepspeed.json").read_text(encoding="utf-8"))
    assert spec["candidate"]["micro_batch_size"] == recipe["train_micro_batch_size_per_gpu"]
    verified = " ".join(outputs["verify"][0].split())
    assert "x the baseline" in verified and "loss" in verified


def test_production_is_back_at_the_initial_version(done):
    folder, outputs = done
    home = Home(folder / "home")
    tracker = Tracker(home.default_tracking_uri)
    client = tracker.client()
    registry = Registry(client)
    records = chain(Records(registry, tracker.uri).of("llama-quickstart"))
    assert [(record.action, record.from_version, record.to_version) for record in records] == [
        ("promote", "", "1"),
        ("promote", "1", "2"),
        ("rollback", "2", "1"),
    ]
    assert registry.find("llama-quickstart", alias="production").version == "1"
    assert registry.find("llama-quickstart", alias="previous").version == "2"
    with home.open("quickstart") as ledger:
        noted = [event.record["action"] for event in fold(ledger.events()).promotions]
    assert noted == ["promote", "promote", "rollback"]
    assert all(word in outputs["history"][0] for word in ("rollback", "as before", "not proven"))
