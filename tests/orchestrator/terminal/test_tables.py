"""Tables on terminals of 60 to 200 columns: a row is a line, nothing is wider, what decides is always there."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text

from orchestrator.commands.forecast import DryRunVerdict
from orchestrator.promotion.references import Difference
from orchestrator.report.profile_tables import profile_tables
from orchestrator.sweep.fold import fold
from orchestrator.terminal.fitted import ALWAYS, Column, FittedTable
from orchestrator.terminal.plan_screen import render_dry_runs
from orchestrator.terminal.result_screen import render_difference, render_history, render_profile
from orchestrator.terminal.sweep_screen import render_live
from tests.goldens.variants import PROFILED, PROFILES, profiled
from tests.support import virtual_sweeps
from tests.support.cli_homes import keep_running, run, running
from tests.support.sweep_files import changed, write
from trials.dryrun.estimate import DryRunEstimate, RunFailure, StageEstimate, Traffic
from trials.spec import Candidate, Layout, RandomData, Workload
from trials.spec import LinearModel as Model

WIDTHS = (60, 80, 200)
LONG = "a-sweep-with-a-name-of-some-length"
SWEEP = changed(virtual_sweeps.SWEEP, ("space", "pp"), [2, 4])

SWEEP = changed(SWEEP, ("cluster", "simulation", "slow_nodes"), {"node0001": 1.3})
SWEEP["space"]["recompute"] = ["none", "full", {"select": {r"feed_forward|add|.*norm|.*\.(wo|sc.*)": "all"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished sweep whose configurations have long names, and its file."""
    folder = tmp_path_factory.mktemp("tables")
    virtual_sweeps.submit(folder, SWEEP)
    return folder


@pytest.fixture
def seen(monkeypatch):
    """The tables that were rendered, with the width that each had and its lines."""
    found = []
    render = FittedTable.__rich_console__

    def noted(self, console, options):
        lines = list(render(self, console, options))
        found.append((self, options.max_width, lines))
        return lines

    monkeypatch.setattr(FittedTable, "__rich_console__", noted)
    return found


def check(seen, output, width):
    """Every table has one line per row, no wider than its room, with all columns that are never left out."""
    assert max(map(len, output.splitlines())) <= width
    assert "\x1b" not in output
    assert seen
    for table, room, lines in seen:
        widths = table.fit(room)
        assert 0 in widths
        assert {i for i, column in enumerate(table.columns) if column.priority >= ALWAYS} <= set(widths)
        has_head = any(column.title for column in table.columns)
        rows = lines[bool(table.title) + 2 * has_head :][: len(table.rows)]
        assert len(lines) == bool(table.title) + 2 * has_head + len(table.rows) + bool(table.left_out(room))
        for line, (cells, _) in zip(rows, table.rows, strict=True):
            assert line.cell_len <= room
            assert "\n" not in line.plain
            if cells and not table.columns[0].is_number and table.columns[0].min_width is None:
                assert line.plain.startswith(cells[0].plain)


def invoke(monkeypatch, width, *arguments):
    monkeypatch.setenv("COLUMNS", str(width))
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("width", WIDTHS)
def test_commands_about_a_sweep_fit(folder, seen, monkeypatch, width):
    home = ("--home", virtual_sweeps.home(folder).path)
    for arguments in (("report", "first"), ("explain", "first"), ("ps",)):
        del seen[:]
        output = invoke(monkeypatch, width, *arguments, *home)
        check(seen, output, width)
        if arguments[0] == "report":
            assert "tokens/s/p" in output
            assert len(re.findall(r"^  t\d{3} ", output, re.M)) >= 6


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan_ranks_first_and_fits(folder, seen, monkeypatch, width):
    file = write(folder, SWEEP)
    output = invoke(monkeypatch, width, "plan", file, "--home", folder / "other")
    check(seen, output, width)
    places = [output.index(words) for words in ("expected to be fastest", "legal candidates of", "rejected\n")]
    assert places == sorted(places)
    ranking = seen[0][0]
    assert {"#", "configuration", "tokens/s/p"} <= {ranking.columns[i].title for i in ranking.fit(width)}
    if width < 200:
        assert re.search(rf"not shown at {width} columns\s\(--json or COLUMNS=\d+\):(.|\n)*memory\sterms", output)
    else:
        assert r"…" not in output[: output.index("legal candidates of")]
    number = re.search(r"^ +(\d+)  ", output[output.index("configuration") :], re.M)[1]
    del seen[:]
    check(seen, invoke(monkeypatch, width, "plan", file, "--why", number, "--home", folder / "other"), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_probe_and_a_busy_sweep_fit(folder, seen, monkeypatch, tmp_path, width):
    check(seen, invoke(monkeypatch, width, "probe", write(folder, SWEEP), "--home", tmp_path / "probed"), width)
    del seen[:]
    with keep_running(tmp_path, LONG).hold():
        check(seen, invoke(monkeypatch, width, "status", LONG, "--home", tmp_path), width)


def text(renderable, width):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def stage(number):
    return StageEstimate(
        stage=number,
        rank=8 * number,
        peak_bytes=5 << 30,
        peak_by_category={"weights": 2 << 30, "activations": 2 << 30, "gradients": 1 << 30},
        peak_phase="backward",
        flops={"forward": 10**15, "backward": 2 * 10**15, "recompute": 10**14},
        collectives={
            "all_gather": Traffic(num_calls=40, num_bytes=1 << 30),
            "all_reduce": Traffic(num_calls=2, num_bytes=8),
        },
        num_parameters=3_000_000_000,
    )


def verdict(result):
    workload = Workload(model=Model(), data=RandomData(), seq_length=1, global_batch_size=64)
    candidate = Candidate(layout=Layout(pp=2, stage_layers=((5, 4),), dp_shard=8, zero_stage=3))
    known = {"limit_bytes": 4 << 30, "fragmentation": 0.1, "context_bytes": 0}
    return DryRunVerdict(name="baseline", candidate=candidate, workload=workload, result=result, **known)


RECORD = {
    "number": 3, "at_s": 1.7e9, "from_version": 1, "to_version": 2, "action": "promote", "state": "ended", "trial": "4",
    "short_name": r"pp4 interleavedv2 z2x4 mbs1 ~feed_forward|add|.*norm|.*\.(wo|sc.*):40 O2-bf16", "speedup": "1.25x",
    "sweep": LONG, "by": "somebody@a-host-with-a-long-name", "forced": False,
    "altered": False, "missing": [], "reason": "because it is faster", "note": "",
}  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_other_tables_fit_too(seen, width):
    estimate = DryRunEstimate(stages=(stage(0), stage(1)))
    failed = RunFailure(reason="unsupported", message="an operator that nothing can simulate, named at some length")
    pairs = {"recompute": (r"full:40 ~feed_forward\.mul:40 and much more of it", "none")}
    difference = Difference(a="llama@production", b="llama@previous", parts={"knobs": pairs, "workload": {}})
    for content in (
        render_dry_runs([verdict(estimate)]),
        render_dry_runs([verdict(estimate), verdict(failed)], as_table=True),
        render_history({"name": "llama", "production": 2, "is_settled": True, "records": [RECORD], "gaps": [2]}),
        render_difference(difference),
        render_profile(profile_tables(fold(profiled(PROFILED, *PROFILES)).trials[PROFILED])),
        render_live(fold(running("busy")), {}, 1.7e9),
    ):
        del seen[:]
        check(seen, text(content, width), width)


def test_a_dry_run_of_split_experts_shows_the_worst_split_of_tokens_too():
    even, crowded = DryRunEstimate(stages=(stage(0),)), DryRunEstimate(stages=(replace(stage(0), peak_bytes=10 << 30),))
    both = replace(verdict(even), crowded=crowded, limit_bytes=8 << 30)
    assert both.to_json()["crowded_bytes"] == both.crowded_bytes == 11 << 30 and both.fits
    shown = text(render_dry_runs([both]), 120)
    assert "a rank that gets them all needs 11.0 GiB does not fit" in shown
    assert "crowded_bytes" not in verdict(even).to_json()
    assert "gets them all" not in text(render_dry_runs([verdict(even)]), 120)


def test_omitted_columns_are_reported_and_text_is_cut_last():
    columns = (
        Column(title="trial"),
        Column(title="configuration", min_width=10),
        Column(title="speed", is_number=True),
        Column(title="spread", priority=1, is_number=True),
        Column(title="memory", priority=2, is_number=True),
    )
    table = FittedTable(columns=columns)
    table.add_row("t000", "a name of thirty characters ..", "10,000", "1%", "10 GiB")
    assert "not shown" not in text(table, 62)
    narrow = text(table, 55).splitlines()
    assert narrow[2] == "t000   a name of thirty characters ..  10,000  10 GiB"
    assert narrow[3] == "not shown at 55 columns (--json or COLUMNS=61): spread"
    cut = text(table, 30).splitlines()
    assert cut[2] == "t000   a name of thir…  10,000"
    assert cut[0].split() == ["trial", "configuration", "speed"]
    assert text(table, 16).splitlines()[2] == "t000   …  10,000"


def test_any_cell_stays_on_one_line():
    table = FittedTable(columns=(Column(title="a"), Column(title="b", min_width=5)))
    table.add_row(Text("one\ntwo"), "\x1b[31mred\nsecond 表表表表表表表表表表表")
    shown = text(table, 24).splitlines()
    assert len(shown) == 3
    assert shown[2].startswith("one two")
    assert "\x1b" not in shown[2]


def test_a_pipe_gets_a_fixed_width_and_no_blanks_at_the_ends(folder, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    output = run("report", "first", "--home", virtual_sweeps.home(folder).path).stdout
    assert 80 < max(map(len, output.splitlines())) <= 100
    assert [line for line in output.splitlines() if line != line.rstrip()] == []
