"""`vitlab plan`: what a run will need and take, before it starts.

Three kinds of numbers, kept apart: counted (parameters, compute; exact), estimated (memory and hours, by formula) and measured
(images per second and memory, on this machine).
"""

import dataclasses
import math
from typing import Any

from vitlab.core.config import override_texts
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.core.memory import free_memory
from vitlab.core.runtime import pick_device, prepare, restored_torch_globals
from vitlab.models.cost import count_macs, count_params
from vitlab.models.names import format_name
from vitlab.models.spec import Pair
from vitlab.options.option import takes
from vitlab.options.training_options import PlanOptions
from vitlab.runs.training.resolve import resolve
from vitlab.training.call import TrainCall
from vitlab.training.memory import MemoryEstimate, estimate_memory
from vitlab.training.microbatch import without_lone_image
from vitlab.training.recipe import Recipe, read_recipe, recipe_from_dict, with_changes
from vitlab.training.recipe_book import count_exaflops, resolved, written_length
from vitlab.training.trial import try_steps, why_untried

_GB = 2**30
_DEFAULT_LR = 1e-3  # any: steps on noise take as long with every rate
_SECONDS = 3600
_IMAGE_SIZE, _CLASSES, _BATCH_SIZE = 224, 1000, 256  # of a model that is planned without a recipe: ImageNet's


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What `vitlab plan --json` prints. Fields that begin with `measured_` are None where nothing was run."""

    recipe: str
    model: str
    start: str  # the start weights, or scratch
    image_size: Pair
    classes: int
    params: int
    macs: int  # of one image, forward
    length: str
    batch_size: int
    steps: int
    images_seen: int
    exaflops: float
    device: str
    device_memory_gb: float
    precision: str
    images_each: int  # of a batch, for each of `gpus`
    micro_batch: int  # of these, per forward pass, as many as fit
    memory_gb: dict[str, float]  # estimated, of each, for that micro-batch or for all its images at once
    measured_batch: int | None
    measured_memory_gb: float | None  # on a CPU, growth of the process
    measured_images_per_second: float | None
    estimated_memory_gb: float | None  # for the measured batch, to compare
    gpus: int
    hours: float | None  # estimated from the measured speed, `gpus` times as fast
    cost: float | None
    notes: tuple[str, ...]

    def lines(self) -> list[tuple[str, str]]:
        """For people: a label and a sentence each, which says whether it was counted, estimated or measured."""
        rows, cols = self.image_size
        cost = f"{self.params:,} parameters, {_number(self.macs / 1e9)} G multiply-adds per {rows}x{cols} image"
        steps = f"{self.steps:,} steps of {self.batch_size:,} images, {self.images_seen:,} in all"
        table = [
            ("model", f"{self.model}: {cost}"),
            ("start", self.start),
            ("length", f"{self.length}: {steps}"),
            ("compute", f"{_number(self.exaflops)} exaFLOPs"),
        ]
        if self.gpus > 1:
            table.append(("share", f"{self.images_each:,} images of a step for each of {self.gpus:,} processes"))
        room = f"{self.device_memory_gb:.1f} GB of {self.device}, {self.precision}"
        table.append(("micro-batch", f"{self.micro_batch:,} images fit into {room}"))
        memory = ", ".join(f"{name} {size:.3g}" for name, size in self.memory_gb.items() if size)
        table.append(("memory", f"estimated, in GB: {memory}"))
        if self.measured_images_per_second is not None:
            speed = f"{self.measured_images_per_second:,.1f} images/s at {self.measured_batch:,} images a step"
            used = f"{self.measured_memory_gb:.3g} GB, where {self.estimated_memory_gb:.3g} were estimated"
            table.append(("speed", f"measured: {speed}; {used}"))
        if self.hours is not None:
            where = f"{self.gpus} x {self.device}" + ("" if self.cost is None else f", cost {self.cost:,.2f}")
            table.append(("time", f"estimated: {_duration(self.hours)} on {where}; reading images not counted"))
        return [*table, *(("note", note) for note in self.notes)]

    def sentences(self) -> list[str]:
        """The lines as `vitlab plan` prints them."""
        return [f"{label:<14} {text}" for label, text in self.lines()]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # three digits, never a power of ten above them


def _duration(hours: float) -> str:
    """In the unit that people would say it in."""
    if hours >= 1:
        return f"{_number(hours)} hours"
    return f"{_number(hours * 60)} minutes" if hours * 60 >= 1 else f"{_number(hours * _SECONDS)} seconds"


@takes(PlanOptions)
def plan(options: PlanOptions) -> RunPlan:
    """Parameters, compute, memory, speed on this machine, hours and cost of a run: on `data`, of a recipe, or of a bare model.

    Measured speed leaves out reading the images. `gpus` of this kind are taken to be that many times as fast.
    """
    _check(options)
    gpus, measure = options.gpus, options.measure
    whole, known = _recipe(options)
    total = _steps(whole, options.images or known)
    if whole.train.batch_size % gpus:
        raise UsageError(f"train.batch_size {whole.train.batch_size} cannot be shared evenly by {gpus} processes")
    each = whole.train.batch_size // gpus
    with restored_torch_globals():
        runtime = prepare(options.device, whole.seed, options.threads)
        memory = estimate_memory(whole, gpus, runtime.device)
        room = free_memory(runtime.device)
        console = Console(quiet=options.quiet)
        trial = try_steps(whole, each, room, World(0, 1, runtime.device), console) if measure else None
    fits = memory.at_once(each, room)
    if fits and trial and trial.largest:
        fits = min(fits, trial.largest)
    if fits < each:
        fits = without_lone_image(whole, each, fits)
    at_once = min(each, whole.train.micro_batch or each, fits)
    seen = total * whole.train.batch_size
    hours = None if trial is None else seen / (trial.speed * gpus) / _SECONDS
    return RunPlan(
        recipe=options.recipe or "",
        model=format_name(whole.model),
        start=whole.init,
        image_size=whole.model.image_size,
        classes=whole.model.num_classes,
        params=count_params(whole.model),
        macs=count_macs(whole.model),
        length=written_length(whole),
        batch_size=whole.train.batch_size,
        steps=total,
        images_seen=seen,
        exaflops=count_exaflops(whole, seen),
        device=str(runtime.device),
        device_memory_gb=room / _GB,
        precision=whole.train.precision,
        images_each=each,
        micro_batch=at_once,
        memory_gb=_in_gb(memory, at_once, each),
        measured_batch=None if trial is None else trial.batch,
        measured_memory_gb=None if trial is None else trial.memory / _GB,
        measured_images_per_second=None if trial is None else trial.speed,
        estimated_memory_gb=None if trial is None else trial.estimated / _GB,
        gpus=gpus,
        hours=hours,
        cost=None if hours is None or options.price_per_hour is None else hours * gpus * options.price_per_hour,
        notes=_notes(whole, each, fits, gpus, untried=why_untried(whole, each, room) if measure else ""),
    )


def _check(options: PlanOptions) -> None:
    if options.data is None and (options.recipe is None) == (options.model is None):
        raise UsageError("plan what? Give data, a recipe or a model, one of them", hint="See `vitlab recipes list`.")
    if options.data is None and options.init is not None:
        raise UsageError("--init goes with data to train on")
    own = {name: getattr(options, name) for name in ("image_size", "classes", "batch_size", "epochs", "steps")}
    beside = [name for name, value in own.items() if value is not None]
    if beside and (options.recipe is not None or options.data is not None):
        raise UsageError(
            f"{'a recipe' if options.data is None else 'a run on data'} has its own {', '.join(beside)}",
            hint="Change it with --set, as in --set train.epochs=N, train.batch_size=N or data.image_size=[H,W].",
        )
    for name, number in (("--images", options.images), ("--gpus", options.gpus)):
        if number is not None and number < 1:
            raise UsageError(f"{name} must be at least 1, not {number}")
    price = options.price_per_hour
    if price is not None and not 0 <= price < math.inf:
        raise UsageError(f"--price-per-hour must not be negative, not {price}")
    if price is not None and not options.measure:
        raise UsageError("a cost needs hours: leave --no-measure out")


def _recipe(options: PlanOptions) -> tuple[Recipe, int | None]:
    """What would be trained, and on how many images where that is known."""
    changes = override_texts(options.overrides)
    if options.data is not None:
        call = TrainCall(
            options.data,
            recipe=options.recipe,
            init=options.init,
            model=options.model,
            overrides=options.overrides,
            dry_run=True,  # downloads no weights
        )
        job = resolve(call, World(0, 1, pick_device(options.device)), Console(quiet=True))
        return job.recipe, len(job.parts.learnt)
    if options.recipe is not None:
        return resolved(with_changes(read_recipe(options.recipe), changes))
    table = with_changes(_model_table(options), changes)
    return recipe_from_dict(table, _CLASSES if options.classes is None else options.classes), None


def _model_table(options: PlanOptions) -> dict[str, Any]:
    """A recipe for a bare model: what is not asked for stays at its default."""
    size = _IMAGE_SIZE if options.image_size is None else options.image_size
    lengths = {"epochs": options.epochs, "steps": options.steps}
    length = {unit: value for unit, value in lengths.items() if value is not None} or {"epochs": 1}
    batch_size = _BATCH_SIZE if options.batch_size is None else options.batch_size
    return {
        "title": options.model,
        "data": {"source": "", "image_size": [size, size] if isinstance(size, int) else list(size)},
        "model": {"name": options.model},
        "train": {"batch_size": batch_size, **length},
        "optim": {"lr": _DEFAULT_LR},
    }


def _steps(recipe: Recipe, images: int | None) -> int:
    if images is None and recipe.train.epochs is not None:
        raise UsageError("an epoch of how many images? Give --images, or --steps instead")
    return recipe.train.in_steps((images or 0) * recipe.data.repeats, recipe.train.batch_size)


def _in_gb(memory: MemoryEstimate, micro_batch: int, each: int) -> dict[str, float]:
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "ema": memory.ema,
        "activations": micro_batch * memory.per_image + memory.fixed,
        "traffic": memory.traffic,
        "undo": memory.undo,
        "peak": memory.peak(micro_batch, accumulates=micro_batch < each),
    }
    return {name: size / _GB for name, size in parts.items()}


def _notes(recipe: Recipe, each: int, fits: int, processes: int, *, untried: str) -> tuple[str, ...]:
    notes: list[str] = []
    train = recipe.train
    asked = train.micro_batch or each
    if fits == 0:
        notes.append("one image does not fit into that memory")
    elif fits < asked:
        whose = f"a batch of {each} does" if processes == 1 else f"the {each} images of a process do"
        if train.micro_batch:
            notes.append(f"train.micro_batch {train.micro_batch} does not fit: {fits} does")
        elif train.sharded and processes > 1:  # see `autotune_microbatch`
            notes.append(
                f"{whose} not fit at once, and a sharded run does not try what does: set train.micro_batch={fits}"
            )
        else:
            notes.append(f"{whose} not fit at once: micro-batches of {fits} do")
    if fits and untried:
        notes.append(f"nothing was measured: {untried}")
    if train.compiled or recipe.optim.train != "full":
        notes.append("memory is estimated for training everything, and speed measured with no compiling")
    return tuple(notes)
