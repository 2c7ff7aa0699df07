"""Controllers as Ray Jobs, on a real head with its dashboard and token authentication, over loopback."""

import importlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.base import ClusterError
from cluster.ray.connection import _require_reachable, dashboard_url
from tests.support import sweeps

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]

START_S = 150
TUNE_CLUSTER = Path(sys.executable).with_name("tune-cluster")
SECRET = "hunter2-hunter2"


@dataclass(frozen=True)
class Head:
    address: str
    dashboard: str
    settings: dict[str, str]


def free_ports(num):
    """Free ports below those that the kernel hands out, so that no other process gets one before the head."""
    found = []
    while len(found) < num:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def kill_marked(mark):
    """Kill everything that was started below the head."""
    while True:
        found = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_marked(entry, mark)]
        if not found:
            return
        for entry in found:
            try:
                os.kill(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def _is_marked(entry, mark):
    try:
        return f"TEST_HEAD={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


@pytest.fixture(scope="module")
def head():
    folder = Path(tempfile.mkdtemp(prefix="tj-"))  # Ray puts sockets there: the path must stay short
    mark = secrets.token_hex(8)
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(secrets.token_hex(32))
    services = ("dashboard", "dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export", "ray-client-server")
    ports = {f"--{name}-port": port for name, port in zip(services, free_ports(len(services)), strict=True)}
    (ports["--port"],) = free_ports(1)
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "OMP_NUM_THREADS": "1",
    }
    argv = [
        *(str(TUNE_CLUSTER.with_name("ray")), "start", "--head", "--block", "--node-ip-address", "127.0.0.2"),
        *("--dashboard-host", "127.0.0.1", "--num-cpus", "2", "--object-store-memory", "80000000"),
        *("--temp-dir", str(folder / "r"), "--disable-usage-stats"),
        *(word for name, port in ports.items() for word in (name, str(port))),
    ]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            env={**clean, **settings, "TEST_HEAD": mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{ports['--dashboard-port']}"
        wait_for(lambda: answers(url), START_S, lambda: (folder / "log").read_text())
        yield Head(address=f"127.0.0.2:{ports['--port']}", dashboard=url, settings=settings)
    finally:
        kill_marked(mark)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def answers(url):
    """Whether the dashboard is there, which wants a token."""
    try:
        urllib.request.urlopen(f"{url}/api/version", timeout=5)
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    return False


def wait_for(is_true, limit_s=120, explain=str):
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline_s, explain()
        time.sleep(0.1)


@pytest.fixture
def jobs(head, monkeypatch):
    """The module under test, with the head's token. Ray's core keeps the settings that it saw first."""
    core = importlib.import_module("ray._raylet")

    def read_settings():
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()

    with monkeypatch.context() as patch:
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_API_SERVER_ADDRESS"):
            patch.delenv(name, raising=False)
        for name, value in head.settings.items():
            patch.setenv(name, value)
        read_settings()
        yield importlib.import_module("cluster.ray.jobs")
    read_settings()


def name():
    return f"tune-cluster-test-{secrets.token_hex(4)}"


@pytest.mark.exhaustive
def test_a_job_is_submitted_once_attached_to_and_replaced_by_the_next(head, jobs, tmp_path, monkeypatch):
    monkeypatch.setenv("TEAM_TOKEN", SECRET)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.9:1")  # Ray would prefer it over its arguments
    go = tmp_path / "go"
    program = (
        "import os, pathlib, sys, time\nprint(sys.argv[1:], os.environ['GREETING'], os.environ['TUNE_CLUSTER_JOB'])\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\nprint('end'); sys.exit(3)"
    )
    words = ["it's; touch /tmp/never", "$HOME", "two words"]
    argv = [sys.executable, "-c", program, *words]
    job_name, mine = name(), {"tune_cluster_home": "/mine"}
    job = jobs.submit_job(head.address, job_name, argv, env={"GREETING": "a b; c"}, metadata=mine)
    assert (job.submission_id, job.attached) == (f"{job_name}-1", False)
    again = jobs.submit_job(head.dashboard, job_name, argv, metadata=mine)
    assert (again.submission_id, again.attached) == (f"{job_name}-1", True)
    others = jobs.submit_job(head.dashboard, job_name, ["true"], metadata={"tune_cluster_home": "/theirs"})
    assert (others.submission_id, others.attached) == (f"{job_name}-2", False)
    assert not jobs.job_status(job).is_over

    log = ""
    for piece in jobs.job_logs(job, follow=True):
        log += piece
        if str(words) in log:
            go.touch()
    lines = log.splitlines()  # among them Ray's own lines, which name the command, sometimes late
    assert f"{words} a b; c {job_name}-1" in lines and lines[-1] == "end"
    status = jobs.job_status(job)
    assert (status.state, status.exit_code) == ("failed", 3)
    assert "".join(jobs.job_logs(job)) == log
    assert SECRET not in everything_kept(head, job.submission_id)
    assert not Path("/tmp/never").exists()
    wait_for(lambda: jobs.job_status(others).is_over)
    after = jobs.submit_job(head.address, job_name, ["true"], metadata=mine)
    assert (after.submission_id, after.attached) == (f"{job_name}-3", False)


def everything_kept(head, job):
    """All that Ray reveals of a job to holders of the token."""
    token = Path(head.settings["RAY_AUTH_TOKEN_PATH"]).read_text()
    request = urllib.request.Request(f"{head.dashboard}/api/jobs/{job}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


@pytest.mark.exhaustive
def test_a_stopped_job_has_time_to_shut_down_cleanly(head, jobs):
    program = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(5)\n    print('put in order', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\ntime.sleep(100)"
    )
    job = jobs.submit_job(head.dashboard, name(), [sys.executable, "-c", program])
    log = ""
    for piece in jobs.job_logs(job, follow=True):
        if "\nready" in piece:
            with jobs._connected(head.dashboard) as client:  # as `ray job stop` does
                client.stop_job(job.submission_id)
        log += piece
    assert log.endswith("put in order\n")
    assert jobs.job_status(job).state == "stopped"


def test_unreachable_jobs_are_reported_in_one_message(head, jobs, monkeypatch):
    (closed,) = free_ports(1)
    for address, words in (
        (f"127.0.0.1:{closed}", "nothing responds"),
        (f"http://127.0.0.1:{closed}", "no Ray dashboard responds"),
        ("ray://127.0.0.1:10001", "neither HOST:PORT"),
        (f"http://user:{SECRET}@127.0.0.1:{closed}", "neither HOST:PORT"),
    ):
        with pytest.raises(ClusterError, match=words):
            jobs.find_job(address, "x-1")
    with pytest.raises(ClusterError, match="has no job x-1"):
        jobs.find_job(head.dashboard, "x-1")
    with pytest.raises(ClusterError, match="listens only on loopback"):
        _require_reachable("192.0.2.7:6379", "127.0.0.1:8265")
    for variable, value in (("RAY_AUTH_TOKEN", "wrong"), ("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN_PATH", "/no")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with pytest.raises(ClusterError, match="does not accept this token; set RAY_AUTH_MODE"):
                dashboard_url(head.address)


def tune_cluster(head, *arguments, limit_s=200, **options):
    return subprocess.run(
        [str(TUNE_CLUSTER), *map(str, arguments)],
        env={**os.environ, **head.settings, "TEAM_TOKEN": SECRET},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        **options,
    )


@pytest.fixture
def file(tmp_path):
    return sweeps.write(
        tmp_path, cluster={"kind": "ray", "device": "cpu", "devices_per_node": 2}, budget={"max_trials": 2}
    )


@pytest.mark.exhaustive
def test_a_sweep_runs_as_a_job_and_is_attached_to_and_followed(head, file, tmp_path):
    home = tmp_path / "home"
    where = ("--address", head.address, "--home", home)
    first = tune_cluster(head, "submit", file, *where, "--json")
    assert first.returncode == 0, first.stderr
    reply = json.loads(first.stdout)
    assert re.fullmatch(r"tune-cluster-tiny-\d+", reply["job"])
    assert (reply["mode"], reply["attached"], reply["exit_code"]) == ("ray job", False, None)

    second = tune_cluster(head, "submit", file, *where, "--follow", "--json")
    assert second.returncode == 0, second.stderr
    assert reply["job"] in second.stderr
    assert "finished: the budget of 2 trials was used up" in second.stderr
    result = json.loads(second.stdout)
    assert (result["state"], result["trials"]["measured"]) == ("finished", 2)

    third = tune_cluster(head, "submit", file, *where, "--json")  # is over: shown here, without another job
    assert json.loads(third.stdout) == result
    kept = everything_kept(head, reply["job"]) + "".join(
        path.read_text(errors="replace") for path in home.rglob("*") if path.is_file()
    )
    token = Path(head.settings["RAY_AUTH_TOKEN_PATH"]).read_text()
    assert SECRET not in kept
    assert token not in kept


@pytest.mark.exhaustive
def test_a_home_invisible_to_the_head_is_reported_at_submission(head, file, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    command = ["submit", str(file), "--address", head.address, "--home", str(home)]
    script = 'mount -t tmpfs none "$0" && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", script, str(home), str(TUNE_CLUSTER), *command]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    done = subprocess.run(
        argv, env={**os.environ, **head.settings}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"cannot access the directory {home}" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(home.rglob("ledger.sqlite")) == []
