"""The sweep file, parsed once and strictly into a :class:`SweepSpec`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag, ValidationError, model_validator

from cluster.base import Deadlines
from cluster.hardware.topology import Topology
from orchestrator.config.search_settings import SearchSection
from orchestrator.config.settings import (
    AUTO_PROFILE,
    BaselineSection,
    BudgetSection,
    ClusterSection,
    ConfirmSection,
    ConfirmValue,
    DeadlinesSection,
    GateSection,
    GateValue,
    Identifier,
    MeasureSection,
    NotifySection,
    ProfileValue,
    SpaceSection,
    TrackingSection,
    check_runner,
    is_there,
)
from orchestrator.config.training_program import ScriptSection, ScriptSweep, refuse_for_scripts, resolve_script
from orchestrator.config.workload import MODEL_SECTIONS, PythonSection, WorkloadSection
from orchestrator.config.yaml_source import KeyPath, YamlSource, dotted, read_yaml, refuse_secrets, to_config_error
from orchestrator.errors import ConfigError
from orchestrator.objective import Objective, ObjectiveName
from orchestrator.program.candidate_command import problem, rule_of
from orchestrator.program.user_program import Script
from orchestrator.space.file_types import Section, ShortForms, fault
from orchestrator.space.knobs import KNOB_NAMES, CustomKnob, CustomScalar
from orchestrator.space.rules import Filters, check
from orchestrator.space.space import build_candidate
from orchestrator.sweep.events import Budget, ProofSettings, SweepCreated
from orchestrator.sweep.snapshot import nearest
from trials.files import digest
from trials.spec import Candidate, Protocol, Workload

OPERATIONAL = frozenset({"address", "min_nodes", "max_wait", "queue", "priority"})
"""Keys of ``cluster`` that determine where and when, not on which hardware, trials run."""
READ = "read"
"""Key of a stored ``workload`` with the files of a training program as they were when the sweep was created."""
FROM_RUN = "from_run"


def _kind_of_workload(value: Any) -> str:
    """The kind of a workload section, recognized by keys that only one kind has."""
    if not isinstance(value, Mapping):
        return str(getattr(type(value), "TAG", WorkloadSection.TAG))
    if "recipe" in value or "run" in value:
        return ScriptSection.TAG
    return PythonSection.TAG if "kind" in value else WorkloadSection.TAG


WorkloadValue = Annotated[
    Annotated[WorkloadSection, Tag(WorkloadSection.TAG)]
    | Annotated[PythonSection, Tag(PythonSection.TAG)]
    | Annotated[ScriptSection, Tag(ScriptSection.TAG)],
    Discriminator(_kind_of_workload),
]
BaselineValue = Annotated[
    BaselineSection,
    ShortForms({FROM_RUN: {}}, remedy="Set the knob values that you use today, such as {micro_batch_size: 4}."),
]


class SweepSpec(Section):
    """One sweep, as described in the sweep file."""

    name: Identifier = Field(description="The name of the sweep, its directory and its records.")
    workload: WorkloadValue = Field(
        description="What to train: a built-in model or your own module in the built-in runner, or your training "
        "program."
    )
    cluster: ClusterSection = Field(default=ClusterSection(), description="Where trials run.")
    space: SpaceSection = Field(description="The knobs to vary, and the choices for each.")
    baseline: BaselineValue = Field(
        default=BaselineSection(),
        description="Your current configuration, which is always trial 0. `from_run` runs your training program with "
        "its command unchanged.",
    )
    objective: ObjectiveName = Field(
        default=Objective().name,
        description="What to optimise: tokens per second per device, step time, or cost per token (see "
        "docs/objective.md).",
    )
    search: SearchSection = Field(default=SearchSection(), description="How to choose the candidates to try.")
    measure: MeasureSection = Field(default=MeasureSection(), description="How a trial is measured.")
    budget: BudgetSection = Field(default=BudgetSection(), description="When to stop.")
    confirm: ConfirmValue = Field(
        default=ConfirmSection(), description="How to re-measure the fastest trials. `off` skips the confirmation."
    )
    gate: GateValue = Field(
        default=GateSection(), description="How to check that the losses of the winner match. `off` skips the check."
    )
    profile: ProfileValue = Field(
        default=AUTO_PROFILE,
        description="Which trials to rerun under the profiler. `auto` profiles the baseline and the winner if the "
        "sweep took at least ten minutes; `off` profiles none.",
    )
    deadlines: DeadlinesSection = Field(default=DeadlinesSection(), description="Time limits for a trial.")
    runner: Annotated[str, AfterValidator(check_runner)] = Field(
        default="trials.worker:run_rank", description="The function that every rank runs, as `module:function`."
    )
    tracking: TrackingSection = Field(default=TrackingSection(), description="Where to record results in MLflow.")
    notify: NotifySection | None = Field(default=None, description="Where to send notifications about the sweep.")

    _source: YamlSource | None = PrivateAttr(default=None)
    _scripted: ScriptSweep | None = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        """Whether both mean the same, regardless of their source."""
        return isinstance(other, SweepSpec) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.spec_hash)

    @property
    def file_text(self) -> str | None:
        """The file as written; None if read from a ledger."""
        return None if self._source is None else self._source.text

    def error(self, path: KeyPath, message: str, remedy: str) -> ConfigError:
        """A problem with the key at ``path``, located in the file."""
        if self._source is None:
            return ConfigError(message, key=dotted(path), remedy=remedy)
        return self._source.error(path, message, remedy)

    @model_validator(mode="before")
    @classmethod
    def _only_scripts_run(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("baseline") == FROM_RUN:
            workload = values.get("workload")
            if isinstance(workload, Mapping) and _kind_of_workload(workload) != ScriptSection.TAG:
                remedy = (
                    "Set the values used today, or tune your training program with workload: {recipe: ..., run: [...]}."
                )
                raise fault("baseline", "'from_run' requires a training program (workload.run)", remedy)
        return values

    @model_validator(mode="after")
    def _resolve_script(self) -> Self:
        """Read a training program together with the knobs to change in it."""
        if not isinstance(self.workload, ScriptSection):
            if own := next((name for name in ("space", "baseline") if getattr(self, name).own), None):
                raise fault(f"{own}.own", "custom knobs require a training program (workload.run)", "Remove them.")
            if self.space.inside is not None:
                message = "these knobs require a training program (workload.run)"
                raise fault("space.inside", message, "Move the knobs to 'space'.")
            return self
        refuse_for_scripts(self)
        num_devices = self.cluster.devices_per_node
        num_devices = None if num_devices is None else num_devices * self.cluster.nodes[0]
        device = None if self.cluster.device == "auto" else self.cluster.device
        self._scripted = resolve_script(
            self.workload,
            self.space,
            self.baseline,
            num_devices=num_devices,
            devices_per_node=self.cluster.devices_per_node,
            device=device,
        )
        return self

    @property
    def script(self) -> Script | None:
        """The user's training program; None for the built-in runner."""
        return None if self._scripted is None else self._scripted.script

    @model_validator(mode="after")
    def _legal_baseline(self) -> Self:
        """Refuse an illegal baseline. The user's filters do not apply: they restrict proposals only."""
        broken = check(self.baseline_candidate, self.to_workload())
        if broken:
            raise fault("baseline", f"invalid configuration: {broken[0].reason}", "Fix the baseline.")
        if self.script is not None and (reason := problem(self.script, self.baseline_candidate)):
            is_read = self.baseline_candidate == self.script.unchanged
            key, what = ("workload.run", "command") if is_read else ("baseline", "baseline")
            raise fault(key, f"not supported by {self.script.training.title}: {reason}", f"Fix the {what}.")
        return self

    @model_validator(mode="after")
    def _known_params(self) -> Self:
        """Refuse earlier runs whose params or metric do not fit the file."""
        found = self.search.learn_from
        if found is None:
            return self
        known = (*KNOB_NAMES, *(knob.name for knob in self.custom_knobs))
        for param, knob in found.params.items():
            if knob not in known:
                near = nearest(knob, known)
                remedy = f"Did you mean {near!r}?" if near else "Use a knob from docs/knobs.md or space.own."
                raise fault(f"search.learn_from.params.{param}", f"unknown knob {knob!r}", remedy)
        if found.unit.startswith("tokens") and self.to_workload().seq_length == 1:
            raise fault(
                "search.learn_from.unit",
                "the number of tokens per sample is unknown",
                "Set workload.seq_length, or use a metric in samples/s or s/step.",
            )
        return self

    @property
    def baseline_candidate(self) -> Candidate:
        """The baseline in canonical form."""
        if self._scripted is not None:
            return self._scripted.baseline
        return self.candidate_of({}, {})

    @property
    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Values to try of every knob, as written."""
        if self._scripted is not None:
            return dict(self._scripted.choices)
        return self.space.choices(self.baseline.values())

    @property
    def custom_knobs(self) -> tuple[CustomKnob, ...]:
        """The custom knobs; empty for the built-in runner."""
        return () if self.script is None else self.script.own

    def candidate_of(self, values: Mapping[str, Any], own: Mapping[str, CustomScalar]) -> Candidate:
        """The baseline with these values of built-in and custom knobs."""
        scripted, devices_per_node = self._scripted, self.cluster.devices_per_node
        if scripted is None:
            values = {**self.baseline.values(), **values}
            return build_candidate(values, self.to_workload().model, devices_per_node=devices_per_node)
        return build_candidate(
            {**scripted.baseline_values, **values},
            scripted.script.model,
            scripted.script.own,
            {**scripted.baseline_custom, **own},
            devices_per_node=devices_per_node,
        )

    @property
    def filters(self) -> Filters:
        """The user's restrictions."""
        least, most = self.cluster.nodes
        return Filters(
            forbid=tuple(pattern.accepted() for pattern in self.space.forbid),
            require=tuple(pattern.accepted() for pattern in self.space.require),
            world_size=self.space.world_size,
            whole_lease=self.space.world_size is None,
            min_nodes=least if least < most else None,
            others=() if self.script is None else (rule_of(self.script),),
        )

    def to_objective(self, topology: Topology | None) -> Objective:
        """The objective on these nodes, or on those of the file if unknown."""
        devices = topology.nodes[0].num_devices if topology else self.cluster.devices_per_node or 1
        return Objective(
            name=self.objective,
            devices_per_node=devices,
            price_per_device_hour=self.cluster.price_per_device_hour,
        )

    def to_workload(self) -> Workload:
        if isinstance(self.workload, ScriptSection):
            assert self._scripted is not None, "resolved when the file was checked"
            return self._scripted.script.workload
        return self.workload.to_workload()

    @property
    def proof(self) -> ProofSettings:
        """Checks that the winner must pass."""
        return ProofSettings(
            confirm=self.confirm.to_settings() if self.confirm.is_on else None,
            gate=self.gate.to_settings() if self.gate.is_on else None,
        )

    def to_budget(self) -> Budget:
        """When the sweep ends."""
        return self.budget.to(Budget, patience=self.search.patience)

    def to_protocol(self) -> Protocol:
        return self.measure.to_protocol()

    def to_deadlines(self) -> Deadlines:
        return self.deadlines.to_deadlines()

    def to_json(self) -> dict[str, Any]:
        """The content of an equivalent sweep file: everything written out, paths absolute, the model inline."""
        content = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        if isinstance(self.workload, ScriptSection):
            content["workload"][READ] = self.workload.what_was_read()
            given = self.baseline.model_fields_set
            content["baseline"] = {key: value for key, value in content["baseline"].items() if key in given}
        return content

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`. Does not check that the training text still exists."""
        workload = dict(data.get("workload", {}))
        context = {"check_files": False, READ: workload.pop(READ, None)}
        return cls.model_validate({**data, "workload": workload}, context=context)

    @property
    def spec_hash(self) -> str:
        """SHA-256 of :meth:`to_json` without the parts that may change later (budget, notifications, place and time
        of runs); equal for files that mean the same."""
        content = {key: value for key, value in self.to_json().items() if key not in ("budget", "notify")}
        cluster = {key: value for key, value in content["cluster"].items() if key not in OPERATIONAL}
        search = {key: value for key, value in content["search"].items() if key != "patience"}
        return digest({**content, "cluster": cluster, "search": search})


def load_sweep(path: str | Path, *, address: str | None = None, budget: Mapping[str, Any] | None = None) -> SweepSpec:
    """Read and check a sweep file, including the data and programs that it names on this host.

    Args:
        address: address of the Ray cluster from the command line; programs and data may exist only there.
        budget: values that replace those of the file's section ``budget``.

    Raises:
        ConfigError: for anything wrong with the file, these values, the model file or the training text it names.
    """
    source = _read(path)
    data = _with_model(source)
    if budget:
        _check_budget(budget)
        section = data.get("budget") or {}
        data["budget"] = {**section, **budget} if isinstance(section, Mapping) else section
    try:
        context = {"folder": source.file.parent, "is_remote": _is_remote(data, address)}
        spec = SweepSpec.model_validate(data, context=context)
    except ValidationError as error:
        raise to_config_error(error, source, SweepSpec) from None
    spec._source = source
    refuse_secrets(source)  # again: env_pass is known only now
    return spec


def _check_budget(values: Mapping[str, Any]) -> None:
    """Refuse command-line values that are invalid in a sweep file.

    Raises:
        ConfigError: with the option's name.
    """
    try:
        BudgetSection.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        option = f"--{str(first['loc'][0]).replace('_', '-')}"
        raise ConfigError(first["msg"], key=option, remedy="See `budget` in docs/sweep-file.md.") from None


def _is_remote(data: Mapping[str, Any], address: str | None) -> bool:
    """Whether the sweep runs on a Ray cluster with other hosts."""
    cluster = data.get("cluster")
    if not isinstance(cluster, Mapping) or cluster.get("kind") != "ray":
        return False
    return (address or os.environ.get("RAY_ADDRESS") or cluster.get("address")) not in (None, "", "local")


def _read(path: str | Path) -> YamlSource:
    source = read_yaml(path)
    if not isinstance(source.data, dict):
        raise source.error((), "expected a mapping", "See docs/sweep-file.md for an example.")
    refuse_secrets(source)
    return source


def _with_model(source: YamlSource) -> dict[str, Any]:
    """The data of the file, with ``workload.model`` replaced by the content of the file it names."""
    workload = source.data.get("workload")
    reference = workload.get("model") if isinstance(workload, dict) else None
    is_model_file = _kind_of_workload(workload) == WorkloadSection.TAG
    if not is_model_file or not isinstance(workload, dict) or not isinstance(reference, str):
        return dict(source.data)
    file = source.file.parent / reference
    if not is_there(file) or file.is_dir():
        raise source.error(
            ("workload", "model"),
            f"model file {str(file)!r} does not exist",
            "Check the path; it is relative to the sweep file.",
        )
    model = _read(file)
    kind = model.data.get("kind")
    section = MODEL_SECTIONS.get(kind if isinstance(kind, str) else "")
    if section is None:
        raise model.error(
            ("kind",), "expected one of " + ", ".join(map(repr, MODEL_SECTIONS)), "Set the kind of model."
        )
    try:
        section.model_validate(model.data, context={"folder": source.file.parent})
    except ValidationError as error:
        raise to_config_error(error, model, section) from None
    return {**source.data, "workload": {**workload, "model": model.data}}


def check_same(created: SweepCreated, spec: SweepSpec) -> None:
    """Refuse a sweep file whose meaning differs from the one the sweep was created from.

    Raises:
        ConfigError: it does.
    """
    if created.spec_hash != spec.spec_hash:
        raise ConfigError(
            f"the sweep {spec.name!r} was started with a different file",
            key="name",
            remedy="Rename this sweep, or choose another directory with --home.",
        )
