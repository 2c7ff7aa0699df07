"""Megatron-LM as people run it: ``pretrain_gpt.py`` and its like with arguments of their own.

Names, defaults and rules are those of ``megatron/training/arguments.py`` from release 0.15 to 0.20.
"""

from __future__ import annotations

from pathlib import PurePath

from orchestrator.recipes.megatron.given import options
from orchestrator.recipes.megatron.reader import read
from orchestrator.recipes.megatron.writer import LAYING
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.training import Overlay, OverlayRequest, Run, Training
from trials.script.command import Expected, LogFormat

_MARKS = ("--micro-batch-size", "--tensor-model-parallel-size", "--num-layers", "--seq-length", "--hidden-size")
_SCRIPTS = ("pretrain_gpt.py", "pretrain_mamba.py", "pretrain_hybrid.py", "pretrain_vlm.py", "pretrain_t5.py")
_OFF = (
    "--save",
    "--load",
    "--save-interval",
    "--non-persistent-save-interval",
    "--pretrained-checkpoint",
    "--use-checkpoint-args",
    "--exit-on-missing-checkpoint",
    "--auto-detect-ckpt-format",
    "--async-save",
    "--tensorboard-dir",
    "--wandb-project",
    "--wandb-exp-name",
    "--wandb-save-dir",
    "--wandb-entity",
    "--enable-one-logger",
    "--save-config-filepath",
    "--log-progress",
    "--profile",
    "--use-pytorch-profiler",
    "--record-memory-history",
    "--full-validation",
    "--exit-duration-in-mins",
    "--rampup-batch-size",
    "--step-batch-size-schedule",
)
"""Arguments that a trial goes without: checkpoints, trackers, profilers, batches that grow."""
_GROWTH = ("--rampup-batch-size", "--step-batch-size-schedule")


def recognises(run: Run) -> bool:
    """By the script's name, or by arguments that no other framework has."""
    names = {PurePath(word).name for word in run.argv}
    given = options(Edit(run.argv))
    return bool(names & set(_SCRIPTS)) or sum(given.get(name) is not None for name in _MARKS) >= 3


def trial_mode(made: Overlay, last_step: int) -> Overlay:
    """Without checkpoints, evaluation, trackers; ``--exit-interval`` ends it and leaves the learning rate's schedule.

    Losses and gradients that are not finite end a run, as by default, unless the user said otherwise; then the count of
    such iterations in the log tells.
    """
    edit = Edit.of_overlay(made)
    given = options(edit)
    if any(given.get(name) for name in _GROWTH):
        edit.warn("micro_batch_size", f"left out: {' and '.join(_GROWTH)}; trials take the whole batch from the start")
    given.drop(*_OFF)
    for name, value in (
        ("--eval-iters", 0),
        ("--log-interval", 1),
        ("--log-memory-interval", 1),
        ("--exit-interval", last_step),
    ):
        given.put(name, value)
    given.put("--log-throughput", value=True)
    return edit.overlay()


def expected(request: OverlayRequest) -> Expected:
    """A pipeline's forward passes are not told apart; linear layers of Transformer Engine are not torch's."""
    candidate, layout = request.candidate, request.candidate.layout
    spread = layout.tp * layout.pp * (layout.dp_shard if layout.zero_stage == 3 else 1)
    return Expected(
        world_size=request.world_size,
        micro_batch_size=candidate.micro_batch_size,
        num_microbatches=None if layout.pp > 1 else request.num_microbatches,
        recomputes=True if candidate.recompute.full else None,
        parameter_shards=spread if spread > 1 else None,
    )


TRAINING = Training(
    name="megatron",
    title="Megatron-LM",
    package="megatron-core",
    releases=">=0.15,<0.21",
    log=LogFormat(name="megatron"),
    recognises=recognises,
    read=read,
    overlay=LAYING.overlay,
    trial_mode=trial_mode,
    expected=expected,
)
