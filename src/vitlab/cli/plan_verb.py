"""`vitlab plan`."""

import dataclasses
from typing import Annotated

import typer

from vitlab.cli.options import Debug, Device, Json, Quiet, Set, Threads, echo, parse_size, print_json


def run(
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="See `vitlab recipes list`.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A model instead, trained with AdamW.")] = None,
    image_size: Annotated[str | None, typer.Option(metavar="H[,W]", help="Of that model; default 224.")] = None,
    classes: Annotated[int | None, typer.Option(metavar="K", help="Of that model; default 1000.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Of that model; default 256.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Length with that model; default 1.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length with that model, instead of epochs.")] = None,
    images: Annotated[int | None, typer.Option(metavar="N", help="Training images, where they are not known.")] = None,
    overrides: Set = None,
    device: Device = "auto",
    threads: Threads = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="As if N devices like this one shared the work evenly.")] = 1,
    price_per_hour: Annotated[float | None, typer.Option(metavar="P", help="Of one device, in any currency.")] = None,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Run a few real steps here.")] = True,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What a run needs and takes before it starts: size, compute, memory, images per second here, hours, cost."""
    from vitlab.runs.training.planning import plan

    found = plan(
        recipe,
        model=model,
        image_size=parse_size(image_size),
        classes=classes,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        images=images,
        overrides=overrides or [],
        device=device,
        threads=threads,
        gpus=gpus,
        price_per_hour=price_per_hour,
        measure=measure,
        quiet=quiet,
    )
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    for label, text in found.lines():
        echo(f"{label:<14} {text}")
