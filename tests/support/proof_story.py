"""A sweep with its proof, for tests of what is shown and recorded: rounds, gate runs, a profile, the verdict."""

from __future__ import annotations

import math
from dataclasses import replace

from orchestrator.sweep.events import (
    ConfirmationRun,
    ConfirmSettings,
    Evaluation,
    EvaluationEnded,
    FinalistsChosen,
    FinishCause,
    GateReport,
    GateRun,
    GateSettings,
    ProfileRun,
    Promoted,
    ProofSettings,
    RatioInterval,
    StepsJudged,
    SweepFinished,
    Verdict,
    VerdictReached,
)
from tests.support.long_story import START_S, all_kinds, candidate, events
from tests.support.story import ended, launched, measured, proposed
from trials.spec import ProfileSpec

PROOF = ProofSettings(confirm=ConfirmSettings(), gate=GateSettings(num_steps=20))
NUM_ROUNDS = 4
NUM_STEPS = 20


def trained(step_time_s, shift=0.0):
    """A gate run: the loss falls, ``shift`` away from where it should be."""
    losses = tuple((5.5 * math.exp(-0.03 * step)) * (1 + shift * step / NUM_STEPS) for step in range(NUM_STEPS))
    return measured(step_time_s, world_size=2, losses=losses, grad_norms=tuple(1.0 + 0.01 * loss for loss in losses))


def _verdict(conclusion):
    report = GateReport(
        trial=1,
        passed=conclusion == "confirmed",
        reasons=() if conclusion == "confirmed" else ("the loss at step 17 is 3% off",),
        precision_class="float32 against float32",
        compared_with="baseline",
        num_steps=NUM_STEPS,
        loss_tolerance=0.01,
        grad_norm_tolerance=0.1,
        loss_deviation=0.0004 if conclusion == "confirmed" else 0.03,
        grad_norm_deviation=0.001,
        loss=StepsJudged(median=0.0004, num_compared=NUM_STEPS, num_beyond=0, num_allowed=0),
        grad_norm=StepsJudged(median=0.001, num_compared=NUM_STEPS, num_beyond=3, num_allowed=10),
    )
    reasons = {
        "confirmed": f"t001 is faster than the baseline in {NUM_ROUNDS} rounds",
        "keep": "t001 does not match the baseline's losses: the loss at step 17 is 3% off",
        "unconfirmed": "the budget of 1 device-hour was used up",
    }
    return Verdict(
        conclusion=conclusion,
        winner=1 if conclusion == "confirmed" else None,
        reason=reasons[conclusion],
        speedup=RatioInterval(value=1.25, low=1.2, high=1.3),
        num_rounds=NUM_ROUNDS,
        gates=(report,),
        evaluations=(Evaluation(trial=1, passed=True, exit_code=0, output_tail=("perplexity 12",)),),
    )


def proof_events(conclusion="confirmed", *, search=None, is_promoted=False):
    """A search of every kind of trial, then four rounds of t001 and t002 with the baseline, a gate run of baseline and
    t001, and a profile of t001."""
    story = events(search or all_kinds(), finished=False)
    story[0] = replace(story[0], proof=PROOF)
    first = sum(event.kind == "trial_proposed" for event in story)
    at_s = START_S + 10.0 * first + 20.0
    story.append(
        FinalistsChosen(
            at_s=at_s, finalists=(1, 2), reason="the fastest", first_check=first, cause=FinishCause.BUDGET_TRIALS
        )
    )
    shift = 0.0 if conclusion == "confirmed" else 0.04
    runs = []
    for number in range(NUM_ROUNDS):
        drift = 1 + 0.01 * (-1) ** number
        for of, step_time_s in ((0, 0.1), (1, 0.08), (2, 0.0995)):
            runs.append((ConfirmationRun(of=of, round=number), measured(step_time_s * drift, world_size=2)))
    runs += [(GateRun(of=0, role="baseline"), trained(0.1)), (GateRun(of=1, role="finalist"), trained(0.08, shift))]
    profile = (ProfileRun(of=1, profile=ProfileSpec()), measured(0.12, world_size=2))
    for i, (check, outcome) in enumerate([*runs, profile]):
        if check == profile[0]:
            at_s += 10.0
            story.append(EvaluationEnded(at_s=at_s, evaluation=_verdict(conclusion).evaluations[0]))
            story.append(VerdictReached(at_s=at_s, verdict=_verdict(conclusion)))
        at_s += 10.0
        number = first + i
        event = proposed(number, candidate(check.of), at_s=at_s)
        story.append(replace(event, origin="check", check=check, reason="to be sure"))
        story.append(launched(number, at_s=at_s + 1.0))
        story.append(ended(number, outcome, at_s=at_s + 9.0))
    story.append(
        SweepFinished(
            at_s=at_s + 10.0, status="finished", reason="every legal candidate was tried", cause=FinishCause.EXHAUSTED
        )
    )
    if is_promoted:
        record = {"action": "promote", "name": "llama", "from_version": "", "to_version": "1", "trial": "1"}
        more = {"by": "me@host", "reason": "", "forced": "false", "recipe_sha256": "0" * 64, "record_id": "r"}
        story.append(Promoted(at_s=at_s + 20.0, record=record | more))
    return story
