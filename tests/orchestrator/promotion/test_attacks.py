"""Manual changes in MLflow's pages or files are noticed or harmless; never a traceback."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from orchestrator.errors import ConfigError
from orchestrator.promotion import commands
from orchestrator.promotion.manifest import FILES, list_files
from orchestrator.promotion.references import describe
from orchestrator.promotion.release import Releases
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.orchestrator.promotion.proven import manifest, proven_home
from trials.files import digest

NAME = "llama"


class Store:
    """A home with versions 1, 2 (previous) and 3 (in production), and possible manual changes to its store."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, proven_home(folder)
        uri = self.home.default_tracking_uri
        self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        for trial in (2, 0, 1):
            self.releases().promote(NAME, manifest(self.home, trial))

    def releases(self) -> Releases:
        return Releases(Tracker(self.home.default_tracking_uri))

    def records(self) -> list[Run]:
        experiment = self.client.get_experiment_by_name("promotions")
        found = self.client.search_runs([experiment.experiment_id], "tags.`tc.kind` = 'promotion'")
        return sorted(found, key=lambda run: int(run.data.tags["tc.number"]))

    def tag_record(self, key: str, value: str, number: int = 3) -> None:
        self.client.set_tag(self.records()[number - 1].info.run_id, key, value)

    def tag(self, version: str, key: str, value: str) -> None:
        self.client.set_model_version_tag(NAME, version, key, value)

    def recipe(self, version: str) -> Path:
        run_id = self.client.get_model_version(NAME, version).run_id
        return self.folder / "mlartifacts" / "promotions" / run_id / "artifacts" / "recipe" / "recipe.json"

    def alter(self, version: str, *keys: str, value: Any = None, in_record: bool = False) -> None:
        """Set the value at ``keys`` in the recipe, or take it away, with all digests made right again by hand."""
        path = self.recipe(version)
        content = json.loads(path.read_text())
        part = content
        for key in keys[:-1]:
            part = part[key]
        if value is None:
            del part[keys[-1]]
        else:
            part[keys[-1]] = value
        path.write_text(json.dumps(content))
        files = {p.relative_to(path.parent).as_posix(): p.read_bytes() for p in path.parent.rglob("*") if p.is_file()}
        listed = list_files(files)
        (path.parent / FILES).write_text(json.dumps(listed))
        for key, sha256 in (("recipe_sha256", digest(content)), ("files_sha256", digest(listed))):
            self.tag(version, key, sha256)
            if in_record:
                self.client.set_tag(self.client.get_model_version(NAME, version).run_id, f"tc.{key}", sha256)

    def foreign(self, alias: str) -> None:
        """A foreign model becomes version 4 and gets the alias."""
        experiment = self.client.create_experiment("theirs", (self.folder / "theirs").as_uri())
        run_id = self.client.create_run(experiment).info.run_id
        self.client.log_text(run_id, "weights", "model/weights.txt")
        self.client.create_model_version(NAME, f"runs:/{run_id}/model", run_id)
        self.client.set_registered_model_alias(NAME, alias, "4")

    def purge(self, number: int) -> None:
        run_id = self.records()[number - 1].info.run_id
        with closing(sqlite3.connect(self.folder / "mlflow.db")) as database:
            for table in ("tags", "latest_metrics", "metrics", "params", "runs"):
                database.execute(f"delete from {table} where run_uuid = ?", (run_id,))
            database.commit()


def message_of(call: Callable[[], Any]) -> str:
    """What the call's message is; empty where it did its work. Nothing else may come of it."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def outcome(store: Store) -> dict[str, str]:
    """The output of each command, the changing ones last: back, and forward again."""
    home = store.home
    return {
        "show": message_of(lambda: commands.show(NAME, home)),
        "diff": message_of(lambda: commands.diff(f"{NAME}@previous", f"{NAME}@production", home)),
        "export": message_of(lambda: describe(f"{NAME}@production", home, None)),
        "history": message_of(lambda: commands.history(NAME, home)),
        "rollback": message_of(lambda: store.releases().roll_back(NAME)),
        "promote": message_of(lambda: store.releases().promote(NAME, manifest(home, 2))),
    }


NONE_LEFT = "all previous production versions of llama were deleted"
ALTERED = "was altered after its promotion"
ATTACKS: dict[str, tuple[Callable[[Store], Any], dict[str, str]]] = {
    "digests made right by hand": (
        lambda at: at.alter("3", "evidence", "tokens_per_s_per_device", value=9e9),
        dict.fromkeys(("show", "diff", "export"), f"version 3 {ALTERED}: its recipe_sha256 does not match the record"),
    ),
    "digests of what is rolled back to": (
        lambda at: at.alter("2", "evidence", "hardware", value="1x8 better"),
        dict.fromkeys(("diff", "rollback"), f"version 2 {ALTERED}: its recipe_sha256 does not match the record"),
    ),
    "evidence of another form": (
        lambda at: at.alter("3", "evidence", "hardware", in_record=True),
        dict.fromkeys(("show", "diff", "export"), "version 3 has no valid manifest: 'hardware' is missing"),
    ),
    "workload of another form": (
        lambda at: at.alter("3", "workload", value={}, in_record=True),
        dict.fromkeys(("show", "diff", "export"), "version 3 has no valid manifest"),
    ),
    "recipe without end": (
        lambda at: at.recipe("3").write_text("[" * 100_000),
        dict.fromkeys(("show", "diff", "export"), f"version 3 {ALTERED}: recipe.json differs"),
    ),
    "files deleted": (
        lambda at: shutil.rmtree(at.recipe("2").parent),
        dict.fromkeys(("diff", "rollback"), "cannot read llama version 2"),
    ),
    "version in production deleted": (
        lambda at: at.client.delete_model_version(NAME, "3"),
        dict.fromkeys(("show", "diff", "export"), "the registry has no llama@production"),
    ),
    "version before deleted": (
        lambda at: at.client.delete_model_version(NAME, "2"),
        {
            "diff": "the registry has no llama@previous",
            "rollback": "version 2, the previous one in production, was deleted in MLflow. Version 1 still exists",
        },
    ),
    "model deleted": (
        lambda at: at.client.delete_registered_model(NAME),
        dict.fromkeys(("show", "diff", "export"), "the registry has no") | {"rollback": NONE_LEFT},
    ),
    "model renamed": (
        lambda at: at.client.rename_registered_model(NAME, "renamed"),
        dict.fromkeys(("show", "diff", "export"), "the registry has no") | {"rollback": NONE_LEFT},
    ),
    "production is somebody's own model": (
        lambda at: at.foreign("production"),
        dict.fromkeys(("show", "diff", "export"), "version 4 was not registered by tune-cluster"),
    ),
    "the version before is somebody's own model": (
        lambda at: at.foreign("previous"),
        {"diff": "version 4 was not registered by tune-cluster"},
    ),
    "tags of a version deleted": (
        lambda at: [
            at.client.delete_model_version_tag(NAME, "3", key) for key in at.client.get_model_version(NAME, "3").tags
        ],
        dict.fromkeys(("show", "diff", "export"), f"version 3 {ALTERED}"),
    ),
    "speed-up of a version": (lambda at: at.tag("2", "speedup", "fast"), {}),
    "records deleted": (lambda at: [at.client.delete_run(run.info.run_id) for run in at.records()], {}),
    "experiment of records deleted": (
        lambda at: at.client.delete_experiment(at.client.get_experiment_by_name("promotions").experiment_id),
        {},
    ),
    "record in the middle purged": (
        lambda at: at.purge(2),
        {"diff": "cannot read llama version 2", "rollback": "version 2"},
    ),
    "action of a record": (lambda at: at.tag_record("tc.action", "bless"), {}),
    "number of a record": (lambda at: at.tag_record("tc.number", "x"), {}),
    "time of a record": (lambda at: at.tag_record("tc.at_s", "1e400"), {}),
    "the missing evidence of a record": (lambda at: at.tag_record("tc.missing", "7"), {}),
    "action and file of a record": (
        lambda at: [at.tag_record("tc.action", "bless"), (at.recipe("3").parents[1] / "record.json").unlink()],
        dict.fromkeys(("history", "rollback", "promote"), "a record of llama was altered"),
    ),
}


@pytest.mark.representative("digests made right by hand", "version in production deleted")
@pytest.mark.parametrize("attack", ATTACKS)
def test_manual_changes_are_noticed_or_harmless(tmp_path: Path, attack: str) -> None:
    store = Store(tmp_path)
    act, expected = ATTACKS[attack]
    act(store)
    found = outcome(store)
    assert {what for what, words in found.items() if words} == set(expected), found
    for what, words in expected.items():
        assert words in found[what], found
    if "promote" not in expected:
        current = store.client.get_model_version_by_alias(NAME, "production")
        assert current.tags["trial"] == "2" and commands.show(NAME, store.home)["version"] == str(current.version)
        assert commands.history(NAME, store.home)["is_settled"]


@pytest.mark.exhaustive
def test_a_gap_in_the_records_is_reported(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert commands.history(NAME, store.home)["gaps"] == []
    store.purge(2)
    assert commands.history(NAME, store.home)["gaps"] == [3]
    made = store.releases().promote(NAME, manifest(store.home, 2)).record
    assert (made.number, made.from_version) == (4, "3")


def test_a_simulated_configuration_is_a_candidate_at_most(tmp_path: Path) -> None:
    """Marked wherever it is shown; the alias production does not take it, by a rollback neither."""
    from tests.orchestrator.promotion.proven import simulate

    home = proven_home(tmp_path)
    releases = Releases(Tracker(home.default_tracking_uri))
    releases.promote(NAME, manifest(home, 2))
    simulate(home)
    for options in ({}, {"force": True}, {"force": True, "trial": "2"}):
        with pytest.raises(ConfigError, match="simulated: nothing was measured, so it cannot be promoted"):
            commands.promote(NAME, home, sweep="simulated", **options)
    done = commands.promote(NAME, home, sweep="simulated", is_candidate=True)
    assert (done["version"], done["alias"], done["is_new"]) == ("2", "candidate", True)
    again = commands.promote(NAME, home, sweep="simulated", is_candidate=True)
    assert (again["version"], again["is_new"]) == ("2", False)
    shown = commands.show(f"{NAME}@candidate", home)
    assert shown["evidence"]["virtual"] == "simulated" and shown["aliases"] == ["candidate"]
    version = releases.registry.client.get_model_version(NAME, "2")
    assert (version.tags["watermark"], version.tags["verdict"], version.tags["gate"]) == (
        "SIMULATED",
        "simulated",
        "not run",
    )
    assert version.description.startswith("# SIMULATED: nothing was measured")
    assert commands.show(NAME, home)["version"] == "1" and commands.history(NAME, home)["is_settled"]
    with pytest.raises(ConfigError, match="version 2 is SIMULATED"):
        commands.roll_back(NAME, home, to="2")
    assert [record["action"] for record in commands.history(NAME, home)["records"]] == ["candidate", "promote"]
