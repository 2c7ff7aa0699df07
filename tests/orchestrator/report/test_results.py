"""Results as values: claims, summaries, profiles. How they are shown is frozen in ``tests/goldens``."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import pytest
from pydantic import ValidationError

from cluster.gang.gang_outcome import merge_findings
from configs import CONFIGS
from orchestrator import units
from orchestrator.config.settings import ProfileSection
from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import check_tracking_uri, public_uri
from orchestrator.report.result_schema import SCHEMA_FILE, result_schema, schema_text
from orchestrator.report.sources import ProfileCopies, copy_profile, profile_files
from orchestrator.report.summary import chosen_result, confidence, headline, summarize
from orchestrator.statistics import Interval
from orchestrator.sweep.events import FinishCause, SweepFinished
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import attempt_folder
from orchestrator.sweep.state import SweepState
from tests.goldens.variants import PROFILED, PROFILES, VARIANTS, profiled
from tests.support.long_story import speeds, state
from tests.support.proof_story import proof_events
from tests.support.story import created, ended, evidence, launched, measured, proposed
from trials.files import from_json, to_json
from trials.outcome import HostOutOfMemory, Measured, OutOfMemory
from trials.reports import FOLDER, Findings
from trials.spec import Candidate, ProfileSpec, Recompute


@pytest.mark.parametrize(
    ("value", "low", "high", "shown", "short"),
    [
        (1.4, 1.004, 1.86, "at least 1.004x (95% CI: 1.004x–1.86x)", "≥ 1.004x"),  # noqa: RUF001
        (1.4, 1.0001, 1.86, "at least 1.0001x (95% CI: 1.0001x–1.86x)", "≥ 1.0001x"),  # noqa: RUF001
        (1.4, 1.25, 1.86, "at least 1.25x (95% CI: 1.25x–1.86x)", "≥ 1.25x"),  # noqa: RUF001
        (1.4, 0.5, 0.996, "at most 0.996x (95% CI: 0.50x–0.996x)", "≤ 0.996x"),  # noqa: RUF001
        (3.06, 2.98, 3.14, "3.06x (95% CI: 2.98x–3.14x)", "3.06x"),  # noqa: RUF001
        (3.18, 1.0649, 9.561, "at least 1.06x (95% CI: 1.06x–9.57x)", "≥ 1.06x"),  # noqa: RUF001
        (0.5, 0.2, 0.941, "at most 0.95x (95% CI: 0.20x–0.95x)", "≤ 0.95x"),  # noqa: RUF001
        (1.2, 0.8, 1.9, "not distinguishable from 1x (95% CI: 0.80x–1.90x)", "≈1.20x"),  # noqa: RUF001
        (1.2, None, None, "1.20x (interval unknown)", "1.20x"),
    ],
)
def test_ratios_claim_no_more_than_their_interval_and_round_to_no_tie(value, low, high, shown, short):
    found = Interval(low, high) if low is not None else None
    assert (units.ratio(value, found), units.short_ratio(value, found)) == (shown, short)


def test_every_result_follows_the_published_schema():
    for name, variant in VARIANTS.items():
        body = summarize(fold(variant.story()), "").to_json()
        jsonschema.validate(json.loads(json.dumps(body, allow_nan=False)), result_schema())
        assert set(body) == set(result_schema()["properties"]), f"{name}: nothing that the schema does not name"
    assert (CONFIGS.parent / SCHEMA_FILE).read_text(encoding="utf-8") == schema_text()
    with pytest.raises(LookupError):
        summarize(SweepState(), "")


def test_stores_may_have_spaces_in_their_paths_and_passwords_stay_out():
    for uri in ("sqlite:////home/a b/mlflow.db", "https://mlflow:5000"):
        assert check_tracking_uri(uri) == uri
    for uri in ("https://mlflow 5000", "sqlite:////", "sqlite:///relative.db"):
        with pytest.raises(ConfigError, match="not a supported tracking URI"):
            check_tracking_uri(uri)
    uri = "http://user:pass@mlflow.example:5000/x"
    assert summarize(state(speeds(0.1)), uri).to_json()["tracking_uri"] == "http://mlflow.example:5000/x"
    assert public_uri("sqlite:////srv/a@b/mlflow.db") == "sqlite:////srv/a@b/mlflow.db"


def test_every_profiled_rank_reaches_the_measurement():
    merged = merge_findings([Findings(profile=PROFILES[:1]), Findings(), Findings(profile=PROFILES[1:])])
    assert merged.profile == PROFILES
    assert from_json(Findings, to_json(merged)) == merged


def test_profiles_are_files_named_by_ranks_and_copied_on_request(tmp_path, caplog):
    second, first = PROFILES
    state = fold(profiled(PROFILED, *PROFILES))
    trial, trace = state.trials[PROFILED], first.files[0].name
    folder = attempt_folder(tmp_path, PROFILED, 0, trial.attempts[0].token) / FOLDER
    assert profile_files(tmp_path, trial) == []
    folder.mkdir(parents=True)
    (folder / trace).write_bytes(b"trace")
    (folder / "rank0.stranger").write_bytes(b"")
    (folder / second.files[0].name).symlink_to(folder / trace)
    found = profile_files(tmp_path, trial)
    assert found == [folder / trace]
    copied = copy_profile(tmp_path / "out", "quick", trial, found)
    assert copied == tmp_path / f"out/quick-t{PROFILED:03d}" and (copied / trace).read_bytes() == b"trace"
    watched = SimpleNamespace(num_checks=1, trials=[trial], sweep=SimpleNamespace(sweep="watched"))
    ProfileCopies(tmp_path / "out", tmp_path).on_state(watched)
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "out").iterdir()) == ["quick", "watched"]
    (tmp_path / "file").touch()
    ProfileCopies(tmp_path / "file", tmp_path).on_state(watched)
    assert "cannot copy the profile" in caplog.text
    with pytest.raises(ConfigError, match="cannot copy the profile"):
        copy_profile(tmp_path / "file", "quick", trial, found)


def test_the_section_gives_the_settings_of_ranks():
    section = ProfileSection.model_validate({"trials": ["baseline"], "ranks": [0, 5], "memory": True})
    assert section.to_spec().ranks == (0, 5) and section.to_spec().memory
    assert ProfileSection().to_spec() == ProfileSpec() and ProfileSection().trials == ["winner"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"start_step": 5, "stop_step": 4}, "is before start_step"),
        ({"stop_step": 40}, "the limit is 20"),
        ({"start_step": 0}, "greater than or equal to 1"),
        ({"ranks": [1, True]}, "valid integer"),
        ({"ranks": [1, 1]}, "listed twice"),
        ({"trials": ["best"]}, "'winner' or 'baseline'"),
        ({"trials": ["winner", "winner"]}, "listed twice"),
    ],
)
def test_each_mistake_in_the_section_has_one_message(values, message):
    with pytest.raises(ValidationError) as caught:
        ProfileSection.model_validate(values)
    (error,) = caught.value.errors()
    assert message in error["msg"]


def test_without_a_winner_the_trial_shown_is_that_of_the_speedup():
    """The search found t001 fastest, the rounds t002: its name, its figures and its speed-up stand together."""
    story = proof_events("unconfirmed")
    for place, event in enumerate(story):
        outcome = getattr(event, "outcome", None)
        if isinstance(outcome, Measured) and outcome.measurement.step_time_s in (0.0995 * 1.01, 0.0995 * 0.99):
            story[place] = replace(event, outcome=measured(0.5 * outcome.measurement.step_time_s, world_size=2))
    state = fold(story)
    summary = summarize(state, "")
    chosen = chosen_result(state, summary)
    assert (summary.best.trial.number, summary.confirmed.trial, chosen.trial.number) == (1, 2, 2)
    assert headline(state, summary).endswith("Fastest so far: t002.")
    assert confidence(state, summary).startswith("speed-up of t002: ")


@pytest.mark.parametrize(
    ("outcome", "changes", "text"),
    [
        (
            OutOfMemory(evidence=evidence()),
            {"micro_batch_size": 4},
            "`micro_batch_size` to less than 4 or `recompute` to `full`",
        ),
        (HostOutOfMemory(evidence=evidence()), {"recompute": Recompute(full=((1,),))}, "values that need less memory"),
    ],
)
def test_a_baseline_without_enough_memory_is_the_headline_with_its_remedy(outcome, changes, text):
    finished = SweepFinished(at_s=9.0, status="finished", reason="done", cause=FinishCause.EXHAUSTED)
    state = fold([created(), proposed(0, Candidate(**changes)), launched(0), ended(0, outcome), finished])
    kind = "device" if isinstance(outcome, OutOfMemory) else "host"
    remedy = f"In `baseline`, set {text}, then run `submit --replace`."
    expected = f"The baseline ran out of {kind} memory. Nothing was measured. {remedy}"
    assert headline(state, summarize(state, "")) == expected
