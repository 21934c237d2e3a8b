"""`vitlab convert`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import Debug, Json, Quiet, print_json


def run(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A weights file, a transformers folder, a bundle or a run.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new file or folder.")],
    to: Annotated[str, typer.Option(help="vitlab, google-npz, big-vision, timm, hf or torchvision.")] = "vitlab",
    drop: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Leave these arrays out; repeatable.")] = None,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Let a torch file run code. Only for your own.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Weights from one format to another, lossless, with an account of every array."""
    from vitlab.runs.conversion import convert

    report = convert(source, out, to=to, drop=drop or [], trust_pickle=trust_pickle)  # pyright: ignore[reportArgumentType]
    if as_json:
        print_json(dataclasses.asdict(report))
    elif not quiet:
        for line in report.sentences():
            typer.echo(line)
