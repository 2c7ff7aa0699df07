"""Questions about layers per stage and recompute policies, as frameworks with coarser settings ask them."""

from __future__ import annotations

from orchestrator.recipes.base import Draft
from orchestrator.space.knobs.layer_choices import ALL_LAYERS, RecomputeChoice, layers_of, resolve_recompute
from trials.spec import Candidate, Counts, Layout, Recompute
from trials.stages import all_chunks


def present(draft: Draft) -> Counts:
    """Layers of the draft's candidate per chunk and stage."""
    return layers_of(draft.candidate.layout, draft.workload.num_layers)


def first_layers(number: int, held: Counts) -> Counts:
    """Full recompute of the first ``number`` layers of every chunk; ``()`` for none."""
    return resolve_recompute(RecomputeChoice(full=number), held).full


def most(counts: Counts) -> int:
    return max((number for row in counts for number in row), default=0)


def is_first_layers_everywhere(counts: Counts, held: Counts) -> bool:
    """Whether one number for all chunks and stages says the same."""
    return first_layers(most(counts), held) == counts


def gathered_again(recompute: Recompute, held: Counts) -> Counts:
    """Recompute of communication in every layer that is not recomputed in full."""
    return resolve_recompute(RecomputeChoice(full=recompute.full, communication=ALL_LAYERS), held).communication


def in_every_layer(counts: Counts, recompute: Recompute, held: Counts) -> bool:
    """Whether a pattern applies to every layer that is not recomputed in full."""
    return counts == gathered_again(recompute, held)


def is_uniform(counts: Counts) -> bool:
    return len({number for row in counts for number in row}) <= 1


def in_model_order(layout: Layout, num_layers: int) -> list[int]:
    """Layers of every virtual stage, first to last."""
    return [len(chunk.layer_ids) for chunk in all_chunks(layout, num_layers)]


def layer_ids(counts: Counts, layout: Layout, num_layers: int) -> list[int]:
    """Global numbers of the first ``counts`` layers of every chunk and stage."""
    return sorted(
        layer
        for chunk in all_chunks(layout, num_layers)
        for layer in chunk.layer_ids[: counts[chunk.chunk][chunk.stage]]
    )


def refuse_stages(draft: Draft, message: str) -> None:
    """Refuse the layout's stages; numbers of layers per stage then mean something else and are refused, too."""
    draft.refuse("layout.stage_layers", message)
    if draft.candidate.recompute != Recompute():
        draft.refuse("recompute", "numbers of layers are those of other stages")


def num_microbatches(draft: Draft) -> int:
    candidate: Candidate = draft.candidate
    return candidate.num_microbatches(draft.workload.global_batch_size)
