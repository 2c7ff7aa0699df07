"""``tune-cluster ui``: what it prints, how it ends, what it does without MLflow."""

import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from cluster.processes import python_module
from orchestrator.live.page_server import Archive
from orchestrator.sweep.ledger import Recorded
from tests.support.cli_homes import run
from tests.support.mlflow_store import new_store


@contextmanager
def ui(home, *options):
    """The command, until Ctrl-C; its exit code has to be 0."""
    argv = python_module("orchestrator", "ui", *options, "--home", str(home.path))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 0


def opened(url):
    """The page that the printed address leads to."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(url, timeout=30) as answer:
        return answer.geturl(), answer.read().decode()


@pytest.mark.slow
def test_the_printed_address_opens_the_page_until_ctrl_c(home):
    with ui(home, "proven", "--page-only", "--json") as child:
        links = json.loads(child.stdout.readline())
        assert list(links) == ["schema_version", "page"]
        at, page = opened(links["page"])
        assert at.endswith("/sweeps/proven") and "<title>proven</title>" in page
    with pytest.raises(urllib.error.URLError):
        opened(links["page"])


@pytest.mark.slow
def test_without_a_store_the_page_comes_first_and_alone(home):
    with ui(home) as child:
        assert child.stdout.readline().startswith("page         http://127.0.0.1:")
        assert "MLflow has nothing to show yet" in child.stderr.readline()


@pytest.mark.exhaustive
def test_mlflow_is_served_too_and_both_link_to_each_other(home):
    new_store(home.path)
    with home.open("proven", read_only=False) as ledger:
        Recorded(experiment_id="1", run_id="f" * 32).put(ledger)
    with ui(home, "proven", "--json") as child:
        links = json.loads(child.stdout.readline())
        assert list(links)[:2] == ["schema_version", "page"] and "f" * 32 in links["report"]
        with urllib.request.urlopen(links["report"].partition("#")[0], timeout=60) as answer:
            assert "MLflow" in answer.read().decode()


def test_requested_ports_are_not_changed(home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = run("ui", "busy", "--page-only", "--port", taken.getsockname()[1], "--home", home.path)
    assert refused.exit_code == 2 and "Choose another port with --port" in refused.stderr


def test_links_lead_to_the_server_that_shows_the_store(home):
    with home.open("busy", read_only=False) as ledger:
        Recorded(experiment_id="1", run_id="f" * 32).put(ledger)
    archive = Archive(home)
    assert archive.links(home.read("busy")) == {}  # that file is not served
    archive.base, archive.store = "http://127.0.0.1:5000", home.default_tracking_uri
    assert all(url.startswith("http://127.0.0.1:5000/") for url in archive.links(home.read("busy")).values())
    assert archive.links(home.read("proven")) == {}  # nothing was recorded
    with home.open("busy", read_only=False) as ledger:
        ledger.put_document("tracking", {"uri": "http://me:secret@mlflow.example"})
    found = archive.links(home.read("busy"))
    assert found and all(url.startswith("http://mlflow.example/") for url in found.values())
