"""What may go to production, and what is registered of it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from orchestrator.errors import ConfigError
from orchestrator.promotion import commands
from orchestrator.promotion.manifest import choose, list_files
from orchestrator.promotion.references import describe
from orchestrator.promotion.release import Releases
from orchestrator.sweep.events import Verdict
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger, SweepBusyError
from orchestrator.sweep.snapshot import Home
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.orchestrator.promotion.proven import FASTER, confirmed, gate, manifest, new_home, proof, proven_home, sweep
from tests.support.long_story import candidate, events, fill, speeds
from tests.support.story import WORKLOAD
from trials.files import digest, from_json
from trials.spec import Candidate, Workload


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return proven_home(tmp_path)


@pytest.fixture
def client(home: Home) -> MlflowClient:
    return MlflowClient(tracking_uri=home.default_tracking_uri, registry_uri=home.default_tracking_uri)


def files_of(client: MlflowClient, name: str, version: str, folder: Path) -> dict[str, bytes]:
    found = client.get_model_version(name, version)
    root = Path(client.download_artifacts(found.run_id, "recipe", str(folder)))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_confirmed_winner_goes_to_production_with_its_evidence(home: Home, client: MlflowClient, tmp_path: Path):
    done = commands.promote("llama", home, sweep="story", reason="first", expect_current="none")
    assert json.loads(json.dumps(done)) == done
    assert (done["version"], done["trial"], done["previous_version"], done["is_new"]) == ("1", 1, None, True)
    shown = commands.show("llama@production", home)
    assert commands.show("llama@1", home) == commands.show("llama", home) == shown
    assert from_json(Candidate, shown["candidate"]) == candidate(1)
    assert from_json(Workload, shown["workload"]) == WORKLOAD
    facts = shown["evidence"]
    assert facts["verdict"]["conclusion"] == "confirmed"
    assert [run["of"] for run in facts["confirmation"]] == [0, 1, 0, 1]
    assert facts["gate"]["report"]["passed"] and set(facts["gate"]["runs"]) == {"baseline", "finalist"}
    assert facts["gate"]["runs"]["finalist"]["losses"] == [5.5, 5.4, 5.3]
    assert facts["fingerprint"] == {"torch": "2"}
    version = client.get_model_version_by_alias("llama", "production")
    assert version.tags["speedup"] == "1.25" and version.tags["gate"] == "passed" and version.tags["forced"] == "false"
    assert "1.25x (95% CI: 1.20x–1.30x) against the baseline" in version.description  # noqa: RUF001
    body = yaml.safe_load(version.description.split("```yaml\n")[1].split("```")[0])
    assert from_json(Candidate, body["candidate"]) == candidate(1)
    files = files_of(client, "llama", "1", tmp_path)
    listed = json.loads(files.pop("files.json"))
    assert listed == {path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items())}
    assert digest(listed) == version.tags["files_sha256"] and len(version.tags) < 20
    assert {"recipe.json", "recipe.yaml", "exports/README.txt"} <= set(files)
    assert any(path.startswith("exports/torchrun/") for path in files)


def test_the_ledger_and_the_experiment_keep_the_record(home: Home, client: MlflowClient):
    record = commands.promote("llama", home, sweep="story", reason="first")["record"]
    with home.open("story") as ledger:
        (noted,) = fold(ledger.events()).promotions
    kept = {"action": "promote", "from_version": "", "to_version": "1", "trial": "1", "reason": "first"}
    assert kept.items() <= noted.record.items() and noted.record["record_id"] == record["record_id"]
    run = client.get_run(record["record_id"])
    assert run.info.status == "FINISHED" and client.get_experiment(run.info.experiment_id).name == "promotions"
    assert run.data.tags["tc.kind"] == "promotion" and run.data.tags["tc.reason"] == "first"
    assert "none → v1" in run.info.run_name and "none → v1" in run.data.tags["mlflow.note.content"]
    (stored,) = (found for found in client.list_artifacts(run.info.run_id) if found.path == "record.json")
    assert stored.file_size
    version = client.get_model_version("llama", "1")
    assert run.data.tags["tc.files_sha256"] == version.tags["files_sha256"] and version.run_id == run.info.run_id


def test_promoting_the_same_recipe_again_changes_nothing(home: Home, client: MlflowClient):
    commands.promote("llama", home, sweep="story")
    again = commands.promote("llama", home, sweep="story", force=True, reason="again")
    assert (again["version"], again["is_new"], again["forced"]) == ("1", False, False)
    assert len(client.search_model_versions("name = 'llama'")) == 1
    assert len(commands.history("llama", home)["records"]) == 1


KEEP = Verdict(
    conclusion="keep", winner=None, reason="no finalist was shown to be faster than the baseline in 8 rounds"
)
WRONG = Verdict(
    conclusion="keep",
    winner=None,
    reason="t001 does not match the baseline's losses",
    gates=(gate(1, "the loss differs by 0.2 in step 3"),),
)
UNSETTLED = Verdict(conclusion="unconfirmed", winner=None, reason="the budget of 2 device-hours was used up")


@pytest.mark.parametrize(
    ("verdict", "trial", "parts"),
    [
        (None, None, ("not measured again", "tune-cluster confirm story t001")),
        (KEEP, "1", ("not shown to be faster than the current configuration", "Keep your current configuration")),
        (
            KEEP,
            None,
            ("it is the current configuration (no finalist was shown to be faster", "Keep your current configuration"),
        ),
        (
            WRONG,
            "t001",
            ("failed the loss gate", "the loss differs by 0.2 in step 3", "Keep your current configuration"),
        ),
        (UNSETTLED, None, ("the budget of 2 device-hours was used up", "confirm story t001")),
        (confirmed(gates=()), None, ("the loss gate did not check", "`gate:` on")),
        (confirmed(), "2", ("the confirmed winner is t001", "confirm story t002")),
        (confirmed(tied_with=(2,)), "2", ("the confirmed winner is t001, but the two are tied",)),
    ],
)
def test_unproven_trials_are_refused(
    tmp_path: Path, verdict: Verdict | None, trial: str | None, parts: tuple[str, ...]
):
    home = Home(tmp_path)
    sweep(home, verdict=verdict)
    with home.open("story") as ledger:
        state = fold(ledger.events())
    with pytest.raises(ConfigError) as caught:
        choose(state, trial, force=False)
    words = str(caught.value)
    assert all(part in words for part in parts), words
    assert choose(state, trial, force=True).forced


def test_force_is_recorded_everywhere(home: Home, client: MlflowClient):
    done = commands.promote("llama", home, sweep="story", trial="2", force=True)
    assert done["forced"] and done["record"]["forced"] and done["record"]["missing"] == done["missing"] != []
    assert commands.show("llama", home)["evidence"]["missing"] == done["missing"]
    version = client.get_model_version("llama", "1")
    assert version.tags["forced"] == "true" and version.tags["verdict"] == "not confirmed"
    assert version.tags["gate"] == "not run" and "promoted with --force" in version.description
    assert client.get_run(done["record"]["record_id"]).data.tags["tc.forced"] == "true"
    with home.open("story") as ledger:
        assert fold(ledger.events()).promotions[0].record["forced"] == "true"
    client.set_tag(done["record"]["record_id"], "tc.forced", "false")
    client.set_model_version_tag("llama", "1", "forced", "false")
    (record,) = commands.history("llama", home)["records"]
    assert record["forced"] and record["altered"] and record["missing"] == done["missing"]
    (kept,) = home.path.glob("mlartifacts/promotions/*/artifacts/record.json")
    kept.write_text(kept.read_text().replace('"forced": true', '"forced": false'))
    with pytest.raises(ConfigError, match="a record of llama was altered"):
        commands.history("llama", home)


def test_an_inaccessible_change_blocks_no_other(home: Home, client: MlflowClient):
    """Root may write everywhere, so that a file stands where the folder of the interrupted change would be."""
    releases = Releases(Tracker(home.default_tracking_uri))
    commands.promote("llama", home, sweep="story")
    begun = releases.records.begin(replace(releases.records.of("llama")[-1], number=2, to_version="", from_version="1"))
    (home.path / "mlartifacts" / "promotions" / begun.record_id).write_text("in the way")
    done = commands.promote("llama", home, sweep="story", trial="2", force=True)
    assert done["record"]["number"] == 3 and done["previous_version"] == "1"
    assert [record["state"] for record in commands.history("llama", home)["records"]] == ["done", "void", "done"]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"trial": "3"}, "trial t003 in the sweep 'story' was not measured (out of memory: rank 0 on host: boom)"),
        ({"trial": "4"}, "trial t004 is only a check of t000"),
        ({"trial": "40"}, "no trial '40'"),
        ({"name": "team/llama"}, "'team/llama'"),
        ({"name": "Llama"}, "'Llama'"),
        ({"name": ""}, "''"),
        ({"name": "llama' OR 'a' = 'a"}, "OR"),
        ({"expect_current": "2"}, "production is none, not 2"),
        ({"expect_current": "two"}, "'two' is not a version"),
    ],
)
def test_refusals_name_the_reason(home: Home, client: MlflowClient, options: dict[str, str], part: str):
    arguments = {"name": "llama", "trial": None, "expect_current": None, **options}
    with pytest.raises(ConfigError) as caught:
        commands.promote(home=home, sweep="story", force=True, **arguments)
    assert part in str(caught.value)
    assert client.search_registered_models() == []


def test_measured_rounds_are_reported_while_the_confirmation_runs(tmp_path: Path):
    home = new_home(tmp_path)
    story = proof(3, 1, confirmed(), FASTER)
    with Ledger(home.sweep_folder("story")) as ledger:
        fill(ledger, [*events(speeds(*FASTER), finished=False, name="story"), *story[:13]])
        ledger.put_document("tracking", {"uri": None})
        state = fold(ledger.events())
    with pytest.raises(ConfigError, match="2 rounds of its confirmation are measured, the confirmation is still runn"):
        choose(state, None, force=False)
    assert describe("story:1", home, None).doubt.startswith("2 rounds of its confirmation are measured")
    assert describe("story:2", home, None).doubt == "it was not measured again, interleaved with the baseline"


def test_a_running_sweep_is_not_promoted(tmp_path: Path):
    home = new_home(tmp_path)
    sweep(home, finished=False)
    with pytest.raises(ConfigError, match="its proof is not finished"):
        commands.promote("llama", home, sweep="story")
    with home.open("story", read_only=False) as ledger, ledger.hold(), pytest.raises(SweepBusyError):
        commands.promote("llama", home, sweep="story", force=True)
    assert commands.promote("llama", home, sweep="story", force=True)["version"] == "1"


def test_an_altered_recipe_is_noticed(home: Home, tmp_path: Path):
    releases = Releases(Tracker(home.default_tracking_uri))
    for trial in (1, 2):
        releases.promote("llama", manifest(home, trial))
    (stored, _) = sorted(tmp_path.glob("mlartifacts/promotions/*/artifacts/recipe/recipe.json"), key=_written)
    content = json.loads(stored.read_text())
    content["candidate"]["micro_batch_size"] = 64
    stored.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="altered"):
        commands.show("llama@1", home)
    with pytest.raises(ConfigError, match=r"altered.*recipe\.json"):
        releases.roll_back("llama")
    files = {path.relative_to(stored.parent).as_posix(): path.read_bytes() for path in stored.parent.rglob("*.*")}
    (stored.parent / "files.json").write_text(json.dumps(list_files(files)))
    with pytest.raises(ConfigError, match=r"altered.*the list of its files"):
        releases.roll_back("llama")
    stored.unlink()
    with pytest.raises(ConfigError, match=r"altered.*recipe\.json differs"):
        commands.show("llama@1", home)


def _written(path: Path) -> float:
    return path.stat().st_mtime
