"""A simulated sweep of some forty candidates for the tests of the search, with a store that needs no migration."""

from orchestrator.commands.submission import submission_of_sweep
from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller
from orchestrator.sweep.snapshot import Home
from tests.support.mlflow_store import new_store
from tests.support.sweep_files import write

SHAPE = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 32, "ffn_hidden_size": 11008}
SWEEP = {
    "name": "first",
    "workload": {"model": {"kind": "llama", **SHAPE, "vocab_size": 32000}, "seq_length": 4096, "global_batch_size": 64},
    "cluster": {
        "kind": "simulated",
        "num_nodes": 2,
        "simulation": {"accelerator": "a100-80", "deviation": 1.0, "seed": 3},
    },
    "baseline": {"dp_shard": 16, "zero_stage": 3, "recompute": "full", "precision": "O1"},
    "space": {
        "dp_shard": [4, 8, 16],
        "zero_stage": [1, 3],
        "pp": [1, 2, 4],
        "micro_batch_size": [1, 2, 4],
        "recompute": ["none", "full"],
        "world_size": 16,
    },
    "measure": {"min_warmup_steps": 3, "max_warmup_steps": 3, "num_steps": 5, "max_steps": 5},
    "budget": {"max_trials": 6, "consecutive_failures": 50},
    "confirm": "off",  # proofs have separate tests
    "gate": "off",
    "tracking": {"report": False},  # pages have separate tests, too
    "deadlines": {"starting_s": 600.0, "warmup_s": 3600.0, "measuring_s": 7200.0, "stall_s": 1800.0},
}


class Quiet:
    """Watches nothing."""

    def on_state(self, state):
        pass

    def on_lease(self, nodes, waiting):
        pass

    def on_progress(self, trial, progress):
        pass


def home(folder):
    """A home in ``folder`` with an empty store."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    if not (folder / "home" / "mlflow.db").exists():
        new_store(folder / "home")
    return Home(folder / "home")


def submit(folder, content):
    return submit_file(write(folder, content), home(folder))


def submit_file(file, found, observer=None):
    return controller.submit(load_sweep(file), found, observer or Quiet())


def resume(name, found):
    spec = submission_of_sweep(name, found, address=None, mode=None).spec
    return controller.resume(spec, found, Quiet())
