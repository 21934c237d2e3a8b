"""What a model makes of images, layer by layer: patch features, token norms, CKA, and the head on every layer.

Models are taken as they would predict (no dropout), without gradients, a few images at a time, on their own device.
Letters: B images, C channels, N patches, T tokens, D width, Y X rows and columns of patches, L M layers, Q queries, K classes,
S samples.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.inspection.principal import principal_axes
from vitlab.models.model import Model
from vitlab.models.results import token_names
from vitlab.models.spec import Pair
from vitlab.models.tape import Tape
from vitlab.models.vit import ViT

_IMAGES = 8  # that pass through the model at a time

# --- patch features in colour -----------------------------------------------------------------------------------------

_DARKEST, _BRIGHTEST = 0.01, 0.99  # of all patches; a few extreme ones would leave all others one grey


@dataclasses.dataclass(frozen=True)
class PatchPca:
    """Patch features as colours: patches of one colour are alike to the model, in one image and between images."""

    colours_BYX3: Tensor  # red, green and blue are the first three components, 0 to 1
    explained_3: Tensor  # share of the variance along each


@torch.no_grad()
def patch_pca(features_BND: Tensor, grid: Pair) -> PatchPca:
    """The first three principal components of patch features over all images given.

    Each is scaled so that its percentiles 1 and 99 become 0 and 1. A component that is not there (fewer than four different
    patches) is grey.
    """
    _require_patches(features_BND, grid)
    batch, _, width = features_BND.shape
    axes_KD, variance_K = principal_axes(features_BND.reshape(-1, width))
    colours_S3 = torch.full((features_BND.shape[0] * features_BND.shape[1], 3), 0.5, device=axes_KD.device)
    explained_3 = torch.zeros(3)
    for k, axis_D in enumerate(axes_KD[:3]):
        score_S = features_BND.reshape(-1, width).to(axis_D.device).float() @ axis_D.float()
        low, high = (_quantile(score_S, share) for share in (_DARKEST, _BRIGHTEST))
        if high > low:
            colours_S3[:, k] = ((score_S - low) / (high - low)).clamp(0, 1)
        explained_3[k] = variance_K[k] / variance_K.sum()
    return PatchPca(colours_S3.reshape(batch, *grid, 3), explained_3)


def _quantile(x_LS: Tensor, share: float) -> Tensor:
    """Of the last dimension, a value that is there. torch's own refuses 16 million values, or determinism on a GPU."""
    return x_LS.sort(dim=-1).values[..., int(share * (x_LS.shape[-1] - 1))]


def _require_patches(features_BND: Tensor, grid: Pair) -> None:
    if features_BND.ndim != 3 or features_BND.shape[1] != grid[0] * grid[1] or not len(features_BND):
        raise UsageError(
            f"patch features must be [images, {grid[0] * grid[1]}, width] for a {grid[0]}x{grid[1]} grid, "
            f"not {list(features_BND.shape)}",
            hint="Use model.features(x, tokens='patches').last, and its .grid.",
        )


# --- nearest patches --------------------------------------------------------------------------------------------------

_MOST_COMPARED = 16_384  # patches of all images among which queries are picked: each is compared with each
_REPETITION = 0.5  # weight of being like what is picked already; chosen by eye on 24 photos, not measured
_LEAST_FRAMED = 7  # rows and columns: on smaller grids half of all patches or more are at the edge


class Patch(NamedTuple):
    """One patch of one image, all counted from 0."""

    image: int
    row: int
    col: int


class Match(NamedTuple):
    """A patch and its cosine similarity to the query."""

    patch: Patch
    similarity: float


@dataclasses.dataclass(frozen=True)
class NearestPatches:
    """For each query patch, the most similar patches of every other image."""

    queries: tuple[Patch, ...]
    matches: tuple[tuple[Match, ...], ...]  # by query: the best of the first other image, best first, then of the next
    similarity_QBYX: Tensor  # cosine of each query to every patch of every image, its own included


@torch.no_grad()
def nearest_patches(features_BND: Tensor, grid: Pair, queries: Sequence[Patch], top: int = 1) -> NearestPatches:
    """The `top` patches of every other image that are most similar to each query, by cosine."""
    _require_patches(features_BND, grid)
    if not 1 <= top <= grid[0] * grid[1]:
        raise UsageError(f"top must be 1 to {grid[0] * grid[1]}, the patches of an image, not {top}")
    for query in queries:
        _require_patch(query, len(features_BND), grid)
    index = [[query[0] for query in queries], [query[1] * grid[1] + query[2] for query in queries]]
    query_QD = F.normalize(features_BND[index[0], index[1]].float(), dim=-1)
    # Image by image: the unit vectors of all of them at once would double the memory of the features.
    similarity_QBN = torch.stack([query_QD @ F.normalize(one_ND.float(), dim=-1).T for one_ND in features_BND], dim=1)
    best = similarity_QBN.topk(top, dim=-1)
    values_QBK, places_QBK = best.values.tolist(), best.indices.tolist()
    matches = tuple(
        tuple(
            Match(Patch(image, *divmod(place, grid[1])), value)
            for image in range(len(features_BND))
            if image != query[0]
            for value, place in zip(values_QBK[q][image], places_QBK[q][image], strict=True)
        )
        for q, query in enumerate(queries)
    )
    similarity_QBYX = similarity_QBN.reshape(len(queries), len(features_BND), *grid)
    return NearestPatches(tuple(Patch(*query) for query in queries), matches, similarity_QBYX)


@torch.no_grad()
def pick_queries(
    features_BND: Tensor, grid: Pair, count: int = 4, *, exclude_BYX: Tensor | None = None
) -> tuple[Patch, ...]:
    """Patches worth showing the matches of, the best first: parts of things that other images have too.

    A patch scores by how much more similar its best matches in other images are than the average patch, or as its neighbours
    do if that is less, minus half its similarity to those picked before. The edge of the image is left out, and so is
    `exclude_BYX` (such as `TokenNorms.outliers_BYX`); no image gives more than its share. Of very many images, only the first
    are looked at. The same features always give the same patches.
    """
    _require_patches(features_BND, grid)
    if len(features_BND) < 2:
        raise UsageError("nearest patches are looked for in other images, and there is only one image")
    if count < 1:
        raise UsageError(f"the number of patches to pick must be at least 1, not {count}")
    images = min(len(features_BND), max(2, _MOST_COMPARED // features_BND.shape[1]))
    unit_BND = F.normalize(features_BND[:images].float(), dim=-1)
    score_BN = _distinctiveness(unit_BND)
    # An artefact is alone among patches that are unlike it; a part of a thing is not.
    score_B1YX = score_BN.reshape(images, 1, *grid)
    around_B1YX = F.avg_pool2d(score_B1YX, 3, stride=1, padding=1, count_include_pad=False)
    score_BN = torch.minimum(score_B1YX, around_B1YX).flatten(1)
    score_BN[_edge_N(grid, score_BN.device).expand_as(score_BN)] = -torch.inf
    if exclude_BYX is not None:
        score_BN = score_BN.masked_fill(exclude_BYX[:images].flatten(1).to(score_BN.device), -torch.inf)
    share, used, picked = -(-count // images), [0] * images, list[Patch]()
    for _ in range(count):
        image, place = divmod(int(score_BN.argmax()), score_BN.shape[1])
        if score_BN[image, place] == -torch.inf:
            break
        picked.append(Patch(image, *divmod(place, grid[1])))
        used[image] += 1
        score_BN = score_BN - _REPETITION * (unit_BND @ unit_BND[image, place]).clamp(min=0)
        score_BN[image, place] = -torch.inf
        if used[image] == share:
            score_BN[image] = -torch.inf
    return tuple(picked)


def _distinctiveness(unit_BND: Tensor) -> Tensor:
    """[B, N]: similarity to the best matches in that half of the other images that match best, above the average patch.

    The average is half over the patch's own image: what fills an image is background, however well it is matched.
    """
    images = len(unit_BND)
    mean_BD = unit_BND.mean(dim=1)
    scores: list[Tensor] = []
    for i, own_ND in enumerate(unit_BND):
        others = [other for other in range(images) if other != i]
        best_BN = torch.stack([(own_ND @ unit_BND[other].T).amax(dim=1) for other in others])
        matched_N = best_BN.topk(-(-len(others) // 2), dim=0).values.mean(dim=0)
        scores.append(matched_N - own_ND @ (mean_BD[i] + mean_BD[others].mean(dim=0)) / 2)
    return torch.stack(scores)


def _edge_N(grid: Pair, device: torch.device) -> Tensor:
    """Whether a patch lies at the edge, where things are cut off; none does on a small grid."""
    edge_YX = torch.ones(grid, dtype=torch.bool, device=device)
    edge_YX[1:-1, 1:-1] = False
    return edge_YX.flatten() & (min(grid) >= _LEAST_FRAMED)


def _require_patch(query: Patch, images: int, grid: Pair) -> None:
    image, row, col = query
    if not (0 <= image < images and 0 <= row < grid[0] and 0 <= col < grid[1]):
        raise UsageError(
            f"there is no patch (row {row}, column {col}) of image {image}: there are {images} images of "
            f"{grid[0]}x{grid[1]} patches, counted from 0"
        )


# --- token norms ------------------------------------------------------------------------------------------------------

_OUTLIER_FACTOR = 2.0  # of the median norm, and
_OUTLIER_SPREADS = 5.0  # standard deviations above it, of logarithms: see TokenNorms.thresholds_L
_NORMAL_SPREAD = 1.4826  # times the median absolute deviation: the standard deviation, were the values normal


@dataclasses.dataclass(frozen=True)
class TokenNorms:
    """L2 norms of the tokens after every block, and patches that stand out.

    Large models use some patches of plain background as scratch space: their tokens have a far greater norm, no longer hold
    what the patch shows, and spoil attention maps (Darcet et al., Vision Transformers Need Registers, 2023). They may show in
    the middle of a model alone: the last block of DINOv2 ViT-S/14 lifts all others to their norm. So each layer is judged.
    """

    norms_LBT: Tensor  # before the final norm
    tokens: tuple[str, ...]  # cls, register0, ..., patch(0,0), ...
    grid: Pair
    thresholds_L: Tensor  # twice the median of all patches, or 5 robust standard deviations above it if that is more
    outliers_LBYX: Tensor  # bool: the norm is above the layer's threshold

    @property
    def layer(self) -> int:
        """The block after which most patches are outliers, the deepest of equals; without any, the last."""
        counts = self.outliers_LBYX.sum(dim=(1, 2, 3)).tolist()
        return max(range(len(counts)), key=lambda block: (counts[block], block))

    @property
    def outliers_BYX(self) -> Tensor:
        """The outliers of that layer."""
        return self.outliers_LBYX[self.layer]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many these are, by image."""
        return tuple(self.outliers_BYX.sum(dim=(1, 2)).tolist())

    @property
    def places(self) -> tuple[Patch, ...]:
        """Where they are, image by image, in raster order."""
        return tuple(Patch(*place) for place in self.outliers_BYX.nonzero().tolist())

    @property
    def num_prefix(self) -> int:
        """How many tokens come before the patches."""
        return len(self.tokens) - self.grid[0] * self.grid[1]


@torch.no_grad()
def token_norms(model: ViT, x_BCYX: Tensor) -> TokenNorms:
    """The norm of every token after each block, and which patches are outliers among those of all images given.

    The spread is measured by the median absolute deviation, which the outliers themselves do not widen, and on logarithms,
    since norms spread by factors.
    """
    norms_LBT = _each_layer(model, x_BCYX, lambda z_BTD: z_BTD.float().norm(dim=-1))
    grid = model.spec.grid_for((x_BCYX.shape[2], x_BCYX.shape[3]))
    patches_LBN = norms_LBT[:, :, model.spec.num_prefix :]
    logs_LS = patches_LBN.flatten(1).clamp(min=torch.finfo(torch.float32).tiny).log()
    median_L = _quantile(logs_LS, 0.5)
    spread_L = _NORMAL_SPREAD * _quantile((logs_LS - median_L[:, None]).abs(), 0.5)
    thresholds_L = median_L.exp() * (_OUTLIER_SPREADS * spread_L).exp().clamp(min=_OUTLIER_FACTOR)
    return TokenNorms(
        norms_LBT=norms_LBT,
        tokens=token_names(model.spec.uses_cls, model.spec.registers, grid),
        grid=grid,
        thresholds_L=thresholds_L,
        outliers_LBYX=(patches_LBN > thresholds_L[:, None, None]).unflatten(2, grid),
    )


# --- CKA --------------------------------------------------------------------------------------------------------------

_BLOCK_BYTES = 128 * 2**20  # of all layers' similarities that are held at a time
FEWEST_IMAGES = 4  # that debiased CKA can compare
_NO_VARIATION = 1e-12  # of the squared size of a layer's features: float32 rounding, not a difference between images


@dataclasses.dataclass(frozen=True)
class LayerFeatures:
    """One vector per image and layer, on the CPU: what CKA compares."""

    layers: tuple[Tensor, ...]  # float32 [S, D], by block (a BiT: by stage)
    tokens: Literal["cls", "mean"]

    @property
    def images(self) -> int:
        return len(self.layers[0])


@torch.no_grad()
def layer_features(
    model: Model, batches: Iterable[Tensor], *, tokens: Literal["cls", "mean"] | None = None
) -> LayerFeatures:
    """Collect class tokens (or mean patches) after the final norm, by layer, from a stream of batches.

    Only these vectors are kept: a thousand images of ViT-L are 98 MB.
    """
    parts: list[list[Tensor]] = [[] for _ in range(model.spec.num_blocks)]
    kind: Literal["cls", "mean"] = tokens or "mean"
    with _evaluated(model):
        for x_BCYX in batches:
            for chunk_BCYX in x_BCYX.split(_IMAGES):
                found = model.features(chunk_BCYX.to(_device(model)), tokens=tokens, layers=range(len(parts)))
                kind = "cls" if found.tokens == "cls" else "mean"
                for part, (_, features_BD) in zip(parts, sorted(found.layers.items()), strict=True):
                    part.append(features_BD.float().cpu())
    if not parts[0]:
        raise UsageError("there are no images to compare layers on")
    return LayerFeatures(tuple(torch.cat(part) for part in parts), kind)


@torch.no_grad()
def cka(first: LayerFeatures, second: LayerFeatures | None = None, *, debiased: bool = True) -> Tensor:
    """Linear centred kernel alignment, [L, M], of every two layers of one model or of two on the same images.

    1: the same similarities between images, up to rotation and scale; 0: unrelated ones (or a layer that is the same for all
    images). With fewer images than channels the textbook estimate is near 1 for anything, even noise, hence `debiased`: the
    unbiased estimator of Nguyen et al. (2021), which is 0 on average for unrelated layers and may be a little below it.
    """
    samples = first.images
    if second is not None and second.images != samples:
        raise UsageError(f"CKA compares layers on the same images; these have {samples} and {second.images}")
    least = FEWEST_IMAGES if debiased else 2
    if samples < least:
        raise UsageError(f"CKA needs at least {least} images, not {samples}")
    layers = first.layers if second is None else (*first.layers, *second.layers)
    centred = [_centred(x_SD) for x_SD in layers]
    # CKA is the cosine between the layers' centred similarity matrices. These are never held whole: row by row of all of them,
    # the inner products add up.
    inner_LL = torch.zeros(len(layers), len(layers), dtype=torch.float64)
    rows = max(1, _BLOCK_BYTES // (8 * len(layers) * samples))
    for start in range(0, samples, rows):
        chosen = slice(start, start + rows)
        flat_LS = torch.stack([_similarities(x_SD, chosen, debiased).flatten() for x_SD in centred])
        inner_LL += flat_LS @ flat_LS.T
    norm_L = inner_LL.diagonal().sqrt()
    cosine_LL = inner_LL / (norm_L[:, None] * norm_L).clamp(min=torch.finfo(torch.float64).tiny)
    count = len(first.layers)
    return (cosine_LL if second is None else cosine_LL[:count, count:]).float()


def _centred(x_SD: Tensor) -> Tensor:
    """Float64, mean 0, size 1; zeros where the samples do not differ."""
    x_SD = x_SD.cpu().double()
    centred_SD = x_SD - x_SD.mean(dim=0)
    size, variation = x_SD.square().sum(), centred_SD.square().sum()
    return centred_SD / variation.sqrt() if variation > _NO_VARIATION * size else torch.zeros_like(centred_SD)


def _similarities(x_SD: Tensor, rows: slice, debiased: bool) -> Tensor:
    """Rows of the centred Gram matrix; debiased, those of the U-centred one, whose diagonal is 0.

    The rows of the Gram matrix of centred vectors sum to 0, so without the diagonal d they sum to -d.
    """
    gram_RS = x_SD[rows] @ x_SD.T
    if not debiased:
        return gram_RS
    own_S, samples = x_SD.square().sum(dim=1), len(x_SD)
    gram_RS += (own_S[rows, None] + own_S) / (samples - 2) - own_S.sum() / ((samples - 1) * (samples - 2))
    gram_RS.diagonal(offset=rows.start).zero_()
    return gram_RS


# --- the head on every layer ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LogitLens:
    """What the model would answer if it ended after each block."""

    logits_LBK: Tensor | None  # of the last block: the model's own; None where the model has no head
    similarity_LB: Tensor  # cosine of each layer's representation to the last one's


@torch.no_grad()
def logit_lens(model: ViT, x_BCYX: Tensor) -> LogitLens:
    """Final norm, pooling, `pre_logits` and head on every block's output: at which depth the prediction forms.

    Only the last block was trained to be read like this. An early layer that says nothing may hold much in another basis.
    """
    represented_LBD = _each_layer(model, x_BCYX, model.represent_tokens)
    logits_LBK = None if model.head is None else model.head(represented_LBD).float()
    similarity_LB = F.cosine_similarity(represented_LBD.float(), represented_LBD[-1:].float(), dim=-1)
    return LogitLens(logits_LBK, similarity_LB)


# --- running a model --------------------------------------------------------------------------------------------------


class _LayerTape(Tape):
    """Keeps what `reduce` makes of each block's output, at once, so that no two outputs are held."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__("block*/+mlp")
        self._reduce = reduce

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, self._reduce(value))


def _each_layer(model: ViT, x_BCYX: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """`reduce` of every block's output tokens [B, T, D], stacked to [L, B, ...]."""
    chunks: list[Tensor] = []
    with _evaluated(model):
        for chunk_BCYX in x_BCYX.split(_IMAGES):
            tape = _LayerTape(reduce)
            model.represent(chunk_BCYX.to(_device(model)), tape)
            chunks.append(torch.stack(list(tape.values())))
    return torch.cat(chunks, dim=1)


@contextlib.contextmanager
def _evaluated(model: Model) -> Generator[None]:
    """Without dropout, whatever the mode of the model, which it has again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _device(model: Model) -> torch.device:
    return next(model.parameters()).device
