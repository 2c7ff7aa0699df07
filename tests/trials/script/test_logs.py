"""What parsers read of logs: real ones where the framework runs here, else lines written by its documented format."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.script.command import LogFormat
from trials.script.logs import PARSERS, LogValue, make_parser, number, significant
from trials.script.report_lines import LineSplitter

FOLDER = Path(__file__).parent / "logs"
NANO = r"iter (?P<step>\d+): loss (?P<loss>\S+), time (?P<step_ms>[\d.]+)ms"
GIB, MIB = 2.0**30, 2.0**20


def records(name, **log):
    """All records of a fixture, read as a rank reads it: in pieces, with the parser's own filter."""
    parser = make_parser(LogFormat(name=name.partition(".")[0].rstrip("45"), **log))
    lines = LineSplitter(parser.needles)
    path = FOLDER / (name if "." in name else f"{name}.log")
    data = path.read_bytes()
    pieces = [data[i : i + 100] for i in range(0, len(data), 100)]
    return [
        record
        for piece in (*pieces, None)
        for line in (lines.feed(piece) if piece else lines.flush())
        for record in parser.feed(line)
    ]


def column(found, name):
    return [round(record.values[name].value, 6) if name in record.values else None for record in found]


def test_megatron_is_a_table_of_names_and_its_nan_is_seen():
    found = records("megatron")
    assert [record.step for record in found] == [1, 1, 2, 3]
    assert column(found, "step_time_s") == [31.2345, None, 1.2345, 1.2301]
    assert column(found, "loss") == [10.88765, None, 7.654321, None]
    assert column(found, "allocated_bytes") == [None, 2048.5 * MIB, None, None]
    assert column(found, "samples") == [256, None, 256, 256]
    assert found[2].values["loss"].resolution == pytest.approx(1e-6)
    assert found[2].values["step_time_s"].resolution == pytest.approx(1e-4)
    assert [record.non_finite for record in found] == ["", "", "", "the log counts 1 nan iterations"]


def test_torchtitan_lines_and_structured_logs():
    lines, spans = records("torchtitan"), records("torchtitan.jsonl")
    assert [record.step for record in lines] == [record.step for record in spans] == [1, 2, 3, 4, 5, 6]
    assert column(lines, "loss")[1:3] == [7.63363, 6.68193]
    assert lines[1].values["tokens_per_s_per_device"] == LogValue(443.0, 1.0)
    assert lines[2].at_s.value - lines[1].at_s.value == pytest.approx(0.873, abs=1e-6)
    assert column(spans, "step_time_s")[1] == pytest.approx(1.153339)
    assert column(spans, "tokens") == [512.0] * 6
    assert spans[1].values["data_s"].value == pytest.approx(0.0008, abs=1e-3)
    assert all(record.is_structured for record in spans)


def test_deepspeed_steps_end_when_they_are_logged():
    found = [record for record in records("deepspeed") if record.at_s is not None]
    assert [record.step for record in found] == list(range(1, len(found) + 1))
    assert found[1].at_s.value - found[0].at_s.value == pytest.approx(0.048, abs=1e-6)


def test_transformers_prints_four_digits():
    found = records("transformers")
    assert column(found, "loss")[:3] == [5.55, 5.544, 5.559]
    assert {record.values["loss"].resolution for record in found} == {0.001}
    assert "tokens" not in found[0].values  # padding may be among them
    older = records("transformers4.log")
    assert [record.step for record in older] == [1, 2]
    assert older[0].values["loss"] == LogValue(5.5438, 1e-4)
    assert math.isnan(older[1].values["loss"].value)


@pytest.mark.parametrize(("name", "steps"), [("llamafactory", 10), ("ms_swift", 6)])
def test_descendants_of_the_trainer_print_behind_progress_bars(name, steps):
    assert [record.step for record in records(name)] == list(range(1, steps + 1))


def test_json_lines_of_llamafactory():
    first, second = records("llamafactory.jsonl")
    assert (first.step, first.values["loss"].value, first.is_structured) == (9, 5.4109, True)
    assert math.isnan(second.values["loss"].value)
    assert second.values["reserved_bytes"].value == 2 * GIB


def test_lightning_rows_follow_their_header():
    found = records("lightning.csv")
    assert [(record.step, record.values["loss"].value) for record in found] == [(0, 5.691), (1, 5.598), (2, 5.55)]


def test_mindformers_in_both_modes():
    found = records("mindformers")
    assert [record.step for record in found] == [9, 11, 12, 13]
    assert column(found, "step_time_s") == [1.234, 1.23, 1.229, 1.228]
    assert column(found, "loss") == [7.123456, 7.111111, 7.05, None]
    assert found[0].values["step_time_s"].resolution == pytest.approx(1e-3)
    assert column(found, "grad_norm") == [1.23, None, 1.234567, None]


def test_paddle_intervals_are_shared_by_their_steps():
    first, second = records("paddlenlp")
    assert (first.values["step_time_s"].value, second.values["step_time_s"].value) == (1.2, 1.25)
    assert first.values["reserved_bytes"].value == 14.25 * GIB
    assert second.step == 3


def test_patterns_have_named_groups():
    found = records("pattern", pattern=NANO)
    assert [record.step for record in found] == list(range(10))
    assert found[1].values == {"loss": LogValue(5.6292, 1e-4), "step_time_s": LogValue(0.05788, pytest.approx(1e-5))}
    with pytest.raises(ValueError, match="invalid regular expression"):
        make_parser(LogFormat(name="pattern", pattern="("))


@pytest.mark.parametrize(
    ("text", "value", "resolution"),
    [
        ("1,234.50", 1234.5, 0.01),
        ("3.0E-04", 3e-4, 1e-5),
        ("12", 12, 1),
        ("-inf", -math.inf, 0),
        ("1e400", math.inf, 1e300),
    ],
)
def test_numbers_have_the_resolution_of_their_digits(text, value, resolution):
    found = number(text)
    assert (found.value, found.resolution) == (value, pytest.approx(resolution))
    assert number("N/A") is None
    assert significant("1.158e+04", 4).resolution == pytest.approx(10)


WORDS = [
    *(
        f"{needle.decode()} "
        for parser in PARSERS
        if parser != "pattern"
        for needle in make_parser(LogFormat(name=parser)).needles
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        "|",
        ":",
        ",",
        "'",
        '"',
        "step",
        "loss",
        "iteration",
        "1/2",
        "nan",
        "1e999",
        "9" * 5000,
        "\x1b[31m",
        "é",
        "(",
    ),
]


@pytest.mark.representative("transformers", "lightning", "megatron")
@pytest.mark.parametrize("name", sorted(PARSERS))
@given(parts=st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=8)), max_size=30))
def test_parsers_survive_any_line(name, parts):
    parser = make_parser(LogFormat(name=name, pattern=NANO))
    for record in parser.feed("".join(parts)):
        assert record.step >= 0
