"""Homes found from another folder are named, never entered automatically."""

from pathlib import Path

import pytest

from orchestrator import process_support
from orchestrator.process_support import DEFAULT_HOME
from tests.support import long_story
from tests.support.cli_homes import keep, run


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder that is not the one with the home ``tune-cluster-runs``, which holds the sweep ``story``."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("TUNE_CLUSTER_HOME", raising=False)
    keep(tmp_path / "project" / DEFAULT_HOME, "story", long_story.events(long_story.speeds(0.1), finished=False))
    (tmp_path / "project" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    return tmp_path


def seen(result):
    return " ".join(result.stderr.split())


def test_a_home_above_the_folder_is_named_and_not_entered(elsewhere, monkeypatch):
    monkeypatch.chdir(elsewhere / "project" / "deep" / "er")
    home = elsewhere / "project" / DEFAULT_HOME
    refused = run("status", "story")
    assert refused.exit_code == 2
    assert f"A sweep of this name is in {home}: add --home {home}." in seen(refused)
    assert "A sweep of this name is in" not in seen(run("status", "another"))
    assert f"tune-cluster ps --home {home}" in seen(run("ps"))
    assert not Path(DEFAULT_HOME).exists()


def test_a_home_that_was_used_is_remembered(elsewhere, monkeypatch):
    monkeypatch.chdir(elsewhere / "other")
    assert "A sweep of this name is in" not in seen(run("status", "story"))
    home = elsewhere / "project" / DEFAULT_HOME
    for used in (home, elsewhere / "gone", home):
        process_support.remember(used)
    assert process_support._remembered() == [str(home), str(elsewhere / "gone")]
    assert f"A sweep of this name is in {home}: add --home {home}." in seen(run("logs", "story", "best"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"relative\n\0\n/" + b"x" * 5000 + b"\n", None])
def test_an_invalid_list_of_homes_is_ignored(elsewhere, monkeypatch, content):
    monkeypatch.chdir(elsewhere / "other")
    file = elsewhere / "state" / "tune-cluster" / "homes"
    if content is None:
        file.mkdir(parents=True)
    else:
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    assert "no sweep 'story'" in seen(run("status", "story"))
    process_support.remember(elsewhere / "other")


def test_the_home_is_accepted_before_the_command_and_after_it(elsewhere, monkeypatch):
    monkeypatch.chdir(elsewhere / "other")
    home = elsewhere / "project" / DEFAULT_HOME
    before = run("--home", home, "status", "story")
    assert before.exit_code == 0, before.output
    assert before.stdout == run("status", "story", "--home", home).stdout
    assert run("--home", "absent", "status", "story", "--home", home).exit_code == 0, "the more specific one counts"
    monkeypatch.setenv("TUNE_CLUSTER_HOME", "absent")
    assert run("--home", home, "status", "story").exit_code == 0
    assert run("status", "story").exit_code == 2
