"""Predictions and guided proposals for workloads that are no decoders: by formula, and as dry runs counted."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from cluster.cost.generic import _sent_bytes, generic_step_seconds
from cluster.cost.inputs import load_prior
from cluster.hardware.topology import load_cluster
from cluster.virtual import ModelledCost
from orchestrator.cli.main import main
from orchestrator.search.predictor import Predictor
from orchestrator.search.search import GuidedSearch, Search
from orchestrator.space.notation import flat_params
from orchestrator.sweep.events import Budget
from orchestrator.sweep.fold import fold
from tests.support.story import created, ended, launched, measured, proposed
from tests.support.virtual_sweeps import submit
from trials.dryrun.estimate import DryRunEstimate, StageEstimate, Traffic
from trials.sizes import model_flops_per_token, num_parameters
from trials.spec import (
    Candidate,
    ImageFolderData,
    Kernels,
    Layout,
    LinearModel,
    Loader,
    Precision,
    RandomData,
    ResNetModel,
    TrialSpec,
    Workload,
)

RESNET = Workload(model=ResNetModel(), data=ImageFolderData(), seq_length=1, global_batch_size=256)
AMP = Precision(level="O1", dtype="bfloat16")
CANDIDATES = [
    Candidate(
        layout=Layout(dp_replicate=dp),
        micro_batch_size=size,
        precision=AMP,
        loader=Loader(num_workers=workers, prefetch_factor=2 if workers else 0),
        kernels=Kernels(memory_format=memory_format),
    )
    for dp in (1, 4)
    for size in (16, 64)
    for workers in (0, 2, 8)
    for memory_format in ("nchw", "nhwc")
]


def predictor(workload=RESNET, candidates=CANDIDATES, **options):
    return Predictor(workload, candidates, load_cluster("dgx-a100"), features=flat_params, **options)


def counted(peak_bytes=12 * 10**9):
    """What a dry run might say of 64 images per step on one of four ranks."""
    forward = RESNET.global_batch_size / 4 * model_flops_per_token(RESNET.model, 1) / 3
    stage = StageEstimate(
        stage=0,
        rank=0,
        peak_bytes=peak_bytes,
        peak_by_category={"param": 10**8, "grad": 10**8, "optimizer": 2 * 10**8, "activation": peak_bytes - 4 * 10**8},
        peak_phase="backward",
        flops={"forward": int(forward), "backward": int(2 * forward), "recompute": 0},
        collectives={"all_reduce": Traffic(num_calls=5, num_bytes=10**8)},
        num_parameters=25 * 10**6,
    )
    return DryRunEstimate(stages=(stage,))


def test_the_formula_matches_resnet_50():
    """4.1 billion multiplications and 25.6 million parameters; 22 million kept elements are 44 MB per image."""
    x = predictor().inputs
    assert x.forward_flops[0] == pytest.approx(8.2e9, rel=0.02)
    assert x.num_params[0] == pytest.approx(25.56e6, rel=0.01)
    assert x.activation_bytes[0] == pytest.approx(44e6, rel=0.05)
    assert x.transfer_bytes[0] == 0 and x.transfer_bytes[-1] == pytest.approx(1.5 * 4 * 25.56e6, rel=0.01)


@pytest.mark.parametrize(("level", "gathered"), [("O0", 4), ("O1", 4), ("O2", 2)])
def test_zero_3_gathers_fp32_weights_below_o2_and_reduces_in_fp32(level, gathered):
    precision = Precision(level=level, dtype="float32" if level == "O0" else "bfloat16")
    layout = Layout(dp_shard=2, zero_stage=3)
    candidate = Candidate(layout=layout, micro_batch_size=RESNET.global_batch_size // 4, precision=precision)
    weights = num_parameters(RESNET.model)
    assert _sent_bytes(RESNET, candidate) == weights / 2 * (2 * 2 * gathered + 2 * 4), "two micro-batches"


def test_terms_add_up_and_a_dry_run_counts_before_the_formula():
    known = next(c for c in CANDIDATES if c.layout.dp == 4 and c.micro_batch_size == 64)
    by_formula, by_dry_run = predictor(), predictor(estimates={known: counted()})
    for found in (by_formula, by_dry_run):
        np.testing.assert_allclose(np.sum(list(found.estimates.step_terms_s.values()), axis=0), found.estimates.step_s)
    alike = [i for i, c in enumerate(CANDIDATES) if (c.layout, c.micro_batch_size) == (known.layout, 64)]
    others = [i for i in range(len(CANDIDATES)) if i not in alike]
    terms = by_dry_run.estimates.peak_terms_bytes
    assert len(alike) == 6, "formats and data reading do not matter"
    np.testing.assert_allclose((terms["states"] + terms["activations"])[alike], 12e9)
    np.testing.assert_allclose(terms["states"][alike], 4e8)
    for name in ("peak_bytes", "step_s"):
        before, after = getattr(by_formula.estimates, name), getattr(by_dry_run.estimates, name)
        np.testing.assert_array_equal(before[others], after[others])
    assert by_dry_run.inputs.transfer_bytes[alike[0]] == pytest.approx(1.5 * 10**8)
    assert by_dry_run.inputs.forward_flops[alike[0]] == pytest.approx(
        by_formula.inputs.forward_flops[alike[0]], rel=1e-6
    )


def truth(candidate):
    """Step time: the model's, twice as long without channels last, and bound by reading with few workers."""
    row = CANDIDATES.index(candidate)
    device_s = TRUTH.estimates.step_s[row] * (1.0 if candidate.kernels.memory_format == "nhwc" else 1.7)
    return max(device_s, 0.5 / (1 + candidate.loader.num_workers) / candidate.layout.dp)


TRUTH = predictor()


def test_knobs_unknown_to_the_model_are_learned_within_few_trials():
    guide = GuidedSearch(predictor())
    search = Search(CANDIDATES, features=flat_params, sampler="guided", guide=guide)
    workload = {"workload": RESNET, "budget": Budget(max_trials=10)}
    events = [created(**workload)]
    for number in range(10):
        candidate = CANDIDATES[0] if number == 0 else search.suggest(number, fold(events)).candidate
        world_size = candidate.layout.world_size
        outcome = measured(truth(candidate), world_size=world_size, tokens_per_step=RESNET.tokens_per_step)
        events += [proposed(number, candidate), launched(number), ended(number, outcome)]
    best = fold(events).best.measurement
    fastest = min(truth(c) * c.layout.world_size for c in CANDIDATES)
    assert best.step_time_s * best.world_size <= 1.05 * fastest


def test_linear_chains_feel_number_formats():
    workload = Workload(model=LinearModel(), data=RandomData(), seq_length=1, global_batch_size=2048)
    precisions = [Precision(level="O0", dtype="float32"), AMP]
    found = predictor(workload, [Candidate(micro_batch_size=2048, precision=p) for p in precisions]).estimates
    assert found.step_s[0] > 3 * found.step_s[1]


@pytest.mark.parametrize("name", ["resnet", "amp-linear"])
def test_the_sweeps_of_the_repository_are_predicted(name, tmp_path):
    arguments = ["plan", f"configs/sweeps/{name}.yaml", "--home", str(tmp_path), "--cluster", "dgx-a100", "--json"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    forecast = json.loads(done.stdout)["forecast"]
    assert forecast["top"][0]["tokens_per_s_per_device"] >= forecast["baseline"]["tokens_per_s_per_device"] > 0
    for entry in forecast["top"]:
        assert sum(entry["step_terms_s"].values()) == pytest.approx(entry["step_time_s"])
        assert sum(entry["peak_terms_bytes"].values()) == pytest.approx(entry["peak_bytes"])


def test_a_sweep_of_images_runs_on_a_simulated_machine(tmp_path):
    content = yaml.safe_load(Path("configs/sweeps/resnet.yaml").read_text(encoding="utf-8"))
    content["cluster"] = {"kind": "simulated", "devices_per_node": 1, "simulation": {"accelerator": "a100-80"}}
    content["cluster"]["simulation"] |= {"deviation": 1.0, "seed": 1}
    state = submit(tmp_path, {**content, "budget": {"max_trials": 8}}).state
    assert state.status == "finished", state.finish_reason
    assert set(state.counts()) <= {"measured", "stopped_early"}
    assert state.best.measurement.step_time_s < state.baseline.measurement.step_time_s


def test_a_simulated_machine_of_images_follows_the_model_unless_it_deviates():
    like_model, off = (ModelledCost(load_cluster("dgx-a100"), deviation=deviation, seed=2) for deviation in (0.0, 1.0))
    plain, chosen, other = (TrialSpec(workload=RESNET, candidate=CANDIDATES[row]) for row in (0, 1, 2))
    usual = generic_step_seconds(TRUTH.inputs.take(slice(0, 1)), load_prior("time").coefficients)
    assert like_model(plain).step_time_s == pytest.approx(float(sum(usual.values())[0]))
    assert like_model(plain).peak_bytes == pytest.approx(TRUTH.estimates.peak_bytes[0], abs=1)
    assert like_model(other).step_time_s < like_model(plain).step_time_s, "workers read while it computes"
    assert like_model(plain).peak_bytes == like_model(chosen).peak_bytes == like_model(other).peak_bytes
    times_s = [off(spec).step_time_s for spec in (plain, chosen, other)]
    assert len(set(times_s)) == 3 and off(chosen).step_time_s == times_s[1]
    assert off(plain).peak_bytes == off(chosen).peak_bytes
