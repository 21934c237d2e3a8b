"""The numbers behind every figure of `vitlab inspect`, for one classifier and some images.

Attention distance, entropy and layer representations stream over all images in constant memory; maps and curves are of a few
photos. Letters: B photos, N patches, L layers, H heads, D width, K classes, Y X grid.
"""

import dataclasses
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.core.runtime import multiplies_bfloat16
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageInput, decode, read
from vitlab.data.loader import BadImages
from vitlab.data.preprocess import Preprocess, normalise, seen_region
from vitlab.engines.classifier import Classifier, Prediction, rank_labels
from vitlab.engines.inference import InferenceOptions, inference_progress, unpadded_batches
from vitlab.inspection.attention import AttentionStatistics, attention_statistics, images_at_once, require_vit
from vitlab.inspection.embeddings import (
    FIGURE_7_COMPONENTS,
    PatchFilters,
    PositionSimilarity,
    patch_filters,
    position_similarity,
)
from vitlab.inspection.faithfulness import (
    Curves,
    curves,
    end_scores,
    random_order,
    randomised,
    rank_correlation,
)
from vitlab.inspection.overlays import to_picture
from vitlab.inspection.representations import (
    FEWEST_IMAGES,
    LayerFeatures,
    LogitLens,
    NearestPatches,
    PatchPca,
    TokenNorms,
    layer_features,
    logit_lens,
    nearest_patches,
    patch_pca,
    pick_queries,
    token_norms,
)
from vitlab.inspection.rollout import rollout_rows
from vitlab.inspection.saliency import STEPS, Method, Target, methods_of, saliency
from vitlab.models.model import Model
from vitlab.models.names import format_name
from vitlab.models.results import resolve_indices, token_names
from vitlab.models.spec import ModelSpec, Pair, ViTSpec
from vitlab.models.vit import ViT

_ANOTHER_SEED = 7919  # a model that somebody made with the same seed is compared with another one
_STEPS_TO_CHECK = 3  # of integrated gradients for random weights, whose exact values nobody reads
_OF_TOKENS = ("positions", "viewer", "norms", "lens")  # figures of a sequence of tokens on one grid
_OF_ATTENTION = ("heads", "distance", "entropy")  # figures of whatever attends
_SHARP_PX, _FEW_PX = 512, 96  # the side of photos as they are shown; that of images whose pixels one can count


@dataclasses.dataclass(frozen=True)
class Photos:
    """The photos that are shown, as they lie on the disk."""

    names: tuple[str, ...]
    sources: tuple[ImageInput, ...]

    def __len__(self) -> int:
        return len(self.names)


@dataclasses.dataclass(frozen=True)
class Maps:
    """Saliency maps by method, and what tells whether they mean anything."""

    heat_BYX: Mapping[str, Tensor]
    curves: Mapping[str, Curves]
    random: Curves  # the same photos, patches in random order
    randomised_B: Mapping[str, Tensor]  # rank correlation with the map of a model with random weights


@dataclasses.dataclass(frozen=True)
class Inspected:
    """One model; what was not requested, or is not available, is None, and `missing` says why."""

    name: str
    classifier: Classifier
    grid: Pair
    tokens: tuple[str, ...]
    seen_BCYX: Tensor | None = None  # uint8, as the model sees the photos
    predictions: Sequence[Sequence[Prediction]] = ()
    explained: tuple[str, ...] = ()  # the class of each photo that the maps are about; empty without a head
    filters: PatchFilters | None = None
    positions: PositionSimilarity | None = None
    statistics: AttentionStatistics | None = None
    layers: LayerFeatures | None = None
    maps: Maps | None = None
    pca: PatchPca | None = None
    neighbours: NearestPatches | None = None
    norms: TokenNorms | None = None
    lens: LogitLens | None = None
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    @property
    def model(self) -> Model:
        return self.classifier.model

    @property
    def vit(self) -> ViT:
        """The model, where it has tokens."""
        return require_vit(self.classifier.model)

    @property
    def spec(self) -> ModelSpec:
        return self.classifier.model.spec

    def shows(self, figure: str, request: "Request") -> bool:
        """Whether a figure is wanted, and there is nothing that rules it out."""
        return figure in request.figures and figure not in self.missing

    def pixels(self, photo: int) -> Tensor:
        """What the model computes with, [1, C, Y, X] on its device."""
        assert self.seen_BCYX is not None
        return normalise(self.classifier.preprocess, self.seen_BCYX[photo : photo + 1].to(self.classifier.device))


@dataclasses.dataclass(frozen=True)
class Request:
    """Which figures, and how they are made."""

    figures: Collection[str]
    named: bool = False  # whether somebody asked for just these figures
    components: int | None = None  # None: 28, or as many as there are
    label: str | None = None  # the class that is explained
    layers: Sequence[int] | None = None  # of the head maps
    heads: Sequence[int] | None = None
    query: Sequence[int] | None = None  # row and column of the patch that attends; None: the class token
    depth: int | None = None  # layers that rollout goes through
    add_identity: bool = True
    seed: int = 0


def choose_photos(dataset: Dataset, classifier: Classifier, count: int, console: Console) -> Photos:
    """`count` images, evenly spread over the data set; one that cannot be read gives its place to the next."""
    found: dict[str, ImageInput] = {}
    places = [round(i * (len(dataset) - 1) / max(1, count - 1)) for i in range(min(count, len(dataset)))]
    for place in [*places, *(i for i in range(len(dataset)) if i not in places)]:
        if len(found) == min(count, len(dataset)):
            break
        name = str(dataset.keys[place])
        try:
            source = dataset.read(place)
            read(source, classifier.preprocess)
        except FileProblem as error:
            console.say(f"skipped {name}: {error.what}")
        else:
            found[name] = source
    if not found:
        raise FileProblem(f"none of the {len(dataset):,} images of {dataset.name} could be read")
    return Photos(tuple(found), tuple(found.values()))


def left_out(spec: ModelSpec, figures: Collection[str]) -> dict[str, str]:
    """Of these figures those that make no sense for a model, and why."""
    if spec.has_attention_maps:
        return {}
    if spec.attention_shape[0]:
        why = "attends on grids that shrink, without a sequence of tokens: no viewer, positions, token norms or logit lens"
        names = _OF_TOKENS
    else:
        why, names = "has no attention and no tokens to show", (*_OF_TOKENS, *_OF_ATTENTION)
    return {figure: f"{format_name(spec)} {why}" for figure in figures if figure in names}


def inspect_weights(name: str, classifier: Classifier, request: Request) -> Inspected:
    """What is seen without an image: patch filters and positions."""
    model = classifier.model
    spec, missing, values = model.spec, left_out(model.spec, request.figures), dict[str, Any]()
    grid = spec.grid_for(classifier.preprocess.image_size)
    if "filters" in request.figures:
        values["filters"] = _filters(model, request.components)
    if "positions" in request.figures and "positions" not in missing:
        try:
            values["positions"] = position_similarity(require_vit(model))
        except UsageError as error:
            missing["positions"] = error.what
    prefix = (spec.uses_cls, spec.registers) if isinstance(spec, ViTSpec) else (False, 0)
    return Inspected(name, classifier, grid, token_names(*prefix, grid), **values, missing=missing)


def _filters(model: Model, components: int | None) -> PatchFilters:
    if components is not None:  # asked for, so they are shown in place of the filters themselves
        return dataclasses.replace(patch_filters(model, components), filters_DCPP=None)
    every = patch_filters(model, None)
    first = slice(FIGURE_7_COMPONENTS)
    return dataclasses.replace(
        every, components_KCPP=every.components_KCPP[first], explained_K=every.explained_K[first]
    )


def require_request(classifier: Classifier, request: Request) -> None:
    """Raise where something was asked for that this model does not have, before any work."""
    spec = classifier.model.spec
    grid = spec.grid_for(classifier.preprocess.image_size)
    if request.named and (lacking := left_out(spec, request.figures)):
        raise UsageError(
            f"--figures {','.join(lacking)}: {next(iter(lacking.values()))}", hint="Leave these figures out."
        )
    _require_attention(classifier.model, request)
    if request.depth is not None and not 1 <= request.depth <= spec.num_blocks:
        raise UsageError(f"--depth must be from 1 to {spec.num_blocks} layers, not {request.depth}")
    if request.query is not None:
        if len(request.query) != 2:
            raise UsageError("--query is the row and the column of a patch, such as 3,5")
        if not all(0 <= place < side for place, side in zip(request.query, grid, strict=True)):
            raise UsageError(
                f"there is no patch {tuple(request.query)} on a grid of {grid[0]}x{grid[1]}",
                hint="Rows and columns count from 0.",
            )
    if request.label is None or request.label in classifier.labels:
        return
    if not classifier.labels:
        raise UsageError("the model has no classes, so none of them can be explained", hint="Leave --label out.")
    raise UnknownName("class", request.label, classifier.labels)


def _require_attention(model: Model, request: Request) -> None:
    """Raise where options are about layers, heads or tokens that the model does not have."""
    layers, heads = model.spec.attention_shape
    of_maps = {"--layers": request.layers, "--heads": request.heads, "--query": request.query}
    of_rollout = {"--depth": request.depth, "--no-identity": None if request.add_identity else True}
    named = [name for name, value in of_maps.items() if value is not None and not layers]
    named += [name for name, value in of_rollout.items() if value is not None and not model.spec.has_attention_maps]
    if named:
        error = model.no_attention()
        raise UsageError(f"{', '.join(named)}: {error.what}", hint="Leave it out.")
    if layers:
        resolve_indices(request.layers, layers, "layer")
        resolve_indices(request.heads, heads, "head")


def measure_attention(
    inspected: Inspected, dataset: Dataset, options: InferenceOptions, request: Request, console: Console
) -> Inspected:
    """Attention distance, entropy and layer representations over all images of `dataset`, in constant memory."""
    model, size = inspected.model, inspected.classifier.preprocess.image_size
    most = images_at_once(model, torch.empty(1, model.spec.in_channels, *size, device="meta"))
    few = dataclasses.replace(options, batch_size=min(options.batch_size, most))
    values, missing = dict[str, Any](), dict(inspected.missing)
    if inspected.shows("distance", request) or inspected.shows("entropy", request):
        batches = _pixels(inspected, dataset, few, console, f"attention of {inspected.name}")
        values["statistics"] = attention_statistics(model, batches)
    if "cka" in request.figures:
        found = layer_features(model, _pixels(inspected, dataset, few, console, f"layers of {inspected.name}"))
        if found.images < FEWEST_IMAGES:
            missing["cka"] = f"CKA needs at least {FEWEST_IMAGES} images, not {found.images}"
        else:
            values["layers"] = found
    return dataclasses.replace(inspected, **values, missing=missing)


def _pixels(
    inspected: Inspected, dataset: Dataset, options: InferenceOptions, console: Console, label: str
) -> Generator[Tensor]:
    rule, device, done = inspected.classifier.preprocess, inspected.classifier.device, 0
    with inference_progress(console, label, len(dataset), options) as advance:
        for batch in unpadded_batches(dataset, rule, options, device, BadImages(most=len(dataset))):
            yield normalise(rule, batch.images[batch.valid].to(device))
            done += len(batch.valid)
            advance(done)


def inspect_photos(inspected: Inspected, photos: Photos, request: Request, console: Console) -> Inspected:
    """Everything that is of single photos."""
    model, classifier = inspected.model, inspected.classifier
    seen_BCYX = torch.stack([read(source, classifier.preprocess) for source in photos.sources])
    x_BCYX = normalise(classifier.preprocess, seen_BCYX.to(classifier.device))
    with torch.inference_mode():
        logits_BK = model(x_BCYX).float().cpu() if classifier.labels else None
    predictions = [] if logits_BK is None else rank_labels(classifier.bundle, logits_BK, 5)
    values: dict[str, Any] = {"seen_BCYX": seen_BCYX, "predictions": predictions}
    missing = dict(inspected.missing)
    wanted = set(request.figures) - set(missing)
    outliers_BYX: Tensor | None = None
    if "norms" in wanted:
        norms = values["norms"] = token_norms(inspected.vit, x_BCYX)
        outliers_BYX = norms.outliers_BYX
    if {"features", "neighbours"} & wanted:
        with torch.inference_mode():
            features_BND = model.features(x_BCYX, tokens="patches").last
        if "features" in wanted:
            values["pca"] = patch_pca(features_BND, inspected.grid)
        if "neighbours" in wanted and len(photos) > 1:
            queries = pick_queries(features_BND, inspected.grid, exclude_BYX=outliers_BYX)
            values["neighbours"] = nearest_patches(features_BND, inspected.grid, queries)
        elif "neighbours" in wanted:
            missing["neighbours"] = "nearest patches are sought in other photos, and there is one"
    if "lens" in wanted:
        values["lens"] = logit_lens(inspected.vit, x_BCYX)
    if "saliency" in wanted:
        index_B = _explained(classifier, predictions, request.label)
        if index_B is None:
            target = Target.own(model, x_BCYX)
        else:
            target = Target.classes(index_B.to(classifier.device), several=bool(classifier.bundle.thresholds))
            values["explained"] = tuple(classifier.labels[int(i)] for i in index_B)
        values["maps"] = _maps(model, x_BCYX, target, request, console, inspected.name)
    return dataclasses.replace(inspected, **values, missing=missing)


def _explained(classifier: Classifier, predictions: Sequence[Sequence[Prediction]], label: str | None) -> Tensor | None:
    """The number of the class that each photo's maps are about; None without a head."""
    if not classifier.labels:
        return None
    if label is not None:
        return torch.full((len(predictions),), classifier.labels.index(label))
    return torch.tensor([answers[0].index for answers in predictions])


def _maps(model: Model, x_BCYX: Tensor, target: Target, request: Request, console: Console, name: str) -> Maps:
    """Every map with its curves. They share their ends, and the score of a random order."""
    methods = methods_of(model.spec)
    heat, checked, rho = dict[str, Tensor](), dict[str, Curves](), dict[str, Tensor]()
    other = randomised(model, seed=request.seed + _ANOTHER_SEED)
    others_target = target.for_model(other, x_BCYX)
    # Scores to a hundredth are enough to tell curves apart, and curves are most of the work.
    half = multiplies_bfloat16(x_BCYX.device)
    with console.progress(f"saliency of {name}", len(methods) + 1) as advance:
        advance(0, "random order")
        ends_B2 = end_scores(model, x_BCYX, target, half=half)
        random = random_order(model, x_BCYX, target, ends_B2=ends_B2, half=half, seed=request.seed)
        for done, method in enumerate(methods, start=1):
            advance(done, method)
            heat_BYX = _map(model, x_BCYX, method, target, request, steps=STEPS)
            checked[method] = curves(model, x_BCYX, heat_BYX, target, ends_B2=ends_B2, half=half)
            other_BYX = _map(other, x_BCYX, method, others_target, request, steps=_STEPS_TO_CHECK)
            heat[method], rho[method] = heat_BYX.cpu(), rank_correlation(heat_BYX, other_BYX).cpu()
        advance(len(methods) + 1, "")
    return Maps(heat, checked, random, rho)


def _map(model: Model, x_BCYX: Tensor, method: Method, target: Target, request: Request, *, steps: int) -> Tensor:
    if method == "rollout":
        return rollout_rows(model, x_BCYX, add_identity=request.add_identity, depth=request.depth)
    return saliency(model, x_BCYX, method, target, steps=steps)


def sharp_view(source: ImageInput, rule: Preprocess) -> Tensor:
    """What a model sees of a photo, uint8 [C, Y, X], in as many of the photo's own pixels as a figure has room for."""
    seen_CYX = read(source, rule)
    if rule.mode == "array" or max(rule.image_size) <= _FEW_PX:
        return seen_CYX
    photo_CYX = decode(source, rule.mode, rule.bits)
    region = seen_region(rule, *photo_CYX.shape[1:])
    zoom = min(1.0, _SHARP_PX / max(region.rows, region.cols))
    size = (round(region.rows * zoom), round(region.cols * zoom))
    if size[0] <= seen_CYX.shape[1] or photo_CYX.dtype != torch.uint8:
        return seen_CYX
    box = (region.left, region.top, region.left + region.cols, region.top + region.rows)
    drawn = to_picture(photo_CYX).resize((size[1], size[0]), Image.Resampling.LANCZOS, box=box)
    pixels = torch.from_numpy(np.array(drawn))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
