"""What a model has learned before it sees an image: patch filters and positions (Figure 7, left and centre; Figure 10).

Letters: D filters, C channels, P pixels of a filter's side, K components, N patches, Y X rows and columns of patches, T tokens,
L position tables, R offsets, Dh head width.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.inspection.principal import principal_axes
from vitlab.models.model import Model
from vitlab.models.spec import Pos
from vitlab.models.vit import Block, ViT

FIGURE_7_COMPONENTS = 28
_MOST_FILTERS = 64  # that can be looked at one by one: those of a ResNet's root at its usual width

# --- filters ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PatchFilters:
    """Principal components of a model's first filters, strongest first."""

    components_KCPP: Tensor  # unit vectors; the entry with the largest magnitude is positive
    explained_K: Tensor  # share of the filters' variance along each, at most 1 in all
    source: str  # which layer the filters are of, as a caption names it
    rank: int  # how many components there are in all
    filters_DCPP: Tensor | None = None  # a CNN's filters themselves, where they are few


@torch.no_grad()
def patch_filters(model: Model, components: int | None = FIGURE_7_COMPONENTS) -> PatchFilters:
    """The principal components of the filters that see the pixels (Figure 7, left); `None` gives all there are.

    These are the D filters of the patch embedding, centred over filters. In a hybrid the patch embedding sees features, not
    pixels, and is often a single one wide: there, and in a CNN, it is the first convolution, as it is applied.
    """
    filters_DCPP, source = model.first_filters()
    axes_KF, variance_K = principal_axes(filters_DCPP.flatten(1))
    rank = len(axes_KF)
    if rank == 0:
        raise UsageError(f"the filters of the {source} are all the same; they have no principal components")
    wanted = rank if components is None else components
    if not 1 <= wanted <= rank:
        raise UsageError(
            f"the filters of the {source} have {rank} principal components, so {wanted} of them cannot be shown",
            hint=f"Ask for 1 to {rank}.",
        )
    explained_K = variance_K / variance_K.sum()
    few = not model.spec.has_attention_maps and len(filters_DCPP) <= _MOST_FILTERS
    return PatchFilters(
        components_KCPP=axes_KF[:wanted].reshape(wanted, *filters_DCPP.shape[1:]).float(),
        explained_K=explained_K[:wanted].float(),
        source=source,
        rank=rank,
        filters_DCPP=filters_DCPP.detach().float() if few else None,
    )


# --- positions --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PositionSimilarity:
    """How alike the positions of every two patches are: `similarity_YXYX[row, col]` is the map of one patch."""

    similarity_YXYX: Tensor  # cosine, -1 to 1
    kind: Pos
    note: str  # what was compared, for a caption
    tables: int  # how many there are to choose from


@torch.no_grad()
def position_similarity(model: ViT, table: int = 0) -> PositionSimilarity:
    """The cosine between the positions of every two patches, on the model's own grid (Figure 7, centre; Figure 10).

    With `pos_at="every"` each block has a table, and `table` chooses one. Relative positions belong to pairs, not to patches.
    There, the map of patch i shows at j the cosine between the vectors that i uses for j and for itself, averaged over the
    blocks: how far j counts as being where i is. Offsets are those of the sequence, so the end of a row is next to the start
    of the next one.
    """
    spec = model.spec
    if spec.pos == "none":
        raise UsageError("this model has no positions to compare (pos=none): its patches are an unordered set")
    if spec.pos == "relative":
        _require_table(table, 1)
        cosine_NN, note = _relative_similarity(model), f"learned relative offsets, mean of {spec.num_blocks} blocks"
        return PositionSimilarity(cosine_NN.reshape(*spec.grid, *spec.grid), spec.pos, note, tables=1)
    _, patches_LND = model.pos(spec.grid, model.embed.weight)
    assert patches_LND is not None
    _require_table(table, len(patches_LND))
    table %= len(patches_LND)
    unit_ND = F.normalize(patches_LND[table].float(), dim=1)
    note = {
        "learned": "learned, one vector per patch",
        "learned2d": "learned, one vector per row and one per column",
        "sincos2d": "fixed sines and cosines, not learned",
    }[spec.pos]
    if spec.pos_at == "every":
        note += f"; added before layer {table + 1} of {len(patches_LND)}"
    if spec.pos_at == "shared":
        note += "; the same before every layer"
    similarity_YXYX = (unit_ND @ unit_ND.T).reshape(*spec.grid, *spec.grid)
    return PositionSimilarity(similarity_YXYX, spec.pos, note, tables=len(patches_LND))


def _require_table(table: int, count: int) -> None:
    if not -count <= table < count:
        have = "one position table" if count == 1 else f"{count} position tables, 0 to {count - 1}"
        raise UsageError(f"there is no position table {table}: this model has {have}")


def _relative_similarity(model: ViT) -> Tensor:
    """[N, N]: a patch's vector for each other patch beside its vector for itself."""
    patches, middle = model.spec.grid[0] * model.spec.grid[1], model.spec.num_tokens - 1
    to_zero_R = torch.zeros(2 * model.spec.num_tokens - 1, device=model.embed.weight.device)
    for block in model.blocks:
        assert isinstance(block, Block) and block.attn.relative is not None
        unit_RDh = F.normalize(block.attn.relative.float(), dim=1)
        to_zero_R += unit_RDh @ unit_RDh[middle] / len(model.blocks)
    place_N = torch.arange(patches, device=to_zero_R.device)
    return to_zero_R[place_N[:, None] - place_N[None, :] + middle]
