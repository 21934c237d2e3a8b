"""The options of `load` and `convert`: what a person says about weights because their file does not."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from vitlab.models.spec import GridResize
from vitlab.options.evaluation_options import Preprocessing
from vitlab.options.option import Device, DryRun, Opt, Quiet, StrPath, TrustPickle, numbers, opt, size

_STATED, _SURGERY = "What the file does not say", "Surgery"


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What is stated about a file of weights, whatever is done with it."""

    preprocess: Preprocessing = None
    drop: Sequence[str] = opt((), "Leave out these arrays, pre_logits or head; repeatable.", "NAME")
    part: str | None = opt(None, "Which model of a torch file that holds several: model_ema.", "NAME", panel=_STATED)
    heads: int | None = opt(None, "Attention heads, where no array shows.", "N", panel=_STATED)
    gelu: Literal["tanh", "exact"] | None = opt(None, "tanh or exact, where no config shows.", "KIND", panel=_STATED)
    norm_eps: float | None = opt(None, "Epsilon of the layer norms, where no config shows.", "E", panel=_STATED)
    grid: Sequence[int] | None = opt(
        None, "Rows and columns of the positions, where they are not square.", "H,W", parse=numbers, panel=_STATED
    )
    trust_pickle: TrustPickle = False
    quiet: Quiet = False


@dataclass(frozen=True)
class LoadOptions(Stated):
    path: Annotated[StrPath, Opt("A bundle, a run, a file of weights, a transformers folder, or a published name.")]
    _: KW_ONLY
    image_size: int | Sequence[int] | None = opt(
        None, "Carry the positions to another grid, and prepare images of that size."
    )
    adapter: StrPath | None = opt(None, "What a LoRA run has added to these weights: its folder, or that run.")
    device: Device = "auto"


@dataclass(frozen=True)
class ConvertOptions(Stated):
    source: Annotated[StrPath, Opt("A weights file, a transformers folder, a bundle, a run, or a name.", "IN")]
    out: Annotated[StrPath, Opt("A new file or folder.", "OUT")]
    _: KW_ONLY
    to: Literal["vitlab", "google-npz", "big-vision", "timm", "hf", "torchvision", "dinov2"] = opt(
        "vitlab", "vitlab, google-npz, big-vision, timm, hf, torchvision, dinov2.", "FORMAT"
    )
    average_with: Sequence[StrPath] = opt((), "Take the mean with this checkpoint; repeatable.", "PATH")
    classes: int | None = opt(None, "A new head of zeros.", "K", panel=_SURGERY)
    labels: Sequence[str] = opt((), "Keep only these classes of the head; repeatable.", "NAME", panel=_SURGERY)
    image_size: int | Sequence[int] | None = opt(
        None, "Carry the positions to another grid.", "H[,W]", parse=size, panel=_SURGERY
    )
    pos_resize: GridResize | None = opt(
        None,
        "corner-bilinear (the paper's), bilinear, bicubic, bicubic-antialias or bicubic-offset (DINOv2's); "
        "default: the model's own.",
        "HOW",
        panel=_SURGERY,
    )
    patch_size: int | None = opt(None, "Resize the patch kernel, as FlexiViT.", "P", panel=_SURGERY)
    channels: int | None = opt(None, "Another number of input channels.", "C", panel=_SURGERY)
    cls_in_pos: bool | None = opt(None, "Split the class token's position off, or fold it in.", panel=_SURGERY)
    dry_run: DryRun = False
