"""The command line: thin. stdout carries the result, stderr is for people; heavy imports happen inside commands.

Exit codes: 0 done; 1 the sweep failed; 2 the user's input or surroundings need mending; 130 interrupted.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from orchestrator.invocation import DEFAULT_HOME, HOME_VARIABLE, Invocation
from trials.estimate import FRAGMENTATION

P = ParamSpec("P")
R = TypeVar("R")

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130

_home_option = click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=HOME_VARIABLE,
    default=DEFAULT_HOME,
    show_default=True,
    help=f"Folder of all sweeps and of the local MLflow store (or {HOME_VARIABLE}).",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn errors the user can mend into one message on stderr and exit code 2."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        from cluster.base import ClusterError
        from orchestrator.errors import ConfigError
        from orchestrator.ledger import LedgerError

        try:
            return command(*args, **kwargs)
        except (ConfigError, ClusterError, LedgerError) as error:
            click.echo(f"error: {error}", err=True)
        except OSError as error:
            click.echo(f"error: {error.filename or ''}: {error.strerror or error}".replace(": :", ":"), err=True)
        except KeyboardInterrupt:
            click.echo("interrupted; a sweep goes on where it stopped when it is submitted again", err=True)
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(EXIT_USER)

    return wrapper


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-v", "--verbose", is_flag=True, help="Log what the controller does, on stderr.")
@click.version_option(package_name="tune-cluster")
def main(verbose: bool) -> None:
    """Find the fastest way to train a model on a cluster, by measuring.

    \b
    Example:
      tune-cluster submit configs/sweeps/quickstart.yaml
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@_home_option
@_json_option
@reports_errors
def submit(file: Path, home: Path, as_json: bool) -> None:
    """Run the sweep in FILE, or go on with it if it was interrupted.

    \b
    Example:
      tune-cluster submit configs/sweeps/quickstart.yaml
    """
    from orchestrator import report, service
    from orchestrator.home import Home
    from orchestrator.signals import interrupt_on_sigterm

    with interrupt_on_sigterm(), report.LiveView() as view:
        result = service.submit(file, Home(home), observer=view)
    _print(
        as_json,
        result.summary.to_json(),
        lambda: report.render_report(
            result.state, result.summary, recorded=result.recorded, invocation=Invocation.current(home)
        ),
    )
    if result.state.status == "failed":
        click.echo(f"error: the sweep failed: {result.state.finish_reason}", err=True)
        for line in result.state.last_words:
            click.echo(f"  | {line}", err=True)
        sys.exit(EXIT_FAILED)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--why", metavar="CANDIDATE", help="Explain one: a number or name of the plan, baseline, or '{tp: 2}'.")
@click.option("--cluster", metavar="NAME", help="Plan for a cluster of configs/clusters, like dgx-h100.")
@_home_option
@_json_option
@reports_errors
def plan(file: Path, why: str | None, cluster: str | None, home: Path, as_json: bool) -> None:
    """Show what FILE would try, what the cost model expects of it, and what is ruled out and why. Starts nothing.

    What `dryrun` predicted of its candidates before is shown, and those that would not fit are ruled out.

    \b
    Examples:
      tune-cluster plan configs/sweeps/quickstart.yaml
      tune-cluster plan configs/sweeps/quickstart.yaml --why '{tp: 2, micro_batch_size: 4}'
      tune-cluster plan configs/sweeps/resnet.yaml --cluster dgx-a100
    """
    from orchestrator import planning, report_plan
    from orchestrator.home import Home

    made = planning.plan_file(file, Home(home), why=why, cluster=cluster)
    _print(as_json, made.to_json(), lambda: report_plan.render_planning(made))


@main.command()
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
    type=click.Choice(["cpu", "cuda"]),
    help="Whose memory; default: what FILE would run on, cuda where that is not known.",
)
@click.option("--exact", is_flag=True, help="Simulate all layers instead of computing them from few.")
@_home_option
@_json_option
@reports_errors
def dryrun(
    file: Path, trials: tuple[str, ...], all_legal: bool, limit: int, home: Path, as_json: bool, **options: Any
) -> None:
    """Predict the memory, FLOPs and collectives of trials of FILE, on this machine, whatever the world's size.

    \b
    Examples:
      tune-cluster dryrun configs/sweeps/quickstart.yaml
      tune-cluster dryrun configs/sweeps/quickstart.yaml --trial 3 --trial '{tp: 2, dp_replicate: 8}' \\
        --device cuda --max-device-memory 80GB
      tune-cluster dryrun configs/sweeps/quickstart.yaml --all --limit 50
    """
    from orchestrator import dryrun_command, report_dryrun
    from orchestrator.home import Home

    with report_dryrun.progress() as progress:
        num_legal = limit if all_legal else None
        verdicts = dryrun_command.dry_run(
            file, Home(home), trials=trials, num_legal=num_legal, progress=progress, **options
        )
    body = [verdict.to_json() for verdict in verdicts]
    _print(as_json, body, lambda: report_dryrun.render_dry_runs(verdicts, as_table=all_legal))
    if any(verdict.failed for verdict in verdicts):
        sys.exit(EXIT_USER)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@_home_option
@_json_option
@reports_errors
def probe(file: Path, home: Path, as_json: bool) -> None:
    """Measure matmul, copy and all-reduce rates of the cluster FILE leases; find slow nodes. Takes seconds.

    The rates are kept for `plan` and `submit`, whose cost model uses them. With cluster.exclude_slow_nodes in FILE,
    trials stay off the nodes found slow.

    \b
    Example:
      tune-cluster probe configs/sweeps/quickstart.yaml
    """
    from orchestrator import probe as probing
    from orchestrator import report_probe
    from orchestrator.home import Home

    with report_probe.progress() as progress:
        probed = probing.probe_file(file, Home(home), progress)
    _print(as_json, probed.to_json(), lambda: report_probe.render_probe(probed))


@main.command()
@click.argument("sweep", required=False)
@_home_option
@_json_option
@reports_errors
def status(sweep: str | None, home: Path, as_json: bool) -> None:
    """Show where SWEEP stands, or list all sweeps.

    \b
    Example:
      tune-cluster status quickstart
    """
    from orchestrator import report, service
    from orchestrator.home import Home

    names = [sweep] if sweep else Home(home).sweeps()
    results = [service.load(name, Home(home)) for name in names]
    body = [result.summary.to_json() for result in results]
    _print(as_json, body[0] if sweep else body, lambda: report.render_status(results))


@main.command(name="report")
@click.argument("sweep")
@_home_option
@_json_option
@reports_errors
def report_command(sweep: str, home: Path, as_json: bool) -> None:
    """Show the result of SWEEP: winner against baseline, every trial, every failure.

    \b
    Example:
      tune-cluster report quickstart
    """
    from orchestrator import report, service
    from orchestrator.home import Home

    result = service.load(sweep, Home(home))
    _print(
        as_json,
        result.summary.to_json(),
        lambda: report.render_report(
            result.state, result.summary, recorded=result.recorded, invocation=Invocation.current(home)
        ),
    )


@main.command()
@click.argument("sweep", required=False)
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True, help="Port on this host.")
@_home_option
@_json_option
@reports_errors
def ui(sweep: str | None, port: int, home: Path, as_json: bool) -> None:
    """Open the MLflow UI on the sweeps' store, on this host only, until interrupted.

    \b
    Example:
      tune-cluster ui quickstart
    """
    from orchestrator import service
    from orchestrator.home import Home

    if service.serve_ui(Home(home), sweep, port=port, announce=lambda links: _announce(links, as_json)):
        click.echo("error: the MLflow server ended by itself; its own message stands above", err=True)
        sys.exit(EXIT_FAILED)


@main.command()
@click.argument("sweep")
@click.option("--name", required=True, help="Name of the registered configuration, e.g. llama-quickstart.")
@click.option("--trial", type=int, help="Promote this trial instead of the fastest one.")
@click.option("--force", is_flag=True, help="Promote even if it was not shown faster than the baseline; recorded.")
@_home_option
@_json_option
@reports_errors
def promote(sweep: str, name: str, trial: int | None, force: bool, home: Path, as_json: bool) -> None:
    """Register the best configuration of SWEEP as NAME, alias production.

    \b
    Example:
      tune-cluster promote quickstart --name llama-quickstart
    """
    from orchestrator import report_promotion, service
    from orchestrator.home import Home

    promoted = service.promote(name, Home(home), sweep=sweep, trial=trial, force=force)
    _print(as_json, promoted, lambda: report_promotion.render_promotion(promoted, Invocation.current(home)))


@main.command()
@click.argument("reference")
@_home_option
@click.option("--tracking-uri", help="MLflow store to look in, if it is not the one in --home.")
@_json_option
@reports_errors
def show(reference: str, home: Path, tracking_uri: str | None, as_json: bool) -> None:
    """Print a registered configuration: NAME@production or NAME@3.

    \b
    Example:
      tune-cluster show llama-quickstart@production
    """
    from orchestrator import report_promotion, service
    from orchestrator.home import Home

    shown = service.show(reference, Home(home), tracking_uri=tracking_uri)
    _print(as_json, shown, lambda: report_promotion.render_recipe(shown))


def _print(as_json: bool, body: Any, render: Callable[[], Any]) -> None:
    if as_json:
        click.echo(json.dumps(body, indent=2))
        return
    from rich.console import Console

    Console().print(render())


def _announce(links: dict[str, str], as_json: bool) -> None:
    click.echo(json.dumps(links) if as_json else "\n".join(f"{what:<12} {url}" for what, url in links.items()))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
