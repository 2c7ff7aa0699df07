"""Logs of ranks and controllers: their ends, what is added, and their place on other nodes."""

import json
import shutil
import threading
from dataclasses import replace

import pytest

from cluster.hardware.topology import Device
from orchestrator import text as log_files
from orchestrator.report.result_schema import SCHEMA_VERSION
from orchestrator.sweep.snapshot import attempt_folder
from orchestrator.text import MAX_LINE_CHARS, MAX_TAIL_BYTES, Follower, follow, plain, tail
from tests.support import long_story, sweeps
from tests.support.cli_homes import controller, keep, run
from tests.support.story import ended as attempt_ended
from tests.support.story import evidence, failures, launched, measured, proposed
from trials.outcome import Crashed


def write(sweep_folder, trial, attempt, **texts):
    """Logs ``rank0="..."`` of an attempt of the story."""
    folder = attempt_folder(sweep_folder, trial, attempt, f"token-{trial}-{attempt}")
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / f"{name}.log").write_text(text, encoding="utf-8")
    return folder


def two_attempts(folder):
    """t000 was lost once and crashed in rank 1 then; rank 1 ran on another node."""
    ranks = (Device(node="here", index=0), Device(node="there", index=0))
    crash = Crashed(evidence=replace(evidence("no such kernel"), rank=1, node="there"))
    story = [
        *long_story.events([], finished=False),
        proposed(0),
        replace(launched(0), ranks=ranks),
        attempt_ended(0, failures()["gang_lost"]),
        replace(launched(0, attempt=1), ranks=ranks),
        attempt_ended(0, crash, attempt=1),
    ]
    story[0] = replace(story[0], budget=replace(story[0].budget, lost_attempts_per_trial=3))
    return keep(folder, "story", story)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "ablink"),
        ("10%\r50%\r100%\r\n", "100%\n"),
        ("\x1bPq evil \x1b\\text\x9b2J\x1b", "text2J"),
        ("left\u202eright\ttab", "leftright\ttab"),
    ],
)
def test_control_characters_are_removed(raw, shown):
    assert plain(raw) == shown


def test_only_the_end_of_a_huge_log_is_read(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * (3 * MAX_TAIL_BYTES) + b"\n" + b"\n".join(b"%d" % i for i in range(1000)))
    read = tail(path, 3)
    assert (read.lines, read.is_whole, read.end) == (("997", "998", "999"), False, path.stat().st_size)
    everything = tail(path, 10**9)
    assert sum(map(len, everything.lines)) < MAX_TAIL_BYTES + 1000
    path.write_bytes(b"y" * 10 * MAX_LINE_CHARS)
    assert len(tail(path, 5).lines[0]) < MAX_LINE_CHARS + 50


@pytest.mark.parametrize("text", [b"", b"one", b"one\n", b"one\ntwo\n", b"\n\n", b"caf\xe9\n"])
def test_a_short_log_is_shown_whole(tmp_path, text):
    (tmp_path / "log").write_bytes(text)
    read = tail(tmp_path / "log", 10)
    assert (list(read.lines), read.is_whole) == (text.decode(errors="replace").splitlines(), True)


def test_following_yields_every_line_once_even_if_the_file_appears_late_or_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "FOLLOW_S", 0.001)
    path, over = tmp_path / "log", threading.Event()
    lines = follow([("a", Follower(path))], over.is_set)

    def grow():
        with path.open("w") as file:
            for i in range(200):
                file.write(f"line {i}\nhal")
                file.flush()
                file.write("f\n")
            file.write("no line feed")
        over.set()

    thread = threading.Thread(target=grow)
    thread.start()
    found = [line for _, line in lines]
    thread.join()
    assert found == [word for i in range(200) for word in (f"line {i}", "half")] + ["no line feed"]
    again = Follower(path, start=path.stat().st_size)
    path.write_text("new\n")
    assert again.new_lines() == ["new"]


def test_the_rank_that_failed_first_is_shown_first(tmp_path):
    ledger = two_attempts(tmp_path)
    write(ledger.folder, 0, 1, rank0="peer is gone\n", rank1="step 1\nno such \x1b[1mkernel\n")
    shown = run("logs", "story", "t000", "--home", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == "step 1\nno such kernel\npeer is gone\n"
    assert "rank 1 on there, failed first" in shown.stderr
    body = json.loads(run("logs", "story", "0", "--home", tmp_path, "--json", "--lines", "1").stdout)
    assert [(log["rank"], log["lines"], log["is_whole"]) for log in body["ranks"]] == [
        (1, ["no such kernel"], False),
        (0, ["peer is gone"], True),
    ]
    assert (body["attempt"], body["outcome"]) == (1, "crashed")


def test_a_log_on_another_node_is_named_with_the_part_sent_home(tmp_path):
    ledger = two_attempts(tmp_path)
    folder = write(ledger.folder, 0, 1, rank0="peer is gone\n")
    shown = run("logs", "story", "baseline", "--rank", "1", "--home", tmp_path)
    assert shown.stdout == "last words\nno such kernel\n"
    assert f"on node there: {folder / 'rank1.log'}" in shown.stderr.replace("\n", "")
    both = run("logs", "story", "baseline", "--home", tmp_path)
    assert both.stdout == "last words\nno such kernel\npeer is gone\n"


def test_logs_of_attempts_and_ranks_that_do_not_exist(tmp_path):
    ledger = two_attempts(tmp_path)
    ledger.append(proposed(1))
    for arguments, words in (
        (("0", "--attempt", "2"), "Attempts: 0 to 1"),
        (("0", "--rank", "2"), "Ranks: 0 to 1"),
        (("1",), "not been launched yet"),
        (("7",), "t000 to t001"),
        (("best",), "nothing has been measured yet"),
        (("../0",), "no trial '../0'"),
    ):
        result = run("logs", "story", *arguments, "--home", tmp_path)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert words in result.stderr
    assert run("logs", "story", "0", "--attempt", "0", "--home", tmp_path).exit_code == 0


def test_following_a_trial_ends_if_its_sweep_is_replaced(tmp_path, monkeypatch):
    """The sweep that replaces it has no such trial, but more events."""
    ledger = two_attempts(tmp_path)
    ledger.append(replace(launched(0, attempt=2), ranks=(Device(node="here", index=0),)))
    write(ledger.folder, 0, 2, rank0="step 1\n")

    def follow_over_a_replacement(_logs, is_over):
        shutil.rmtree(ledger.folder)
        story = long_story.events([], finished=False)
        with keep(tmp_path, "story", [replace(story[0], at_s=1.0), *story[1:]]) as other, other.hold():
            assert is_over()
        return ()

    monkeypatch.setattr("orchestrator.commands.inspection.follow", follow_over_a_replacement)
    shown = run("logs", "story", "0", "--follow", "--home", tmp_path)
    assert (shown.exit_code, shown.stdout) == (0, "step 1\n"), shown.output


def test_following_a_trial_ends_with_it(tmp_path):
    story = long_story.events([], finished=False)
    ledger = keep(tmp_path, "story", [*story, proposed(0), launched(0)])
    write(ledger.folder, 0, 0, rank0="first\nsecond\n")
    done = []

    def follow_it():
        done.append(run("logs", "story", "0", "--follow", "--json", "--home", tmp_path))

    with ledger.hold():
        thread = threading.Thread(target=follow_it)
        thread.start()
        thread.join(1.0)
        assert thread.is_alive()
        ledger.append(attempt_ended(0, measured()))
        thread.join(60.0)
    assert [json.loads(line) for line in done[0].stdout.splitlines()] == [
        {"rank": 0, "line": "first"},
        {"rank": 0, "line": "second"},
    ]


def test_the_log_of_a_controller(tmp_path):
    ledger = keep(tmp_path, "story", long_story.events([]), controller=controller(mode="foreground"))
    missing = run("logs", "story", "--home", tmp_path)
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert "on head has not written a log yet" in missing.stderr
    ledger.put_document("controller", controller())
    (ledger.folder / "controller.log").write_text("up\ndown\n")
    assert run("logs", "story", "--home", tmp_path, "--lines", "1").stdout == "down\n"
    assert run("logs", "story", "--home", tmp_path, "--follow").stdout == "up\ndown\n"
    body = json.loads(run("logs", "story", "--home", tmp_path, "--json").stdout)
    assert (body["lines"], body["controller"]["pid"], body["schema_version"]) == (["up", "down"], 4242, SCHEMA_VERSION)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_logs_of_a_real_sweep_are_found(tmp_path):
    file = sweeps.write(
        tmp_path, budget={"max_trials": 1}, runner="tests.orchestrator.cli.test_logs:run_rank_and_print"
    )
    submitted = run("submit", file, "--home", tmp_path)
    assert submitted.exit_code == 0, submitted.output
    body = json.loads(run("logs", "tiny", "baseline", "--home", tmp_path, "--json").stdout)
    assert [(log["rank"], log["lines"][-1]) for log in body["ranks"]] == [(0, "a line of 0"), (1, "a line of 1")]


def run_rank_and_print(spec, progress):
    """The real runner, which is silent, with one line after it."""
    from trials.worker import run_rank

    report = run_rank(spec, progress)
    print(f"a line of {report['rank']}", flush=True)
    return report
