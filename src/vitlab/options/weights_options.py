"""The options of `load` and `convert`: what a person says about weights because their file does not."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from vitlab.models.spec import GridResize
from vitlab.options.evaluation_options import Preprocessing
from vitlab.options.option import Device, DryRun, Opt, Quiet, StrPath, TrustPickle, numbers, size

_STATED, _SURGERY = "What the file does not say", "Surgery"


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What is stated about a file of weights, whatever is done with it."""

    preprocess: Preprocessing = None
    drop: Annotated[Sequence[str], Opt("Leave out these arrays, pre_logits or head; repeatable.", metavar="NAME")] = ()
    part: Annotated[
        str | None, Opt("Which model of a torch file that holds several: model_ema.", metavar="NAME", panel=_STATED)
    ] = None
    heads: Annotated[int | None, Opt("Attention heads, where no array tells.", metavar="N", panel=_STATED)] = None
    gelu: Annotated[
        Literal["tanh", "exact"] | None, Opt("tanh or exact, where no config tells.", metavar="KIND", panel=_STATED)
    ] = None
    norm_eps: Annotated[
        float | None, Opt("Epsilon of the layer norms, where no config tells.", metavar="E", panel=_STATED)
    ] = None
    grid: Annotated[
        Sequence[int] | None,
        Opt("Rows and columns of the positions, where they are not square.", "H,W", parse=numbers, panel=_STATED),
    ] = None
    trust_pickle: TrustPickle = False
    quiet: Quiet = False


@dataclass(frozen=True)
class LoadOptions(Stated):
    path: Annotated[StrPath, Opt("A bundle, a run, a file of weights, a transformers folder, or a published name.")]
    _: KW_ONLY
    image_size: Annotated[
        int | Sequence[int] | None, Opt("Carry the positions to another grid, and prepare images of that size.")
    ] = None
    adapter: Annotated[StrPath | None, Opt("What a LoRA run has added to these weights: its folder, or that run.")] = (
        None
    )
    device: Device = "auto"


@dataclass(frozen=True)
class ConvertOptions(Stated):
    source: Annotated[StrPath, Opt("A weights file, a transformers folder, a bundle, a run, or a name.", metavar="IN")]
    out: Annotated[StrPath, Opt("A new file or folder.", metavar="OUT")]
    _: KW_ONLY
    to: Annotated[
        Literal["vitlab", "google-npz", "big-vision", "timm", "hf", "torchvision", "dinov2"],
        Opt("vitlab, google-npz, big-vision, timm, hf, torchvision, dinov2.", metavar="FORMAT"),
    ] = "vitlab"
    average_with: Annotated[
        Sequence[StrPath], Opt("Take the mean with this checkpoint; repeatable.", metavar="PATH")
    ] = ()
    classes: Annotated[int | None, Opt("A new head of zeros.", metavar="K", panel=_SURGERY)] = None
    labels: Annotated[
        Sequence[str], Opt("Keep only these classes of the head; repeatable.", metavar="NAME", panel=_SURGERY)
    ] = ()
    image_size: Annotated[
        int | Sequence[int] | None,
        Opt("Carry the positions to another grid.", metavar="H[,W]", parse=size, panel=_SURGERY),
    ] = None
    pos_resize: Annotated[
        GridResize | None,
        Opt(
            "corner-bilinear (the paper's), bilinear, bicubic, bicubic-antialias or bicubic-offset (DINOv2's); "
            "default: the model's own.",
            metavar="HOW",
            panel=_SURGERY,
        ),
    ] = None
    patch_size: Annotated[int | None, Opt("Resize the patch kernel, as FlexiViT.", metavar="P", panel=_SURGERY)] = None
    channels: Annotated[int | None, Opt("Another number of input channels.", metavar="C", panel=_SURGERY)] = None
    cls_in_pos: Annotated[bool | None, Opt("Split the class token's position off, or fold it in.", panel=_SURGERY)] = (
        None
    )
    dry_run: DryRun = False
