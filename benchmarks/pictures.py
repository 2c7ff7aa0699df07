"""Screenshots, badges and the recorded terminal of the documents, taken from a real sweep.

    python -m benchmarks.pictures                              # runs the quickstart; live page while it confirms
    python -m benchmarks.pictures --home FOLDER --sweep NAME   # of a sweep that exists
    python -m benchmarks.pictures --parts badges,terminal
    python -m benchmarks.pictures --parts result --home FOLDER --sweep NAME   # the README's result of its own script

Needs Chromium and playwright, which the tests use too. ``tests/test_site.py`` takes the pictures of a recorded sweep.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from orchestrator.live.page_server import PageServer
from orchestrator.process_support import PLAIN
from orchestrator.sweep.snapshot import Home

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "measured" / "quickstart.md"
README = ROOT / "README.md"
RECORD_START, RECORD_END = "<!-- recorded by python -m benchmarks.pictures -->\n", "<!-- end of the record -->\n"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DESKTOP, PHONE = (1180, 1000), (390, 1000)
COLUMNS = "100"
SETTLE_MS = 5000
"""Time for MLflow to draw its charts once the first ones are there."""
START_S = 900.0
"""Time for the quickstart to reach its confirmation."""


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    parts = options.parts.split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    if "badges" in parts:
        badges(options.out)
    if set(parts) == {"badges"}:
        return 0
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(open_browser())
        if options.home is not None:
            take(browser, options.home, options.sweep, options.out, options.record, parts=parts)
            return 0
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = stack.enter_context(_quickstart(home))
        if "live" in parts:
            live(browser, home, "quickstart", options.out)
        if running.wait() != 0:
            raise SystemExit("the quickstart failed")
        rest = [part for part in parts if part != "live"]
        take(browser, home, "quickstart", options.out, options.record, parts=rest)
    return 0


def take(
    browser: Any, home: Path, sweep: str, out: Path, record: Path, *, readme: Path = README, parts: Sequence[str]
) -> None:
    """The parts of a finished sweep."""
    if "live" in parts:
        live(browser, home, sweep, out)
    if "page" in parts:
        page(browser, home, sweep, out)
    if "terminal" in parts:
        terminal(home, sweep, record)
    if "mlflow" in parts:
        mlflow(browser, home, sweep, out)
    if "result" in parts:
        result(home, sweep, readme)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, help="home of a finished sweep (default: run the quickstart)")
    parser.add_argument("--sweep", default="quickstart", help="its name (default: quickstart)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder (default: docs/images)")
    parser.add_argument("--record", type=Path, default=RECORD, help="page that gets the terminal's text")
    parser.add_argument("--parts", default="badges,live,page,terminal,mlflow", help="default: %(default)s")
    return parser.parse_args(arguments)


def badges(out: Path) -> None:
    """Write the README's badges; their text is that of ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    minors = [name.removeprefix(prefix) for name in project["classifiers"] if name.startswith(prefix)]
    systems = [name for name in project["classifiers"] if name.startswith("Operating System")]
    shown = {
        "python": ("Python", " | ".join(f"3.{minor}" for minor in minors), "#3670a0"),
        "license": ("license", project["license"], "#2c7a4b"),
        "platform": ("platform", systems[0].rpartition(" :: ")[2], "#5a5f66"),
    }
    for name, (label, value, colour) in shown.items():
        (out / f"badge-{name}.svg").write_text(_badge(label, value, colour), encoding="utf-8")


def _badge(label: str, value: str, colour: str) -> str:
    left, right = 6.3 * len(label) + 12, 6.3 * len(value) + 12
    width = left + right
    text = 'y="14" text-anchor="middle" fill="#fff" font-family="DejaVu Sans,Verdana,sans-serif" font-size="11"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="20" role="img" '
        f'aria-label="{label}: {value}"><clipPath id="r"><rect width="{width:.0f}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#r)"><rect width="{left:.0f}" height="20" fill="#444"/>'
        f'<rect x="{left:.0f}" width="{right:.0f}" height="20" fill="{colour}"/></g>'
        f'<text x="{left / 2:.0f}" {text}>{label}</text><text x="{left + right / 2:.0f}" {text}>{value}</text></svg>\n'
    )


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """A headless Chromium."""
    if CHROMIUM is None:
        raise SystemExit("no Chromium is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def live(browser: Any, home: Path, sweep: str, out: Path) -> None:
    """The sweep's live page on a desktop and on a phone, and the page of the fastest trial."""
    server = PageServer(Home(home), None, invocation=PLAIN, links=lambda _sweep: {}, poll_s=0.5)
    with server:
        with open_window(browser, server.url(), DESKTOP) as window:
            window.goto(f"{server.base}/sweeps/{sweep}")
            window.locator("#confirmation svg").first.wait_for(timeout=START_S * 1000)
            window.screenshot(path=out / "live.png")
            window.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
            window.screenshot(path=out / "live-phone.png")
        with open_window(browser, server.url(), DESKTOP) as window:
            best = Home(home).read(sweep).state.best
            window.goto(f"{server.base}/sweeps/{sweep}/trials/{best.number if best else 0}")
            window.locator("#measured table, #measured dl").first.wait_for()
            window.screenshot(path=out / "live-trial.png")


def page(browser: Any, home: Path, sweep: str, out: Path) -> None:
    """The top of the page that ``report --html`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "report.html"
        _run("report", sweep, "--html", str(written), home=home)
        with open_window(browser, written.as_uri(), DESKTOP) as window:
            window.screenshot(path=out / "page.png")


def terminal(home: Path, sweep: str, record: Path) -> None:
    """Put what ``report`` prints between the markers of ``record``."""
    _put(re.sub(r"sqlite:////\S*/", "sqlite:////.../", _run("report", sweep, home=home)).strip("\n"), record)


def result(home: Path, sweep: str, readme: Path) -> None:
    """Put the headline of ``report`` and what the winner changes between the markers of ``readme``."""
    report = _run("report", sweep, home=home)
    headline = re.search(r"Confirmed: .*?(?=\. Winner: t\d+)", re.sub(r"[\s│]+", " ", report))
    if headline is None:
        raise SystemExit(f"nothing was confirmed in {sweep}")
    changes = re.findall(r"^  \S+ +\S+ +→ .*$", report, flags=re.MULTILINE)
    _put("\n".join([headline[0], *changes]), readme)


def _put(text: str, page: Path) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(RECORD_START)
    after = rest.partition(RECORD_END)[2]
    page.write_text(f"{before}{RECORD_START}\n```\n{text}\n```\n\n{RECORD_END}{after}", encoding="utf-8")


def mlflow(browser: Any, home: Path, sweep: str, out: Path) -> None:
    """The two saved views of MLflow that ``ui`` links to."""
    words = [sys.executable, "-m", "orchestrator", "ui", sweep, "--home", str(home), "--json"]
    server = subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        links = json.loads(server.stdout.readline())
        for view in ("trials", "charts"):
            with open_window(browser, links[view], DESKTOP) as window:
                window.locator("[role=row], svg.main-svg").nth(3).wait_for(timeout=START_S * 1000)
                window.wait_for_timeout(SETTLE_MS)
                window.screenshot(path=out / f"mlflow-{view}.png")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


@contextlib.contextmanager
def open_window(browser: Any, url: str, size: tuple[int, int]) -> Iterator[Any]:
    """A page at this address, in a window of this size."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]})
    try:
        window = context.new_page()
        window.goto(url)
        yield window
    finally:
        context.close()


@contextlib.contextmanager
def _quickstart(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The quickstart at work, once its ledger exists."""
    file = ROOT / "configs" / "sweeps" / "quickstart.yaml"
    words = [sys.executable, "-m", "orchestrator", "submit", str(file), "--home", str(home)]
    process = subprocess.Popen(words, cwd=ROOT, env=_environment())
    try:
        _wait_until(lambda: "quickstart" in Home(home).sweeps() or process.poll() is not None)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait()


def _wait_until(reached: Callable[[], bool]) -> None:
    end_s = time.monotonic() + START_S
    while not reached() and time.monotonic() < end_s:
        time.sleep(0.5)


def _run(*words: str, home: Path) -> str:
    """What a command prints, run in this process."""
    from orchestrator.cli.main import main as command

    printed = io.StringIO()
    with mock.patch.dict(os.environ, _environment()), contextlib.redirect_stdout(printed):
        command([*words, "--home", str(home)], standalone_mode=False)
    return printed.getvalue()


def _environment() -> dict[str, str]:
    return {**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1"}


if __name__ == "__main__":
    sys.exit(main())
