import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from orchestrator.errors import ConfigError
from orchestrator.ledger import Ledger
from orchestrator.promotion import Promotion, promote, show
from orchestrator.tracking import Tracker
from tests.orchestrator.long_story import all_kinds, events, fill, speeds
from tests.orchestrator.mlflow_store import new_store
from tests.orchestrator.story import failures, measured
from trials.codec import from_json
from trials.outcome import Outcome
from trials.spec import Candidate, Workload


class Desk:
    """A sweep with its store, ready to promote from."""

    def __init__(self, folder: Path, uri: str, outcomes: list[Outcome], *, finished: bool = True, name: str = "story"):
        self.ledger = Ledger(folder)
        self.state = fill(self.ledger, events(outcomes, finished=finished, name=name))
        self.tracker = Tracker(uri)
        self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def promote(self, name: str = "llama", **options: object) -> Promotion:
        return promote(ledger=self.ledger, tracker=self.tracker, name=name, **options)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return new_store(tmp_path)


@pytest.fixture
def desk(tmp_path: Path, uri: str) -> Iterator[Desk]:
    opened = Desk(tmp_path / "sweep", uri, [*all_kinds(), *speeds(0.09)])
    yield opened
    opened.ledger.close()


def refusal(desk: Desk, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        desk.promote(**options)
    assert desk.client.search_registered_models() == []
    return str(caught.value)


def test_the_winner_goes_to_production_with_its_evidence(desk: Desk):
    done = desk.promote()
    assert (done.version, done.trial, done.previous_version, done.forced, done.is_new) == ("1", 1, None, False, True)
    assert json.loads(json.dumps(done.to_json())) == done.to_json()
    shown = show(desk.tracker, "llama@production")
    assert show(desk.tracker, "llama@1") == show(desk.tracker, "llama") == shown
    assert (shown["name"], shown["version"], shown["aliases"]) == ("llama", "1", ["production"])
    assert from_json(Candidate, shown["candidate"]) == desk.state.trials[1].candidate
    assert from_json(Workload, shown["workload"]) == desk.state.sweep.workload
    evidence = shown["evidence"]
    assert (evidence["sweep"], evidence["trial"], evidence["forced"]) == ("story", 1, False)
    assert evidence["ci95"][0] < evidence["tokens_per_s_per_device"] < evidence["ci95"][1]
    assert evidence["speedup"]["verdict"] == "faster"
    assert evidence["fingerprint"] == {"torch": "2"}


def test_the_registry_page_says_it_all(desk: Desk):
    desk.promote()
    version = desk.client.get_model_version_by_alias("llama", "production")
    assert version.source == f"runs:/{version.run_id}/recipe"
    assert version.tags["speedup"] == "1.25"
    assert version.tags["config_key"] == desk.state.trials[1].candidate.config_key
    assert {"tokens_per_s_per_device", "sweep", "trial", "hardware", "verdict", "forced"} <= set(version.tags)
    assert version.description.startswith("**3,200 tokens/s/p**")
    body = yaml.safe_load(version.description.split("```yaml\n")[1].split("```")[0])
    assert from_json(Candidate, body["candidate"]) == desk.state.trials[1].candidate


def test_a_sweep_is_found_in_the_experiment_it_was_recorded_in(tmp_path: Path, uri: str):
    desk = Desk(tmp_path / "sweep", uri, speeds(0.1, 0.05))
    Tracker(uri, "of my own").sync(desk.ledger, desk.state)
    assert desk.promote().trial == 1
    assert {e.name for e in desk.client.search_experiments()} == {"Default", "of my own"}


def test_promoting_another_keeps_the_previous(desk: Desk):
    desk.promote()
    done = desk.promote(trial=9)
    assert (done.version, done.previous_version) == ("2", "1")
    assert show(desk.tracker, "llama@production")["evidence"]["trial"] == 9
    assert show(desk.tracker, "llama@previous")["evidence"]["trial"] == 1


def test_promoting_the_same_again_changes_nothing(desk: Desk):
    desk.promote()
    again = desk.promote()
    assert (again.version, again.is_new) == ("1", False)
    assert len(desk.client.search_model_versions("name = 'llama'")) == 1


def test_what_is_not_faster_is_refused_unless_forced(desk: Desk):
    assert "trial 2 is not shown to be faster than the baseline (0.80x" in refusal(desk, trial=2)
    done = desk.promote(trial=2, force=True)
    assert done.forced
    assert show(desk.tracker, "llama@production")["evidence"]["forced"] is True
    version = desk.client.get_model_version("llama", "1")
    assert version.tags["forced"] == "true"
    assert "Promoted by force" in version.description


def test_force_on_a_proven_winner_is_not_called_forced(desk: Desk):
    assert desk.promote(force=True).forced is False


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"trial": 3}, "trial 3 of story was not measured (out of memory: rank 0 on host: boom)"),
        ({"trial": 10}, "has no trial 10"),
        ({"trial": -1}, "has no trial -1"),
        ({"trial": 0}, "keep what you have"),
        ({"name": "team/llama"}, "'team/llama'"),
        ({"name": "models:llama"}, "'models:llama'"),
        ({"name": "Llama"}, "'Llama'"),
        ({"name": ""}, "''"),
        ({"name": "x" * 64}, "x"),
        ({"name": "llama' OR 'a' = 'a"}, "OR"),
    ],
)
def test_refusals_say_what_is_wrong(desk: Desk, options: dict[str, object], part: str):
    assert part in refusal(desk, **options)


@pytest.mark.parametrize(
    ("outcomes", "finished", "part"),
    [
        (speeds(0.1, 0.05), False, "still running"),
        (list(failures().values()), True, "measured nothing"),
        (speeds(0.1, 0.0999), True, "not shown to be faster"),
        ([failures()["oom"], measured()], True, "the baseline was not measured"),
    ],
)
def test_sweeps_that_prove_nothing_are_refused(
    tmp_path: Path, uri: str, outcomes: list[Outcome], finished: bool, part: str
):
    assert part in refusal(Desk(tmp_path / "sweep", uri, outcomes, finished=finished))


def test_a_store_that_is_away_is_said(tmp_path: Path, uri: str):
    (tmp_path / "blocked").write_text("")
    desk = Desk(tmp_path / "sweep", uri, speeds(0.1, 0.05))
    desk.tracker = Tracker(f"sqlite:///{tmp_path / 'blocked' / 'mlflow.db'}")
    with pytest.raises(ConfigError, match="store"):
        desk.promote()


@pytest.mark.parametrize("reference", ["llama@production", "llama@7", "other@production", "llama@nowhere"])
def test_showing_what_is_not_there(desk: Desk, reference: str):
    desk.promote(name="elsewhere")
    with pytest.raises(ConfigError, match=reference):
        show(desk.tracker, reference)


def test_an_altered_recipe_is_noticed(desk: Desk, tmp_path: Path):
    done = desk.promote()
    run = desk.client.get_model_version("llama", done.version).run_id
    (stored,) = tmp_path.glob(f"mlartifacts/*/{run}/artifacts/recipe/recipe.json")
    recipe = json.loads(stored.read_text())
    recipe["candidate"]["micro_batch_size"] = 64
    stored.write_text(json.dumps(recipe))
    with pytest.raises(ConfigError, match="altered"):
        show(desk.tracker, "llama@production")
    recipe["candidate"]["wheels"] = 4
    stored.write_text(json.dumps(recipe))
    with pytest.raises(ConfigError, match="no valid recipe"):
        show(desk.tracker, "llama@production")
    stored.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        show(desk.tracker, "llama@production")


def test_a_version_from_elsewhere_is_not_read(desk: Desk):
    desk.promote()
    run_id = desk.tracker.find_run(desk.state, 2)
    other = desk.client.create_model_version("llama", f"runs:/{run_id}/recipe", desk.tracker.find_run(desk.state, 1))
    with pytest.raises(ConfigError, match="cannot be read"):
        show(desk.tracker, f"llama@{other.version}")
