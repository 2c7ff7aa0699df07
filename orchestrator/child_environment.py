"""Commands that users name in a sweep file: what they get of the controller's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from orchestrator.invocation import HOME_VARIABLE
from trials.secrets import for_ranks


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """With the variables ``own``: none of the controller's secrets, nor what would make the command seem to be one."""
    kept = {name: value for name, value in for_ranks(os.environ).items() if not name.startswith("TUNE_CLUSTER_")}
    home = {HOME_VARIABLE: os.environ[HOME_VARIABLE]} if HOME_VARIABLE in os.environ else {}
    return {**kept, **home, **own}
