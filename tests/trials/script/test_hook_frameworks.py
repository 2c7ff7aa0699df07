"""The hook in unchanged programs of transformers, Accelerate, DeepSpeed and Lightning."""

import math
import re

import pytest

from tests.trials.script.hooked import SEEN, launch
from tests.trials.script.test_hook_torch import steps_agree

TRAINER = [
    *("trainer_loop.py", "--use_cpu", "--max_steps", "4", "--logging_steps", "1", "--report_to", "none"),
    *("--save_strategy", "no", "--disable_tqdm", "true", "--per_device_train_batch_size", "4"),
]


def without_times(text):
    text = re.sub(r"^\[\d{4}-[^]]*\]", "", text, flags=re.MULTILINE)
    return re.sub(r"'(train_runtime|train_\w+_per_second)': '[^']*'(, )?", "", text)


@pytest.mark.slow
def test_trainer_with_accumulation_recomputation_and_bf16(tmp_path):
    argv = [*TRAINER, "--output_dir", str(tmp_path / "out"), "--gradient_accumulation_steps", "2", "--bf16", "true"]
    argv += ["--activation_checkpointing", "true", "--include_num_input_tokens_seen", "true"]
    (traced,) = launch(argv, tmp_path / "hooked")
    steps_agree(traced, count=4, source="hook:transformers")
    assert traced.losses == traced.printed_losses
    assert {step["loss_scope"] for step in traced.steps} == {"all"}
    assert all(0 < step["grad_norm"] < 10 for step in traced.steps)
    assert all("tokens" not in step for step in traced.steps)  # it counts padding, which depends on the micro-batch
    assert traced.facts == traced.facts | {
        "world_size": 1,
        "micro_batch_size": 4,
        "forwards_per_step": 2,
        "dtype": "bfloat16",
        "layer_calls_per_forward": 2.0,
        "layers": 2,
    }
    assert set(traced.facts["versions"]) >= {"torch", "transformers", "accelerate"}
    assert [line.get("step", line.get("event")) for line in traced.lines if line.get("event") not in SEEN] == [
        *("loaded", "begin"),
        *(1, 2, 3, 4),
        "end",
    ]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_trainer_on_two_ranks_prints_what_it_prints_without_the_hook(tmp_path):
    argv = [*TRAINER, "--output_dir", str(tmp_path / "out")]
    bare = launch(argv, tmp_path / "bare", ranks=2, hook=False)
    traced = launch(argv, tmp_path / "hooked", ranks=2)
    for rank, before in zip(traced, bare, strict=True):
        steps_agree(rank, count=4, source="hook:transformers")
        assert without_times(rank.output) == without_times(before.output)
        assert rank.facts == rank.facts | {"world_size": 2, "dtype": "float32", "layer_calls_per_forward": 1.0}
        assert rank.losses == rank.printed_losses
    assert traced[0].losses == traced[1].losses


@pytest.mark.slow
@pytest.mark.exhaustive
def test_trainer_reports_a_loss_hidden_by_its_log_and_stops_on_request(tmp_path):
    (tmp_path / "stop").write_text("3")
    (traced,) = launch([*TRAINER, "--output_dir", str(tmp_path / "out"), "--poison"], tmp_path)
    assert "steps 3" in traced.output
    assert [math.isfinite(loss) for loss in traced.losses] == [True, True, False]
    assert all(map(math.isfinite, traced.printed_losses))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_trainer_continues_while_its_workers_may_be_ahead(tmp_path, workers):
    (tmp_path / "stop").write_text("2")
    (tmp_path / "stop_late").write_text("3")
    more = ["--dataloader_num_workers", str(workers)]
    (traced,) = launch([*TRAINER, "--output_dir", str(tmp_path / "out"), *more], tmp_path)
    assert f"steps {3 if workers else 2}" in traced.output, traced.errors
    assert [("batches_ahead" in step) for step in traced.steps] == [bool(workers)] * len(traced.steps)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_accelerate_on_two_ranks(tmp_path):
    argv = ["accelerate_loop.py", "--accum", "2"]
    bare = launch(argv, tmp_path / "bare", ranks=2, hook=False, ACCELERATE_USE_CPU="true")
    traced = launch(argv, tmp_path / "hooked", ranks=2, ACCELERATE_USE_CPU="true")
    for rank, before in zip(traced, bare, strict=True):
        steps_agree(rank, count=4)
        assert rank.output == before.output
        assert rank.facts == rank.facts | {"world_size": 2, "micro_batch_size": 4, "forwards_per_step": 2}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_deepspeed_on_two_ranks(tmp_path):
    for rank in launch(["deepspeed_loop.py", "--stage", "3"], tmp_path, ranks=2):
        assert rank.code == 0, rank.errors
        assert [step["step"] for step in rank.steps] == [1, 2, 3, 4]
        assert {step["source"] for step in rank.steps} == {"hook:deepspeed"}
        assert rank.losses == pytest.approx(rank.printed_losses, abs=1e-6)
        assert all(step["grad_norm"] > 0 for step in rank.steps)
        assert rank.facts == rank.facts | {
            "world_size": 2,
            "micro_batch_size": 4,
            "forwards_per_step": 2,
            "dtype": "bfloat16",
        }
        shards = rank.facts["parameter_bytes_global"] / rank.facts["parameter_bytes_local"]
        assert shards == pytest.approx(2, rel=0.01)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_lightning_on_two_ranks(tmp_path):
    argv = ["lightning_fit.py", "--accum", "2", "--precision", "bf16-mixed", "--devices", "2"]
    bare = launch(argv, tmp_path / "bare", ranks=2, hook=False)
    traced = launch(argv, tmp_path / "hooked", ranks=2)
    for rank, before in zip(traced, bare, strict=True):
        steps_agree(rank, count=4, source="hook:lightning")
        assert rank.output == before.output
        assert rank.facts == rank.facts | {
            "world_size": 2,
            "micro_batch_size": 4,
            "forwards_per_step": 2,
            "dtype": "bfloat16",
        }


@pytest.mark.slow
@pytest.mark.exhaustive
def test_lightning_stops_on_request(tmp_path):
    (tmp_path / "stop").write_text("2")
    (traced,) = launch(["lightning_fit.py", "--steps", "4"], tmp_path)
    assert [step["step"] for step in traced.steps] == [1, 2]
