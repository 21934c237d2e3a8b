"""`vitlab models list | info`. Nothing here imports torch."""

import dataclasses
from typing import Annotated, Any, cast

import typer

from vitlab.cli.options import Debug, Json, Verb, echo, print_json, read_by, show, terminal_width, two_columns
from vitlab.core.errors import UnknownName
from vitlab.engines.model_facts import WeightsInfo, model_info
from vitlab.models.cost import count_params
from vitlab.models.facts import ModelInfo
from vitlab.models.names import list_models
from vitlab.models.spec import spec_to_dict
from vitlab.options.option import size
from vitlab.weights.catalogue import Checkpoint, find, list_pretrained

app = typer.Typer(
    name="models",
    help="List models by the paper's names, and published checkpoints; their exact size and cost.",
    no_args_is_help=True,
)


@app.command("list", cls=Verb, epilog="Example: [bold]vitlab models list 'ViT-*'[/bold]")
def show_list(
    pattern: Annotated[str, typer.Argument(help="A shell pattern, such as 'ViT-*'.")] = "*",
    pretrained: Annotated[
        bool,
        typer.Option("--pretrained", help="Published checkpoints instead, by the names that load and convert take."),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The listed models with size and cost at their default image size. Other patch sizes work too: ViT-S/4, ViT-B/14."""
    if pretrained:
        _show_pretrained(pattern, as_json)
        return
    names = list_models(pattern)
    if not names:
        raise UnknownName("model pattern", pattern, list_models(), hint="`vitlab models list` lists all.")
    infos = [model_info(name) for name in names]
    if as_json:
        print_json([_as_json(info) for info in infos])
        return
    echo(f"{'model':<16}{'params':>13}{'GMACs':>10}{'tokens':>8}{'stride':>8}  image")
    for info in infos:
        tokens = "-" if info.tokens is None else info.tokens
        size = f"{info.image_size[0]}x{info.image_size[1]}"
        echo(f"{info.name:<16}{info.params:>13,}{info.macs / 1e9:>10.3f}{tokens:>8}{info.stride:>8}  {size}")


def _show_pretrained(pattern: str, as_json: bool) -> None:
    entries = [find(name) for name in list_pretrained(pattern)]
    if not entries:
        raise UnknownName("checkpoint pattern", pattern, list_pretrained(), hint="`vitlab models list` lists all.")
    if as_json:
        print_json([_checkpoint_as_json(entry) for entry in entries])
        return
    echo(f"{'checkpoint':<34}{'image':>8}{'classes':>9}{'top-1':>8}{'MB':>8}  here")
    for entry in entries:
        rows, cols = entry.preprocess["image_size"]
        top1 = "-" if entry.expected is None else f"{entry.expected.top1:.1f}"
        here = "yes" if entry.path.is_file() else "-"
        classes = entry.spec.num_classes or "-"
        echo(f"{entry.name:<34}{f'{rows}x{cols}':>8}{classes:>9}{top1:>8}{_megabytes(entry):>8}  {here}")


def _checkpoint_as_json(entry: Checkpoint) -> dict[str, Any]:
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry) if field.name != "stated"}
    expected = None if entry.expected is None else dataclasses.asdict(entry.expected)
    more = {"alias": entry.alias, "path": entry.path, "here": entry.path.is_file(), "megabytes": _megabytes(entry)}
    return {**fields, "spec": entry.stated, "expected": expected, **more}


def _megabytes(entry: Checkpoint) -> int:
    """As published, or else by the number of parameters in float32, which all of these files are."""
    published = entry.size or (entry.mib or 0) * 2**20
    return round((published or count_params(entry.spec) * 4) / 1e6)


@app.command("info", cls=Verb, epilog="Example: [bold]vitlab models info ViT-B/16 --image-size 384[/bold]")
def show_info(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="ViT-B/16, R50+ViT-B/16, BiT-R50x1, EfficientNet-B0, vit-b-16; or a bundle, a run, weights, ViT-S/14@dinov2.",
        ),
    ],
    image_size: Annotated[
        str | None, typer.Option(metavar="H[,W]", callback=read_by(size), help="Image size in pixels.")
    ] = None,
    classes: Annotated[int | None, typer.Option(metavar="K", help="Number of classes; 0 for no head.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Parameters, multiply-adds and tokens of one model, exact; of weights also preprocessing, labels, licence and format."""
    info = model_info(name, image_size=cast(Any, image_size), classes=classes)
    rows = [
        ("model", f"{info.name} (alias {info.alias})"),
        ("parameters", f"{info.params:,}"),
        ("multiply-adds", f"{info.macs / 1e9:,.3f} G per image ({info.flops / 1e9:,.3f} GFLOPs)"),
        ("image", f"{info.image_size[0]}x{info.image_size[1]}, {info.spec.in_channels} channels"),
        ("classes", f"{info.num_classes:,}"),
        ("true stride", f"{info.stride} pixels"),
    ]
    if info.grid and info.tokens:
        rows.append(("tokens", f"{info.tokens:,} ({info.grid[0]}x{info.grid[1]} patches)"))
    if isinstance(info, WeightsInfo):
        rows += _about_weights(info)
    show(_as_json(info), two_columns(rows, terminal_width()), as_json=as_json)


def _about_weights(info: WeightsInfo) -> list[tuple[str, str]]:
    rule = info.preprocess
    sizes = "x".join(map(str, rule["image_size"]))
    more = [f"{key} {rule[key]}" for key in ("resize", "crop_frac", "filter", "mean", "std") if key in rule]
    return [
        ("labels", f"{info.labels:,}"),
        ("preprocessing", ", ".join([sizes, *more])),
        ("format", info.format),
        ("from", info.source or "not known"),
        ("start weights", info.start or "not stated"),
        ("licence", info.licence or "not stated"),
    ]


def _as_json(info: ModelInfo) -> dict[str, Any]:
    fields = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    return {**fields, "spec": spec_to_dict(info.spec)}
