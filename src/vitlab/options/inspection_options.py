"""The options of `inspect`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from vitlab.options.evaluation_options import Model, Preprocessing
from vitlab.options.option import Columns, DryRun, Inference, Opt, Part, StrPath, names, numbers, size

# In the order of the page. What needs no image comes from the weights alone.
OF_WEIGHTS = ("filters", "positions")
OF_IMAGES = ("viewer", "heads", "saliency", "distance", "entropy", "features", "neighbours", "norms", "lens", "cka")
FIGURES = (*OF_WEIGHTS, *OF_IMAGES)

_MAPS = "Maps over the photos"


@dataclass(frozen=True)
class InspectOptions(Inference):
    model: Model
    images: Annotated[
        StrPath | Sequence[StrPath],
        Opt("Files, folders, patterns or a data set; default: held-out images of a run.", metavar="IMAGES"),
    ] = ()
    _: KW_ONLY
    compare: Annotated[
        StrPath | None, Opt("A second model beside the first, in the viewer and in every chart.", metavar="MODEL")
    ] = None
    out: Annotated[
        StrPath | None,
        Opt("A new folder; default runs/inspect-1, or the next free name.", metavar="DIR", changes_result=False),
    ] = None
    figures: Annotated[
        Sequence[str] | None, Opt(f"Only these: {', '.join(FIGURES)}.", metavar="NAME,NAME", parse=names)
    ] = None
    photos: Annotated[int, Opt("How many of the images are shown, evenly spread.", metavar="N")] = 8
    max_images: Annotated[
        int, Opt("How many are measured for attention distance, entropy and CKA; the paper: 128.", metavar="N")
    ] = 128
    columns: Columns = None
    part: Part = None
    image_size: Annotated[
        int | Sequence[int] | None,
        Opt("Pixels, in place of the model's own: a finer grid of patches.", metavar="H[,W]", parse=size),
    ] = None
    preprocess: Preprocessing = None
    components: Annotated[
        int | None, Opt("Principal components of the patch embedding; default 28, as in the paper.", metavar="N")
    ] = None
    label: Annotated[
        str | None, Opt("Explain this class; default: the predicted one of each photo.", metavar="NAME", panel=_MAPS)
    ] = None
    layers: Annotated[
        Sequence[int] | None,
        Opt("Layers of the head maps, from 0; default first, middle, last.", metavar="I,J", parse=numbers, panel=_MAPS),
    ] = None
    heads: Annotated[
        Sequence[int] | None, Opt("Heads of the head maps; default: all.", metavar="I,J", parse=numbers, panel=_MAPS)
    ] = None
    query: Annotated[
        Sequence[int] | None,
        Opt(
            "Row and column of the patch that attends; default: class token.", metavar="R,C", parse=numbers, panel=_MAPS
        ),
    ] = None
    depth: Annotated[
        int | None, Opt("Roll attention out through the first N layers; default: all.", metavar="N", panel=_MAPS)
    ] = None
    identity: Annotated[
        bool, Opt("Count the residual path as half of each layer in rollout; the paper's sentence: not.", panel=_MAPS)
    ] = True
    dry_run: DryRun = False
