"""What users see, frozen: help, JSON documents, ledger rows and a sweep in six states in every renderer.

``python -m tests.goldens.outside --write`` makes the files of ``outside/`` again; without ``--write`` it shows what
differs. A text or key that changes on purpose is written again, and its diff read.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import http.client
import json
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

from click import Command, Context, Group
from click.testing import CliRunner
from mlflow import MlflowClient

from orchestrator.cli.main import main
from orchestrator.live.page_server import HOST, PageServer
from orchestrator.process_support import PLAIN
from orchestrator.sweep.events import Annotated, FinishCause, LedgerEvent, SweepFinished
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import Home
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.support import cli_homes, long_story, proof_story, virtual_sweeps
from tests.support.mlflow_store import new_store
from tests.support.story import failures
from tests.support.sweep_files import write as write_sweep

FOLDER = Path(__file__).with_name("outside")
NOW_S = 1_700_001_000.0
WIDTH = 80
STAMP = {"at_s": 0.0, "token": "token", "host": "host", "pid": 1, "fingerprint": {}, "spec_hash": "hash"}
"""What differs from run to run in the rows of a real ledger."""


def _at_rest(*outcomes: Any, status: str, reason: str) -> list[LedgerEvent]:
    story = long_story.events(outcomes, finished=False)
    return [
        *story,
        SweepFinished(at_s=story[-1].at_s + 5.0, status=status, reason=reason, cause=FinishCause.FAULTS_IN_A_ROW),
    ]  # type: ignore[arg-type]


def _annotated(story: list[LedgerEvent]) -> list[LedgerEvent]:
    """With a note on the sweep and one with a tag on t001."""
    stamp: dict[str, Any] = {"at_s": story[-1].at_s, "by": "anna@desk", "written_at_s": NOW_S}
    return [
        *story,
        Annotated(**stamp, request=1, text="first sweep after the driver update"),
        Annotated(**stamp, request=2, trial=1, text="close to the memory limit", tags={"team": "vision"}),
    ]


STATES: dict[str, Callable[[], list[LedgerEvent]]] = {
    "begun": lambda: long_story.events([], finished=False, name="begun"),
    "running": lambda: cli_homes.running("running"),
    "searched": lambda: long_story.events(long_story.all_kinds()),
    "confirmed": lambda: _annotated(proof_story.proof_events(is_promoted=True)),
    "refused": lambda: proof_story.proof_events("keep"),
    "failed": lambda: _at_rest(failures()["crashed"], status="failed", reason="the baseline crashed: boom"),
}
"""A sweep just begun, one with trials of every kind at work, then four that are over."""


@contextlib.contextmanager
def frozen() -> Iterator[Path]:
    """A home whose path has the same length everywhere, at one time of day in one time zone, in a narrow terminal."""
    folder = Path(tempfile.mkdtemp(prefix="outside-", dir="/tmp"))
    variables = {"TUNE_CLUSTER_HOME": str(folder), "COLUMNS": str(WIDTH), "TZ": "UTC", "USER": "me", "LOGNAME": "me"}
    try:
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch("time.time", lambda: NOW_S),
            mock.patch.object(sys, "argv", ["tune-cluster"]),
            mock.patch("orchestrator.report.plots.style.to_svg", lambda *_: "<svg></svg>"),  # only words are shown
            mock.patch("shutil.which", lambda name, *_: f"/bin/{name}"),
            contextlib.chdir(folder),
        ):
            time.tzset()
            yield folder
    finally:
        time.tzset()
        shutil.rmtree(folder)


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[None]:
    """All states in one home. The two that are not over are held, as by a controller."""
    with contextlib.ExitStack() as held:
        for name, story in STATES.items():
            is_open = name in ("begun", "running")
            more: dict[str, Any] = {"controller": cli_homes.controller()} if is_open else {}
            if name == "running":
                more |= {"lease": cli_homes.LEASE, "live": cli_homes.LIVE}
            first, *rest = story()
            ledger = held.enter_context(cli_homes.keep(folder, name, [replace(first, sweep=name), *rest], **more))  # type: ignore[call-arg]
            if is_open:
                held.enter_context(ledger.hold())
        yield


def run(*words: str) -> str:
    done = CliRunner().invoke(main, list(words), color=False)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    code = f"exit code {done.exit_code}\n" if done.exit_code else ""
    return f"$ tune-cluster {' '.join(words)}\n{code}{done.output}\n"


def document(*words: str) -> str:
    done = CliRunner().invoke(main, [*words, "--json"])
    if done.exit_code not in (0, 1):
        raise AssertionError(done.output)
    return f"$ tune-cluster {' '.join(words)} --json\n{as_json(json.loads(done.stdout))}\n"


def _rounded(value: Any) -> Any:
    """The last digits of a float differ from processor to processor."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def as_json(value: Any, indent: str = "") -> str:
    """What fits into a line stands in one."""
    value = _rounded(value)
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= 120 or not isinstance(value, dict | list):
        return line
    deeper = indent + " "
    parts = (
        [f"{json.dumps(key)}: {as_json(one, deeper)}" for key, one in value.items()]
        if isinstance(value, dict)
        else [as_json(one, deeper) for one in value]
    )
    return (
        ("{\n" if isinstance(value, dict) else "[\n")
        + ",\n".join(deeper + part for part in parts)
        + (f"\n{indent}}}" if isinstance(value, dict) else f"\n{indent}]")
    )


def _helps(command: Command, *names: str) -> Iterator[str]:
    name = " ".join(("tune-cluster", *names))
    with Context(command, info_name=name, max_content_width=WIDTH, **main.context_settings) as context:
        yield command.get_help(context)
    for name, one in command.commands.items() if isinstance(command, Group) else ():
        yield from _helps(one, *names, name)


def helps() -> str:
    return f"\n\n{'-' * WIDTH}\n".join(_helps(main)) + "\n"


def terminal(name: str) -> str:
    commands = [("status", name), ("report", name), ("explain", name), ("explain", name, "t000"), ("watch", name)]
    skipped = ("explain", "watch") if name in ("begun", "running") else ()
    shown = [run(*words) for words in commands if words[0] not in skipped]
    return "".join([*shown, *([run("explain", name, "t003")] if name == "searched" else [])])


def documents(name: str) -> str:
    commands = [("status", name), ("report", name), ("explain", name), ("explain", name, "t000")]
    skipped = ("explain",) if name in ("begun", "running", "failed") else ()
    return "".join(document(*words) for words in commands if words[0] not in skipped)


class _Text(HTMLParser):
    """The words of a page, a line for each block, a bar between cells; of drawings their titles."""

    CELLS = ("td", "th")
    INSIDE = ("a", "b", "i", "em", "strong", "span", "small", "code", "sup", "sub", "time", "mark", "abbr", *CELLS)

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._hidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        if tag in ("script", "style", "svg"):
            self._hidden.append(tag)
        self.words.append(" | " if tag in self.CELLS else "" if tag in self.INSIDE else "\n")

    def handle_endtag(self, tag: str) -> None:
        if self._hidden and self._hidden[-1] == tag:
            self._hidden.pop()
        self.words.append("" if tag in self.INSIDE else "\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(re.sub(r"\s+", " ", data))


def name_parts_of(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    lines = (re.sub(r" +", " ", line).strip() for line in "".join(parser.words).splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def offline(name: str) -> str:
    shown = run("report", name, "--html", f"{name}.html")
    page = Path(f"{name}.html")
    return name_parts_of(page.read_text(encoding="utf-8")) if page.exists() else shown


def live(server: PageServer, name: str) -> str:
    """The first message of a sweep's stream, or of the list of sweeps, and a trial's document."""
    stream = "/api/events" if name == "*" else f"/api/sweeps/{name}/events"
    shown = [parts(_first_message(server, stream))]
    if name not in ("*", "begun"):
        with _got(server, f"/api/sweeps/{name}/trials/0") as answer:
            document = json.loads(answer.read())
        fragments = {f"html/{part}": text for part, text in document.pop("html").items()}
        shown.append(parts(document | fragments))
    return "\n".join(shown)


def parts(named: Mapping[str, Any]) -> str:
    """The words of fragments, and what else there is as JSON."""
    texts = []
    for name, part in sorted(named.items()):
        if isinstance(part, Mapping) and "row" in part:
            rest = {key: value for key, value in part.items() if key != "row"}
            texts.append(
                f"{name}: {name_parts_of(part['row'])}{as_json(rest)}\n"
                if rest
                else f"{name}: {name_parts_of(part['row'])}"
            )
        else:
            texts.append(
                f"{name}: {name_parts_of(part)}" if name.startswith("html/") and part else f"{name}: {as_json(part)}\n"
            )
    return "".join(texts)


@contextlib.contextmanager
def _got(server: PageServer, path: str) -> Iterator[http.client.HTTPResponse]:
    with contextlib.closing(http.client.HTTPConnection(HOST, server.access.port, timeout=30)) as connection:
        connection.request("GET", f"/?token={server.access.token}")
        with connection.getresponse() as answer:
            cookie = answer.headers["Set-Cookie"].partition(";")[0]
    with contextlib.closing(http.client.HTTPConnection(HOST, server.access.port, timeout=30)) as connection:
        connection.request("GET", path, headers={"Cookie": cookie})
        with connection.getresponse() as answer:
            yield answer


def _first_message(server: PageServer, path: str) -> Any:
    with _got(server, path) as stream:
        for line in iter(lambda: stream.readline().decode().rstrip("\n"), None):
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))
    raise AssertionError("no message")


def notes(folder: Path, name: str) -> str:
    """Markdown notes of all runs in MLflow, with the names of what stands on each."""
    with Home(folder).open(name, read_only=False) as ledger:
        tracker, state = Tracker(f"sqlite:///{folder}/mlflow.db"), fold(ledger.events())
        while tracker.sync(ledger, state):  # a slow machine gets some entries at a time
            pass
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()], max_results=1000)
    mine = [one for one in runs if one.data.tags.get("tc.sweep") == name]
    mine.sort(key=lambda one: (one.data.tags["tc.kind"] != "sweep", int(one.data.tags.get("tc.trial", -1))))
    return "\n".join(_noted(client, one) for one in mine)


def _noted(client: MlflowClient, run: Any) -> str:
    data = run.data
    tags = {key: value for key, value in sorted(data.tags.items()) if key.startswith("tc.") and "\n" not in value}
    tags = {key: value for key, value in tags.items() if not re.search(r"token|sweep_id|parent|uri", key)}
    note = data.tags.get("mlflow.note.content", "")
    return (
        f"# {run.info.run_name}: {run.info.status}\n\n{note}\n\ntags: {json.dumps(tags, ensure_ascii=False)}\n"
        f"params: {json.dumps(dict(sorted(data.params.items())))}\n"
        f"metrics: {as_json(dict(sorted(data.metrics.items())))}\n"
        f"artifacts: {' '.join(_artifacts(client, run.info.run_id))}\n"
    )


def _artifacts(client: MlflowClient, run_id: str, path: str | None = None) -> Iterator[str]:
    for one in client.list_artifacts(run_id, path):
        yield from _artifacts(client, run_id, one.path) if one.is_dir else [one.path]


def rows(folder: Path) -> str:
    """Rows as they stand in the database, the first of each kind of event, check and outcome."""
    shown: dict[tuple[Any, ...], str] = {}
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
        for seq, kind, text in database.execute("SELECT seq, kind, body FROM events ORDER BY seq"):
            body = json.loads(text)
            parts = [body.get(name) or {} for name in ("outcome", "check")]
            key = (kind, *(part.get("kind") for part in parts))
            shown.setdefault(key, f"{seq} {kind} {as_json(_stamped(body))}\n")
    return "".join(shown.values())


def _stamped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: STAMP[key] if key in STAMP else _stamped(one) for key, one in value.items()}
    return [_stamped(one) for one in value] if isinstance(value, list) else value


def made() -> dict[str, str]:
    """All goldens by file name."""
    with frozen() as folder:
        found = {"help.txt": helps()}
        with kept(folder):
            found["ps.txt"] = run("ps") + document("ps")
            for name in STATES:
                found[f"{name}.terminal.txt"] = terminal(name)
                found[f"{name}.documents.txt"] = documents(name)
                found[f"{name}.offline.txt"] = offline(name)
            with PageServer(Home(folder), None, invocation=PLAIN, links=lambda _sweep: {}, poll_s=0.1) as server:
                for name in STATES:
                    found[f"{name}.live.txt"] = live(server, name)
                found["sweeps.live.txt"] = live(server, "*")
        new_store(folder)
        for name in ("begun", "running", "confirmed", "failed"):
            found[f"{name}.notes.txt"] = notes(folder, name)
        for name in ("running", "confirmed"):
            found[f"{name}.rows.txt"] = rows(Home(folder).sweep_folder(name))
        space = {"dp_shard": [8, 16], "zero_stage": 3, "micro_batch_size": [1, 2], "world_size": 16}
        file = write_sweep(folder, {**virtual_sweeps.SWEEP, "space": space})
        found["plan.txt"] = run("plan", file.name) + document("plan", file.name)
        return {name: plain(text, folder) for name, text in found.items()}


def submitted() -> dict[str, str]:
    """Rows and documents of a simulated sweep, submitted as users do."""
    with frozen() as folder:
        new_store(folder)
        file = write_sweep(folder, virtual_sweeps.SWEEP)
        done = CliRunner().invoke(main, ["submit", str(file)])
        assert done.exit_code == 0, done.output
        return {"submitted.rows.txt": plain(rows(Home(folder).sweep_folder("first")), folder)}


def plain(text: str, folder: Path) -> str:
    text = text.replace(str(folder), "/tmp/outside-xxxxxxxx")
    return re.sub(r"\b[0-9a-f]{32}\b", "0" * 32, re.sub(r"[ \t]+$", "", text, flags=re.M))


def difference(name: str, text: str) -> str:
    """Lines that differ from those in the file of this name; empty where none does."""
    path = FOLDER / name
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    found = difflib.unified_diff(before.splitlines(), text.splitlines(), f"{name} (kept)", f"{name} (now)", "", "", 1)
    return "\n".join(line.rstrip("\n") for line in found)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    is_written = parser.parse_args().write
    from tests.goldens import variants

    texts = made() | submitted() | variants.made()
    if is_written:
        FOLDER.mkdir(exist_ok=True)
        for path in FOLDER.glob("*.txt"):
            path.unlink()
        for name, text in texts.items():
            (FOLDER / name).write_text(text, encoding="utf-8")
    else:
        print("\n".join(filter(None, (difference(name, text) for name, text in texts.items()))))


if __name__ == "__main__":
    _main()
