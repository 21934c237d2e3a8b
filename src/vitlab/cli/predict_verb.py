"""`vitlab predict`."""

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import BatchSize, Debug, Device, Json, Quiet, Seed, Threads, Workers, echo, print_json


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A bundle, a run, a file of weights, or a name.")],
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGES", help="Files, folders and patterns such as 'photos/*.jpg'.")
    ],
    top: Annotated[int, typer.Option(metavar="K", help="How many labels for each image.")] = 5,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Store the answers in a new .json, .csv or .parquet.")
    ] = None,
    batch_size: BatchSize = 64,
    workers: Workers = None,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What is in these images. Bad files are reported and skipped; it fails only where all are bad."""
    from vitlab.runs.evaluation.prediction import predict

    found = predict(
        model,
        images,
        top=top,
        out=out,
        batch_size=batch_size,
        workers=workers,
        device=device,
        seed=seed,
        threads=threads,
        quiet=quiet,
    )
    if as_json:
        print_json(found.to_json())
    elif out is not None:
        echo(found.stored())
    else:
        for line in found.sentences():
            echo(line)
