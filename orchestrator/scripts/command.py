"""What a rank is told of a trial of a training program of the user's own."""

from __future__ import annotations

from orchestrator.scripts.overlay import file_names, render, request_of
from orchestrator.scripts.script import Script
from trials import flops
from trials.script.command import CommandFile, ScriptCommand
from trials.spec import Candidate, Protocol

RUNNER = "trials.script.runner:run_rank"
"""Function that every rank of such a trial runs."""
MARGIN_STEPS = 4
"""Steps that a program is asked for beyond those that are needed: it shall not begin to end while it is measured."""


def last_step(protocol: Protocol) -> int:
    """The step at which a trial's program is asked to end."""
    return protocol.min_warmup_steps + protocol.num_steps + MARGIN_STEPS


def script_command(
    script: Script,
    candidate: Candidate,
    protocol: Protocol,
    *,
    device: str,
    memory_limit_bytes: int | None = None,
    cache_dir: str | None = None,
    env_pass: tuple[str, ...] = (),
) -> ScriptCommand:
    """The command of one trial: the candidate laid over the user's own, in trial mode.

    Args:
        env_pass: variables of the ranks' environment that the program sees besides those that the file names.

    Raises:
        ConfigError: a file of the user's that cannot be changed.
    """
    workload, shape = script.workload, script.model.shape
    laid = render(script, candidate, last_step=last_step(protocol), device=device)
    names = file_names(script, laid.files)
    return ScriptCommand(
        argv=laid.argv,
        cwd=script.run.cwd,
        env=tuple(sorted(laid.env.items())),
        env_pass=(*script.env_pass, *env_pass),
        files=tuple(CommandFile(name=name, file_name=names[name], text=text) for name, text in laid.files.items()),
        launcher=script.model.launcher,
        log=script.log,
        hook=script.hook,
        protocol=protocol,
        num_devices=candidate.layout.world_size,
        tokens_per_step=workload.tokens_per_step,
        samples_per_step=workload.global_batch_size,
        expected=script.training.expected(request_of(script, candidate, device)),
        device=device,
        memory_limit_bytes=memory_limit_bytes,
        model_flops_per_token=0.0 if shape is None else flops.model_flops_per_token(shape, workload.seq_length),
        cache_dir=cache_dir,
    )
