"""Reports of programs: which source counts, when it is enough, what invalidates a measurement."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.failure import InfeasibleSpec, NonFiniteLoss, classify
from trials.script.command import Expected, ScriptCommand
from trials.script.judge import Judge, OutputWatch, failure
from trials.script.logs import LogRecord, LogValue
from trials.script.report_lines import ReportedError, StepBook
from trials.spec import Protocol

COMMAND = ScriptCommand(
    argv=("x",),
    cwd="/",
    protocol=Protocol(min_warmup_steps=1, num_steps=3),
    num_devices=2,
    tokens_per_step=1000,
    samples_per_step=8,
)


class Story:
    """A book of reported steps, and its judge."""

    def __init__(self, *, num_steps=3, **expected):
        protocol = Protocol(min_warmup_steps=1, num_steps=num_steps, max_steps=max(16, num_steps))
        command = replace(COMMAND, protocol=protocol, expected=Expected(**expected))
        self.book = StepBook(command)
        self.judge = Judge(command, self.book)

    def report(self, step, *, source="report", origin="rank0.jsonl", arrived_s=0.0, since_s=None, **values):
        line = json.dumps({"v": 1, "source": source, "step": step, **values})
        self.book.add_report_line(line, origin=origin, arrived_s=arrived_s, since_s=since_s)
        return self

    def facts(self, origin="rank0.jsonl", **values):
        self.book.add_report_line(
            json.dumps({"source": "hook:torch", "event": "facts", **values}), origin=origin, arrived_s=0.0
        )
        return self

    def log(self, step, *, arrived_s=0.0, at_s=None, **values):
        record = LogRecord(
            step=step,
            values={name: LogValue(value, 0.001) for name, value in values.items()},
            at_s=None if at_s is None else LogValue(at_s, 0.001),
        )
        self.book.add_log_record(record, format_name="pattern", origin="output", arrived_s=arrived_s)
        return self


def seconds(story):
    times = story.judge.times()
    return None if times is None else [round(value, 6) for value in times.seconds]


def test_reports_override_hooks_and_hooks_override_logs():
    story = Story()
    for step in range(1, 5):
        story.log(step, step_time_s=0.3, loss=3.0)
    assert (seconds(story), story.judge.times().source) == ([0.3] * 3, "log:pattern")
    assert story.judge.times().resolution_s == 0.001
    for step in range(1, 5):
        story.report(step, source="hook:torch", step_time_s=0.2)
    assert (seconds(story), story.judge.times().source) == ([0.2] * 3, "hook:torch")
    for step in range(1, 4):
        story.report(step, step_time_s=0.1, loss=5.0 - step)
    assert story.judge.times().source == "hook:torch"  # the report of the last step is still to come
    story.report(4, step_time_s=0.1, loss=1.0)
    assert (seconds(story), story.judge.times().source) == ([0.1] * 3, "report")
    assert story.judge.per_step("loss") == (4.0, 3.0, 2.0, 1.0)
    assert {source.name: source.source for source in story.judge.sources(story.judge.times())} == {
        "step_time_s": "report",
        "loss": "report",
    }


def test_a_log_of_micro_batches_does_not_replace_steps_counted_by_a_hook():
    story = Story()
    for step in range(1, 5):
        assert seconds(story) is None
        for micro_batch in (2 * step - 1, 2 * step):
            story.log(micro_batch, step_time_s=0.1)
        story.report(step, source="hook:torch", step_time_s=0.2)
    assert (seconds(story), story.judge.times().source) == ([0.2] * 3, "hook:torch")


@pytest.mark.parametrize("first", [0, 1, 5001])
def test_steps_are_counted_from_the_first_wherever_numbering_begins(first):
    story = Story()
    for step in range(3):
        story.log(first + step, step_time_s=0.1 * (step + 1))
    assert (story.judge.num_steps, seconds(story)) == (3, None)
    story.log(first + 3, step_time_s=0.4)
    assert seconds(story) == [0.2, 0.3, 0.4]


def test_a_line_for_several_steps_counts_for_each_of_them():
    story = Story().log(2, step_time_s=0.5)
    assert seconds(story) is None
    assert seconds(story.log(4, step_time_s=0.25)) == [0.5, 0.25, 0.25]


def test_times_come_from_clocks_then_rates_then_arrivals():
    assert seconds(_judge_of(lambda story, n: story.log(n, at_s=10.0 + n, arrived_s=9.0))) == [1.0, 1.0, 1.0]
    assert seconds(_judge_of(lambda story, n: story.log(n, tokens_per_s=2000.0))) == [0.5] * 3
    assert seconds(_judge_of(lambda story, n: story.log(n, tokens_per_s_per_device=2000.0))) == [0.25] * 3
    assert seconds(_judge_of(lambda story, n: story.log(n, samples_per_s=80.0))) == [0.1] * 3
    assert seconds(_judge_of(lambda story, n: story.log(n, arrived_s=0.5 * n))) == [0.5] * 3
    assert seconds(_judge_of(lambda story, n: story.report(n, t=100.0 + 0.5 * n))) == [0.5] * 3


def _judge_of(tell):
    story = Story()
    for step in range(1, 5):
        tell(story, step)
    return story


def test_lines_that_arrive_together_share_their_time():
    story = Story().log(1, arrived_s=1.0)
    for step in (2, 3, 4):
        story.log(step, arrived_s=1.6)
    assert seconds(story) == [0.2] * 3
    assert story.judge.times().resolution_s == pytest.approx(0.2)
    assert seconds(_judge_of(lambda story, n: story.log(n, arrived_s=5.0))) is None


def test_the_slowest_process_counts_and_shares_are_averaged():
    story = Story()
    for step in range(1, 5):
        for rank in (0, 1):
            values = {"step_time_s": 0.1 + 0.1 * rank * (step == 3), "loss": 2.0 + rank, "loss_scope": "rank"}
            story.report(step, source="hook:torch", origin=f"rank{rank}.jsonl", **values)
    assert seconds(story) == [0.1, 0.2, 0.1]
    assert story.judge.per_step("loss") == (2.5,) * 4
    assert next(s for s in story.judge.sources(story.judge.times()) if s.name == "loss").is_share


@pytest.mark.parametrize(
    ("expected", "facts", "says"),
    [
        ({"world_size": 2}, {"world_size": 1}, "requires the world size to be 2, but the program has 1"),
        ({"micro_batch_size": 4}, {"micro_batch_size": 2}, "samples per micro-batch to be 4"),
        ({"num_microbatches": 2}, {"forwards_per_step": 4}, "micro-batches per step and rank to be 2"),
        (
            {"dtype": "bfloat16"},
            {"dtype": "torch.float32"},
            "first linear layer to be bfloat16, but the program has float32",
        ),
        ({"recomputes": True}, {"layer_calls_per_forward": 1}, "each layer runs once per forward pass"),
        ({"recomputes": False}, {"layer_calls_per_forward": 2}, "each layer runs 2 times"),
        (
            {"parameter_shards": 8},
            {"parameter_bytes_local": 100, "parameter_bytes_global": 100},
            "sharded over 8 ranks",
        ),
    ],
)
def test_knobs_that_do_not_act_are_no_measurement(expected, facts, says):
    story = Story(**expected).facts(**facts)
    with pytest.raises(InfeasibleSpec, match=says) as caught:
        story.judge.check_facts()
    assert str(caught.value).startswith("not applied: ")
    assert classify(caught.value) == "infeasible"


def test_matching_or_unknown_facts_raise_no_objection():
    expected = {"world_size": 2, "micro_batch_size": 4, "dtype": "bfloat16", "recomputes": True, "parameter_shards": 2}
    Story(**expected).facts(world_size=2, layer_calls_per_forward=1.5).judge.check_facts()
    sizes = {"parameter_bytes_local": 60, "parameter_bytes_global": 100}
    Story(**expected).facts(micro_batch_size=4, dtype="bfloat16", **sizes).judge.check_facts()
    Story().facts(world_size=1, dtype="float64").judge.check_facts()
    gan = Story(num_microbatches=1).facts(backwards_per_step=2, num_optimizers=1)
    gan.judge.check_facts()  # after the first step of the first optimiser
    gan.facts(forwards_per_step=3, backwards_per_step=3, num_optimizers=2).judge.check_facts()
    Story(num_microbatches=2).facts(forwards_per_step=4, backwards_per_step=2, num_optimizers=1).judge.check_facts()


def test_another_global_batch_is_another_training():
    story = _judge_of(lambda story, n: story.report(n, samples=16))
    with pytest.raises(InfeasibleSpec, match="8 samples per optimiser step, but the program has 16"):
        story.judge.check_facts()
    _judge_of(lambda story, n: story.report(n, samples=16 + n)).judge.check_facts()  # they vary: batches of their own


def test_amounts_per_step_are_no_more_than_a_hook_counts():
    story = _judge_of(lambda story, n: story.report(n, samples=60 + n).facts(micro_batch_size=4, forwards_per_step=1.0))
    with pytest.raises(InfeasibleSpec, match=r"reports 63 samples per optimiser step, but trains on 8 \(seen by rank0"):
        story.judge.check_facts()
    packed = _judge_of(
        lambda story, n: story.report(n, samples=60 + n).facts(micro_batch_size=1, forwards_per_step=1.0)
    )
    packed.judge.check_facts()
    story = _judge_of(lambda story, n: story.report(n, tokens=1000).report(n, source="hook:transformers", tokens=400))
    with pytest.raises(InfeasibleSpec, match=r"reports 1000 tokens per optimiser step, but trains on 400"):
        story.judge.check_facts()
    _judge_of(
        lambda story, n: story.report(n, tokens=1000).report(n, source="hook:transformers", tokens=1000)
    ).judge.check_facts()


def test_divergence_beyond_the_measured_steps_does_not_count():
    story = _judge_of(lambda story, n: story.report(n, loss=1.0))
    story.report(5, loss="NaN")
    story.judge.check_finite()
    with pytest.raises(NonFiniteLoss, match="loss is inf at step 4"):
        Story().report(4, loss="inf").judge.check_finite()


@pytest.mark.parametrize(
    ("lines", "exit_code", "kind"),
    [
        (
            ["Traceback (most recent call last):", "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried"],
            1,
            "oom",
        ),
        (["ResourceExhaustedError: ", "Out of memory error on GPU 0. Cannot allocate 2.0GB memory"], 1, "oom"),
        (
            ["RuntimeError: Memory not enough: Device(id:0) memory isn't enough and alloc failed, kernel name: X"],
            1,
            "oom",
        ),
        (["terminate called after throwing an instance of 'std::bad_alloc'"], -6, "oom"),
        (["2 CUDA OOM errors thrown.", "hint: lower this to avoid out of memory"], 1, "error"),
        (
            [
                "Traceback (most recent call last):",
                "MemoryError: x",
                "Traceback (most recent call last):",
                "KeyError: 1",
            ],
            1,
            "error",
        ),
        (
            ["torch.OutOfMemoryError: HIP out of memory", "Traceback", "RuntimeError: Connection closed by peer [1]:2"],
            1,
            "oom",
        ),
        (["RuntimeError: [pair.cc] Connection closed by peer [127.0.0.1]:4242"], 1, "connection"),
        (["torch.distributed.DistNetworkError: EADDRINUSE", "ChildFailedError: x"], 1, "port"),
        ([], 3, "error"),
    ],
)
def test_output_reveals_why_a_program_failed(tmp_path, lines, exit_code, kind):
    output = OutputWatch()
    for line in lines:
        output.feed(line)
    cause = failure(
        reported_errors=(),
        file=tmp_path / "none",
        output=output,
        exit_code=exit_code,
        where="after 1 of 4 steps",
        is_megatron=False,
    )
    expected = "host_oom" if "bad_alloc" in "".join(lines) else kind
    assert classify(cause, "cuda") == expected
    assert "after 1 of 4 steps" in str(cause)


AUTOTUNING = "[rank0]:E1103 select_algorithm.py:5068] [0/0]"
WATCHDOG = "[rank0]:[E1103 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL()"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (
            [f"{AUTOTUNING} CUDA out of memory. Tried to allocate 3 GiB.", f"{AUTOTUNING} Ignoring this choice."],
            "error",
        ),
        ([f"{AUTOTUNING} CUDA out of memory. Tried to allocate 3 GiB."], "oom"),
        (["CUDA out of memory. Retrying with micro-batch 4", WATCHDOG, "terminate called after throwing"], "error"),
        (
            ["terminate called after throwing an instance of 'c10::OutOfMemoryError'", "what(): CUDA out of memory."],
            "oom",
        ),
        (["terminate called", "  what():  CUDA out of memory.", WATCHDOG], "oom"),
        (["torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGABRT"], "error"),
    ],
)
def test_a_survived_out_of_memory_error_is_not_the_cause_of_the_end(tmp_path, lines, kind):
    """What it tuned, or caught before another reason aborted it; of several ranks' aborts, the first counts."""
    output = OutputWatch()
    for line in lines:
        output.feed(line)
    ended = {"file": tmp_path / "none", "exit_code": -6, "where": "after 1 of 4 steps", "is_megatron": False}
    cause = failure(reported_errors=(), output=output, **ended)
    assert classify(cause, "cuda") == kind
    assert kind == "oom" or str(cause) == "the command was killed by signal 6 after 1 of 4 steps"


def test_the_evidence_has_the_exception_type_of_the_program(tmp_path):
    (tmp_path / "error").write_text(json.dumps({"message": {"message": "ValueError: no", "extraInfo": {}}}))
    cause = failure(
        reported_errors=(),
        file=tmp_path / "error",
        output=OutputWatch(),
        exit_code=1,
        where="after 0 of 4 steps",
        is_megatron=False,
    )
    assert (type(cause).__module__, type(cause).__qualname__) == ("builtins", "ValueError")
    assert str(cause) == "no (the command exited with code 1 after 0 of 4 steps)"


def test_a_program_step_of_several_hook_steps_is_measured_as_one():
    """Two optimiser steps of an iteration that it reports: the hook would call half of it a step."""
    story = Story()
    for step in range(1, 5):
        story.report(2 * step - 1, source="hook:torch", step_time_s=0.1)
        story.report(2 * step, source="hook:torch", step_time_s=0.1).report(step, step_time_s=0.2, tokens=1000)
        if step == 3:
            assert (story.judge.num_steps, seconds(story)) == (3, None)
    assert (seconds(story), story.judge.times().source) == ([0.2] * 3, "report")


def test_a_lost_connection_is_the_least_credible_of_several_errors(tmp_path):
    lost = ReportedError("torch.distributed.DistBackendError", "Connection reset by peer")
    reported_errors = [ReportedError("ValueError", "bad batch"), lost]
    watch = OutputWatch()
    ended = {"file": tmp_path / "none", "exit_code": 1, "where": "", "is_megatron": False}
    assert type(failure(reported_errors=reported_errors, output=watch, **ended)).__name__ == "ValueError"
    watch.feed("Last error: Cuda failure 2 'out of memory'")
    watch.feed("torch.distributed.DistBackendError: NCCL error in: init.cc, unhandled cuda error")
    assert classify(failure(reported_errors=[], output=watch, **ended)) == "oom"


# ---- reported times against the clock ----


def watched(tell, *, num_steps=20, **options):
    """The contradiction in a story of which ``tell`` gives the steps, one warm-up step before the measured ones."""
    story = Story(num_steps=num_steps)
    for step in range(1, num_steps + 2):
        tell(story, step)
    return story.judge.contradiction(**options)


def test_reported_times_must_agree_with_the_arrival_of_their_lines():
    assert watched(lambda story, n: story.report(n, step_time_s=0.1, arrived_s=0.1 * n)) is None
    fast = watched(lambda story, n: story.report(n, step_time_s=0.002, arrived_s=0.4 * n))
    assert fast.reported_s / fast.num_steps == pytest.approx(0.002)
    assert fast.seen_s / fast.num_steps == pytest.approx(0.4)
    assert "2 ms per step by report, but 400 ms per step by the arrival of its lines" in fast.message
    assert "torch.cuda.synchronize()" in fast.message
    slow = watched(lambda story, n: story.log(n, step_time_s=2.0, arrived_s=0.4 * n))
    assert "2 s per step by log:pattern, but 400 ms" in slow.message
    assert "a wrong unit" in slow.message


def test_clocks_of_the_program_are_checked_too():
    assert watched(lambda story, n: story.report(n, t=100 + 0.1 * n, arrived_s=0.1 * n)) is None
    assert watched(lambda story, n: story.report(n, t=100 + 0.01 * n, arrived_s=0.1 * n)) is not None
    assert watched(lambda story, n: story.report(n, source="hook:torch", step_time_s=0.01, arrived_s=0.1 * n))


def test_pauses_between_steps_are_no_contradiction_but_half_of_the_steps_are():
    def evaluates(every):
        arrived = {n: 0.05 * n + 2.0 * (n // every) for n in range(1, 30)}
        return watched(lambda story, n: story.report(n, step_time_s=0.05, arrived_s=arrived[n]))

    assert evaluates(5) is None
    assert evaluates(2) is not None
    times = {n: 0.05 if n % 2 else 0.001 for n in range(1, 30)}
    assert watched(lambda story, n: story.report(n, step_time_s=times[n], arrived_s=0.05 * n)) is not None


def test_buffered_lines_are_compared_burst_by_burst():
    assert watched(lambda story, n: story.log(n, step_time_s=0.1, arrived_s=0.1 * (n - n % 7))) is None
    assert watched(lambda story, n: story.log(n, step_time_s=0.02, arrived_s=0.1 * (n - n % 7))) is not None


@pytest.mark.parametrize("every", [7, 20, 25])
def test_a_line_that_reports_on_all_measured_steps_is_compared_with_the_next(every):
    def contradiction(claimed_s):
        story = Story(num_steps=16)
        for step in range(every, 81, every):
            story.log(step, step_time_s=claimed_s, arrived_s=3.0 + 0.1 * step)
        assert seconds(story) == [claimed_s] * 16
        return story.judge.contradiction()

    assert contradiction(0.1) is None
    assert contradiction(0.02) is not None and contradiction(0.5) is not None


def test_lines_that_arrive_all_at_once_can_only_be_too_many():
    def at_once(tell, **options):
        return watched(lambda story, n: getattr(story, tell)(n, step_time_s=0.1, arrived_s=9.0), **options)

    assert at_once("log", began_s=5.0) is None, "the end of a program that buffers its output"
    assert at_once("log", began_s=8.5) is not None, "20 steps of 100 ms within 500 ms"
    assert "Flush the output" in at_once("log").message, "the program went on: no buffer explains that"
    assert at_once("report", began_s=5.0) is not None, "reports are written one by one"
    polled = watched(lambda story, n: story.report(n, step_time_s=0.001, arrived_s=9.0, since_s=8.98))
    assert polled is None


def test_optimizer_steps_seen_by_a_hook_override_the_program():
    def with_hook(hook_s, *, per_step=1, later_s=0.01):
        story = Story(num_steps=20)
        for n in range(1, 21 // per_step + 2):
            story.report(n, source="hook:torch", step_time_s=hook_s, arrived_s=hook_s * n)
        for n in range(1, 22):  # in time with what it claims
            story.report(n, step_time_s=0.1, arrived_s=later_s + 0.1 * n)
        return story.judge.contradiction()

    assert with_hook(0.1) is None
    held_back = with_hook(0.4, later_s=8.5)
    assert (
        "100 ms per step by report, but 400 ms per step by the optimiser steps seen by hook:torch" in held_back.message
    )
    assert with_hook(0.05) is None, "a report may count larger steps"
    assert "optimiser steps seen by hook:torch" in with_hook(1.0, per_step=10).message


@pytest.mark.parametrize(("every", "num_steps"), [(5, 16), (8, 22), (10, 28)])
def test_reports_of_every_few_steps_agree_with_the_optimizer_steps_between_them(every, num_steps):
    story = Story(num_steps=num_steps)
    for step in range(1, every * -(-(num_steps + 1) // every) + 1):
        story.report(step, source="hook:torch", step_time_s=0.4, arrived_s=0.4 * step)
        if step % every == 0:
            story.report(step, step_time_s=0.4, arrived_s=0.01 + 0.4 * step)
    assert story.judge.times().source == "report" and story.judge.contradiction() is None


@given(
    steps=st.lists(st.floats(1e-3, 5.0), min_size=4, max_size=40),
    late=st.lists(st.floats(0.0, 0.02), min_size=41, max_size=41),
    share=st.floats(0.9, 1.0),
)
def test_honest_programs_are_believed_whatever_their_steps(steps, late, share):
    ends = list(itertools.accumulate(steps, initial=3.0))
    honest = watched(
        lambda story, n: story.log(
            n, step_time_s=share * (steps[n - 2] if n > 1 else 1.0), arrived_s=ends[n - 1] + late[n - 1]
        ),
        num_steps=len(steps),
    )
    assert honest is None


@given(step_s=st.floats(0.1, 5.0), factor=st.floats(1.5, 1000), count=st.integers(8, 60), is_slow=st.booleans())
def test_a_clock_off_by_half_is_not_believed(step_s, factor, count, is_slow):
    claimed_s = step_s * factor if is_slow else step_s / factor
    assert watched(lambda story, n: story.report(n, step_time_s=claimed_s, arrived_s=step_s * n), num_steps=count)


def ahead(*levels, num_steps=4):
    """The story of a program whose workers are so many batches ahead after each step."""
    story = Story(num_steps=num_steps)
    for step, level in enumerate(levels, 1):
        known = {} if level is None else {"batches_ahead": level}
        story.report(step, source="hook:torch", step_time_s=step / 100, **known)
    return story.judge


@pytest.mark.parametrize(
    ("levels", "warmup"),
    [
        pytest.param([None] * 20, 1, id="no workers"),
        pytest.param([4, 4, 4, 4, 4, 3, 4, 4, 4], 5, id="full"),
        pytest.param([4, 4, 4, 4, 3, 3, 2, 2, 1, 1, 0, 1, 0, 0, 1, 1], 12, id="falling"),
        pytest.param([4, 4, 4, 4, 3, 2, 1, None, None, 0, 1], 5, id="end of an epoch"),
        pytest.param(list(range(90, 0, -1)), 17, id="falling for very long"),
    ],
)
def test_measured_steps_move_on_while_they_use_up_loaded_batches(levels, warmup):
    judge = ahead(*levels)
    assert judge.settle()
    assert judge.num_warmup_steps == warmup
    assert [value.value for value in judge.times().values] == [step / 100 for step in range(warmup + 1, warmup + 5)]


def test_measured_steps_that_cannot_move_on_are_taken_at_the_end():
    judge = ahead(4, 4, 4, 4, 3, 2, 1, num_steps=4)
    assert not judge.settle()
    assert judge.settle(is_last=True) and judge.num_warmup_steps == 3


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, [0.1, 0.3, 0.1, 0.3]),
        ({"num_workers": 2}, [0.2] * 4),
        ({"num_workers": 8}, [0.2] * 4),
        (
            {"num_workers": 2, "forwards_per_step": 2, "backwards_per_step": 2, "num_optimizers": 1},
            [0.1, 0.3, 0.1, 0.3],
        ),
    ],
)
def test_loader_workers_that_deliver_together_share_their_waits(facts, expected):
    story = Story(num_steps=4).facts(**facts)
    for step in range(1, 6):
        story.report(step, source="hook:torch", step_time_s=0.3 if step % 2 else 0.1)
    assert seconds(story) == expected
