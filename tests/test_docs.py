"""The documents stay true: links lead somewhere, shown files are the real ones, shown commands exist."""

import re

import pytest

from orchestrator.cli.main import main
from orchestrator.space.knobs import KNOB_NAMES
from tests.support import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    assert [target for target in targets if "://" not in target and not (document.parent / target).exists()] == []


def test_the_readme_shows_the_quickstart_as_it_is():
    shown = (ROOT / "configs" / "sweeps" / "quickstart.yaml").read_text(encoding="utf-8")
    assert f"```yaml\n{shown}```" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_shown_commands_exist(document):
    text = document.read_text(encoding="utf-8")
    shown = set(re.findall(r"^\s*(?:\$ )?tune-cluster ([a-z]+)", text, flags=re.MULTILINE))
    assert shown <= set(main.commands)


def test_the_readme_names_existing_modules():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    reading = text[text.index("## Reading the code") : text.index("## Status")]
    folder = ""
    for name in re.findall(r"`([\w./]+\.(?:py|md))`", reading):
        folder = name.rpartition("/")[0] or folder
        assert (ROOT / folder / name.rpartition("/")[2]).exists(), name


def test_every_knob_has_its_section():
    text = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, flags=re.MULTILINE | re.DOTALL))
    assert set(sections) == set(KNOB_NAMES)
    frameworks = "| Megatron-LM | torchtitan | DeepSpeed | MindFormers | PaddleNLP | Accelerate |"
    assert [name for name, body in sections.items() if frameworks not in body] == []
