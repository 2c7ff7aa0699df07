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


_MODEL = "Model to train: a Hugging Face config.json, a directory that contains one, or a model file."
_ADDRESS = "Defaults to `$RAY_ADDRESS`, then to `cluster.address` in FILE."
_OUTPUT = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.option("--recipe", metavar="NAME", help="Framework that COMMAND uses. Detected by default.")
@click.option("--model", type=click.Path(path_type=Path), help=_MODEL)
@click.option("--parameters", metavar="SIZE", help="Use a Llama model of this size, such as 13B, instead of `--model`.")
@click.option("--cluster", metavar="NAME|FILE", help=CLUSTER_HELP)
@click.option("--address", metavar="HOST:PORT", help="Address of the Ray cluster to use. Defaults to this machine.")
@click.option("--nodes", type=click.IntRange(1), help="Number of nodes to use. Defaults to all nodes in the cluster.")
@click.option(
    "--devices-per-node", type=click.IntRange(1), help="Number of devices to use on each node. Defaults to all of them."
)
@click.option(
    "--seq-length", type=click.IntRange(1), help="Tokens per sequence. Defaults to the model's maximum, up to 4096."
)
@click.option(
    "--global-batch-size",
    type=click.IntRange(1),
    help="Sequences per optimiser step. Defaults to a typical value for the model.",
)
@click.option(
    "--max-trials", type=click.IntRange(1), help="Maximum number of trials. Defaults to 25, or to 12 on CPUs."
)
@click.option("--name", help="Name of the sweep. Defaults to the name of the script or model.")
@click.option(
    "--output", "-o", type=_OUTPUT, help="File to write. Defaults to sweep.yaml, or to NAME.yaml with `--example`."
)
@click.option(
    "--run/--no-run",
    "runs",
    default=True,
    show_default=True,
    help="Run COMMAND for a few training steps to detect its batch size and what its options do.",
)
@click.option(
    "--run-time",
    type=click.FloatRange(1),
    default=180.0,
    show_default=True,
    help="Total time limit for running COMMAND, in seconds, without waiting for devices.",
)
@click.option("--example", metavar="NAME", help="Write the example NAME instead (see `--list`).")
@click.option("--list", "list_examples", is_flag=True, help="List the examples and exit.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.option("--yes", is_flag=True, help="Do not prompt for missing values.")
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
    """Generate a starter sweep file for a command or a model.

    Given a training COMMAND, parses it, runs it for three steps to detect the batch size, then reruns it with each
    promising option changed to see what the option does. Lists everything that could not be parsed or detected. With
    `--no-run`, only parses the command.

    With `--model` or `--parameters`, uses the cost model to choose a typical baseline that fits in memory. Replace this
    baseline with your current configuration. To tune for a cluster that you do not have, simulate it with `--cluster`.

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
        words = "Cluster (HOST:PORT of a Ray head node, a name like dgx-h100, or empty for this host)"
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
        program.command("check", str(file)): "run three training steps to check that trials can be measured",
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
@click.option("--address", metavar="HOST:PORT", help=f"Address of the Ray cluster to check. {_ADDRESS}")
@home_option
@json_option
def doctor(file: Path | None, address: str | None, home: Path, as_json: bool) -> None:
    """Check that this machine can run sweeps.

    Checks PyTorch, devices, Ray, MLflow, disk, memory, limits and load. Reports `ok`, `warn` or `fail` for each check,
    and suggests a fix for each problem. Changes nothing and starts nothing. Exits with code 1 if a check fails.

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
    help="Candidate to explain: `baseline`, a number or name from the plan, or knobs such as '{tp: 2}'.",
)
@click.option("--cluster", metavar="NAME|FILE", help=CLUSTER_HELP)
@home_option
@json_option
def plan(file: Path, why: str | None, cluster: str | None, home: Path, as_json: bool) -> None:
    """Show what a sweep would try, without running it.

    Lists the candidates generated from FILE with their predicted step time and memory, and shows which ones are ruled
    out and why. Shows any results from earlier dry runs, and rules out candidates that would not fit in memory.

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
    help="Candidate to simulate: `baseline` (the default), a number or name from `plan`, or knobs to change in the "
    "baseline, such as '{tp: 2}'. Can be repeated.",
)
@click.option(
    "--all",
    "all_legal",
    is_flag=True,
    help="Simulate the valid candidates, up to `--limit`. `plan` and `submit` reuse the results.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="With `--all`, simulate only the first N candidates in the plan.",
)
@click.option(
    "--max-device-memory",
    metavar="SIZE",
    help="Memory limit per device, such as 80GB. Defaults to `cluster.device_memory` in FILE, or to the memory of this "
    "machine's GPUs.",
)
@click.option(
    "--fragmentation",
    type=click.FloatRange(0.0, 1.0),
    default=FRAGMENTATION,
    show_default=True,
    help="Extra memory that the allocator reserves, as a fraction of live memory.",
)
@click.option(
    "--device",
    type=click.Choice(list(FAMILIES)),
    help="Type of device to simulate. Defaults to the one in FILE, or to `cuda` if FILE specifies none.",
)
@click.option("--exact", is_flag=True, help="Simulate every layer instead of extrapolating from a few.")
@home_option
@json_option
def dryrun(
    file: Path, trials: tuple[str, ...], all_legal: bool, limit: int, home: Path, as_json: bool, **options: Any
) -> None:
    """Estimate candidates' memory use and FLOPs without running them.

    Simulates candidates from FILE on this machine, at any world size, and reports memory use, FLOPs and collectives.

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
    """Benchmark the cluster and find slow nodes.

    Measures the matmul, copy and all-reduce throughput of the cluster described in FILE, and saves the results for the
    cost model that `plan` and `submit` use. This takes a few seconds. If `cluster.exclude_slow_nodes` is set in FILE,
    no trials are scheduled on slow nodes.

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
@click.option("--address", metavar="HOST:PORT", help=f"Address of the Ray cluster to run on. {_ADDRESS}")
@home_option
@json_option
def check(file: Path, address: str | None, home: Path, as_json: bool) -> None:
    """Run three training steps to check that trials can be measured.

    Runs the smallest candidate in FILE, compares the recorded values with those declared in FILE, and suggests a fix
    for each mismatch. Shows how step time, loss and memory are measured, whether each knob takes effect, and how long
    the program takes to start. If `space.inside` is set, a second run shows which of its knobs the program rejects.

    `submit` begins with the same check, unless you pass `--no-check`. Exits with code 2 if something must be fixed
    before trials can be measured.

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
