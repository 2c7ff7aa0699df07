"""A home whose sweeps are served, and a browser to look at them with."""

import shutil
from pathlib import Path

import pytest

from orchestrator.live.page_server import PageServer
from orchestrator.process_support import PLAIN
from orchestrator.sweep.snapshot import Home
from tests.support import cli_homes, proof_story

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def make_home(folder):
    """``busy`` runs according to its ledger, ``proven`` is over."""
    cli_homes.keep_running(folder).close()
    cli_homes.keep(folder, "proven", proof_story.proof_events()).close()
    return Home(folder)


@pytest.fixture
def home(tmp_path):
    return make_home(tmp_path)


@pytest.fixture
def server(home):
    with serve(home) as found:
        yield found


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """For tests that change nothing in its home."""
    with serve(make_home(tmp_path_factory.mktemp("home"))) as found:
        yield found


def serve(home: Home, **options) -> PageServer:
    """A separate server at any free port, that looks ten times a second."""
    return PageServer(home, None, invocation=PLAIN, links=lambda _sweep: {}, poll_s=0.1, **options)


class Window:
    """A page in the browser, and what it complained about."""

    def __init__(self, browser, server, path="/", **options):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.errors = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.set_default_timeout(20_000)
        self.page.goto(server.url())
        if path != "/":
            self.page.goto(server.base + path)

    def _on_console(self, message):
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.context.close()
        if kind is None:
            assert self.errors == []

    def text(self, selector):
        return self.page.locator(selector).inner_text()

    def wait(self, selector, text):
        self.page.locator(selector, has_text=text).first.wait_for()


def keep_log(home: Home, sweep: str, trial: int, text: str) -> Path:
    """The log of rank 0 of a trial's last attempt."""
    from orchestrator.sweep.snapshot import attempt_folder

    found = home.read(sweep)
    attempts = found.state.trials[trial].attempts
    folder = attempt_folder(found.folder, trial, len(attempts) - 1, attempts[-1].token)
    folder.mkdir(parents=True)
    path = folder / "rank0.log"
    path.write_text(text, encoding="utf-8")
    return path
