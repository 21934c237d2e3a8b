"""`vitlab convert`."""

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import Debug, Json, Quiet, parse_numbers, parse_size, show


def run(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A weights file, a transformers folder, a bundle, a run, or a name.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new file or folder.")],
    to: Annotated[str, typer.Option(help="vitlab, google-npz, big-vision, timm, hf, torchvision, dinov2.")] = "vitlab",
    drop: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Leave out these arrays, pre_logits or head; repeatable.")
    ] = None,
    part: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which model of a torch file that holds several: model_ema.")
    ] = None,
    average_with: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="Take the mean with this checkpoint; repeatable.")
    ] = None,
    preprocess: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="minus-one-to-one, imagenet, or a preprocess.json, in place of its own."),
    ] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", help="Attention heads, where no array tells.")] = None,
    gelu: Annotated[str | None, typer.Option(metavar="KIND", help="tanh or exact, where no config tells.")] = None,
    norm_eps: Annotated[
        float | None, typer.Option(metavar="E", help="Epsilon of the layer norms, where no config tells.")
    ] = None,
    grid: Annotated[
        str | None, typer.Option(metavar="H,W", help="Rows and columns of the positions, where they are not square.")
    ] = None,
    classes: Annotated[int | None, typer.Option(metavar="K", help="A new head of zeros.")] = None,
    labels: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Keep only these classes of the head; repeatable.")
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(metavar="H[,W]", help="Carry the positions to another grid.")
    ] = None,
    pos_resize: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="corner-bilinear (the paper's), bilinear, bicubic, bicubic-antialias or bicubic-offset (DINOv2's); "
            "default: the model's own.",
        ),
    ] = None,
    patch_size: Annotated[int | None, typer.Option(metavar="P", help="Resize the patch kernel, as FlexiViT.")] = None,
    channels: Annotated[int | None, typer.Option(metavar="C", help="Another number of input channels.")] = None,
    cls_in_pos: Annotated[
        bool | None,
        typer.Option("--cls-in-pos/--no-cls-in-pos", help="Split the class token's position off, or fold it in."),
    ] = None,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Let a torch file run code. Only for your own.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Weights from one format to another, lossless, with an account of every array."""
    from vitlab.runs.conversion import run_conversion
    from vitlab.weights.foreign import Reading
    from vitlab.weights.surgery import Changes

    how = Reading(
        drop=tuple(drop or ()),
        part=part,
        preprocess=preprocess,
        heads=heads,
        gelu=gelu,  # pyright: ignore[reportArgumentType]
        norm_eps=norm_eps,
        grid=parse_numbers(grid, "--grid") or None,
        trust_pickle=trust_pickle,
    )
    changes = Changes(
        classes=classes,
        labels=tuple(labels or ()),
        image_size=parse_size(image_size),
        pos_resize=pos_resize,  # pyright: ignore[reportArgumentType]
        patch_size=patch_size,
        channels=channels,
        cls_in_pos=cls_in_pos,
    )
    report = run_conversion(source, out, to, how, changes, average_with or [], quiet=quiet)  # pyright: ignore[reportArgumentType]
    show(report, report.sentences(), as_json=as_json)
