"""The pages in a browser: they follow the sweep, sort, confirm actions, and never take text for markup."""

import re
import subprocess
import time
from dataclasses import replace

import pytest

from cluster.processes import python_module
from orchestrator.process_support import user_name
from orchestrator.sweep.checkpoint import last_request
from orchestrator.sweep.events import TrialsRetried
from orchestrator.sweep.snapshot import Home
from tests.orchestrator.live.conftest import Window, keep_log, serve
from tests.support import sweeps, virtual_sweeps
from tests.support.cli_homes import LIVE, controller, keep, run, running
from tests.support.story import ended, evidence, measured
from trials.outcome import Crashed

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def order(page):
    return [text.split("\t")[0] for text in page.locator("#trials tbody tr").all_inner_texts()]


def cut_tables(page):
    """Sections whose tables reach beyond the window."""
    return page.evaluate(
        """[...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth + 1)
        .map(box => box.closest("section")?.id)"""
    )


def is_wide(page):
    return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


def test_the_page_follows_and_controls_a_sweep(browser, server, home):
    with home.open("busy", read_only=False) as ledger, ledger.hold(), Window(browser, server, "/sweeps/busy") as window:
        page = window.page
        window.wait("#phase", "running")
        window.wait("#trials tr[data-number='5']", "measuring 7")
        window.wait("#verdict", "1.25x")
        assert order(page)[:3] == ["t001", "t000", "t002"]
        ledger.append(ended(5, measured(0.05, world_size=2), at_s=time.time()))
        window.wait("#verdict b", "t005 at")
        window.wait("#status", "6 of 40 trials done; best so far t005")
        assert order(page)[:2] == ["t005", "t001"]
        assert page.locator("#history .point").count() == 4
        assert "t005" in page.locator("#history title").last.inner_html()
        _sort(page)
        _pause(window, ledger)
        _retry(window, ledger)


def _sort(page):
    """By a click, and with the keyboard."""
    page.locator("#trials th button", has_text=re.compile("^step$")).click()
    assert order(page)[:3] == ["t005", "t001", "t000"]
    page.keyboard.press("Enter")
    assert order(page)[:3] == ["t002", "t000", "t001"]
    assert page.locator("#trials th[aria-sort='descending']").inner_text().strip().startswith("step")
    assert page.locator("#trials th[aria-sort]").count() == 1


def _pause(window, ledger):
    """With a confirmation; Escape cancels it, and the focus returns to where it was."""
    page = window.page
    button = page.locator("button[data-action=pause]")
    button.focus()
    page.keyboard.press("Enter")
    window.wait("dialog[open]", "Pause: busy?")
    page.keyboard.press("Escape")
    page.locator("dialog[open]").wait_for(state="detached")
    assert page.evaluate("document.activeElement.dataset.action") == "pause" and last_request(ledger) == 0
    button.click()
    page.locator("#ask-yes").click()
    window.wait("#notice", "busy: pause requested")
    [request] = ledger.requests(0)
    assert request.body == {"action": "pause"} and request.by.startswith(user_name())
    window.wait("#spending", "requests")


def _retry(window, ledger):
    page = window.page
    page.locator("button[data-action=retry]").click()
    window.wait("dialog[open] label", "out of memory (1)")
    assert page.locator("#ask-yes").is_disabled()  # nothing failed by a fault
    page.locator("dialog[open] label", has_text="out of memory").click()
    page.locator("#ask-yes").click()
    window.wait("#notice", "will be launched again: t003")
    ledger.append(TrialsRetried(at_s=time.time(), request=2, trials=(3,), by="me"))
    window.wait("#trials tr[data-number='3']", "waiting")


def test_nothing_that_is_shown_is_taken_for_markup(browser, tmp_path):
    home = Home(tmp_path)
    story = [replace(event, reason=HOSTILE) if hasattr(event, "candidate") else event for event in running("hostile")]
    story[0] = replace(story[0], hardware=HOSTILE)
    lease = {"nodes": [HOSTILE], "waiting": HOSTILE, "at_s": 0.0}
    with (
        keep(tmp_path, "hostile", story, controller=controller(address=HOSTILE), lease=lease, live=LIVE) as ledger,
        ledger.hold(),
        serve(home) as server,
    ):
        ledger.append(ended(6, Crashed(evidence=evidence(HOSTILE))))
        log = keep_log(home, "hostile", 5, f"{HOSTILE}\n")
        with Window(browser, server, "/sweeps/hostile") as window:
            window.wait("#trials tr[data-number='6'] small", HOSTILE)
            window.wait("#hardware", HOSTILE)
            page = window.page
            assert page.locator("main img, main script").count() == 0
            page.locator("#trials tr[data-number='5'] a").click()
            window.wait("#logs pre", HOSTILE)
            window.wait("#origin", HOSTILE)
            with log.open("a", encoding="utf-8") as file:
                file.write("and what comes later\n")
            window.wait("#logs pre", "and what comes later")
            page.goto(f"{server.base}/sweeps/hostile/trials/6")
            window.wait("#failed pre", HOSTILE)
            assert page.locator("main img, main script").count() == 0
            page.goto(f"{server.base}/")
            window.wait("td", HOSTILE)


@pytest.mark.representative("light")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_every_page_without_scrolling_sideways(browser, server, home, scheme):
    with Window(
        browser, server, viewport={"width": 390, "height": 844}, color_scheme=scheme, reduced_motion="reduce"
    ) as window:
        page = window.page
        window.wait("td", "Confirmed:")
        for path, place, text in (
            ("/", "td", "busy"),
            ("/sweeps/proven", "#confirmation", "the winner"),
            ("/sweeps/busy", "#running", "measuring 7"),
            ("/sweeps/proven/trials/1", "#measured", "peak memory"),
            ("/sweeps/proven/trials/5", "#failed", "boom"),
        ):
            page.goto(server.base + path)
            window.wait(place, text)
            assert not is_wide(page), path
            assert cut_tables(page) == [], path
        written = home.path / "proven.html"
        assert run("report", "proven", "--home", home.path, "--html", written).exit_code == 0
        page.goto(written.as_uri())
        assert cut_tables(page) == []
        assert page.locator("td[data-head='speed-up']").count()
        page.goto(f"{server.base}/sweeps/proven/trials/5")
        window.wait("#failed", "boom")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.goto(f"{server.base}/sweeps/proven")
        window.wait("#trials", "t001")
        page.emulate_media(media="print")
        assert not page.locator("#actions").is_visible() and page.locator("#trials").is_visible()


def test_a_notice_is_shown_once_and_not_on_pages_opened_later(browser, server):
    def publish(text):
        feed = server.hub.watch("busy", None).feed
        feed.publish({"notice": {"text": text, "is_bad": True, "at_s": time.time()}})

    with Window(browser, server, "/sweeps/busy") as window:
        window.wait("#trials", "t005")
        publish("it failed")
        window.wait("#notice", "it failed")
        window.page.evaluate("document.getElementById('notice').textContent = ''")
        window.page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        window.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        window.page.evaluate("Object.defineProperty(document, 'hidden', {value: false})")
        window.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        with Window(browser, server, "/sweeps/busy") as later:
            later.wait("#trials", "t005")
            assert later.text("#notice") == window.text("#notice") == ""
            publish("again")
            later.wait("#notice", "again")


def test_a_page_finds_its_server_again(browser, home):
    """The tab stays: it reports a lost connection, and later shows what came meanwhile."""
    with serve(home) as server, Window(browser, server, "/sweeps/busy") as window:
        window.wait("#stream", "Updates automatically")
        server.hub.stop()  # ends all streams; the next connection begins another
        window.wait("#stream", "Not connected")


def test_all_interactive_elements_have_a_name(browser, server):
    with Window(browser, server, "/sweeps/busy") as window:
        window.wait("#trials", "t005")
        nameless = window.page.evaluate(
            """[...document.querySelectorAll("a[href], button, select, input, [role=region], section:not([hidden])")]
            .filter(e => !(e.innerText || e.ariaLabel || e.getAttribute("aria-labelledby") || "").trim())
            .filter(e => !e.closest("svg, dialog")).map(e => e.outerHTML)"""
        )
        assert nameless == []
        for landmark in ("header", "nav[aria-label]", "main", "footer", "h1"):
            assert window.page.locator(landmark).count() == 1, landmark
        assert window.page.locator("#status").get_attribute("aria-live") == "polite"


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_real_sweep_is_paused_resumed_and_followed_to_its_end_on_its_page(browser, tmp_path):
    """Real gangs on this host; resuming starts a controller in the background."""
    file = sweeps.write(tmp_path, measure={"num_steps": 20, "max_steps": 20}, budget={"max_trials": 2})
    home = Home(tmp_path / "home")
    command = python_module("orchestrator", "submit", str(file), "--detach", "--home", str(home.path))
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with serve(home) as server, Window(browser, server, "/sweeps/tiny") as window:
        window.page.set_default_timeout(120_000)
        window.wait("#running td", "t000")
        press(window, "pause")
        window.wait("#phase", "paused")
        press(window, "resume")
        window.wait("#notice", "its controller is running")
        window.wait("#trials tr[data-number='0']", "measured")
        window.wait("#phase", "finished")
        assert window.page.locator("#history .point").count() == 2
        window.page.locator("#trials a", has_text="t001").click()
        window.wait("#logs", "rank 0 on")
        window.wait("#steps figcaption", "every measured step")
    assert {trial.status for trial in home.read("tiny").state.searched()} == {"measured"}


def press(window, action):
    window.page.locator(f"button[data-action={action}]").click()
    window.page.locator("#ask-yes").click()


@pytest.mark.exhaustive
def test_simulated_sweeps_are_marked_on_every_page(browser, tmp_path):
    home = virtual_sweeps.home(tmp_path)
    virtual_sweeps.submit(tmp_path, virtual_sweeps.SWEEP)
    with serve(home) as server, Window(browser, server) as window:
        window.wait("td small", "SIMULATED")
        window.page.locator("td a", has_text="first").click()
        window.wait("#watermark", "nothing was measured or proven")
        window.wait("#predictions figcaption", "as predicted")
        assert window.page.title().startswith("SIMULATED first")
        window.page.locator("#trials a", has_text="t001").click()
        window.wait("#watermark", "SIMULATED")
        window.wait("#attempts", "reported to the search")
        window.page.emulate_media(media="print")
        assert window.page.locator("#watermark").is_visible()
