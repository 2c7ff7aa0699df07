"""The documents stay true: links lead somewhere, shown files are the real ones, shown commands exist."""

import re
import shlex
import shutil
import subprocess
from typing import get_args

import pytest
import yaml

from orchestrator import errors
from orchestrator.cli.main import main
from orchestrator.config.queue_policy import load_policy
from orchestrator.config.schema import sweep_schema
from orchestrator.config.sweep import load_sweep
from orchestrator.errors import ConfigError
from orchestrator.space.knobs import KNOB_NAMES
from orchestrator.space.rules import RULES
from orchestrator.sweep.events import FinishCause
from orchestrator.sweep.snapshot import Home
from tests.support import ROOT
from trials import outcome
from trials.failure import TREATMENTS

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


def blocks(document, *languages):
    """The fenced blocks of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [block for language, block in found if language in languages]


def shown_commands(document):
    """Words after `tune-cluster` of every command in a block, also where something stands before it."""
    lines = [line for block in blocks(document, "sh", "console") for line in block.replace("\\\n", " ").splitlines()]
    commands = [line for line in lines if re.match(r"(\$ |.*-- |\w+=\S+ )?tune-cluster [a-z]", line)]
    words = [shlex.split(line, comments=True) for line in commands]
    return [line[line.index("tune-cluster") + 1 :] for line in words if "tune-cluster" in line]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_shown_commands_are_understood(document):
    """Names, options and numbers of arguments; what they do is for the tests of the tutorial."""
    for name, *words in shown_commands(document):
        main.commands[name].make_context(name, list(words))


def test_the_tutorial_shows_commands():
    assert len(shown_commands(ROOT / "docs" / "tutorial.md")) >= 12


def test_the_reading_order_names_existing_modules():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    reading = text[text.index("## Reading the code") : text.index("## A GPU at hand")]
    folder = ""
    for name in re.findall(r"`([\w./]+\.(?:py|md))`", reading):
        folder = name.rpartition("/")[0] or folder
        assert (ROOT / folder / name.rpartition("/")[2]).exists(), name


def test_the_first_screen_of_the_readme_has_what_a_newcomer_needs():
    first = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split()[:420])
    for words in (
        "pip install torch",
        "pip install .",
        "tune-cluster init --",
        "tune-cluster submit",
        "run on GPUs yet",
    ):
        assert words in first, words


def test_every_knob_has_its_section():
    text = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, flags=re.MULTILINE | re.DOTALL))
    assert set(sections) == set(KNOB_NAMES)
    rows = re.findall(
        r"^\| `(\w+)` \|(?: [^|]+ \|){6}$", text[text.index("## Names in other frameworks") :], re.MULTILINE
    )
    assert sorted(rows) == sorted(KNOB_NAMES)


QUICKSTART = ROOT / "configs" / "sweeps" / "quickstart.yaml"
YAML_BLOCKS = [
    pytest.param(block, id=f"{document.name}-{number}")
    for document in DOCUMENTS
    for number, block in enumerate(blocks(document, "yaml"))
    if not re.search(r"^  cwd: \.\./(my-project|LLaMA-Factory)\b", block, flags=re.MULTILINE)
]
"""Those of strangers' folders are checked with files by ``tests/orchestrator/frameworks/test_framework_pages.py``."""


@pytest.mark.parametrize("block", YAML_BLOCKS)
def test_shown_yaml_is_accepted(block, tmp_path):
    """A sweep, some sections of one (put into the quickstart), or the queue's policy; that meant to be wrong is."""
    given = yaml.safe_load(block)
    file = tmp_path / "shown.yaml"
    if "quotas" in given:
        (tmp_path / "queue.yaml").write_text(block, encoding="utf-8")
        assert load_policy(Home(tmp_path)).quotas == given["quotas"]
        return
    if "name" not in given:
        base = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
        base["workload"]["model"] = str(ROOT / "configs" / "models" / "llama-tiny.yaml")
        content = yaml.safe_dump({**base, **given})
    else:
        content = block.replace("../models/", f"{ROOT}/configs/models/")
    content = content.replace("../own-project", f"{ROOT}/tests/data/programs")
    file.write_text(content.replace("../examples", f"{ROOT}/configs/examples"), encoding="utf-8")
    if "max_trails" in block:
        with pytest.raises(ConfigError, match="max_trails"):
            load_sweep(file)
    else:
        load_sweep(file)


def reported_ids():
    """Every id by which the program reports a failure."""
    yield from (rule.id for rule in RULES)
    yield from FinishCause
    yield from (kind.kind for kind in get_args(outcome.Failure))
    yield from get_args(outcome.LossCause)
    yield from TREATMENTS
    yield from (str(value) for name, value in vars(errors).items() if name.startswith("EXIT_"))


def test_troubleshooting_has_a_remedy_for_every_id():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    remedies = {name: row[2] for row in rows if len(row) == 3 for name in re.findall(r"[\w.-]+", row[0])}
    assert [name for name in reported_ids() if not remedies.get(name)] == []


COVERAGE = ROOT / "docs" / "coverage.md"


def coverage_rows():
    """Cells of every row of the coverage page: capability, state, what provides it, reason or note."""
    rows = re.findall(r"^\| (?!capability)(.+) \|$", COVERAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def key_exists(path):
    """Whether the sweep file has this key; a name without a section may also be a knob."""
    schema = sweep_schema()
    names = path.split(".")
    return any(_descends(start, schema["$defs"]) for start in ([schema, names], [schema, ["baseline", *names]]))


def _descends(start, definitions):
    node, names = start
    if not names:
        return True
    if "$ref" in node:
        return _descends([definitions[node["$ref"].rpartition("/")[2]], names], definitions)
    options = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    inner = node.get("properties", {}).get(names[0])
    return (inner is not None and _descends([inner, names[1:]], definitions)) or any(
        _descends([option, names], definitions) for option in options
    )


def test_the_coverage_page_has_a_reason_for_everything_that_is_missing():
    rows = coverage_rows()
    assert len(rows) == 179
    for capability, state, provided, reason in rows:
        assert state in ("yes", "partly", "no"), capability
        assert provided or state == "no", capability
        assert reason or state == "yes", capability


def test_the_coverage_page_names_what_exists():
    """Commands with their options, keys of the sweep file, knobs; pages are checked with all links."""
    named = [name for row in coverage_rows() for name in re.findall(r"`([^`]+)`", row[2])]
    for name in named:
        if not name.startswith("tune-cluster "):
            assert key_exists(name.partition(":")[0]), name
            continue
        words = shlex.split(name)[1:]
        if words[0] == "--home":
            words = words[2:]
        main.commands[words[0]].make_context(words[0], words[1:])
    assert len(named) > 150
    assert not key_exists("dataloader.no_such_key")
    assert not key_exists("no_such_knob")


def test_the_script_for_slurm_is_sound():
    script = ROOT / "docs" / "operation" / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    checker = shutil.which("shellcheck")
    if checker is not None:
        subprocess.run([checker, str(script)], check=True)


def test_the_cluster_for_kuberay_is_complete():
    """Every mount has its volume in all pods, and those with GPUs request as many from Ray and Kubernetes."""
    spec = yaml.safe_load((ROOT / "docs" / "operation" / "raycluster.yaml").read_text(encoding="utf-8"))["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for pod, (container,) in ((group["template"]["spec"], group["template"]["spec"]["containers"]) for group in groups):
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        requested = container["resources"]["limits"].get("nvidia.com/gpu", "0")
        assert group["rayStartParams"]["num-gpus"] == requested
    assert spec["authOptions"] == {"mode": "token"}
