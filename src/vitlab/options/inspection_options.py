"""The options of `inspect`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from vitlab.options.evaluation_options import Model, Preprocessing
from vitlab.options.option import Columns, DryRun, Inference, Part, StrPath, names, numbers, opt, size

# In the order of the page. What needs no image comes from the weights alone.
OF_WEIGHTS = ("filters", "positions")
OF_IMAGES = ("viewer", "heads", "saliency", "distance", "entropy", "features", "neighbours", "norms", "lens", "cka")
FIGURES = (*OF_WEIGHTS, *OF_IMAGES)

_MAPS = "Maps over the photos"


@dataclass(frozen=True)
class InspectOptions(Inference):
    model: Model
    images: StrPath | Sequence[StrPath] = opt(
        (), "Files, folders, patterns or a data set; default: held-out images of a run.", "IMAGES"
    )
    _: KW_ONLY
    compare: StrPath | None = opt(None, "A second model beside the first, in the viewer and in every chart.", "MODEL")
    out: StrPath | None = opt(
        None, "A new folder; default runs/inspect-1, or the next free name.", "DIR", changes_result=False
    )
    figures: Sequence[str] | None = opt(None, f"Only these: {', '.join(FIGURES)}.", "NAME,NAME", parse=names)
    photos: int = opt(8, "How many of the images are shown, evenly spread.", "N")
    max_images: int = opt(
        128,
        "How many are measured for attention distance, entropy and CKA, evenly spread; the paper: 128. "
        "Another --seed takes others.",
        "N",
    )
    columns: Columns = None
    part: Part = None
    image_size: int | Sequence[int] | None = opt(
        None, "Pixels, in place of the model's own: a finer grid of patches.", "H[,W]", parse=size
    )
    preprocess: Preprocessing = None
    components: int | None = opt(None, "Principal components of the patch embedding; default 28, as in the paper.", "N")
    label: str | None = opt(None, "Explain this class; default: the predicted one of each photo.", "NAME", panel=_MAPS)
    layers: Sequence[int] | None = opt(
        None, "Layers of the head maps, from 0; default first, middle, last.", "I,J", parse=numbers, panel=_MAPS
    )
    heads: Sequence[int] | None = opt(None, "Heads of the head maps; default: all.", "I,J", parse=numbers, panel=_MAPS)
    query: Sequence[int] | None = opt(
        None, "Row and column of the patch that attends; default: class token.", "R,C", parse=numbers, panel=_MAPS
    )
    depth: int | None = opt(None, "Roll attention out through the first N layers; default: all.", "N", panel=_MAPS)
    identity: bool = opt(
        True, "Count the residual path as half of each layer in rollout; the paper's sentence: not.", panel=_MAPS
    )
    dry_run: DryRun = False
