"""The options of `train`, `noisy-student`, `plan` and `demo`."""

from collections.abc import Mapping, Sequence
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


_NOISY = "Short forms of --set noisy_student"


@dataclass(frozen=True)
class NoisyStudentOptions(Machine):
    data: Annotated[
        StrPath | Any,
        Opt("The labelled images, as for `train`; default: what the recipe names.", metavar="DATA"),
    ] = None
    _: KW_ONLY
    unlabelled: Annotated[
        StrPath | Any,
        Opt(
            "The unlabelled images: a folder of photos, or any data set, whose labels are not used; default with "
            "--labelled: the rest of DATA.",
            metavar="SOURCE",
        ),
    ] = None
    out: Annotated[
        StrPath | None, Opt("A new folder; default runs/noisy-student-1, or the next free name.", metavar="DIR")
    ] = None
    recipe: Annotated[
        str | None, Opt("Of teacher and students; default: chosen from the labelled images.", metavar="NAME")
    ] = None
    teacher: Annotated[
        StrPath | None,
        Opt(
            "A run, bundle or file of weights with the classes of DATA; default: one is trained first.", metavar="MODEL"
        ),
    ] = None
    init: Annotated[
        StrPath | None, Opt("Start weights of teacher and students, as for `train`.", metavar="WEIGHTS")
    ] = None
    model: Annotated[str | None, Opt("The teacher's model, where it is trained.", metavar="NAME")] = None
    student: Annotated[
        Sequence[str],
        Opt("A student's model, once or once per generation; default: its teacher's.", metavar="NAME", panel=_NOISY),
    ] = ()
    generations: Annotated[int | None, Opt("Students, each the teacher of the next.", metavar="N", panel=_NOISY)] = None
    labelled: Annotated[
        int | None, Opt("Images of DATA that keep their labels, stratified.", metavar="N", panel=_NOISY)
    ] = None
    labelled_per_class: Annotated[int | None, Opt("The same, for each class.", metavar="N", panel=_NOISY)] = None
    threshold: Annotated[
        float | None, Opt("Least confidence of a pseudo-label; default 0.3.", metavar="P", panel=_NOISY)
    ] = None
    per_class: Annotated[
        int | None, Opt("Pseudo-labelled images of each class; default: the mean.", metavar="N", panel=_NOISY)
    ] = None
    hard: Annotated[bool, Opt("The likeliest class instead of all probabilities.", panel=_NOISY)] = False
    finish: Annotated[bool, Opt("Fine-tune the last student on larger, unaugmented images (FixRes).", panel=_NOISY)] = (
        False
    )
    columns: Columns = None
    overrides: Overrides = ()
    student_overrides: Annotated[
        Sequence[str] | Mapping[str, Any],
        Opt("Override one config key of the students alone; repeatable.", metavar="KEY=VALUE", flag="student-set"),
    ] = ()
    resume: Annotated[StrPath | None, Opt("Resume where a stopped one is.", metavar="DIR")] = None
    dry_run: DryRun = False


_NOISY_KEYS = ("generations", "labelled", "labelled_per_class", "threshold", "per_class")


def noisy_student_forms(options: NoisyStudentOptions) -> tuple[str, ...]:
    """`--generations 3` and its like, as the overrides that they stand for."""
    given = {f"noisy_student.{name}": getattr(options, name) for name in _NOISY_KEYS}
    # One way to say how many replaces the other, which a recipe may have.
    if (options.labelled is None) != (options.labelled_per_class is None):
        given |= {f"noisy_student.{name}": getattr(options, name) or 0 for name in ("labelled", "labelled_per_class")}
    given |= {f"data.columns.{name}": column for name, column in (options.columns or {}).items()}
    given |= {"noisy_student.students": list(options.student)} if options.student else {}
    given |= {"noisy_student.targets": "hard"} if options.hard else {}
    given |= {"noisy_student.finish": True} if options.finish else {}
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
