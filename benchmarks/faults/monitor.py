"""Answers questions about a Ray cluster from one of its hosts, without being a driver: one JSON line for each asked.

``python -m benchmarks.faults.monitor HOST:PORT``; questions are ``nodes`` and ``groups``.
"""

import json
import sys

from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions


def main() -> None:
    address = sys.argv[1]
    out = sys.stdout
    sys.stdout = sys.stderr  # Ray prints what it likes
    for question in sys.stdin:
        try:
            state = GlobalState()
            state._initialize_global_state(GcsClientOptions.create(address, None, True, True))
            answer = QUESTIONS[question.strip()](state)
            state.disconnect()
        except Exception as error:  # the head may be away: the one who asks decides what that means
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


def nodes(state: GlobalState) -> dict[str, bool]:
    """Address -> alive. Of several that had the same address, the one that is alive counts."""
    found: dict[str, bool] = {}
    for node in state.node_table():
        address = node["NodeManagerAddress"]
        found[address] = found.get(address, False) or node["Alive"]
    return found


def groups(state: GlobalState) -> list[str]:
    """Names of the placement groups that hold or ask for something."""
    return [group["name"] for group in state.placement_group_table().values() if group["state"] != "REMOVED"]


QUESTIONS = {"nodes": nodes, "groups": groups}

if __name__ == "__main__":
    main()
