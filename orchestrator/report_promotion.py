"""What is in production, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator import report_format as fmt
from orchestrator.invocation import PLAIN, Invocation


def render_promotion(promoted: Mapping[str, Any], invocation: Invocation = PLAIN) -> RenderableType:
    """The outcome of a promotion, from its JSON form."""
    where = f"{promoted['name']}@production"
    if not promoted["is_new"]:
        first = Text(f"{where} is this configuration already (version {promoted['version']}).")
    else:
        first = Text(f"{where} is now version {promoted['version']}.", style="bold green")
    lines = [first, _evidence(promoted["recipe"])]
    if promoted["previous_version"]:
        lines.append(Text(f"{promoted['name']}@previous is version {promoted['previous_version']}.", style="dim"))
    lines.append(Text(invocation.command("show", where)))
    return Group(*lines)


def render_recipe(shown: Mapping[str, Any]) -> RenderableType:
    """A registered configuration: where it stands, why, and the configuration itself as YAML."""
    aliases = " ".join(f"@{alias}" for alias in shown["aliases"])
    title = Text.assemble((f"{shown['name']} version {shown['version']}", "bold"), (f"  {aliases}", "green"))
    body = yaml.safe_dump({"candidate": shown["candidate"]}, sort_keys=False)
    return Group(title, _evidence(shown), Text(""), Text(body.rstrip()))


def _evidence(recipe: Mapping[str, Any]) -> Text:
    evidence = recipe["evidence"]
    speed = f"{fmt.rate(evidence['tokens_per_s_per_device'])} {evidence.get('unit', 'tokens/s/p')}"
    compared = evidence["speedup"]
    against = f", {compared['ratio']:.2f}x the baseline" if compared else ""
    source = f"{fmt.trial_id(evidence['trial'])} of {evidence['sweep']} on {evidence['hardware']}"
    text = Text(f"{recipe['short_name']}: {speed}{against}; {source}")
    if evidence["forced"]:
        text.append("; promoted by force, not shown to be faster", style="yellow")
    return text
