"""The options of `export`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from vitlab.options.evaluation_options import Model
from vitlab.options.option import DryRun, Force, Opt, Quiet, StrPath, Threads, opt, size

_INPUT, _CHECK = "What goes in", "The check"

Target = Literal["onnx", "openvino", "torch-export"]
Precision = Literal["fp32", "fp16", "bf16", "int8"]


@dataclass(frozen=True)
class ExportOptions:
    model: Model
    out: Annotated[StrPath, Opt("A new file, or a new folder for openvino.", "OUT")]
    _: KW_ONLY
    to: Target = opt("onnx", "onnx, openvino or torch-export.", "FORMAT")
    precision: Precision = opt("fp32", "fp32, fp16, bf16 or int8.", "KIND")
    calibration: StrPath | None = opt(
        None, "Images that set the ranges of int8; default: of --check, those not compared on.", "DATA"
    )
    opset: int = opt(20, "Of ONNX, 18 to 23.", "N")
    batch_size: int | None = opt(None, "Images at a time, always as many; default: any number.", "N", panel=_INPUT)
    image_size: int | Sequence[int] | None = opt(
        None, "Carry the positions to another grid first.", "H[,W]", parse=size, panel=_INPUT
    )
    dynamic_size: bool = opt(
        False, "Images of any size that fits the patches: positions are resized in the graph.", panel=_INPUT
    )
    preprocess_inside: bool = opt(
        False, "uint8 images [B, rows, columns, channels] of any size in, probabilities out.", panel=_INPUT
    )
    check: StrPath | None = opt(
        None, "Images to compare on; default: held out from the run, else generated ones.", "DATA", panel=_CHECK
    )
    check_images: int = opt(32, "How many of them.", "N", panel=_CHECK)
    limit: float | None = opt(
        None, "The largest difference of a score to accept; default: depends on --precision.", "X", panel=_CHECK
    )
    agreement: float | None = opt(
        None, "The least share of equal first answers; default: depends on --precision.", "SHARE", panel=_CHECK
    )
    force: Force = False
    dry_run: DryRun = False
    threads: Threads = None
    quiet: Quiet = False
