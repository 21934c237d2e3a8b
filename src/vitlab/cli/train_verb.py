"""`vitlab train`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import Debug, Device, DryRun, Json, PrintConfig, Quiet, Seed, Set, Threads, echo, print_json
from vitlab.core import config
from vitlab.core.launch import read_launch


def run(
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="A folder of class folders, a table, shards, or a name; default: what the recipe names.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; default runs/train-1, or the next free name.")] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="See `vitlab recipes list`; default: chosen from the data.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(metavar="WEIGHTS", help="A bundle, run, file or published name to start from.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A model, such as ViT-S/16.")] = None,
    overrides: Set = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Repeat with N seeds; gives mean and range.")] = 1,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="KEY=V1,V2", help="Try each value, choose on held-out training images, test once."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Resume a stopped run, or all of a sweep or of seeds.")
    ] = None,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = None,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Images in, a trained, tested and explained classifier out: bundle and report."""
    if dry_run or print_config:
        from vitlab.runs.training.resolve import TrainCall
        from vitlab.runs.training.training_run import dry_run as resolve_only
        from vitlab.training.recipe import recipe_to_dict

        job = resolve_only(
            TrainCall(
                data=data,
                out=out,
                recipe=recipe,
                init=init,
                model=model,
                overrides=tuple(overrides or ()),
                seeds=seeds,
                sweep=sweep,
                resume=resume,
                device=device,
                seed=seed,
            )
        )
        table = recipe_to_dict(job.recipe) if print_config else job.describe()
        if as_json:
            print_json(table)
        elif print_config:
            echo(config.dump_toml(table), end="")
        else:
            for name, value in table.items():
                for i, text in enumerate([value] if isinstance(value, str) else value):
                    echo(f"{'' if i else name:<10} {text}")
        return
    from vitlab.runs.training.training_run import train

    result = train(
        data,
        out=out,
        recipe=recipe,
        init=init,
        model=model,
        overrides=overrides or (),
        seeds=seeds,
        sweep=sweep,
        resume=resume,
        device=device,
        seed=seed,
        threads=threads,
        quiet=quiet,
    )
    if read_launch().rank:  # of several processes, the first speaks for all
        return
    print_json(dataclasses.asdict(result)) if as_json else [echo(line) for line in result.sentences()]
