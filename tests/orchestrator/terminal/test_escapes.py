"""Text of programs, files and stores reaches terminals without control characters."""

import dataclasses
import io
import json
import types
import typing
import warnings

import pytest
from rich.table import Table
from rich.text import Text

from orchestrator.config.yaml_source import parse_yaml
from orchestrator.console import SafeConsole
from orchestrator.errors import ConfigError
from orchestrator.report.plots import style
from orchestrator.space.notation import short_name
from orchestrator.sweep.snapshot import Home, attempt_folder
from orchestrator.terminal.fitted import print_for_people
from orchestrator.terminal.sweep_screen import LiveView
from orchestrator.text import CONTROLS, echo_json, one_line, plain
from tests.support import cli_homes, proof_story
from tests.support.cli_homes import run
from trials.spec import CustomChoice

FORGED = "FORGED: confirmed"
HOSTILE = f"\x1b]0;owned\x07\x1b[2J\x1b[1;31m\x9b2J\x9d0;x\x9c\u202egnp\u2066\u2028\r{FORGED}\n{FORGED}\x00\x7f"
NOT_FREE = {"kind", "sweep", "spec_hash", "token", "name", "category", "conclusion", "status", "origin", "objective"}
"""Fields whose texts are names that are checked, or words of ours."""


def is_text(hint):
    """Whether a field of this type holds any text, or several."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        return any(is_text(part) for part in typing.get_args(hint))
    return hint is str


def hostile(value):
    """``value`` with every text in it that is free made hostile."""
    if isinstance(value, tuple):
        return tuple(map(hostile, value))
    if not dataclasses.is_dataclass(value):
        return value
    hints = typing.get_type_hints(type(value))
    changes = {}
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if is_text(hints[field.name]) and field.name not in NOT_FREE and held:
            changes[field.name] = tuple(HOSTILE + text for text in held) if isinstance(held, tuple) else held + HOSTILE
        elif field.name not in NOT_FREE:
            changes[field.name] = hostile(held)
    return dataclasses.replace(value, **{name: new for name, new in changes.items() if new != getattr(value, name)})


def with_own_knob(event):
    candidate = getattr(event, "candidate", None)
    if candidate is None:
        return event
    own = (CustomChoice(name="--w", value=HOSTILE),)
    return dataclasses.replace(event, candidate=dataclasses.replace(candidate, own=own))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home in which everything that may be any text is hostile: ``proven`` is over, ``busy`` runs."""
    folder = tmp_path_factory.mktemp("hostile")
    seen = []
    for name, events, documents in (
        ("proven", proof_story.proof_events(is_promoted=True), {}),
        ("busy", cli_homes.running("busy"), {"lease": {**cli_homes.LEASE, "waiting": HOSTILE}}),
    ):
        made = [with_own_knob(hostile(event)) for event in events]
        seen += [old for old, new in zip(events, made, strict=True) if new != old]
        cli_homes.keep(folder, name, made, controller=cli_homes.controller(host=HOSTILE), **documents).close()
    assert len({type(event) for event in seen}) >= 5
    state = Home(folder).read("proven").state
    log = attempt_folder(Home(folder).sweep_folder("proven"), 1, 0, state.trials[1].attempts[0].token) / "rank0.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"first\n{HOSTILE}\nlast\n")
    return folder


def check(text):
    assert text.strip()
    assert CONTROLS.search(text) is None, CONTROLS.search(text)
    assert not any(line.startswith(FORGED) for line in text.split("\n"))


VIEWS = (
    ("ps",),
    ("status", "proven"),
    ("status", "busy"),
    ("report", "proven"),
    ("report", "busy"),
    ("explain", "proven"),
    ("explain", "proven", "t001"),
    ("explain", "proven", "t003"),
    ("explain", "busy", "t005"),
    ("logs", "busy", "t002"),
)


@pytest.mark.parametrize("view", VIEWS, ids=" ".join)
def test_no_view_passes_a_control_character(home, view):
    done = run(*view, "--home", home)
    assert done.exit_code == 0, done.output
    check(done.output)


def test_logs_hold_the_lines_and_json_loses_nothing(home):
    check(run("logs", "proven", "t001", "--home", home).output.replace(f"\n{FORGED}", ""))
    done = run("explain", "proven", "t001", "--json", "--home", home)
    assert done.stdout.isascii() and CONTROLS.search(done.stdout) is None
    assert HOSTILE in json.dumps(json.loads(done.stdout), ensure_ascii=False) or "\\u202e" in done.stdout


def test_an_error_is_plain(home):
    done = run("status", f"no{HOSTILE}", "--home", home)
    assert done.exit_code == 2
    assert CONTROLS.search(done.output) is None


def test_the_live_view_is_plain(home):
    out = io.StringIO()
    with LiveView(SafeConsole(file=out, width=100)) as view:
        view.on_lease(["n1"], HOSTILE)
        view.on_state(Home(home).read("busy").state)
    check(out.getvalue())


def test_the_console_drops_controls_wherever_they_stand():
    out = io.StringIO()
    console = SafeConsole(file=out, width=60)
    table = Table("a", HOSTILE.replace("\n", ""))
    table.add_row("a" + HOSTILE, Text("b\x1b[5m", style="red"))
    console.print(table, HOSTILE, "[link=http://x]not a link[/link]")
    assert CONTROLS.search(out.getvalue()) is None
    assert "[link=http://x]not a link[/link]" in out.getvalue()


def test_values_of_own_knobs_are_on_one_line():
    story = proof_story.proof_events()
    candidate = next(with_own_knob(event).candidate for event in story if hasattr(event, "candidate"))
    assert CONTROLS.search(short_name(candidate)) is None and "\n" not in short_name(candidate)
    assert one_line("a\x1b[2J\tb\nc") == r"a\x1b[2J\tb\nc"


@pytest.mark.parametrize("text", [r'a: "\e[2J"', r'a: ["\u202e"]', r'"\x9b": 1', r'a: {"b\r": 2}'])
def test_a_file_with_control_characters_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="control character") as refused:
        parse_yaml(text, tmp_path / "sweep.yaml")
    assert CONTROLS.search(str(refused.value)) is None


def test_plots_pass_no_control_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = style.to_svg(lambda: style.new_figure(f"\u8868 {HOSTILE}", "\x1b[1m\U0001f600", 2.0), "x")
        assert CONTROLS.search(made.replace("\n", "")) is None


def test_print_for_people_and_json(capsys):
    print_for_people(HOSTILE)
    echo_json({"a": HOSTILE})
    found = capsys.readouterr().out
    assert CONTROLS.search(found) is None
    assert json.loads(found[found.index("{") :]) == {"a": HOSTILE}
    assert plain("a\x1b[31mb") == "ab"
