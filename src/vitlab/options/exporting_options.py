"""The options of `export`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from vitlab.options.evaluation_options import Model
from vitlab.options.option import DryRun, Force, Opt, Quiet, StrPath, Threads, size

_INPUT, _CHECK = "What goes in", "The check"

Target = Literal["onnx", "openvino", "torch-export"]
Precision = Literal["fp32", "fp16", "bf16", "int8"]


@dataclass(frozen=True)
class ExportOptions:
    model: Model
    out: Annotated[StrPath, Opt("A new file, or a new folder for openvino.", metavar="OUT")]
    _: KW_ONLY
    to: Annotated[Target, Opt("onnx, openvino or torch-export.", metavar="FORMAT")] = "onnx"
    precision: Annotated[Precision, Opt("fp32, fp16, bf16 or int8.", metavar="KIND")] = "fp32"
    calibration: Annotated[
        StrPath | None,
        Opt("Images that set the ranges of int8; default: of --check, those not compared on.", metavar="DATA"),
    ] = None
    opset: Annotated[int, Opt("Of ONNX, 18 to 23.", metavar="N")] = 20
    batch_size: Annotated[
        int | None, Opt("Images at a time, always as many; default: any number.", metavar="N", panel=_INPUT)
    ] = None
    image_size: Annotated[
        int | Sequence[int] | None,
        Opt("Carry the positions to another grid first.", metavar="H[,W]", parse=size, panel=_INPUT),
    ] = None
    dynamic_size: Annotated[
        bool, Opt("Images of any size that fits the patches: positions are resized in the graph.", panel=_INPUT)
    ] = False
    preprocess_inside: Annotated[
        bool, Opt("uint8 images [B, rows, columns, channels] of any size in, probabilities out.", panel=_INPUT)
    ] = False
    check: Annotated[
        StrPath | None,
        Opt("Images to compare on; default: held out from the run, else generated ones.", metavar="DATA", panel=_CHECK),
    ] = None
    check_images: Annotated[int, Opt("How many of them.", metavar="N", panel=_CHECK)] = 32
    limit: Annotated[
        float | None,
        Opt("The largest difference of a score to accept; default: by the precision.", metavar="X", panel=_CHECK),
    ] = None
    agreement: Annotated[
        float | None,
        Opt("The least share of equal first answers; default: by the precision.", metavar="SHARE", panel=_CHECK),
    ] = None
    force: Force = False
    dry_run: DryRun = False
    threads: Threads = None
    quiet: Quiet = False
