"""What a sweep knew when it was created decides what it proposes, whatever is found out before it goes on."""

import json

from click.testing import CliRunner

from orchestrator.cli.main import main
from orchestrator.config.sweep import load_sweep
from orchestrator.planning.dry_runs import DryRunCache, DryRunEstimates, cache_key
from orchestrator.planning.predictions import PROFILE, CountedCandidates, EarlierTrials, PriorKnowledge
from orchestrator.sweep.events import AttemptEnded
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from tests.support.sweep_files import changed, write
from tests.support.virtual_sweeps import SWEEP, submit
from trials.dryrun.estimate import DryRunEstimate, StageEstimate

CONTENT = changed(SWEEP, ("cluster", "simulation"), {"accelerator": "a100-80", "deviation": 1.0, "seed": 5})
CONTENT["budget"] = {"max_trials": 6}
DOCUMENTS = ("sweep_yaml", "tracking", CountedCandidates.name, PROFILE, EarlierTrials.name)


def counted(peak_bytes):
    """What a dry run of one stage might say."""
    stage = StageEstimate(
        stage=0,
        rank=0,
        peak_bytes=peak_bytes,
        peak_by_category={"activation": peak_bytes},
        peak_phase="backward",
        flops={"forward": 10**12},
        collectives={},
        num_parameters=1,
    )
    return DryRunEstimate(stages=(stage,))


def proposals(state):
    return [(trial.candidate, trial.reason) for trial in state.trials]


def cut(source, target, after):
    """The ledger as it was when trial ``after`` had just ended."""
    with Ledger(source) as old, Ledger(target) as new:
        for name in DOCUMENTS:
            new.put_document(name, old.document(name))
        for event in old.events():
            new.append(event)
            if isinstance(event, AttemptEnded) and event.trial == after:
                return


def test_probes_and_dry_runs_do_not_change_the_proposals_of_a_resumed_sweep(tmp_path):
    whole = submit(tmp_path, CONTENT).state
    other = tmp_path / "other"
    other.mkdir()
    home = Home(other / "home")
    cut(tmp_path / "home" / "sweeps" / whole.sweep.sweep, home.sweep_folder(whole.sweep.sweep), after=1)
    file = write(other, CONTENT)
    probed = CliRunner().invoke(main, ["probe", str(file), "--home", str(home.path)], catch_exceptions=False)
    assert probed.exit_code == 0
    later, workload = whole.trials[-1].candidate, load_sweep(file).to_workload()
    key = cache_key(workload, later, mode="accelerator", exact=False)
    DryRunCache(home.dry_runs).put(key, later, counted(10**13))
    resumed = submit(other, CONTENT).state
    assert proposals(resumed) == proposals(whole)
    fresh = submit(other, changed(CONTENT, ("name",), "fresh")).state
    assert later not in [trial.candidate for trial in fresh.trials], "a dry run shows that it does not fit"
    assert proposals(fresh)[1][1] != proposals(whole)[1][1], "a probe changes what is expected"


def test_prior_knowledge_survives_the_ledger(tmp_path):
    file = write(tmp_path, CONTENT)
    home = ["--home", str(tmp_path / "home")]
    found = CliRunner().invoke(main, ["probe", str(file), *home, "--json"], catch_exceptions=False)
    with Ledger(tmp_path / "empty") as ledger:
        assert PriorKnowledge.kept(ledger) == PriorKnowledge()
    submit(tmp_path, {**CONTENT, "budget": {"max_trials": 1}})
    with Ledger(tmp_path / "home" / "sweeps" / CONTENT["name"]) as ledger:
        known = PriorKnowledge.kept(ledger)
        assert [node.node for node in known.profile.nodes] == [n["node"] for n in json.loads(found.stdout)["nodes"]]
        candidate = load_sweep(file).baseline_candidate
        more = PriorKnowledge(
            estimates=DryRunEstimates(by_candidate={candidate: counted(5)}, limit_bytes=7, context_bytes=2),
            profile=known.profile,
        )
        more.keep(ledger)
        assert PriorKnowledge.kept(ledger) == more
