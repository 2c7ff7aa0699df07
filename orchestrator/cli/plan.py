"""The commands before a sweep: what it would try, what memory that needs, how fast the cluster is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.options import CLUSTER_HELP, home_option, json_option, print_result
from orchestrator.errors import EXIT_USER
from trials.accelerator.kinds import FAMILIES
from trials.dryrun.estimate import FRAGMENTATION


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--why", metavar="CANDIDATE", help="Explain one: a number or name of the plan, baseline, or '{tp: 2}'.")
@click.option("--cluster", metavar="NAME|FILE", help=CLUSTER_HELP)
@home_option
@json_option
def plan(file: Path, why: str | None, cluster: str | None, home: Path, as_json: bool) -> None:
    """Show what FILE would try, what the cost model expects of it, and what is ruled out and why. Starts nothing.

    What `dryrun` predicted of its candidates before is shown, and those that would not fit are ruled out.

    \b
    Examples:
      tune-cluster plan configs/sweeps/quickstart.yaml
      tune-cluster plan configs/sweeps/quickstart.yaml --why '{tp: 2, micro_batch_size: 4}'
      tune-cluster plan configs/sweeps/resnet.yaml --cluster dgx-a100
    """
    from orchestrator.commands.plan import plan_file
    from orchestrator.sweep.home import Home
    from orchestrator.terminal.plan import render_planned_file

    planned = plan_file(file, Home(home), why=why, cluster=cluster)
    print_result(as_json, planned.to_json, lambda: render_planned_file(planned))


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--trial",
    "trials",
    multiple=True,
    help="baseline (the default), a number or name as plan shows it, or knobs to change in the baseline. Repeatable.",
)
@click.option("--all", "all_legal", is_flag=True, help="Every legal candidate, for `plan` and `submit` to use.")
@click.option(
    "--limit", type=click.IntRange(1), default=20, show_default=True, help="With --all: only as many, in plan's order."
)
@click.option(
    "--max-device-memory",
    metavar="SIZE",
    help='Like "80GB"; default: device_memory of FILE, else that of the GPUs here.',
)
@click.option(
    "--fragmentation",
    type=click.FloatRange(0.0, 1.0),
    default=FRAGMENTATION,
    show_default=True,
    help="Share of its live memory that the allocator holds beyond it.",
)
@click.option(
    "--device",
    type=click.Choice(list(FAMILIES)),
    help="Whose memory; default: what FILE would run on, cuda where that is not known.",
)
@click.option("--exact", is_flag=True, help="Simulate all layers instead of computing them from few.")
@home_option
@json_option
def dryrun(
    file: Path, trials: tuple[str, ...], all_legal: bool, limit: int, home: Path, as_json: bool, **options: Any
) -> None:
    """Estimate the memory, FLOPs and collectives of trials of FILE, on this machine, whatever the world's size.

    \b
    Examples:
      tune-cluster dryrun configs/sweeps/quickstart.yaml
      tune-cluster dryrun configs/sweeps/quickstart.yaml --trial 3 --trial '{tp: 2, dp_replicate: 8}' \\
        --device cuda --max-device-memory 80GB
      tune-cluster dryrun configs/sweeps/quickstart.yaml --all --limit 50
    """
    from orchestrator.commands import dry_run
    from orchestrator.sweep.home import Home
    from orchestrator.terminal import dry_run as report_dryrun

    with report_dryrun.progress() as progress:
        num_legal = limit if all_legal else None
        verdicts = dry_run.dry_run(file, Home(home), trials=trials, num_legal=num_legal, progress=progress, **options)
    body = [verdict.to_json() for verdict in verdicts]
    print_result(as_json, body, lambda: report_dryrun.render_dry_runs(verdicts, as_table=all_legal))
    if any(verdict.failed for verdict in verdicts):
        sys.exit(EXIT_USER)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@home_option
@json_option
def probe(file: Path, home: Path, as_json: bool) -> None:
    """Measure matmul, copy and all-reduce rates of the cluster FILE leases; find slow nodes. Takes seconds.

    The rates are kept for `plan` and `submit`, whose cost model uses them. With cluster.exclude_slow_nodes in FILE,
    trials stay off the nodes found slow.

    \b
    Example:
      tune-cluster probe configs/sweeps/quickstart.yaml
    """
    from orchestrator.commands.probe import probe_file
    from orchestrator.sweep.home import Home
    from orchestrator.terminal.probe import progress, render_probe

    with progress() as show:
        probed = probe_file(file, Home(home), show)
    print_result(as_json, probed.to_json(), lambda: render_probe(probed))


COMMANDS = (plan, dryrun, probe)
