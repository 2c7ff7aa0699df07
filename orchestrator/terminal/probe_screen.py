"""What is looked at before a sweep, on the terminal: what a probe measured of nodes and network, what the doctor found
of this host, what a short run of the smallest candidate showed.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cluster.probing import SLOW_DEVIATIONS, SLOW_RATIO, Network, NodeRates, Profile, SlowFigure
from cluster.probing import Progress as Report
from orchestrator import units
from orchestrator.commands.forecast import Probed
from orchestrator.commands.short_run import Checked, ExpectedDuration
from orchestrator.console import SafeConsole
from orchestrator.doctor import Diagnosed, Finding
from orchestrator.report.view import Column
from orchestrator.terminal.fitted import FittedTable, indented, label_grid
from orchestrator.text import plain
from trials.outcome import Measurement

FORMATS = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"}
COPIES = {"device": "copy", "to_device": "to device", "from_device": "from device"}
FINDING_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
MAX_NODES = 32
"""Nodes shown; slow ones come first, and JSON has all."""
_NODE = Column(title="node", min_width=12)

VALUES = {
    "step_time_s": ("step time", "step_time_s"),
    "loss": ("loss", "losses"),
    "grad_norm": ("gradient norm", "grad_norms"),
    "data_s": ("waiting for data", "breakdown"),
    "allocated_bytes": ("memory allocated", "peak_allocated_bytes"),
    "reserved_bytes": ("memory reserved", "peak_reserved_bytes"),
}
"""What trials are shown by, in the order of the table: its title, and where a measurement has it."""
OF_PROCESS = {"rss_bytes": ("process memory", "peak_allocated_bytes")}
"""What stands for the allocator's figure on CPUs."""
SOURCES = {"report": "its own report", "hook": "seen from inside", "file": "a file that it writes", "log": "its output"}


@contextlib.contextmanager
def progress() -> Iterator[Report]:
    """A bar on stderr."""
    columns = (TextColumn("measuring {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as bar:
        task = bar.add_task("nodes", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield report


def render_probe(probed: Probed) -> RenderableType:
    """A line per node, what the network gives, and which nodes are slow by which figure."""
    profile = probed.profile
    count = units.count(len(profile.nodes), "node")
    head = Text.assemble((count, "bold"), f" with {profile.hardware} each; a node counts with its slowest device")
    parts: list[RenderableType] = [head, _devices(probed)]
    if any(node.all_reduce or node.transfer for node in profile.nodes):
        parts.append(_links(profile))
    parts += [Text(_network(network)) for network in profile.networks]
    parts += [Text(_sentence(slow, _flops_unit(profile.nodes)), style="yellow") for slow in _worst(profile)]
    parts += [Text(f"{node.node} could not be measured: {node.failure}", style="red") for node in profile.failed]
    if profile.unfit:
        parts.append(Text(_advice(probed)))
    return Group(*parts, Text(f"kept for `plan` and `submit` in {probed.file}", style="dim", overflow="fold"))


def _ranked(profile: Profile) -> list[NodeRates]:
    """Nodes in the order in which they are shown: those that fell behind first."""
    unfit = set(profile.unfit)
    return sorted(profile.nodes, key=lambda node: (node.node not in unfit, node.node))


def _devices(probed: Probed) -> RenderableType:
    profile = probed.profile
    nodes = _ranked(profile)
    formats = [name for name in FORMATS if any(name in node.matmul_flops_per_s for node in nodes)]
    copies = [name for name in COPIES if any(name in node.copy_bytes_per_s for node in nodes)]
    scale, unit = _flops_unit(profile.nodes)
    columns = [_NODE]
    columns += [Column(title=FORMATS[f], priority=20 - i, is_number=True) for i, f in enumerate(formats)]
    columns += [Column(title=COPIES[c], priority=10 - i, is_number=True) for i, c in enumerate(copies)]
    columns.append(Column(title="verdict"))
    table = FittedTable(title=f"matmul {unit} by number format, copies GB/s", columns=columns)
    for node in nodes[:MAX_NODES]:
        cells = [
            _scaled(node.matmul_flops_per_s[f].per_s, scale) if f in node.matmul_flops_per_s else "" for f in formats
        ]
        cells += [_scaled(node.copy_bytes_per_s[c].per_s, 1e9) if c in node.copy_bytes_per_s else "" for c in copies]
        table.add_row(node.node, *cells, _verdict(node, probed))
    if (hidden := len(nodes) - MAX_NODES) > 0:
        table.add_row(f"... and {hidden} more (--json lists all)")
    return table


def _links(profile: Profile) -> RenderableType:
    columns = [_NODE, Column(title="all-reduce in the node, GB/s", is_number=True)]
    columns.append(Column(title="latency, us", priority=5, is_number=True))
    if has_others := any(node.transfer for node in profile.nodes):
        columns.append(Column(title="to other nodes, GB/s", priority=6, is_number=True))
    table = FittedTable(title="links, per device, all at once", columns=columns)
    for node in _ranked(profile)[:MAX_NODES]:
        inside, outside = node.all_reduce, node.transfer
        cells = [_scaled(inside.bus_bytes_per_s, 1e9), _scaled(inside.latency_s, 1e-6)] if inside else ["", ""]
        if has_others:
            cells.append(_scaled(outside.bytes_per_s, 1e9) if outside else "")
        table.add_row(node.node, *cells)
    return table


def _network(network: Network) -> str:
    link = network.all_reduce
    return (
        f"network: all-reduce over {link.world_size} nodes {_scaled(link.bus_bytes_per_s, 1e9)} GB/s per device, "
        f"latency {_scaled(link.latency_s, 1e-6)} us"
    )


def _verdict(node: NodeRates, probed: Probed) -> Text:
    word = "failed" if node.failure else "slow" if node.node in probed.profile.unfit else "good"
    style = {"failed": "bold red", "slow": "bold yellow", "good": "green"}[word]
    return Text(f"{word}, excluded" if node.node in probed.excluded else word, style=style)


def _worst(profile: Profile) -> list[SlowFigure]:
    """For each slow node, the figure by which it falls behind most."""
    worst: dict[str, SlowFigure] = {}
    for slow in profile.slow_figures:
        worst.setdefault(slow.node, slow)
    return list(worst.values())


def _flops_unit(nodes: Sequence[NodeRates]) -> tuple[float, str]:
    """TFLOP/s, unless every node stays below one."""
    fastest = max((rate.per_s for node in nodes for rate in node.matmul_flops_per_s.values()), default=0.0)
    return (1e12, "TFLOP/s") if fastest >= 1e12 else (1e9, "GFLOP/s")


def _sentence(slow: SlowFigure, flops_unit: tuple[float, str]) -> str:
    scale, unit = flops_unit if slow.figure.startswith("matmul") else (1e9, "GB/s")
    return (
        f"{slow.node} is slow: {slow.figure} {_scaled(slow.per_s, scale)} {unit}, {slow.ratio:.0%} of the usual "
        f"{_scaled(slow.usual_per_s, scale)}"
    )


def _advice(probed: Probed) -> str:
    rule = f"Slow: below {SLOW_RATIO:.0%} of the median and more than {SLOW_DEVIATIONS:g} robust deviations from it."
    if set(probed.profile.unfit) <= probed.excluded:
        return f"{rule} The sweep file leaves these nodes out."
    names = ", ".join(probed.profile.unfit)
    return f"{rule} cluster.exclude_slow_nodes: true, or exclude_nodes: [{names}], keeps trials off them."


def _scaled(value: float, scale: float) -> str:
    """A value with three digits, or with all before the point."""
    scaled = value / scale
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}"


def render_doctor(diagnosed: Diagnosed) -> RenderableType:
    """All findings and the verdict."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in diagnosed.findings:
        table.add_row(
            Text(finding.level, style=FINDING_STYLES[finding.level]), Text(finding.subject), _finding_words(finding)
        )
    style = "bold red" if diagnosed.num_failed else "bold green"
    return Group(table, Padding(Text(diagnosed.verdict, style=style), (1, 0, 0, 0)))


def _finding_words(finding: Finding) -> Text:
    words = Text(finding.words)
    if finding.remedy:
        words.append("\n")
        words.append(finding.remedy, style="italic")
    return words


def render_checked(checked: Checked) -> RenderableType:
    """The verdict, then what supports it."""
    parts: list[RenderableType] = [_check_verdict(checked)]
    grid = label_grid()
    for label, words in _checked_lines(checked):
        grid.add_row(label, words)
    parts.append(indented(grid))
    if checked.measurement is not None and checked.seen.sources:
        parts += [Text(""), _sources(checked, checked.measurement)]
    if checked.log_tail:
        parts += [Text(""), Text("the end of its output", style="bold")]
        parts += [Text(f"  | {plain(line)}", overflow="fold") for line in checked.log_tail]
    return Group(*parts)


def check_line(checked: Checked) -> str:
    """The same in one line, of a run that went well."""
    seen = [title for name, (title, _) in VALUES.items() if checked.seen.source_of(name) is not None]
    found = f"; seen: {', '.join(seen)}" if seen else ""
    late = checked.needed_starting_s
    hint = f"; deadlines.starting_s is tight: {late} would leave room" if late is not None else ""
    return f"{checked.candidate} runs; first step after {checked.starting_s or 0:.0f} s{found}{hint}"


def expected_line(expected: ExpectedDuration) -> str:
    """How long the sweep will take, in words."""
    least, most = round(expected.least_s / 60), round(expected.most_s / 60)
    if most < 2:
        took = "2 minutes at most"
    elif most < 180:
        took = f"about {least} to {most} min" if least < most else f"about {most} min"
    else:
        took = f"about {expected.least_s / 3600:.1f} to {expected.most_s / 3600:.1f} h"
    return f"{units.count(expected.num_trials, 'trial')} and their confirmation: {took}"


def _check_verdict(checked: Checked) -> Text:
    if checked.is_good:
        return Text(f"{checked.sweep}: its trials can be measured", style="bold green")
    what = "a knob does not act" if checked.is_not_applied else "its trials cannot be measured"
    return Text(f"{checked.sweep}: {what}", style="bold red")


def _checked_lines(checked: Checked) -> Iterator[tuple[str, str]]:
    yield "ran", checked.candidate
    if checked.command:
        yield "command", shlex.join(checked.command)
    if checked.evidence is not None:
        code = checked.evidence.exit_code
        ended = f" (exit code {code})" if code is not None else ""
        yield "problem", f"{units.status_words(checked.outcome.kind)}{ended}: {plain(checked.evidence.message)}"
    if checked.contradiction:
        yield "problem", checked.contradiction
    if checked.remedy is not None:
        yield "remedy", checked.remedy
    if checked.starting_s is not None:
        yield "start", _start(checked)
    if checked.measurement is not None:
        found = checked.measurement
        yield "step", f"{units.milliseconds(found.step_time_s)}, the median of {len(found.counted_step_times_s)} steps"
    if checked.expected is not None:
        yield "sweep", f"{expected_line(checked.expected)}; submit --max-trials N shortens it"
    if checked.facts:
        yield (
            "seen",
            ", ".join(f"{name.replace('_', ' ')} {_plain_number(value)}" for name, value in checked.facts.items()),
        )
    for note in checked.seen.notes:
        yield "note", plain(note)


def _start(checked: Checked) -> str:
    took = f"the first step came {checked.starting_s:.0f} s after the launch"
    if checked.needed_starting_s is None:
        return f"{took}; deadlines.starting_s allows {checked.deadline_s:.0f}"
    allowed = f"deadlines.starting_s allows {checked.deadline_s:.0f}"
    return f"{took}, and {allowed}: write deadlines: {{starting_s: {checked.needed_starting_s}}}"


def _sources(checked: Checked, found: Measurement) -> RenderableType:
    """A line per value: the median step time, else the last one; where it comes from, and how finely it is told."""
    columns = [Column(title="value"), Column(title="seen", is_number=True), Column(title="from", min_width=12)]
    columns.append(Column(title="told to", is_number=True))
    table = FittedTable(columns=columns)
    sources = {source.name: source for source in checked.seen.sources}
    shown = VALUES if "allocated_bytes" in sources else {**VALUES, **OF_PROCESS}
    for name, (title, key) in shown.items():
        source = sources.pop(name, None)
        if source is not None:
            table.add_row(title, _last(found, key), _source(source.source), _resolution(name, source.resolution))
        elif name in ("step_time_s", "loss"):
            table.add_row(title, units.DASH, "not found", "")
    for source in sources.values():
        title = source.name.replace("_", " ")
        table.add_row(title, "seen", _source(source.source), _resolution(source.name, source.resolution))
    return table


def _source(source: str) -> str:
    """``hook:torch`` in words."""
    kind, _, name = source.partition(":")
    return f"{SOURCES.get(kind, kind)} ({name})" if name else SOURCES.get(kind, kind)


def _plain_number(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _last(found: Measurement, name: str) -> str:
    value = found.breakdown.data_s if name == "breakdown" else getattr(found, name, None)
    if isinstance(value, tuple):
        value = value[-1] if value else None
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return units.num_bytes(value)
    return units.milliseconds(value) if name in ("step_time_s", "breakdown") else f"{value:,.5g}"


def _resolution(name: str, resolution: float) -> str:
    if not resolution:
        return "all digits"
    if name.endswith("_bytes"):
        return units.num_bytes(int(resolution))
    return f"{resolution * 1000:.3g} ms" if name.endswith("_s") else f"{resolution:.3g}"
