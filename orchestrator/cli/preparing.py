"""The commands that prepare a sweep: init, doctor, plan, dryrun, probe, check."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.options import CLUSTER_HELP, home_option, json_option, print_result
from orchestrator.errors import ExitCode
from orchestrator.text import echo
from trials.accelerator.kinds import FAMILIES
from trials.dryrun.estimate import FRAGMENTATION

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchestrator.commands.init import Questions
    from orchestrator.draft.command_draft import ScriptDraft
    from orchestrator.draft.draft import SweepDraft


# Getting started: write a first sweep file, and check that this machine can run it.


_MODEL = "A Hugging Face config.json, a folder with one, or a model file."
_OUTPUT = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.option("--recipe", metavar="NAME", help="Framework of COMMAND; default: detected.")
@click.option("--model", type=click.Path(path_type=Path), help=_MODEL)
@click.option("--parameters", metavar="SIZE", help="Instead of --model: a Llama of this size, like 13B.")
@click.option("--cluster", metavar="NAME|FILE", help=CLUSTER_HELP)
@click.option("--address", metavar="HOST:PORT", help="A running Ray cluster; default: this host.")
@click.option("--nodes", type=click.IntRange(1), help="Number of nodes; default: all nodes of the cluster.")
@click.option("--devices-per-node", type=click.IntRange(1), help="Devices per node; default: all.")
@click.option("--seq-length", type=click.IntRange(1), help="Tokens per sequence; default: the model's, up to 4096.")
@click.option("--global-batch-size", type=click.IntRange(1), help="Sequences per step; default: typical for the model.")
@click.option("--max-trials", type=click.IntRange(1), help="Maximum number of trials; default: 25, or 12 on CPUs.")
@click.option("--name", help="Name of the sweep; default: the model's name.")
@click.option("--output", "-o", type=_OUTPUT, help="File to write; default: sweep.yaml, or NAME.yaml.")
@click.option(
    "--run/--no-run", "runs", default=True, help="Run COMMAND for a few steps to detect its batch size (default)."
)
@click.option(
    "--run-time",
    type=click.FloatRange(1),
    default=180.0,
    show_default=True,
    help="Time limit for all runs of COMMAND together, in seconds.",
)
@click.option("--example", metavar="NAME", help="Write this example instead; --list shows them.")
@click.option("--list", "list_examples", is_flag=True, help="List the examples and exit.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.option("--yes", is_flag=True, help="Do not prompt.")
@json_option
def init(
    command: tuple[str, ...],
    recipe: str | None,
    output: Path | None,
    example: str | None,
    list_examples: bool,
    force: bool,
    yes: bool,
    as_json: bool,
    runs: bool,
    run_time: float,
    **questions_asked: Any,
) -> None:
    """Write a first sweep file for a command or a model.

    With a training COMMAND, init parses it, runs it for three steps to detect the batch size, and runs it again with
    each promising option changed, to find out what the option does. It lists whatever it could not parse or detect;
    --no-run only parses. With --model or --parameters, the cost model chooses a typical baseline that fits into memory:
    replace it with your current configuration. --cluster simulates a cluster from its description.

    \b
    Examples:
      tune-cluster init -- torchrun --nproc-per-node 2 train.py --bs 4
      tune-cluster init train.py
      tune-cluster init --no-run -- python train.py data.batch_size=16
      tune-cluster init --recipe deepspeed -- deepspeed train.py --bs 16
      tune-cluster init --model config.json --cluster dgx-h100 --nodes 8
      tune-cluster init --parameters 1B
      tune-cluster init --example quickstart
    """
    from orchestrator.commands import init as init_command

    if list_examples:
        found = init_command.examples()
        print_result(as_json, found, lambda: _listed(found))
        return
    if example is not None:
        files = init_command.copy_example(example, output or Path(f"{example}.yaml"), force=force)
        print_result(as_json, {"files": [str(file) for file in files]}, lambda: _next_steps(files[0], files))
        return
    questions = init_command.Questions(**questions_asked)
    file = output or Path("sweep.yaml")
    if command or recipe is not None:
        detection_s = run_time if runs else None
        _init_program(command, recipe, questions, file, force=force, as_json=as_json, detection_s=detection_s)
        return
    if sys.stdin.isatty() and not yes and not as_json:
        questions = _ask_user(questions)
    draft = init_command.draft_sweep(questions, file, force=force)
    print_result(as_json, init_command.init_json(draft, file), lambda: _drafted(draft, file))


def _init_program(
    command: tuple[str, ...],
    recipe: str | None,
    questions: Questions,
    file: Path,
    *,
    force: bool,
    as_json: bool,
    detection_s: float | None,
) -> None:
    """Write a sweep file for a training program: drafted from its command, or a template for its framework."""
    from orchestrator.commands import init as init_command

    if command:
        script = init_command.draft_command(
            command, questions, file, recipe=recipe, force=force, detection_s=detection_s, notify=_print_line
        )
        print_result(as_json, init_command.init_json(script, file), lambda: _drafted_script(script, file))
    elif recipe is not None:
        init_command.write_skeleton(recipe, questions, file, force=force)
        body = {"file": str(file), "recipe": recipe}
        print_result(as_json, body, lambda: f"Wrote {file}. Fill in your command, then run: tune-cluster check {file}")


def _print_line(line: str) -> None:
    echo(f"init: {line}", err=True)


def _ask_user(questions: Questions) -> Questions:
    """Prompt for missing values; an empty answer keeps the default."""
    if questions.model is None and questions.parameters is None:
        answer = click.prompt("Model (path of a Hugging Face config.json, or a size like 13B)", err=True)
        is_path = Path(answer).exists() or "/" in answer or answer.endswith(".json")
        questions = replace(questions, model=Path(answer)) if is_path else replace(questions, parameters=answer)
    if questions.cluster is None and questions.address is None:
        words = "Cluster (HOST:PORT of a Ray head, a name like dgx-h100, or empty for this host)"
        answer = click.prompt(words, default="", show_default=False, err=True)
        if ":" in answer:
            questions = replace(questions, address=answer)
        elif answer:
            nodes = questions.nodes or click.prompt("Nodes", type=click.IntRange(1), default=1, err=True)
            questions = replace(questions, cluster=answer, nodes=nodes)
    return questions


def _listed(found: dict[str, str]) -> str:
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {about}" for name, about in found.items())


def _drafted(draft: SweepDraft, file: Path) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from orchestrator.draft.draft import expected_text

    lines = [f"hardware  {draft.hardware}{', simulated' if draft.simulated else ''}"]
    expected = draft.choices.prediction
    if expected is not None:
        lines.append(f"baseline  expected: {expected_text(expected)}")
    if draft.differences:
        lines.append(f"model     approximated: {'; '.join(draft.differences)}")
    advice = "Set `baseline` to your current configuration. "
    return Group(_next_steps(file, (file,), advice), "", *map(Text, lines))


def _drafted_script(draft: ScriptDraft, file: Path) -> RenderableType:
    import shlex

    from rich.console import Group
    from rich.text import Text

    from orchestrator.process_support import DEFAULT_HOME, Invocation
    from orchestrator.terminal.fitted import NextCommands, indented, label_grid

    grid = label_grid()
    grid.add_row("program", draft.title)
    grid.add_row("command", shlex.join(draft.run))
    grid.add_row("batch", f"{draft.global_batch_size} samples per optimiser step")
    grid.add_row("hardware", draft.hardware)
    if draft.detected.is_seen:
        grid.add_row("detected", draft.detected.words)
    for proof in draft.detected.proofs.values():
        grid.add_row("proven", f"{proof.option.names[0]}: {proof.before} became {proof.after} in a test run")
    if draft.detected.problem:
        grid.add_row("not detected", draft.detected.problem)
    for remark in draft.remarks:
        grid.add_row("not parsed", remark)
    program = Invocation.current(DEFAULT_HOME)
    steps = {
        program.command("check", str(file)): "run three steps to check that trials can be measured",
        program.command("submit", str(file)): "run the same check, then the sweep",
    }
    return Group(Text(f"Wrote {file}"), indented(grid), Text("Next:"), indented(NextCommands(steps)))


def _next_steps(file: Path, files: tuple[Path, ...], advice: str = "") -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from orchestrator.process_support import DEFAULT_HOME, Invocation
    from orchestrator.terminal.fitted import NextCommands, indented

    program = Invocation.current(DEFAULT_HOME)
    steps = {
        program.command("plan", str(file)): "show what it would try, without running it",
        program.command("submit", str(file)): "run the sweep",
    }
    written = f"Wrote {', '.join(str(path) for path in files)}. {advice}Next:"
    return Group(Text(written), indented(NextCommands(steps)))


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--address", metavar="HOST:PORT", help="Ray cluster to check; default: RAY_ADDRESS, or the one in FILE.")
@home_option
@json_option
def doctor(file: Path | None, address: str | None, home: Path, as_json: bool) -> None:
    """Check that this host can run sweeps.

    Checks torch, devices, Ray, MLflow, disk, memory, limits and load. Reports ok, warn or fail for each
    check, and a remedy for each problem.
    Changes nothing and starts nothing. Exit code 0: sweeps can run; 1: something must be fixed first.

    \b
    Examples:
      tune-cluster doctor
      tune-cluster doctor sweep.yaml
      tune-cluster doctor --address HOST:PORT --json
    """
    from orchestrator.doctor import examine
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal.plan_screen import render_doctor

    diagnosed = examine(Home(home), file=file, address=address)
    print_result(as_json, diagnosed.to_json(), lambda: render_doctor(diagnosed))
    if diagnosed.num_failed:
        sys.exit(ExitCode.FAILED)


# Before a sweep: what it would try, how much memory that needs, how fast the cluster is.


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--why",
    metavar="CANDIDATE",
    help="Candidate to explain: baseline, its number or name in the plan, or knobs like '{tp: 2}'.",
)
@click.option("--cluster", metavar="NAME|FILE", help=CLUSTER_HELP)
@home_option
@json_option
def plan(file: Path, why: str | None, cluster: str | None, home: Path, as_json: bool) -> None:
    """Show what a sweep would try, without running it.

    Lists the candidates of FILE with the cost model's predictions, and what is ruled out and why. Uses the results of
    earlier dry runs: it shows them, and rules out candidates that would not fit into memory.

    \b
    Examples:
      tune-cluster plan configs/sweeps/quickstart.yaml
      tune-cluster plan configs/sweeps/quickstart.yaml --why '{tp: 2}'
      tune-cluster plan configs/sweeps/resnet.yaml --cluster dgx-a100
    """
    from orchestrator.commands.forecast import plan_file
    from orchestrator.console import counted_progress
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal.plan_screen import render_planned_file

    with counted_progress("balancing stages", "layout") as progress:
        planned = plan_file(file, Home(home), why=why, cluster=cluster, progress=progress)
    print_result(as_json, planned.to_json, lambda: render_planned_file(planned))


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--trial",
    "trials",
    multiple=True,
    help="Trial to simulate: baseline (the default), a number or name from `plan`, or knobs to change in the baseline, "
    "like '{tp: 2}'. Repeatable.",
)
@click.option("--all", "all_legal", is_flag=True, help="All legal candidates; `plan` and `submit` use the results.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Maximum number of candidates with --all, in the order of the plan.",
)
@click.option(
    "--max-device-memory",
    metavar="SIZE",
    help='Memory of a device, such as "80GB"; default: device_memory in FILE, or that of the GPUs on this host.',
)
@click.option(
    "--fragmentation",
    type=click.FloatRange(0.0, 1.0),
    default=FRAGMENTATION,
    show_default=True,
    help="Memory that the allocator reserves on top of live memory, as a fraction of live memory.",
)
@click.option(
    "--device",
    type=click.Choice(list(FAMILIES)),
    help="Device to simulate; default: the one in FILE, or cuda if unknown.",
)
@click.option("--exact", is_flag=True, help="Simulate all layers instead of extrapolating from a few.")
@home_option
@json_option
def dryrun(
    file: Path, trials: tuple[str, ...], all_legal: bool, limit: int, home: Path, as_json: bool, **options: Any
) -> None:
    """Estimate memory and FLOPs of trials without running them.

    Simulates trials of FILE on this machine, at any world size, and reports memory, FLOPs and collectives.

    \b
    Examples:
      tune-cluster dryrun configs/sweeps/quickstart.yaml
      tune-cluster dryrun configs/sweeps/quickstart.yaml --trial 3 \\
        --trial '{tp: 2, dp_replicate: 8}' --max-device-memory 80GB
      tune-cluster dryrun configs/sweeps/quickstart.yaml --all --limit 50
    """
    from orchestrator.commands import forecast
    from orchestrator.console import counted_progress
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import plan_screen

    with counted_progress("dry run", "simulation") as progress:
        num_legal = limit if all_legal else None
        verdicts = forecast.dry_run(file, Home(home), trials=trials, num_legal=num_legal, progress=progress, **options)
    body = [verdict.to_json() for verdict in verdicts]
    print_result(as_json, body, lambda: plan_screen.render_dry_runs(verdicts, as_table=all_legal))
    if any(verdict.failed for verdict in verdicts):
        sys.exit(ExitCode.USAGE)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@home_option
@json_option
def probe(file: Path, home: Path, as_json: bool) -> None:
    """Measure the cluster's hardware and find slow nodes.

    Measures matmul, copy and all-reduce rates of the cluster in FILE, and saves them for the cost model of `plan` and
    `submit`. Takes seconds. With cluster.exclude_slow_nodes in FILE, trials avoid the slow nodes.

    \b
    Example:
      tune-cluster probe configs/sweeps/quickstart.yaml
    """
    from orchestrator.commands.forecast import probe_file
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal.plan_screen import progress, render_probe

    with progress() as show:
        probed = probe_file(file, Home(home), show)
    print_result(as_json, probed.to_json(), lambda: render_probe(probed))


# A short test run finds mistakes in a sweep file before a sweep is spent on them.


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--address", metavar="HOST:PORT", help="Ray cluster to run on; default: RAY_ADDRESS, or the one in FILE.")
@home_option
@json_option
def check(file: Path, address: str | None, home: Path, as_json: bool) -> None:
    """Run three steps to check that trials can be measured.

    Runs the smallest candidate of FILE, compares what the hook records with the numbers in FILE, and names a remedy for
    each difference. Shows where step time, loss and memory come from, whether the knobs take effect, and how long the
    program takes to start. With `space.inside`, a second run shows which of its knobs the program rejects. `submit`
    starts with the same three-step run, unless --no-check is given. Exit code 0: trials can be measured; 2: something
    must be fixed first.

    \b
    Examples:
      tune-cluster check sweep.yaml
      tune-cluster check sweep.yaml --json
    """
    from orchestrator.commands.short_run import check_file
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal.plan_screen import render_checked

    checked = check_file(file, Home(home), address=address, notify=lambda line: echo(line, err=True))
    print_result(as_json, checked.to_json(), lambda: render_checked(checked))
    if not checked.is_good:
        sys.exit(ExitCode.USAGE)


COMMANDS = (init, doctor, plan, dryrun, probe, check)
