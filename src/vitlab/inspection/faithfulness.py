"""Whether a saliency map means anything: deletion, insertion, a random order, and random weights.

    ends_B2 = end_scores(model, x_BCYX, target)
    found = curves(model, x_BCYX, heat_BYX, target, ends_B2=ends_B2)
    chance = random_order(model, x_BCYX, target, ends_B2=ends_B2)
    rho_B = randomised_weights(model, x_BCYX, heat_BYX, method, target)
    verdict(found, chance, rho_B).sentence

Patches are taken away by putting a blurred copy of the image in their place: colours and light stay as they were, so that what
is missing is detail, and not an edge or a colour that the model never saw in training.
Letters: B batch, C channels, Y X rows and columns (of pixels or patches), N patches, F fractions.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core.errors import UsageError, amount
from vitlab.inspection.saliency import Method, Target, blurred, saliency
from vitlab.models import init
from vitlab.models.build import build
from vitlab.models.model import Model
from vitlab.models.spec import ViTSpec, changed

# Of the patches, at which the score is looked at besides 0 and 1. Close at both ends, where curves bend, and symmetric, so that
# one random order serves for deletion and insertion.
FRACTIONS = (0.1, 0.3, 0.7, 0.9)
SAME_MAP = 0.5  # rank correlation from which on a map is said to be the same with random weights

_FEWEST_IMAGES = 5  # below, even a map that is better on every image may be so by chance: 1 in 16
_AT_ONCE = 32  # images per forward pass
_RESAMPLES = 2000
_LEVEL = 0.025  # one end of a 95 % interval


@dataclasses.dataclass(frozen=True)
class Curves:
    """Normalised scores while patches are deleted from, or inserted into, each image; see `Target.normalised_score`."""

    fractions: tuple[float, ...]  # of the patches, 0 and 1 included
    deletion_BF: Tensor  # most salient patches replaced first
    insertion_BF: Tensor  # most salient patches revealed first

    @property
    def deletion_area_B(self) -> Tensor:
        """Area under each image's deletion curve: low where the first patches matter."""
        return _area(self.deletion_BF, self.fractions)

    @property
    def insertion_area_B(self) -> Tensor:
        """Area under each image's insertion curve: high where the first patches matter."""
        return _area(self.insertion_BF, self.fractions)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What curves and rank correlation say of a map; None where there is nothing to decide by."""

    sentence: str
    beats_random: bool | None  # None: too few images
    follows_weights: bool | None  # None: no check with random weights
    deletion_gain: float  # mean area under the random order's deletion curve less that of the map
    insertion_gain: float  # mean area under the map's insertion curve less that of the random order
    rank_correlation: float | None  # mean of its size, 0 to 1

    @property
    def means_something(self) -> bool:
        """Whether no check speaks against the map, and the curves speak for it."""
        return self.beats_random is True and self.follows_weights is not False


def curves(
    model: Model,
    x_BCYX: Tensor,
    heat_BYX: Tensor,
    target: Target,
    *,
    ends_B2: Tensor | None = None,
    half: bool = False,
) -> Curves:
    """Deletion and insertion in the order of the map; `ends_B2` from `end_scores`, if they are known already.

    `half` runs the model under bfloat16 autocast, which is faster, and exact to about 0.01.
    """
    target.require_fit(model, x_BCYX)
    grid = model.spec.grid_for((x_BCYX.shape[2], x_BCYX.shape[3]))
    if heat_BYX.shape != (len(x_BCYX), *grid):
        rows, cols = heat_BYX.shape[-2:]
        raise UsageError(
            f"the map is on a grid of {rows}x{cols}, and the model's patches on one of {grid[0]}x{grid[1]}"
        )
    rank_BYX = _ranks(heat_BYX.to(x_BCYX.device))
    ends_B2 = end_scores(model, x_BCYX, target, half=half) if ends_B2 is None else ends_B2
    filled_BCYX = blurred(x_BCYX, model.spec.stride)
    deletion_BF = _replacing(model, x_BCYX, filled_BCYX, rank_BYX, target, half, ends_B2)
    insertion_BF = _replacing(model, filled_BCYX, x_BCYX, rank_BYX, target, half, ends_B2.flip(1))
    return Curves((0.0, *FRACTIONS, 1.0), deletion_BF, insertion_BF)


def random_order(
    model: Model,
    x_BCYX: Tensor,
    target: Target,
    *,
    ends_B2: Tensor | None = None,
    half: bool = False,
    seed: int = 0,
) -> Curves:
    """The same with a random order of the patches of each image: what a map has to beat.

    Deleting along an order is inserting along its reverse, read backwards. The reverse of a random order is as random, so one
    pass over symmetric fractions gives both curves.
    """
    rows, cols = model.spec.grid_for((x_BCYX.shape[2], x_BCYX.shape[3]))
    draw = torch.Generator().manual_seed(seed)
    heat_BYX = torch.rand(len(x_BCYX), rows, cols, generator=draw).to(x_BCYX.device)
    ends_B2 = end_scores(model, x_BCYX, target, half=half) if ends_B2 is None else ends_B2
    filled_BCYX, rank_BYX = blurred(x_BCYX, model.spec.stride), _ranks(heat_BYX)
    deletion_BF = _replacing(model, x_BCYX, filled_BCYX, rank_BYX, target, half, ends_B2)
    return Curves((0.0, *FRACTIONS, 1.0), deletion_BF, deletion_BF.flip(1))


def _replacing(
    model: Model,
    old_BCYX: Tensor,
    new_BCYX: Tensor,
    rank_BYX: Tensor,
    target: Target,
    half: bool,
    ends_B2: Tensor,
) -> Tensor:
    """Scores while the patches of `old` give way to those of `new` in the order of their ranks, from end to end: [B, F]."""
    firsts = (rank_BYX < round(fraction * rank_BYX[0].numel()) for fraction in FRACTIONS)
    between = [_scores(model, _mixed(model, new_BCYX, old_BCYX, first_BYX), target, half) for first_BYX in firsts]
    return torch.stack([ends_B2[:, 0], *between, ends_B2[:, 1]], dim=1)


def end_scores(model: Model, x_BCYX: Tensor, target: Target, *, half: bool = False) -> Tensor:
    """Normalised scores of the unchanged and of the wholly replaced images, [B, 2]: where all curves begin and end."""
    filled_BCYX = blurred(x_BCYX, model.spec.stride)
    return torch.stack([_scores(model, each, target, half) for each in (x_BCYX, filled_BCYX)], dim=1)


def randomised(model: Model, *, seed: int = 0) -> Model:
    """A copy of the model with random weights, on its device.

    Initial values, but for the two that would keep the image from reaching the output: the head, which starts at zero, starts
    as any dense layer, and layer scale is 1.
    """
    spec = model.spec
    if isinstance(spec, ViTSpec) and spec.layer_scale is not None:
        spec = changed(spec, {"layer_scale": 1.0})
    with torch.device("cpu"):
        other = build(spec, seed=seed)
    if other.head is not None:
        with torch.no_grad():
            init.lecun(other.head, torch.Generator().manual_seed(seed))
    parameter = next(model.parameters())
    return other.to(parameter.device, parameter.dtype).eval()


def randomised_weights(
    model: Model,
    x_BCYX: Tensor,
    heat_BYX: Tensor,
    method: Method,
    target: Target,
    *,
    images: int = 4,
    steps: int = 4,
    seed: int = 0,
) -> Tensor:
    """Rank correlation of a map with that of the same method for random weights (Adebayo et al. 2018), [B].

    High, whatever the sign, means that the map shows the image and not what the model has learnt. The first `images` are
    looked at, with `steps` of integrated gradients: random weights make smooth functions, and few of both tell enough.
    """
    x_BCYX, target, other = x_BCYX[:images], target.part(slice(images)), randomised(model, seed=seed)
    other_BYX = saliency(other, x_BCYX, method, target.for_model(other, x_BCYX), steps=steps)
    return rank_correlation(heat_BYX[:images], other_BYX)


def rank_correlation(first_BYX: Tensor, second_BYX: Tensor) -> Tensor:
    """Spearman's rank correlation of two maps of each image, [B]; 0 where one of them is the same everywhere."""
    a_BN, b_BN = (_mean_ranks(each.flatten(1)) for each in (first_BYX, second_BYX))
    a_BN, b_BN = (each - each.mean(dim=1, keepdim=True) for each in (a_BN, b_BN))
    return F.cosine_similarity(a_BN, b_BN, dim=1)


def verdict(found: Curves, chance: Curves, rank_correlation_B: Tensor | None = None, *, seed: int = 0) -> Verdict:
    """Compare a map's curves with those of a random order, image by image.

    A map beats the random order if its deletion area is lower and its insertion area higher, each with a paired bootstrap
    interval (95 %) of the mean difference that leaves out 0.
    """
    gains_2B = (
        torch.stack([chance.deletion_area_B - found.deletion_area_B, found.insertion_area_B - chance.insertion_area_B])
        .cpu()
        .double()
    )
    images = gains_2B.shape[1]
    shown = amount(images, "image")
    areas = (
        f"deletion area {found.deletion_area_B.mean():.3f} against {chance.deletion_area_B.mean():.3f}, "
        f"insertion area {found.insertion_area_B.mean():.3f} against {chance.insertion_area_B.mean():.3f}, {shown}"
    )
    beats = None if images < _FEWEST_IMAGES else bool((_lower_ends(gains_2B, seed) > 0).all())
    match beats:
        case None:
            sentence = f"Too few images to compare this map with a random order of the patches ({areas})."
        case True:
            sentence = (
                f"The patches that this map marks matter more to the model than patches taken at random ({areas})."
            )
        case False:
            sentence = (
                f"The patches that this map marks matter no more to the model than patches taken at random ({areas}): "
                "do not read an explanation into it."
            )
    # The size of each: a map may follow the image in one photo and its negative in another.
    rho = None if rank_correlation_B is None else rank_correlation_B.abs().mean().item()
    follows = None if rho is None else rho < SAME_MAP
    if rho is not None:
        same = "another one" if follows else "much the same, so it shows the image and not what the model has learnt"
        sentence += f" With random weights the map is {same} (rank correlation {rho:.2f})."
    deletion_gain, insertion_gain = gains_2B.mean(dim=1).tolist()
    return Verdict(sentence, beats, follows, deletion_gain, insertion_gain, rho)


def _lower_ends(gains_2B: Tensor, seed: int) -> Tensor:
    """Lower ends of the 95 % bootstrap intervals of the means, [2]."""
    images = gains_2B.shape[1]
    index_RB = torch.randint(images, (_RESAMPLES, images), generator=torch.Generator().manual_seed(seed))
    return gains_2B.cpu()[:, index_RB].mean(dim=2).quantile(_LEVEL, dim=1)


def _area(curve_BF: Tensor, fractions: tuple[float, ...]) -> Tensor:
    return torch.trapezoid(curve_BF, torch.tensor(fractions, device=curve_BF.device), dim=1)


def _ranks(heat_BYX: Tensor) -> Tensor:
    """Place of each patch in the order of falling heat, from 0, [B, Y, X].

    Patches of the same heat, such as Grad-CAM's zeros, come in a fixed random order: by rows, the sky would go first.
    """
    heat_BN = heat_BYX.flatten(1)
    shuffle_N = torch.randperm(heat_BN.shape[1], generator=torch.Generator().manual_seed(0)).to(heat_BN.device)
    order_BN = shuffle_N[heat_BN[:, shuffle_N].argsort(dim=1, descending=True, stable=True)]
    return order_BN.argsort(dim=1).reshape(heat_BYX.shape)


def _mean_ranks(values_BN: Tensor) -> Tensor:
    """Ranks in which equal values share their mean."""
    below_BN = [(row_N[:, None] > row_N).sum(dim=1) for row_N in values_BN]
    equal_BN = [(row_N[:, None] == row_N).sum(dim=1) for row_N in values_BN]
    return torch.stack(below_BN).cpu().double() + torch.stack(equal_BN).cpu().double() / 2  # MPS has no float64


def _mixed(model: Model, inside_BCYX: Tensor, outside_BCYX: Tensor, chosen_BYX: Tensor) -> Tensor:
    """One image at the chosen patches, the other elsewhere."""
    stride = model.spec.stride
    pixels_BYX = chosen_BYX.repeat_interleave(stride, dim=1).repeat_interleave(stride, dim=2)
    pixels_BYX = pixels_BYX[:, : inside_BCYX.shape[2], : inside_BCYX.shape[3]]  # a hybrid's may reach over the edge
    return torch.where(pixels_BYX[:, None], inside_BCYX, outside_BCYX)


@torch.no_grad()
def _scores(model: Model, x_BCYX: Tensor, target: Target, half: bool) -> Tensor:
    parts = [slice(start, start + _AT_ONCE) for start in range(0, len(x_BCYX), _AT_ONCE)]
    with torch.autocast(x_BCYX.device.type, dtype=torch.bfloat16, enabled=half):
        return torch.cat([target.part(part).normalised_score(model, x_BCYX[part]) for part in parts])
