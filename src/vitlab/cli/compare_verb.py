"""`vitlab compare`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import (
    BatchSize,
    Debug,
    Device,
    Force,
    Json,
    Part,
    Quiet,
    Seed,
    Threads,
    Workers,
    echo,
    print_json,
)
from vitlab.core.launch import read_launch


def run(
    a: Annotated[str, typer.Argument(metavar="A", help="A bundle, a run, a weights file or a published name.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help="As for `train`; default: the data of the run A.")
    ] = None,
    part: Part = None,
    out: Annotated[
        Path | None, typer.Option(help="A new folder for numbers, records, answers and report.html.")
    ] = None,
    label_map: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON: which of the models' labels are right for a class of the data."),
    ] = None,
    force: Force = False,
    batch_size: BatchSize = 64,
    workers: Workers = None,
    resamples: Annotated[int, typer.Option(metavar="N", help="Draws behind the 95 % interval.")] = 1000,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Two models on the same images: the difference, its interval, and whether chance could make it."""
    from vitlab.runs.evaluation.comparison import compare

    result = compare(
        a,
        b,
        data,
        part=part,
        out=out,
        label_map=label_map,
        force=force,
        batch_size=batch_size,
        workers=workers,
        resamples=resamples,
        device=device,
        seed=seed,
        threads=threads,
        quiet=quiet,
    )
    if read_launch().rank:  # of several processes, the first speaks for all
        return
    print_json(dataclasses.asdict(result)) if as_json else [echo(line) for line in result.sentences()]
