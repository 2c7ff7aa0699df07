"""What people see of a profile."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from rich.console import Console

from cluster.gang.environment import MAX_BYTES_PER_RANK
from cluster.gang.gang_outcome import merge_findings
from cluster.hardware.topology import Device
from orchestrator.config.settings import ProfileSection
from orchestrator.errors import ConfigError
from orchestrator.report.page.page import environment
from orchestrator.report.profile_tables import profile_tables, remarks
from orchestrator.report.sources import ProfileCopies, copy_profile, profile_files
from orchestrator.sweep.events import ProfileRun
from orchestrator.sweep.snapshot import attempt_folder
from orchestrator.sweep.state import Attempt, Trial
from orchestrator.terminal.result_screen import render_profile
from trials.files import from_json, to_json
from trials.outcome import Measured, Measurement, StepBreakdown
from trials.reports import (
    FOLDER,
    CollectiveCount,
    Findings,
    MemoryPeak,
    OperatorTime,
    PhaseTime,
    ProfileFile,
    RankProfile,
    Redundancy,
    StepTimes,
)
from trials.spec import Candidate, ProfileSpec

TRACE = "rank0.trace.json.gz"


def times(computation_s, communication_s=0.02, uncovered_s=0.01, total_s=0.1):
    return StepTimes(
        total_s=total_s,
        computation_s=computation_s,
        communication_s=communication_s,
        uncovered_communication_s=uncovered_s,
        free_s=total_s - computation_s - uncovered_s,
    )


def operator(name, cpu_s, share, num_calls=4.0):
    return OperatorTime(name=name, num_calls=num_calls, cpu_s=cpu_s, device_s=0.0, share=share)


def collective(num_calls, module="layers.*.attention.wo"):
    return CollectiveCount(
        module=module,
        phase="forward",
        kind="all_reduce",
        axis="tp",
        group_size=2,
        num_calls=num_calls,
        num_bytes=1 << 20,
    )


FIRST = RankProfile(
    rank=0,
    stage=0,
    first_step=3,
    last_step=5,
    times=times(0.06),
    phases=(PhaseTime(name="forward", time_s=0.03), PhaseTime(name="bubble", time_s=0.02)),
    operators=(operator("aten::mm", 0.04, 0.8), operator("aten::mul", 0.01, 0.2)),
    collectives=(collective(4),),
    redundancies=(
        Redundancy(module="<w1>", phase="backward", problem="is only added", num_calls=2, num_bytes=1 << 20),
    ),
    counted=True,
    memory=MemoryPeak(peak_bytes=3 << 20, start_bytes=0, phase="backward"),
    folder="/far/profile",
    files=(ProfileFile(name=TRACE, num_bytes=4096),),
)
SECOND = replace(
    FIRST,
    rank=2,
    stage=1,
    times=times(0.02),
    operators=(operator("aten::mm", 0.02, 0.5), operator("aten::embedding", 0.02, 0.5)),
    collectives=(collective(6), collective(1, "output")),
    redundancies=(),
    memory=None,
    files=(ProfileFile(name="rank2.trace.json.gz", num_bytes=MAX_BYTES_PER_RANK + 1),),
    notes=("a note",),
)


def trial(*profiles):
    measurement = Measurement(
        world_size=4,
        tokens_per_step=64,
        step_times_s=(0.1,),
        breakdown=StepBreakdown(),
        peak_allocated_bytes=(1,) * 4,
        peak_reserved_bytes=(1,) * 4,
        num_warmup_steps=2,
        losses=(1.0,),
        grad_norms=(1.0,),
        model_flops_per_token=1.0,
        findings=Findings(profile=profiles),
        places=("here/0", "here/1", "far/0", "far/1"),
    )
    attempt = Attempt(
        token="0123456789ab",
        launched_at_s=0.0,
        ranks=(Device(node="here", index=0),),
        num_devices=4,
        outcome=Measured(measurement=measurement),
    )
    return Trial(number=7, candidate=Candidate(), origin="check", reason="", proposed_at_s=0.0, attempts=(attempt,))


def shown(trial, found=()):
    console = Console(width=80, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(render_profile(profile_tables(trial), found))
    console.file.close()
    return console.export_text()


def test_every_profiled_rank_reaches_the_measurement():
    merged = merge_findings([Findings(profile=(FIRST,)), Findings(), Findings(profile=(SECOND,))])
    assert merged.profile == (FIRST, SECOND)
    assert from_json(Findings, to_json(merged)) == merged


def test_stages_are_compared_by_what_they_compute():
    tables = profile_tables(trial(SECOND, FIRST))
    assert [rank.rank for rank in tables.ranks] == [0, 2]
    assert [(stage.stage, stage.computation_s) for stage in tables.stages] == [(0, 0.06), (1, 0.02)]
    assert tables.imbalance == pytest.approx(1.5) and tables.slowest_stage == 0
    assert tables.to_json()["imbalance"] == pytest.approx(1.5)
    alone = profile_tables(trial(FIRST))
    assert alone.stages == () and alone.imbalance is None and alone.slowest_stage is None
    assert profile_tables(trial()) is None


def test_operators_are_means_over_ranks_and_collectives_those_of_the_busiest():
    tables = profile_tables(trial(FIRST, SECOND))
    assert [(one.name, pytest.approx(one.share)) for one in tables.operators] == [
        ("aten::mm", 0.65),
        ("aten::embedding", 0.25),
        ("aten::mul", 0.1),
    ]
    assert tables.operators[0].cpu_s == pytest.approx(0.03)
    assert {one.module: one.num_calls for one in tables.collectives} == {"layers.*.attention.wo": 6, "output": 1}


def test_the_terminal_shows_all_of_it_in_80_columns(tmp_path):
    text = shown(trial(FIRST, SECOND))
    assert max(map(len, text.splitlines())) <= 80
    joined = re.sub(r"\s+", " ", text)
    for words in (
        "0 (stage 0) 100 ms 60 ms 60 % 20 ms 20 % 10 ms 10 % 30 ms 30 %",
        "the slowest computes 1.50 times the mean",
        "0 slowest 60 ms 1.50 20 ms",
        "aten::mm 4 30 ms 65.0 %",
        "layers.*.attention.wo forward all_reduce tp 2 6 1 MiB",
        "redundant: <w1> (backward) is only added; 2 calls and 1 MiB per step",
        "rank 0: 3 MiB at the memory peak in backward, beyond what was",
        f"here:/far/profile/{TRACE} 4 KiB",
        "stayed there: rank 2 has more than 64 MiB",
        "a note",
    ):
        assert words in joined, words
    here = re.sub(r"\s+", "", shown(trial(FIRST), [tmp_path / TRACE]))
    assert f"in{tmp_path}{TRACE}4KiB" in here and "/far" not in here


@pytest.mark.parametrize(("measured_s", "is_told"), [(0.05, True), (0.099, False), (None, False)])
def test_what_profiling_costs_is_told_where_it_is_much(measured_s, is_told):
    tables = profile_tables(trial(FIRST), measured_s)
    told = [remark.text for remark in remarks(tables) if "overhead" in remark.text]
    assert tables.to_json()["slowdown"] == (None if measured_s is None else pytest.approx(0.1 / measured_s))
    assert bool(told) == is_told
    if is_told:
        assert told[0].startswith("the profiled step takes 100 ms, 2.00x the measured 50 ms")


def test_the_page_has_the_same_escaped():
    template = environment().get_template("profile.html.j2")
    html = template.module.profile_of(profile_tables(trial(FIRST, SECOND)), ())
    assert "&lt;w1&gt;" in html and "<w1>" not in html
    assert html.count("<table") == html.count("</table>") == 5


def test_files_are_those_the_ranks_named_and_are_copied_where_the_user_wants_them(tmp_path, caplog):
    profiled = trial(FIRST, SECOND)
    folder = attempt_folder(tmp_path, 7, 0, "0123456789ab") / FOLDER
    assert profile_files(tmp_path, profiled) == []
    folder.mkdir(parents=True)
    (folder / TRACE).write_bytes(b"trace")
    (folder / "rank0.stranger").write_bytes(b"")
    (folder / "rank2.trace.json.gz").symlink_to(folder / TRACE)
    found = profile_files(tmp_path, profiled)
    assert found == [folder / TRACE]
    copied = copy_profile(tmp_path / "out", "quick", profiled, found)
    assert copied == tmp_path / "out/quick-t007" and (copied / TRACE).read_bytes() == b"trace"
    asked = replace(profiled, check=ProfileRun(of=0, profile=ProfileSpec()))
    state = SimpleNamespace(num_checks=1, trials=[profiled, asked], sweep=SimpleNamespace(sweep="watched"))
    ProfileCopies(tmp_path / "out", tmp_path).on_state(state)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["quick-t007", "watched-t007"]
    (tmp_path / "file").touch()
    ProfileCopies(tmp_path / "file", tmp_path).on_state(state)
    assert "cannot copy the profile" in caplog.text
    with pytest.raises(ConfigError, match="cannot copy the profile"):
        copy_profile(tmp_path / "file", "quick", profiled, found)


def test_the_section_gives_what_ranks_are_told():
    section = ProfileSection.model_validate({"trials": ["baseline"], "ranks": [0, 5], "memory": True})
    assert section.to_spec().ranks == (0, 5) and section.to_spec().memory
    assert ProfileSection().to_spec() == ProfileSpec() and ProfileSection().trials == ["winner"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"start_step": 5, "stop_step": 4}, "stop_step 4 comes before start_step 5"),
        ({"stop_step": 40}, "records more than 20 steps"),
        ({"start_step": 0}, "greater than or equal to 1"),
        ({"ranks": [1, True]}, "valid integer"),
        ({"ranks": [1, 1]}, "listed twice"),
        ({"trials": ["best"]}, "'winner' or 'baseline'"),
        ({"trials": ["winner", "winner"]}, "listed twice"),
    ],
)
def test_each_mistake_in_the_section_has_one_message(values, message):
    with pytest.raises(ValidationError) as caught:
        ProfileSection.model_validate(values)
    (error,) = caught.value.errors()
    assert message in error["msg"]
