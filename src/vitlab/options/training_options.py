"""The options of `train`, `plan` and `demo`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

from vitlab.core.config import override_texts
from vitlab.options.option import Columns, DryRun, Machine, Opt, Overrides, StrPath, Threads, size

_SHORT = "Short forms of --set"

ImageSize = int | Sequence[int]


@dataclass(frozen=True)
class TrainOptions(Machine):
    data: Annotated[
        StrPath | Any,
        Opt("A folder of class folders, a table, shards, or a name; default: what the recipe names.", metavar="DATA"),
    ] = None
    _: KW_ONLY
    out: Annotated[StrPath | None, Opt("A new folder; default runs/train-1, or the next free name.", metavar="DIR")] = (
        None
    )
    recipe: Annotated[str | None, Opt("See `vitlab recipes list`; default: chosen from the data.", metavar="NAME")] = (
        None
    )
    init: Annotated[
        StrPath | None,
        Opt(
            "Start weights: a bundle, run, file or published name; auto, the default, takes good ones from the cache or "
            "downloads them; scratch takes none.",
            metavar="WEIGHTS",
        ),
    ] = None
    model: Annotated[str | None, Opt("A model, such as ViT-S/16.", metavar="NAME")] = None
    epochs: Annotated[
        float | None, Opt("Passes over the training images: train.epochs.", metavar="N", panel=_SHORT)
    ] = None
    lr: Annotated[float | None, Opt("Learning rate: optim.lr.", metavar="RATE", panel=_SHORT)] = None
    batch_size: Annotated[int | None, Opt("Images of one update: train.batch_size.", metavar="N", panel=_SHORT)] = None
    image_size: Annotated[
        ImageSize | None, Opt("Pixels: data.image_size.", metavar="H[,W]", parse=size, panel=_SHORT)
    ] = None
    columns: Columns = None
    min_images: Annotated[
        int | None,
        Opt(
            "Leave out classes with fewer images; others too small to hold out are trained and not tested.", metavar="N"
        ),
    ] = None
    overrides: Overrides = ()
    seeds: Annotated[int, Opt("Repeat with N seeds; gives mean and range.", metavar="N")] = 1
    sweep: Annotated[
        str | None, Opt("Try each value, choose on held-out training images, test once.", metavar="KEY=V1,V2")
    ] = None
    resume: Annotated[StrPath | None, Opt("Resume a stopped run, or all of a sweep or of seeds.", metavar="RUN")] = None
    dry_run: DryRun = False


_KEYS = {
    "epochs": "train.epochs",
    "lr": "optim.lr",
    "batch_size": "train.batch_size",
    "image_size": "data.image_size",
    "min_images": "data.min_images",
}


def short_forms(options: TrainOptions) -> tuple[str, ...]:
    """`--epochs 5` and its like, as the overrides that they stand for."""
    given = {key: getattr(options, name) for name, key in _KEYS.items()}
    given |= {f"data.columns.{name}": column for name, column in (options.columns or {}).items()}
    return override_texts({key: value for key, value in given.items() if value is not None})


@dataclass(frozen=True)
class PlanOptions(Machine):
    data: Annotated[StrPath | None, Opt("What to train on, as for `train`.", metavar="DATA")] = None
    _: KW_ONLY
    recipe: Annotated[str | None, Opt("See `vitlab recipes list`.", metavar="NAME")] = None
    init: Annotated[StrPath | None, Opt("With DATA: weights to start from.", metavar="WEIGHTS")] = None
    model: Annotated[str | None, Opt("A model; without DATA, trained with AdamW.", metavar="NAME")] = None
    image_size: Annotated[ImageSize | None, Opt("Of that model; default 224.", metavar="H[,W]", parse=size)] = None
    classes: Annotated[int | None, Opt("Of that model; default 1000.", metavar="K")] = None
    batch_size: Annotated[int | None, Opt("Of that model; default 256.", metavar="N")] = None
    epochs: Annotated[float | None, Opt("Length with that model; default 1.", metavar="N")] = None
    steps: Annotated[int | None, Opt("Length with that model, instead of epochs.", metavar="N")] = None
    images: Annotated[int | None, Opt("Training images, where they are not known.", metavar="N")] = None
    overrides: Overrides = ()
    gpus: Annotated[int, Opt("As if N devices like this one shared the work evenly.", metavar="N")] = 1
    price_per_hour: Annotated[float | None, Opt("Of one device, in any currency.", metavar="P")] = None
    measure: Annotated[bool, Opt("Run a few real steps here.")] = True


@dataclass(frozen=True)
class DemoOptions(Machine):
    out: Annotated[
        StrPath | None, Opt("A new folder; default runs/demo, or the next free name.", metavar="DIR", named=True)
    ] = None
    _: KW_ONLY
    overrides: Overrides = ()
    threads: Threads = 1
    dry_run: DryRun = False
