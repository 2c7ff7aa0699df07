"""The documents stay true: links lead somewhere, shown files are the real ones, shown commands exist."""

import re
import shlex

import pytest

from orchestrator.cli.main import main
from orchestrator.space.knobs import KNOB_NAMES
from tests.support import ROOT

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    assert [target for target in targets if "://" not in target and not (document.parent / target).exists()] == []


def test_the_readme_shows_the_quickstart_as_it_is():
    shown = (ROOT / "configs" / "sweeps" / "quickstart.yaml").read_text(encoding="utf-8")
    assert f"```yaml\n{shown}```" in (ROOT / "README.md").read_text(encoding="utf-8")


def shown_commands(document):
    """Words after `tune-cluster` of every command in a `sh` block."""
    blocks = re.findall(r"^```sh\n(.*?)^```", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == ["tune-cluster"]]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_shown_commands_are_understood(document):
    """Names, options and numbers of arguments; what they do is for the tests of the tutorial."""
    for name, *words in shown_commands(document):
        main.commands[name].make_context(name, list(words))


def test_the_tutorial_shows_commands():
    assert len(shown_commands(ROOT / "docs" / "tutorial.md")) >= 12


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
