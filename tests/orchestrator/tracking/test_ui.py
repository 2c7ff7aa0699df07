import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.tracking.mlflow_server import serve
from tests.support.mlflow_store import new_store

SERVE = """
import sys
from orchestrator.tracking.mlflow_server import serve
sys.exit(serve(sys.argv[1], port=int(sys.argv[2]), on_ready=lambda base: print(base, flush=True)))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def members(group: int) -> list[int]:
    """Living processes started below ``group``: those whose session is not ours but whose parent was it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[2]) == group and stat[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_the_server_starts_shows_its_page_and_ends_without_a_trace(tmp_path: Path):
    """SIGTERM reaches the server's loop as the exception of Ctrl-C."""
    port = free_port()
    command = [sys.executable, "-c", SERVE, new_store(tmp_path), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path) as child:
        try:
            server = _look_at(child, port)
        finally:
            child.terminate()
        assert child.wait(60) == 0
    deadline = time.monotonic() + 60
    while members(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert members(server) == []


def _look_at(child: subprocess.Popen[str], port: int) -> int:
    """See that the page is there; the server's process."""
    assert child.stdout is not None
    base = child.stdout.readline().strip()
    assert base == f"http://127.0.0.1:{port}"
    with urllib.request.urlopen(base, timeout=60) as page:
        content = page.read()
    assert b"MLflow" in content
    assert content.index(b"autoOpenedOnFirstLoad") < content.index(b"<script defer")
    server = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[0])
    assert members(os.getpgid(server))
    return server


def test_a_port_in_use_is_refused(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+.*--mlflow-port"):
            serve(f"sqlite:///{tmp_path}/mlflow.db", port=taken.getsockname()[1])


def test_a_server_needs_no_other_server():
    with pytest.raises(ConfigError, match="running server"):
        serve("http://127.0.0.1:5000")


@pytest.mark.slow
def test_an_unopenable_store_is_reported(tmp_path: Path):
    (tmp_path / "blocked").write_text("")
    with pytest.raises(ConfigError, match="exited with status"):
        serve(f"sqlite:///{tmp_path}/blocked/mlflow.db", port=free_port())
