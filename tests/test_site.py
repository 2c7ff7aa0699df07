"""The site builds strictly and offline, fits a phone, and its pictures are taken by one script."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from PIL import Image, ImageChops

from benchmarks import pictures
from tests.support import ROOT, cli_homes, proof_story

IMAGES = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run([*words, "--site-dir", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser():
    with pictures.open_browser() as found:
        yield found


def test_pages_load_nothing_from_elsewhere_and_can_be_searched(site):
    pages = sorted(site.rglob("*.html"))
    loaded = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>")
    assert {found for page in pages for found in loaded.findall(page.read_text(encoding="utf-8"))} == set()
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert {page.relative_to(site).as_posix() for page in pages} - {"404.html"} <= {
        entry["location"] for entry in index["docs"]
    }


def test_the_search_works_in_a_folder(site, browser):
    with pictures.open_window(browser, (site / "measured" / "overhead.html").as_uri(), (1280, 844)) as window:
        window.keyboard.press("/")
        window.keyboard.type("loss gate")
        window.locator(".md-search-result__item").first.wait_for()


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_the_window(site, browser, width):
    with pictures.open_window(browser, (site / "index.html").as_uri(), (width, 844)) as window:
        for name in ("index.html", "sweep-file.html", "knobs.html", "measured/quickstart.html"):
            window.goto((site / name).as_uri())
            assert window.evaluate("document.documentElement.scrollWidth") <= width, name


def test_the_script_takes_every_picture_of_a_sweep(browser, tmp_path):
    cli_homes.keep(tmp_path / "home", "proven", proof_story.proof_events()).close()
    record, readme = tmp_path / "quickstart.md", tmp_path / "README.md"
    shutil.copy(pictures.RECORD, record)
    shutil.copy(pictures.README, readme)
    parts = ("live", "page", "terminal", "result")
    pictures.take(browser, tmp_path / "home", "proven", tmp_path, record, readme=readme, parts=parts)
    for name in ("live", "live-phone", "live-trial", "page"):
        with Image.open(tmp_path / f"{name}.png") as taken, Image.open(IMAGES / f"{name}.png") as shown:
            assert taken.width == shown.width
            for picture in (taken, shown):
                drawn = ImageChops.invert(picture.convert("L")).point(lambda shade: 255 if shade > 40 else 0).getbbox()
                assert drawn and drawn[3] > 0.7 * picture.height, f"{name} is nearly blank"
    before, shown = (path.read_text(encoding="utf-8") for path in (pictures.RECORD, record))
    assert shown.partition(pictures.RECORD_START)[0] == before.partition(pictures.RECORD_START)[0]
    assert "Confirmed" in shown and "Confirmation" in shown
    block = readme.read_text(encoding="utf-8").partition(pictures.RECORD_START)[2].partition(pictures.RECORD_END)[0]
    assert re.search(r"^Confirmed: .*x .*\n  \w+ +\S+ +→ ", block, re.MULTILINE), block


def test_badges_are_true(tmp_path):
    pictures.badges(tmp_path)
    for name in ("python", "license", "platform"):
        taken = (tmp_path / f"badge-{name}.svg").read_text(encoding="utf-8")
        assert taken == (IMAGES / f"badge-{name}.svg").read_text(encoding="utf-8")
