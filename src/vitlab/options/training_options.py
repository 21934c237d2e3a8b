"""The options of `train`, `noisy-student`, `plan` and `demo`."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from vitlab.core.config import override_texts
from vitlab.options.option import Columns, DryRun, Machine, Overrides, StrPath, Threads, opt, size

_SHORT = "Short forms of --set"

ImageSize = int | Sequence[int]


@dataclass(frozen=True)
class TrainOptions(Machine):
    data: StrPath | Any = opt(
        None, "A folder of class folders, a table, shards, or a name; default: what the recipe names.", "DATA"
    )
    _: KW_ONLY
    out: StrPath | None = opt(None, "A new folder; default runs/train-1, or the next free name.", "DIR")
    recipe: str | None = opt(None, "See `vitlab recipes list`; default: chosen from the data.", "NAME")
    init: StrPath | None = opt(
        None,
        "Start weights: a bundle, run, file or published name; auto, the default, takes good ones from the cache or "
        "downloads them; scratch takes none.",
        "WEIGHTS",
    )
    model: str | None = opt(None, "A model, such as ViT-S/16.", "NAME")
    epochs: float | None = opt(None, "Passes over the training images: train.epochs.", "N", panel=_SHORT)
    lr: float | None = opt(None, "Learning rate: optim.lr.", "RATE", panel=_SHORT)
    batch_size: int | None = opt(None, "Images of one update: train.batch_size.", "N", panel=_SHORT)
    image_size: ImageSize | None = opt(None, "Pixels: data.image_size.", "H[,W]", parse=size, panel=_SHORT)
    columns: Columns = None
    min_images: int | None = opt(
        None, "Leave out classes with fewer images; others too small to hold out are trained and not tested.", "N"
    )
    overrides: Overrides = ()
    seeds: int = opt(1, "Repeat with N seeds; gives mean and range.", "N")
    sweep: str | None = opt(None, "Try each value, choose on held-out training images, test once.", "KEY=V1,V2")
    resume: StrPath | None = opt(None, "Resume a stopped run, or all of a sweep or of seeds.", "RUN")
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
    data: StrPath | Any = opt(None, "The labelled images, as for `train`; default: what the recipe names.", "DATA")
    _: KW_ONLY
    unlabelled: StrPath | Any = opt(
        None,
        "The unlabelled images: a folder of photos, or any data set, whose labels are not used; default with "
        "--labelled: the rest of DATA.",
        "SOURCE",
    )
    out: StrPath | None = opt(None, "A new folder; default runs/noisy-student-1, or the next free name.", "DIR")
    recipe: str | None = opt(None, "Of teacher and students; default: chosen from the labelled images.", "NAME")
    teacher: StrPath | None = opt(
        None, "A run, bundle or file of weights with the classes of DATA; default: one is trained first.", "MODEL"
    )
    init: StrPath | None = opt(None, "Start weights of teacher and students, as for `train`.", "WEIGHTS")
    model: str | None = opt(None, "The teacher's model, where it is trained.", "NAME")
    student: Sequence[str] = opt(
        (), "A student's model, once or once per generation; default: its teacher's.", "NAME", panel=_NOISY
    )
    generations: int | None = opt(None, "Students, each the teacher of the next.", "N", panel=_NOISY)
    labelled: int | None = opt(None, "Images of DATA that keep their labels, stratified.", "N", panel=_NOISY)
    labelled_per_class: int | None = opt(None, "The same, for each class.", "N", panel=_NOISY)
    threshold: float | None = opt(None, "Least confidence of a pseudo-label; default 0.3.", "P", panel=_NOISY)
    per_class: int | None = opt(None, "Pseudo-labelled images of each class; default: the mean.", "N", panel=_NOISY)
    hard: bool = opt(False, "The likeliest class instead of all probabilities.", panel=_NOISY)
    finish: bool = opt(False, "Fine-tune the last student on larger, unaugmented images (FixRes).", panel=_NOISY)
    columns: Columns = None
    overrides: Overrides = ()
    student_overrides: Sequence[str] | Mapping[str, Any] = opt(
        (), "Override one config key of the students alone; repeatable.", "KEY=VALUE", flag="student-set"
    )
    resume: StrPath | None = opt(None, "Resume a stopped noisy-student run.", "DIR")
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
    data: StrPath | None = opt(None, "What to train on, as for `train`.", "DATA")
    _: KW_ONLY
    recipe: str | None = opt(None, "See `vitlab recipes list`.", "NAME")
    init: StrPath | None = opt(None, "With DATA: weights to start from.", "WEIGHTS")
    model: str | None = opt(None, "A model; without DATA, trained with AdamW.", "NAME")
    image_size: ImageSize | None = opt(None, "Of that model; default 224.", "H[,W]", parse=size)
    classes: int | None = opt(None, "Of that model; default 1000.", "K")
    batch_size: int | None = opt(None, "Of that model; default 256.", "N")
    epochs: float | None = opt(None, "Length with that model; default 1.", "N")
    steps: int | None = opt(None, "Length with that model, instead of epochs.", "N")
    images: int | None = opt(None, "Training images, where they are not known.", "N")
    overrides: Overrides = ()
    gpus: int = opt(1, "As if N devices like this one shared the work evenly.", "N")
    price_per_hour: float | None = opt(None, "Of one device, in any currency.", "P")
    measure: bool = opt(True, "Run a few real steps here.")


@dataclass(frozen=True)
class DemoOptions(Machine):
    out: StrPath | None = opt(None, "A new folder; default runs/demo, or the next free name.", "DIR", named=True)
    _: KW_ONLY
    overrides: Overrides = ()
    threads: Threads = 1
    dry_run: DryRun = False
