"""The search space of a replay sweep: the rows of one problem of a table of published measurements, as candidates.

Rows were measured with other software, whose rules are not the trial runner's, so legality rules do not apply to them.
What a row does not say is at its neutral value.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.cost.published.table import PublishedRow, TableError, read_table
from cluster.virtual.replay import matches
from orchestrator.space.knobs.layer_choices import even_split, layers_of
from trials.spec import Candidate, Counts, Kernels, Layout, Precision, Recompute, Schedule, SelectiveRecompute, Workload


class ReplayError(ValueError):
    """The table does not hold such a problem, or holds it for another workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpace:
    """The rows of a problem that are candidates, without duplicates, in the table's order."""

    baseline: Candidate
    candidates: tuple[Candidate, ...]
    num_rows: int
    unusable: tuple[tuple[str, str], ...]
    """(row id, why it is no candidate)."""


def replay_space(table: str, problem: str, baseline: str | None, workload: Workload) -> ReplaySpace:
    """The space made of the rows of ``problem`` in the file ``table``.

    Raises:
        ReplayError: table, problem or baseline are not there, or the workload is not the one measured.
    """
    rows = [row for row in _table(table) if row["problem"] == problem]
    if not rows:
        raise ReplayError(f"{table} has no problem {problem!r}")
    _check_workload(rows, workload)
    found: dict[str, Candidate] = {}
    unusable: list[tuple[str, str]] = []
    for row in rows:
        try:
            found[row["id"]] = candidate_of(row, workload.num_layers)
        except ReplayError as error:
            unusable.append((row["id"], str(error)))
    timed = [row["id"] for row in rows if row["id"] in found and row.step_time_s and not row.out_of_memory]
    name = baseline if baseline is not None else next(iter(timed), "")
    if name not in found:
        raise ReplayError(f"problem {problem!r} has no usable row {name!r}; there are {', '.join(timed[:10])}")
    return ReplaySpace(
        baseline=found[name],
        candidates=tuple(dict.fromkeys(found.values())),
        num_rows=len(rows),
        unusable=tuple(unusable),
    )


def candidate_of(row: PublishedRow, num_layers: int) -> Candidate:
    """The candidate that the row measured, as far as the row says.

    Raises:
        ReplayError: it was not measured, or cannot be told in the knobs of this project.
    """
    if row.out_of_memory is not True and row.step_time_s is None:
        raise ReplayError("neither a step time nor an out-of-memory outcome")
    layout = _layout(row, num_layers)
    candidate = Candidate(
        layout=layout,
        micro_batch_size=_int(row, "micro_batch", 1),
        recompute=_recompute(row["recompute"], layers_of(layout, num_layers)),
        precision=Precision() if row["precision"] in ("fp32", "tf32") else Precision(level="O2", dtype=_dtype(row)),
        kernels=Kernels(compile="model" if row["compile"] == "yes" else "off"),
    )
    if not matches(row, candidate, num_layers):
        raise ReplayError("the row contradicts itself")
    return candidate


def _layout(row: PublishedRow, num_layers: int) -> Layout:
    tp, pp, cp = (_int(row, name, 1) for name in ("tp", "pp", "cp"))
    num_devices = _int(row, "n_gpus", tp * pp * cp)
    dp = _int(row, "dp", num_devices // (tp * pp * cp))
    if dp < 1 or dp * tp * pp * cp != num_devices:
        raise ReplayError(f"{num_devices} devices are not dp {dp} x tp {tp} x pp {pp} x cp {cp}")
    stage, chunks = _int(row, "zero_stage", 0), _int(row, "vpp", 1)
    shard = min(_int(row, "shard_group", dp if stage else 1), dp)
    if dp % shard or stage not in (0, 1, 2, 3) or pp * chunks > num_layers:
        raise ReplayError(f"dp {dp} in groups of {shard}, ZeRO {stage}, {pp} x {chunks} stages: no such layout")
    schedule: Schedule = "interleaved" if chunks > 1 else "1f1b"
    return Layout(
        pp=pp,
        dp_replicate=dp // shard,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        zero_stage=stage,  # type: ignore[arg-type]  # one of the four, see above
        sequence_parallel=row["sp"] == "true",
        schedule=schedule,
        num_virtual_stages=chunks,
        stage_layers=even_split(num_layers, pp, chunks, schedule) if pp > 1 else (),
    )


def _recompute(kind: str, layers: Counts) -> Recompute:
    """The simplest policy of that kind: per stage means the first one, selective attention in all layers."""
    match kind:
        case "full":
            return Recompute(full=layers)
        case "per-stage":
            return Recompute(full=tuple((row[0], *(0 for _ in row[1:])) for row in layers))
        case "selective":
            return Recompute(selective=(SelectiveRecompute(pattern=r"attention\.sdpa", num_layers=layers),))
        case _:
            return Recompute()


def _dtype(row: PublishedRow) -> Literal["float16", "bfloat16"]:
    return "float16" if row["precision"] == "fp16" else "bfloat16"


def _int(row: PublishedRow, column: str, default: int) -> int:
    return int(float(row[column])) if row[column] else default


def _check_workload(rows: Sequence[PublishedRow], workload: Workload) -> None:
    stated = {
        "layers": workload.num_layers,
        "seq_len": workload.seq_length,
        "global_batch": workload.global_batch_size,
    }
    for column, value in stated.items():
        measured = {_int(row, column, value) for row in rows}
        if measured != {value}:
            shown = ", ".join(map(str, sorted(measured)))
            raise ReplayError(f"the rows were measured with {column} {shown}, the workload says {value}")


@functools.lru_cache(maxsize=4)
def _table(path: str) -> tuple[PublishedRow, ...]:
    try:
        return read_table(Path(path))
    except FileNotFoundError:
        raise ReplayError(f"there is no table {path}") from None
    except OSError as error:
        raise ReplayError(f"the table {path} cannot be read: {error.strerror}") from None
    except (TableError, UnicodeDecodeError) as error:
        raise ReplayError(str(error)) from None
