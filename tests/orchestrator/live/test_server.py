"""Who has access, what they get, and that no client blocks another."""

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cluster.hardware.topology import Device
from orchestrator.errors import ConfigError
from orchestrator.live.live_pages import MAX_ROWS, trial_document
from orchestrator.live.page_server import CSRF_HEADER, HEADERS, HOST, MAX_PENDING
from orchestrator.live.site import Feed
from orchestrator.process_support import PLAIN
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from tests.orchestrator.live.conftest import keep_log, serve
from tests.support.cli_homes import keep, running
from tests.support.story import WORKLOAD, created, ended, evidence, launched, proposed
from trials.outcome import Crashed
from trials.spec import ScriptData, ScriptModel

SECRET = "correct-horse-battery"


def ask(server, path, method="GET", body=None, **headers):
    """(status, headers, body) of one request; headers with underscores for dashes."""
    connection = http.client.HTTPConnection(HOST, server.access.port, timeout=30)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body=body, headers=names)
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read().decode()
    connection.close()
    return found


def cookie(server):
    _, headers, _ = ask(server, f"/?token={server.access.token}")
    return headers["Set-Cookie"].partition(";")[0]


def act(server, action, sweep="busy", body="{}", **headers):
    own = {
        "Cookie": cookie(server),
        "Origin": server.base,
        "Content_Type": "application/json",
        CSRF_HEADER: server.access.csrf,
    }
    return ask(server, f"/api/sweeps/{sweep}/{action}", "POST", body, **{**own, **headers})


def events(server, sweep, last=""):
    """The stream of a sweep, as it comes in."""
    connection = http.client.HTTPConnection(HOST, server.access.port, timeout=30)
    connection.request("GET", f"/api/sweeps/{sweep}/events", headers={"Cookie": cookie(server), "Last-Event-ID": last})
    return connection.getresponse()


def patches(stream):
    """(id, parts) of every message."""
    fields = {}
    for line in iter(lambda: stream.readline().decode().rstrip("\n"), None):
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        elif "data" in fields:
            yield fields["id"], json.loads(fields.pop("data"))


def test_only_the_token_gives_a_cookie_that_grants_access(shared):
    status, headers, _ = ask(shared, f"/sweeps/busy?token={shared.access.token}")
    assert (status, headers["Location"]) == (303, "/sweeps/busy")
    assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
    assert shared.access.token not in headers["Set-Cookie"]
    own = cookie(shared)
    status, headers, body = ask(shared, "/sweeps/busy", Cookie=own)
    assert status == 200 and "busy" in body
    assert {name: headers[name] for name in HEADERS} == HEADERS and "inline" not in HEADERS["Content-Security-Policy"]
    for path in ("/", "/sweeps/busy", "/static/live.css", "/api/sweeps/busy/events", "/?token=wrong", "/?token=%ff"):
        assert ask(shared, path)[0] == 403, path
        assert ask(shared, path, Cookie=own + "x")[0] == 403, path
    status, headers, _ = ask(shared, f"//evil.example/?token={shared.access.token}", Sec_Fetch_Site="cross-site",
                             Sec_Fetch_Mode="navigate")  # fmt: skip
    assert (status, headers["Refresh"]) == (200, "0; url=/")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:5080"},
        {"Host": "evil@127.0.0.1"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "no-cors"},
    ],
)
def test_foreign_names_and_sites_are_refused(shared, headers):
    assert ask(shared, "/sweeps/busy", **{"Cookie": cookie(shared), **headers})[0] == 403
    assert act(shared, "pause", **headers)[0] == 403


def test_tunnels_may_give_the_page_another_port(shared):
    assert ask(shared, "/", Cookie=cookie(shared), Host="localhost:9999", Origin="http://localhost:9999")[0] == 200


def test_only_pages_of_this_server_may_send_requests(server, home):
    for wrong in (
        {CSRF_HEADER: "wrong"},
        {CSRF_HEADER: ""},
        {"Content_Type": "text/plain"},
        {"Origin": "http://127.0.0.1:1"},
        {"Cookie": ""},
    ):
        assert act(server, "pause", **wrong)[0] == 403, wrong
    own = {"Cookie": cookie(server), "Content_Type": "application/json", CSRF_HEADER: server.access.csrf}
    assert ask(server, "/api/sweeps/busy/pause", "POST", "{}", **own)[0] == 403  # no browser leaves out the origin
    assert act(server, "pause", body="x" * 5000)[0] == 413
    assert act(server, "pause", body="[]")[0] == 400
    assert act(server, "delete")[0] == 404
    assert act(server, "pause", "nothing")[0] == 404
    assert home.read("busy").requests == () and home.read("busy").phase == "interrupted"


def test_requests_are_left_to_the_controller_or_done_by_the_server_without_one(server, home):
    with home.open("busy", read_only=False) as ledger, ledger.hold():
        status, _, body = act(server, "drain")
        assert (status, json.loads(body)) == (200, {"message": "busy: drain requested"})
        message = json.loads(act(server, "retry", body='{"kinds": ["oom"]}')[2])["message"]
        assert message == "busy: will be launched again: t003"
        assert [request.body["action"] for request in home.read("busy").requests] == ["drain", "retry"]
    assert json.loads(act(server, "cancel")[2]) == {"message": "busy: now cancelled"}
    assert home.read("busy").phase == "cancelled"
    status, _, body = act(server, "pause")
    assert status == 409 and "already cancelled" in json.loads(body)["error"]
    assert act(server, "retry", body='{"kinds": ["measured"]}')[0] == 409


def test_every_notice_is_sent_even_an_equal_one(server, monkeypatch):
    """Two controllers in a row fail to start for the same reason."""
    submission = SimpleNamespace(is_over=False, address="head:1")
    monkeypatch.setattr("orchestrator.live.site.submission_of_sweep", lambda *_, **__: submission)
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="no space left\n")
    monkeypatch.setattr("orchestrator.live.site.subprocess.run", lambda *_, **__: failed)
    stream, notices = patches(events(server, "busy")), []
    next(stream)
    for _ in range(2):
        assert act(server, "resume")[0] == 200
        while (found := next(stream)[1].get("notice")) is None:
            pass
        notices.append(found)
    one, other = notices
    assert one["text"] == other["text"] and "no space left" in one["text"] and one["at_s"] < other["at_s"]


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/sweeps/..",
            "/sweeps/%2e%2e",
            "/sweeps/Busy",
            "/static/../server.py",
            "/static/live.css.j2",
            "/static/no.js",
        ),
        *("/api/sweeps/busy/trials/5/log/../../../ledger.sqlite", "/api/sweeps/busy/trials/-1", "/sweeps/nothing"),
        *("/api/sweeps/busy/trials/999", "/api/sweeps/nothing/events", "/api/sweeps/busy/trials/5/log?rank=7"),
    ],
)
def test_missing_resources_are_not_found(shared, path):
    assert ask(shared, path, Cookie=cookie(shared))[0] == 404


def test_a_trial_offers_the_logs_that_its_attempts_have(tmp_path):
    """A command that starts its ranks itself has one per node."""
    ranks = tuple(Device(node=node, index=i) for node in ("n1", "n2") for i in range(2))
    model = ScriptModel(recipe="custom", run=("x",), cwd="/", launcher="own")
    for name, workload in (("own", replace(WORKLOAD, model=model, data=ScriptData())), ("each", WORKLOAD)):
        keep(tmp_path, name, [created(workload=workload), proposed(0), replace(launched(0), ranks=ranks)]).close()
    found = [trial_document(Home(tmp_path), name, 0, PLAIN)["attempts"] for name in ("own", "each")]
    assert found == [[[0, "running", 2]], [[0, "running", 4]]]


def test_logs_hold_no_secret_and_follow_no_link(server, home, monkeypatch, tmp_path):
    monkeypatch.setenv("STORE_TOKEN", SECRET)
    path = keep_log(home, "busy", 5, f"one\ntoken {SECRET}\nhalf")
    own = cookie(server)
    found = json.loads(ask(server, "/api/sweeps/busy/trials/5/log?rank=0", Cookie=own)[2])
    assert found["lines"] == ["one", "token ***", "half"] and not found["kept"]
    with path.open("a", encoding="utf-8") as log:
        log.write("\nnext\nunfinished")
    more = json.loads(ask(server, f"/api/sweeps/busy/trials/5/log?after={found['end']}", Cookie=own)[2])
    assert more["lines"] == ["", "next"]
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert ask(server, "/api/sweeps/busy/trials/5/log", Cookie=own)[0] == 404
    with home.open("busy", read_only=False) as ledger:
        ledger.append(ended(5, Crashed(evidence=evidence(f"no access with {SECRET}"))))
    for path in ("/api/sweeps/busy/trials/5", "/sweeps/busy/trials/5"):
        assert SECRET not in ask(server, path, Cookie=own)[2]
    _, first = next(patches(events(server, "busy")))
    assert "no access with ***" in first["trial/5"]["row"] and SECRET not in json.dumps(first)


def test_a_stream_sends_changes_and_resumes_where_it_broke(server, home):
    stream = patches(events(server, "busy"))
    version, first = next(stream)
    assert first["head"]["phase"] == "interrupted" and first["trial/5"]["status"] == "running"
    with home.open("busy", read_only=False) as ledger, ledger.hold():
        time.sleep(0.3)
        ledger.append(ended(5, Crashed(evidence=evidence("late"))))
        received = {}
        while "trial/5" not in received:
            received |= next(stream)[1]
        assert received["trial/5"]["status"] == "crashed" and "trial/1" not in received
        assert received["head"]["phase"] == "running"
        again = next(patches(events(server, "busy", version)))[1]
        assert "trial/5" in again and "trial/1" not in again
        assert "trial/1" in next(patches(events(server, "busy", "other-5")))[1]


def test_a_replaced_sweep_is_read_again(server, home, tmp_path):
    stream = patches(events(server, "busy"))
    assert "trial/7" in next(stream)[1]
    other = Ledger(tmp_path / "other")
    for event in running("busy")[:4]:
        other.append(event)
    other.close()
    folder = home.sweep_folder("busy")
    for path in folder.glob("ledger.sqlite-*"):
        path.unlink()
    shutil.copyfile(tmp_path / "other" / "ledger.sqlite", folder / "ledger.sqlite")  # keeps the inode
    received = {}
    while "trial/7" not in received:
        received |= next(stream)[1]
    assert received["trial/7"] is None


def test_a_client_that_reads_nothing_blocks_no_other(server, home):
    next(patches(events(server, "busy")))
    own = cookie(server)
    stuck = socket.create_connection((HOST, server.access.port))
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    stuck.sendall(f"GET /api/sweeps/busy/events HTTP/1.1\r\nHost: {HOST}\r\nCookie: {own}\r\n\r\n".encode())
    feed = server.hub.watch("busy", None).feed
    for number in range(200):  # far more than sockets hold
        feed.publish({"notice": {"text": "x" * 20_000, "number": number}})
    begun_s = time.monotonic()
    assert next(patches(events(server, "busy")))[1]["notice"]["number"] == 199
    assert time.monotonic() - begun_s < 10
    stuck.close()


def half_open(server, sent=b"G"):
    connection = socket.create_connection((HOST, server.access.port), timeout=30)
    connection.sendall(sent)
    return connection


def test_the_server_answers_despite_hundreds_of_half_open_connections(shared):
    own = cookie(shared)
    held = []
    for _ in range(256):
        with contextlib.suppress(ConnectionError):
            held.append(half_open(shared))
    for _ in range(3):
        begun_s = time.monotonic()
        assert ask(shared, "/", Cookie=own)[0] == 200
        assert time.monotonic() - begun_s < 5
    assert shared.num_connections <= MAX_PENDING + 1
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    "beginning", [b"", b"GET", b"GET / HTTP/1.1\r\nX: y", b"POST /api HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
)
def test_a_request_has_a_total_deadline(shared, monkeypatch, beginning):
    monkeypatch.setattr("orchestrator.live.page_server.REQUEST_S", 0.4)
    with half_open(shared, beginning) as connection:
        begun_s = time.monotonic()
        connection.settimeout(0.1)
        while time.monotonic() - begun_s < 20:  # one byte after another: no single read waits long
            try:
                if connection.recv(1000) == b"":
                    break
            except TimeoutError:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"x")
            except ConnectionError:
                break
        assert time.monotonic() - begun_s < 10


@pytest.mark.parametrize("length", ["\xb2", "-1", "+1", "1_0", "", "9" * 5000, "2, 3"])
def test_non_numeric_lengths_are_refused(shared, length, caplog):
    with half_open(shared, f"POST /api HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode("latin-1")) as connection:
        assert connection.recv(12) == b"HTTP/1.1 400"
    assert caplog.text == ""


def test_a_closed_stream_frees_its_place_at_once(shared, monkeypatch):
    monkeypatch.setattr("orchestrator.live.page_server.MAX_CONNECTIONS", 2)
    own = cookie(shared)
    request = f"GET /api/events HTTP/1.1\r\nHost: {HOST}\r\nCookie: {own}\r\n\r\n".encode()
    streams = [half_open(shared, request) for _ in range(2)]
    assert [stream.recv(12) for stream in streams] == [b"HTTP/1.1 200"] * 2
    assert ask(shared, "/", Cookie=own)[0] == 503
    streams.pop().close()
    begun_s = time.monotonic()
    while ask(shared, "/", Cookie=own)[0] != 200:
        assert time.monotonic() - begun_s < 10  # heartbeats come every 15 s
    streams.pop().close()


def test_a_feed_sends_the_latest_of_each_part_once():
    feed = Feed()
    assert feed.publish({"a": 1, "b": {"c": 2}})
    first = feed.since()
    assert json.loads(first.body) == {"a": 1, "b": {"c": 2}}
    assert not feed.publish({"a": 1}) and feed.since(first.version) is None
    feed.publish({"a": 2})
    feed.publish({"a": 3}, is_all=True)
    assert json.loads(feed.since(first.version).body) == {"a": 3, "b": None}


def test_a_missing_home_is_reported_and_waited_for(server, home):
    stream = patches(events(server, "busy"))
    next(stream)
    folder = home.sweep_folder("busy")
    away = folder.rename(folder.with_name("away"))
    received = {}
    while not received.get("trouble"):
        received |= next(stream)[1]
    assert "retrying" in received["trouble"]
    away.rename(folder)
    while received["trouble"]:
        received |= next(stream)[1]


def test_a_port_in_use_is_refused_only_if_requested(server, home):
    with serve(home) as other:
        assert other.access.port != server.access.port
    with pytest.raises(ConfigError, match="--port"):
        type(server)(home, server.access.port, invocation=None, links=None)


def test_long_sweeps_show_the_latest_and_the_best(server, home):
    from tests.support import long_story
    from tests.support.story import measured

    story = long_story.events([measured(0.1 + 0.001 * (i % 7)) for i in range(450)], name="long")
    with Ledger(home.sweep_folder("long")) as ledger:
        for event in story:
            ledger.append(replace(event))
    _, first = next(patches(events(server, "long")))
    shown = {int(name.partition("/")[2]) for name in first if name.startswith("trial/")}
    state = home.read("long").state
    assert f"; {450 - len(shown)} trials are not shown" in first["html/about"]
    assert {0, 449, *(ranked.number for ranked in state.fastest)} <= shown and len(shown) <= MAX_ROWS + 13
