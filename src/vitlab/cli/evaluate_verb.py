"""`vitlab evaluate`."""

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
    Set,
    Threads,
    Workers,
    echo,
    parse_numbers,
    print_json,
)
from vitlab.core.launch import read_launch


def run(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A bundle, a run, a weights file or a published name.")
    ] = None,
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help="As for `train`; default: the data of the run.")
    ] = None,
    part: Part = None,
    out: Annotated[Path | None, typer.Option(help="A new folder for numbers, records, tables and report.html.")] = None,
    label_map: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON: which of the model's labels are right for a class of the data."),
    ] = None,
    restrict: Annotated[
        bool, typer.Option("--restrict", help="Answers among the data's classes only, as if it knew no others.")
    ] = False,
    real: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ImageNet-ReaL's real.json: also count by its labels.")
    ] = None,
    fit_on: Annotated[
        str | None,
        typer.Option(metavar="PART", help="Where temperature and thresholds are fitted; default val, if not measured."),
    ] = None,
    save_temperature: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A new folder: the bundle with the fitted temperature, and thresholds."),
    ] = None,
    few_shot: Annotated[
        str | None, typer.Option(metavar="1,5,10,25", help="Linear classifiers from so many images of each class.")
    ] = None,
    knn: Annotated[bool, typer.Option("--knn", help="Vote of the 20 nearest training images.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="A linear head on frozen features.")] = False,
    layers: Annotated[
        str | None,
        typer.Option(metavar="I,J", help="For features: of these layers, concatenated; -1 is the last."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="For features: cls, mean or patches; default: what the head sees.")
    ] = None,
    vtab: Annotated[bool, typer.Option("--vtab", help="Fine-tune on the tasks of VTAB-1k that are here.")] = False,
    task: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Of VTAB, only this task; repeatable.")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="For VTAB: choose on its validation images; repeatable."),
    ] = None,
    overrides: Set = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="For VTAB: fine-tune to each task N times.")] = 1,
    download: Annotated[bool, typer.Option("--download", help="For VTAB: fetch what has an address.")] = False,
    as_published: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Settings and accuracy of this checkpoint: ViT-B/16@augreg-i21k-i1k-224."),
    ] = None,
    preprocess: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="minus-one-to-one, imagenet, or a preprocess.json, in place of its own."),
    ] = None,
    force: Force = False,
    batch_size: BatchSize = 64,
    workers: Workers = None,
    resamples: Annotated[int, typer.Option(metavar="N", help="Draws behind each 95 % interval.")] = 1000,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What a model is worth on labelled images: accuracy, classes, confusion, calibration, with intervals."""
    given = {name: value for name, value in locals().items() if name not in ("task", "as_json", "debug")}
    from vitlab.evaluation.result import to_json
    from vitlab.runs.evaluation.evaluation_run import evaluate

    given |= {"few_shot": parse_numbers(few_shot, "--few-shot"), "layers": parse_numbers(layers, "--layers")}
    given |= {"tasks": task or (), "sweep": sweep or (), "overrides": overrides or ()}
    result = evaluate(**given)  # every option has the name of its parameter
    if read_launch().rank:  # of several processes, the first speaks for all
        return
    print_json(to_json(result)) if as_json else [echo(line) for line in result.sentences()]
