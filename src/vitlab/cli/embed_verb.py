"""`vitlab embed`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import (
    BatchSize,
    Debug,
    Device,
    Json,
    Quiet,
    Seed,
    Threads,
    Workers,
    echo,
    parse_numbers,
    print_json,
)


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A bundle, a run, a file of weights, or a name.")],
    data: Annotated[
        list[str],
        typer.Argument(metavar="DATA", help="A data set as for train, a folder of images, or files and patterns."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A new .parquet or .npz.")],
    part: Annotated[str | None, typer.Option(metavar="NAME", help="Only train, val or test.")] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="I,J", help="Of these layers, concatenated; -1 is the last.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="cls, mean or patches; default: what the head sees.")] = None,
    batch_size: BatchSize = 64,
    workers: Workers = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where vectors are kept; default: vitlab's cache folder.")
    ] = None,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """One vector per image, with path and label, in a file. Goes on where it was stopped; computes nothing twice."""
    from vitlab.runs.evaluation.embedding import embed

    done = embed(
        model,
        data[0] if len(data) == 1 else data,
        out,
        part=part,
        layers=parse_numbers(layers, "--layers"),
        tokens=tokens,  # pyright: ignore[reportArgumentType]
        batch_size=batch_size,
        workers=workers,
        cache=cache,
        device=device,
        seed=seed,
        threads=threads,
        quiet=quiet,
    )
    print_json(dataclasses.asdict(done)) if as_json else [echo(line) for line in done.sentences()]
