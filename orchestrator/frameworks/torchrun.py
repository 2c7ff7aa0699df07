"""The recipe of the built-in runner under plain torchrun: the specification of one trial, without loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.frameworks.spelling import WORKLOAD, Recipe, Setting, Settings, SettingsBuilder, custom, flatten
from trials.accelerator.kinds import FAMILIES
from trials.files import from_json, to_json
from trials.spec import Candidate, TrialSpec, Workload, with_learned_routing

SPEC, SCRIPT = "spec.json", "run.sh"
_PARTS = ("layout", "micro_batch_size", "recompute", "precision", "loader", "kernels", "offload")

_RUN = """\
#!/bin/sh
# Trains {short} on {world_size} ranks and writes what was measured to report.json, in this directory.
# NNODES: hosts, each running this; RENDEZVOUS: HOST:PORT of one of them; DEVICE: {kinds}.
set -eu
cd "$(dirname "$0")"
found=cpu
{tools}
: "${{NNODES:=1}}" "${{RENDEZVOUS:=localhost:0}}" "${{DEVICE:=$found}}"
sed "s/\\"device\\": \\"[a-z]*\\"/\\"device\\": \\"$DEVICE\\"/" {spec} > run-$DEVICE.json
exec torchrun --nnodes "$NNODES" --nproc-per-node $(({world_size} / NNODES)) \\
  --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id {key} \\
  -m trials.worker --spec run-$DEVICE.json --out report.json
"""


_TOOLS = tuple(
    f"! command -v {family.query_tool} > /dev/null || found={family.kind}"
    for family in reversed(list(FAMILIES.values()))
    if family.query_tool
)
"""Lines that detect the kind of device by the available tools; the last available one counts."""


def _write(builder: SettingsBuilder) -> None:
    builder.settings["candidate"] = to_json(builder.candidate)
    builder.settings["workload"] = to_json(builder.workload)


def _read(settings: Settings) -> dict[str, Any]:
    return flatten(from_json(Candidate, settings["candidate"]), from_json(Workload, settings["workload"]))


SETTINGS: tuple[Setting, ...] = (
    custom(_PARTS, ("candidate",), _write, _read),
    custom((WORKLOAD,), ("workload",), lambda _: None),
)


def _render(builder: SettingsBuilder) -> dict[str, str]:
    trial = TrialSpec(workload=with_learned_routing(builder.workload), candidate=builder.candidate)
    script = _RUN.format(
        short=f"{builder.workload.model.kind}, configuration {builder.candidate.config_key[:12]},",
        world_size=builder.candidate.layout.world_size,
        key=builder.candidate.config_key[:12],
        spec=SPEC,
        kinds=", ".join(FAMILIES),
        tools="\n".join(_TOOLS),
    )
    return {SPEC: json.dumps(to_json(trial), indent=2) + "\n", SCRIPT: script}


def _load(files: Mapping[str, str]) -> dict[str, Any]:
    trial: TrialSpec = from_json(TrialSpec, json.loads(files[SPEC]))
    return {"candidate": to_json(trial.candidate), "workload": to_json(trial.workload)}


RECIPE = Recipe(
    name="torchrun",
    title="torchrun with the built-in runner",
    settings=SETTINGS,
    render=_render,
    load=_load,
    command=lambda _: f"sh {SCRIPT}",
)
