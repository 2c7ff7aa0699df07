"""Made-up trajectories, and their verdicts by the loss gate."""

import json
import random
import re

from orchestrator.proof.loss_gate import GateTrajectories, Trajectory, judge_gate
from orchestrator.proof.script_gate import OTHER_SPLIT, ScriptRuns, judge_script
from orchestrator.sweep.events import GateSettings
from tests.orchestrator.proof.play import rounded
from tests.support.story import WORKLOAD
from trials.files import canonical_json, to_json
from trials.spec import ImageFolderData, LossScale, Precision, ResNetModel, Workload

N = 20
SETTINGS = GateSettings(num_steps=N)
FP32 = Precision()
BF16 = Precision(level="O1", dtype="bfloat16")
FP16 = Precision(level="O2", dtype="float16", loss_scale=LossScale())
IMAGES = Workload(model=ResNetModel(depth=18), data=ImageFolderData(), seq_length=1, global_batch_size=8)
LOSSES = tuple(5.0 * 0.97**i for i in range(N))
NORMS = tuple(2.0 * 0.98**i for i in range(N))


def run(losses=LOSSES, norms=NORMS, precision=FP32, **fields):
    skipped = sum(norm == 0.0 for norm in norms)
    return Trajectory(
        losses=tuple(losses), grad_norms=tuple(norms), num_skipped_steps=skipped, precision=precision, **fields
    )


def judge(finalist, baseline=None, **options):
    settings, workload = options.pop("settings", SETTINGS), options.pop("workload", None)
    runs = GateTrajectories(baseline=baseline or run(), finalist=finalist, **options)
    return sound(judge_gate(7, runs, settings, workload))


def sound(report):
    assert report.passed == (not report.reasons and not report.doubts)
    assert bool(report.reasons) + bool(report.doubts) <= 1 and report.answer in ("passed", "failed", "inconclusive")
    canonical_json(report)  # the ledger takes it: nothing in it is infinite
    return report


WORD = re.compile(r"(losses|norms)(?:\[(\d+)(?:-(\d+))?\])?([*=])([^@]+)(?:@(\d+))?")
FORMATS = {"fp32": FP32, "bf16": BF16, "fp16": FP16}


def _changed(values, first, last, sign, number):
    def on(step, value):
        return value if not first <= step <= last else value * number if sign == "*" else number

    return [on(step, value) for step, value in enumerate(values, start=1)]


def _trajectory(words, values, make):
    """``losses*1.01@6`` scales from step 6 on, ``norms[2-11]=3`` sets steps; ``steps=5`` cuts, ``steps=21`` adds."""
    fields = {}
    for word in words:
        if found := WORD.fullmatch(word):
            name, first, last, sign, number, since = found.groups()
            first = int(first or since or 1)
            values[name] = _changed(
                values[name], first, int(last or first) if not since and found[2] else N, sign, float(number)
            )
        elif word in FORMATS:
            fields["precision"] = FORMATS[word]
        elif word == "behind":
            values["losses"] = [*values["losses"][:1] * 3, *values["losses"][1:-2]]
        else:
            name, _, value = word.partition("=")
            if name == "steps":
                values = {key: [*one, 99.0][: int(value)] for key, one in values.items()}
            else:
                fields[name] = int(value) if value.isdigit() else value
    return make(values["losses"], values["norms"], **fields)


def _parts(question):
    """By role its words; ``with`` has the options."""
    found = [part.split() for part in question.split(";")]
    return {words[0]: words[1:] for words in found}


def _options(words):
    values = dict(word.split("=") for word in words)
    limits = {name: float(values[name]) for name in ("loss_tolerance", "grad_norm_tolerance") if name in values}
    return GateSettings(num_steps=int(values.get("num_steps", N)), **limits), values


def gates(question):
    """``ROLE WORDS; ...``: what is judged, each as a change of the same run."""
    parts = _parts(question)
    settings, values = _options(parts.pop("with", []))
    runs = {
        role: _trajectory(words, {"losses": LOSSES, "norms": NORMS}, run)
        for role, words in {"baseline": [], **parts}.items()
    }
    workload = {"images": IMAGES, "llama": WORKLOAD}.get(values.get("workload"))
    return as_text(sound(judge_gate(7, GateTrajectories(**runs), settings, workload)))


def falling(noise=0.0, *, seed=0, factor=1.0, num_steps=N, precision=None, digits=None, norms=()):
    """Losses from 8 to 5 with relative ``noise`` per step."""
    draw = random.Random(seed)
    losses = [factor * (8 - 3 * i / num_steps) * (1 + draw.gauss(0, noise)) for i in range(num_steps)]
    resolution = 0.0
    if digits is not None:
        losses, resolution = [round(value, digits) for value in losses], 0.5 * 10.0**-digits
    return Trajectory(
        losses=tuple(losses),
        grad_norms=tuple(norms),
        num_skipped_steps=0,
        precision=precision or FP32,
        loss_resolution=resolution,
    )


def judged(finalist, *, baseline=None, again=None, alike=True, settings=SETTINGS):
    baseline = baseline or falling()
    runs = ScriptRuns(
        baseline=baseline, again=again or baseline, finalist=finalist, differs="" if alike else OTHER_SPLIT
    )
    return judge_script(3, runs, settings)


def script_gates(question):
    """``ROLE NAME=VALUE ...; ...`` of the runs of a user's own program; ``with alike=0`` where splits differ."""
    parts = _parts(question)
    settings, values = _options(parts.pop("with", []))
    runs = {}
    for role, words in parts.items():
        given = dict(word.split("=") for word in words)
        options = {
            name: int(text) if text.isdigit() else float(text) for name, text in given.items() if name != "precision"
        }
        if "norms" in options:
            options["norms"] = [options["norms"]] * N
        nothing = options.pop("losses", None) == 0
        made = falling(**options, precision=FORMATS.get(given.get("precision")))
        runs[role] = Trajectory(losses=(), grad_norms=(), num_skipped_steps=0, precision=FP32) if nothing else made
    return as_text(sound(judged(**runs, alike=values.get("alike") != "0", settings=settings)))


def as_text(report):
    return json.dumps(rounded(to_json(report)), ensure_ascii=False, indent=0).strip("{}\n")
