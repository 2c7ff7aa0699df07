"""All legality rules together: which specifications the runner accepts, and why not. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from trials.failure import InfeasibleSpec
from trials.legality.candidate import CANDIDATE_RULES, FP32_MAX, FP32_TINY
from trials.legality.float8 import FLOAT8_RULES
from trials.legality.layout import LAYOUT_RULES, LegalityRule, has_sane_chunks, holds_plain, uses_ddp
from trials.legality.offload import OFFLOAD_RULES
from trials.legality.pattern import pattern_problem
from trials.spec import (
    Candidate,
    Data,
    HuggingFaceModel,
    ImageFolderData,
    LinearModel,
    LlamaModel,
    Model,
    Protocol,
    PythonData,
    PythonModel,
    RandomData,
    ResNetModel,
    TextData,
    TokenFileData,
    TrialSpec,
    Workload,
)

__all__ = [
    "DATA_OF_MODEL",
    "FP32_MAX",
    "FP32_TINY",
    "RULES",
    "LegalityRule",
    "check",
    "has_sane_chunks",
    "holds_plain",
    "pattern_problem",
    "uses_ddp",
    "violations",
]

RULES: tuple[LegalityRule, ...] = (*LAYOUT_RULES, *CANDIDATE_RULES, *FLOAT8_RULES, *OFFLOAD_RULES)
"""Every rule on a workload and a candidate, in the order of reports."""
DATA_OF_MODEL: dict[type[Model], tuple[type[Data], ...]] = {
    LlamaModel: (TextData, TokenFileData),
    ResNetModel: (ImageFolderData,),
    LinearModel: (RandomData,),
    PythonModel: (PythonData,),
    HuggingFaceModel: (TextData, TokenFileData),
}
"""Kinds of data a kind of model trains on, its default first."""


def check(spec: TrialSpec) -> None:
    """Refuse a specification that no launch can run.

    Raises:
        InfeasibleSpec: naming every rule broken.
    """
    problems = [*violations(spec.workload, spec.candidate), *_protocol_problems(spec.protocol)]
    if problems:
        raise InfeasibleSpec("; ".join(problems))


def violations(workload: Workload, candidate: Candidate) -> Iterator[str]:
    """Yield one sentence per broken rule; nothing means the runner accepts the pair."""
    yield from _workload_problems(workload)
    for rule in RULES:
        reason = rule.check(workload, candidate)
        if reason is not None:
            yield reason
            if rule.id == "degrees":  # the other rules divide by them
                return


def _protocol_problems(protocol: Protocol) -> Iterator[str]:
    if not 0 <= protocol.min_warmup_steps <= protocol.max_warmup_steps:
        yield f"min_warmup_steps {protocol.min_warmup_steps} is outside 0..max_warmup_steps {protocol.max_warmup_steps}"
    if not 1 <= protocol.num_steps <= protocol.max_steps:
        yield f"num_steps {protocol.num_steps} is outside 1..max_steps {protocol.max_steps}"


def _workload_problems(workload: Workload) -> Iterator[str]:
    model, data = workload.model, workload.data
    if isinstance(model, LlamaModel):
        yield from _llama_problems(model)
    if isinstance(model, LlamaModel | HuggingFaceModel):
        if isinstance(data, TextData) and model.vocab_size < 256:
            yield f"vocab_size {model.vocab_size} is below the 256 values of byte-level tokens"
    elif not isinstance(model, PythonModel) and workload.seq_length != 1:
        yield f"seq_length is 1 for model kind {model.kind}, not {workload.seq_length}"
    if not isinstance(data, DATA_OF_MODEL[type(model)]):
        yield f"model kind {model.kind} cannot train on data kind {data.kind}"


def _llama_problems(model: LlamaModel) -> Iterator[str]:
    if model.hidden_size % model.num_heads:
        yield f"hidden_size {model.hidden_size} is not divisible by num_heads {model.num_heads}"
    elif (model.hidden_size // model.num_heads) % 2:
        yield f"head size {model.hidden_size // model.num_heads} is odd; rotary embeddings rotate pairs"
    if model.num_heads % model.num_kv_heads:
        yield f"num_heads {model.num_heads} is not divisible by num_kv_heads {model.num_kv_heads}"
