"""Making a measured configuration the production configuration: a version in MLflow's model registry.

The recipe holds the configuration and the evidence for it. Alias ``production`` points at the version in use,
``previous`` at the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import yaml

from orchestrator import report_format as fmt
from orchestrator.errors import ConfigError
from orchestrator.fold import fold
from orchestrator.home import check_name
from orchestrator.ledger import Ledger
from orchestrator.space import short_name
from orchestrator.state import SweepState, Trial
from orchestrator.summary import Result, Speedup, interval_json, result, speed_unit, speedup
from orchestrator.tracking import Registered, Tracker
from orchestrator.tracking_content import sweep_id
from trials.codec import CodecError, digest, from_json, to_json
from trials.spec import Candidate

PRODUCTION, PREVIOUS = "production", "previous"
_FOLDER = "recipe"
_JSON, _YAML = "recipe.json", "recipe.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """What :func:`promote` did. ``is_new`` is False where this very trial was in production already."""

    name: str
    version: str
    trial: int
    previous_version: str | None
    forced: bool
    is_new: bool
    recipe: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``promote --json``."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "recipe": dict(self.recipe)}


def promote(*, ledger: Ledger, tracker: Tracker, name: str, trial: int | None = None, force: bool = False) -> Promotion:
    """Register the fastest configuration of a finished sweep, or that of ``trial``, and point ``production`` at it.

    Raises:
        ConfigError: the name cannot be used; the sweep is not over or measured nothing; the trial does not exist or
            was not measured; or it is not shown to be faster than the baseline and ``force`` is off.
    """
    check_name(name, "registered name")
    state = fold(ledger.events())
    chosen = _choose(state, trial)
    compared = speedup(chosen.trial, state.baseline)
    proven = compared is not None and compared.verdict == "faster"
    if not proven and not force:
        raise _not_faster(chosen, compared)
    recipe = build_recipe(state, chosen, compared, forced=not proven)
    with tracker.reached():
        return _register(ledger, tracker, name, state, chosen, compared, recipe)


def show(tracker: Tracker, reference: str) -> dict[str, Any]:
    """The recipe of ``name@alias`` or ``name@version``, checked against its own ``config_key``.

    Raises:
        ConfigError: there is no such version, or its recipe was altered.
    """
    name, _, which = reference.partition("@")
    check_name(name, "registered name")
    which = which or PRODUCTION
    selector = {"version": which} if which.isdigit() else {"alias": which}
    with tracker.reached():
        registered = tracker.model_version(name, **selector)
        if registered is None:
            raise ConfigError(f"the registry has no {name}@{which}", remedy="Promote a sweep first, or name a version.")
        try:
            recipe: dict[str, Any] = json.loads(tracker.read_model_file(registered, _JSON))
        except (LookupError, ValueError) as error:
            raise ConfigError(f"{name}@{which} cannot be read: {error}", remedy="Promote the sweep again.") from None
    verify(recipe, registered)
    return {"name": name, "version": registered.version, "aliases": list(registered.aliases), **recipe}


def verify(recipe: Mapping[str, Any], registered: Registered) -> Candidate:
    """The recipe's candidate, after checking that recipe, key and registry agree.

    Raises:
        ConfigError: they do not.
    """
    where = f"{registered.name} version {registered.version}"
    try:
        candidate: Candidate = from_json(Candidate, recipe["candidate"])
    except (KeyError, CodecError) as error:
        raise ConfigError(f"{where} holds no valid recipe: {error}", remedy="Promote the sweep again.") from None
    keys = {candidate.config_key, recipe.get("config_key"), registered.tags.get("config_key")}
    if len(keys) != 1 or digest(recipe) != registered.tags.get("recipe_sha256"):
        raise ConfigError(
            f"{where} was altered after its promotion: its recipe does not match the key it was registered with",
            remedy="Do not use it; promote the sweep again.",
        )
    return candidate


def build_recipe(state: SweepState, chosen: Result, compared: Speedup | None, *, forced: bool) -> dict[str, Any]:
    """The configuration with its workload and the evidence, as JSON values."""
    candidate = chosen.trial.candidate
    return {
        "config_key": candidate.config_key,
        "short_name": short_name(candidate),
        "candidate": to_json(candidate),
        "evidence": {
            "sweep": state.sweep.sweep,
            "sweep_id": sweep_id(state.sweep),
            "trial": chosen.trial.number,
            "tokens_per_s_per_device": chosen.speed.value,
            "unit": speed_unit(state.sweep.workload),
            "ci95": interval_json(chosen.speed.ci95),
            "speedup": compared.to_json() if compared else None,
            "forced": forced,
            "hardware": state.sweep.hardware,
            "fingerprint": dict(state.sweep.fingerprint),
        },
        "workload": to_json(state.sweep.workload),
    }


def _register(
    ledger: Ledger,
    tracker: Tracker,
    name: str,
    state: SweepState,
    chosen: Result,
    compared: Speedup | None,
    recipe: Mapping[str, Any],
) -> Promotion:
    run_id = _recorded_run(ledger, tracker, state, chosen.trial)
    current = tracker.model_version(name, alias=PRODUCTION)
    if current and current.run_id == run_id and current.tags.get("config_key") == recipe["config_key"]:
        return _promotion(current, recipe, previous=None, is_new=False)
    tags, description = _tags(state, chosen, compared, recipe), _describe(chosen, compared, recipe)
    version = tracker.register(name, run_id, _files(recipe), _FOLDER, tags, description)
    if current:
        tracker.set_alias(name, PREVIOUS, current.version)
    tracker.set_alias(name, PRODUCTION, version.version)
    return _promotion(version, recipe, previous=current, is_new=True)


def _choose(state: SweepState, trial: int | None) -> Result:
    name = state.sweep.sweep
    if not state.is_over:
        raise ConfigError(f"sweep {name} is still running", remedy=f"Wait for it, or see: tune-cluster status {name}")
    if trial is not None and not 0 <= trial < len(state.trials):
        raise ConfigError(f"sweep {name} has no trial {trial}", remedy=f"Its trials are 0 to {len(state.trials) - 1}.")
    chosen = state.best if trial is None else state.trials[trial]
    if chosen is None:
        raise ConfigError(f"sweep {name} measured nothing", remedy=f"See why: tune-cluster report {name}")
    found = result(chosen)
    if found is None:
        why = f"{fmt.status_words(chosen.status)}: {fmt.failure(chosen)}"
        raise ConfigError(f"trial {chosen.number} of {name} was not measured ({why})", remedy="Choose another trial.")
    return found


def _not_faster(chosen: Result, compared: Speedup | None) -> ConfigError:
    subject = f"trial {chosen.trial.number}"
    if chosen.trial.number == 0:
        text = "the fastest configuration is the present one: keep what you have"
    elif compared is None:
        text = f"{subject} cannot be compared: the baseline was not measured"
    else:
        interval = fmt.ratio_interval(compared.ratio.ci95)
        text = f"{subject} is not shown to be faster than the baseline ({compared.ratio.value:.2f}x, 95 %: {interval})"
    return ConfigError(text, remedy="Use --force to promote it all the same; that is recorded.")


def _recorded_run(ledger: Ledger, tracker: Tracker, state: SweepState, trial: Trial) -> str:
    """The trial's run, after bringing MLflow up to date."""
    tracker.sync(ledger, state)
    run_id = tracker.find_run(state, trial.number)
    if run_id is None:
        raise ConfigError(
            f"trial {trial.number} of {state.sweep.sweep} is not recorded in MLflow",
            remedy="Check that the tracking store can be reached, then promote again.",
        )
    return run_id


def _files(recipe: Mapping[str, Any]) -> dict[str, str]:
    return {_JSON: json.dumps(recipe, indent=1, sort_keys=True) + "\n", _YAML: _yaml(recipe)}


def _yaml(recipe: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)


def _tags(state: SweepState, chosen: Result, compared: Speedup | None, recipe: Mapping[str, Any]) -> dict[str, str]:
    return {
        "tokens_per_s_per_device": f"{chosen.speed.value:.6g}",
        "speedup": f"{compared.ratio.value:.4g}" if compared else "unknown",
        "verdict": compared.verdict if compared else "unknown",
        "sweep": state.sweep.sweep,
        "trial": str(chosen.trial.number),
        "config_key": recipe["config_key"],
        "hardware": state.sweep.hardware,
        "forced": str(recipe["evidence"]["forced"]).lower(),
        "recipe_sha256": digest(recipe),
    }


def _describe(chosen: Result, compared: Speedup | None, recipe: Mapping[str, Any]) -> str:
    """Markdown: the registry's pages show this, not the artifact."""
    speed = f"**{fmt.rate(chosen.speed.value)} {recipe['evidence']['unit']}** ({fmt.interval(chosen.speed.ci95)})"
    against = (
        f", {compared.ratio.value:.2f}x the baseline ({fmt.ratio_interval(compared.ratio.ci95)})" if compared else ""
    )
    forced = (
        "\n\n**Promoted by force: not shown to be faster than the baseline.**" if recipe["evidence"]["forced"] else ""
    )
    return f"{speed}{against}: `{recipe['short_name']}`{forced}\n\n```yaml\n{_yaml(recipe)}```\n"


def _promotion(
    version: Registered, recipe: Mapping[str, Any], *, previous: Registered | None, is_new: bool
) -> Promotion:
    evidence = recipe["evidence"]
    return Promotion(
        name=version.name,
        version=version.version,
        trial=evidence["trial"],
        previous_version=previous.version if previous else None,
        forced=evidence["forced"],
        is_new=is_new,
        recipe=recipe,
    )
