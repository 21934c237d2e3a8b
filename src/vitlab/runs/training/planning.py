"""`vitlab plan`: what a run will need and take, before it starts.

Three kinds of numbers, kept apart: counted (parameters, compute; exact), estimated (memory, hours; by formula: `memory.py`)
and measured (images per second and memory here, in a few real steps on noise).
"""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.core.runtime import prepare, unchanged
from vitlab.data.loader import Batch
from vitlab.data.preprocess import normalise
from vitlab.models.build import build
from vitlab.models.cost import count_macs, count_params, training_exaflops
from vitlab.models.names import format_name
from vitlab.models.spec import Pair
from vitlab.runs.recipe import Recipe, read_recipe, recipe_from_dict, with_changes
from vitlab.runs.recipe_book import resolved, written_length
from vitlab.runs.training.memory import MemoryEstimate, estimate_memory, free_memory
from vitlab.training.averaging import start_average
from vitlab.training.loop import StepRule, TrainState, fit
from vitlab.training.objective import losses
from vitlab.training.optim import make_optimizer

_GB = 2**30
_WARM_UP, _TIMED = 3, 5  # steps; the first ones choose kernels and fill caches
_PATIENCE = 10.0  # seconds that the timed steps may take together; the batch is chosen for that
_LARGEST_TIMED = 1024  # images; more make no GPU faster
_DEFAULT_LR = 1e-3  # any: steps on noise take as long with every rate
_SECONDS = 3600
_IMAGE_SIZE, _CLASSES, _BATCH_SIZE = 224, 1000, 256  # of a model that is planned without a recipe: ImageNet's


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What `vitlab plan --json` prints. Fields that begin with `measured_` are None where nothing was run."""

    recipe: str
    model: str
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
    micro_batch: int  # images per forward pass that fit, at most the batch
    memory_gb: dict[str, float]  # estimated, for that micro-batch
    measured_batch: int | None
    measured_memory_gb: float | None  # on a CPU, growth of the process
    measured_images_per_second: float | None
    estimated_memory_gb: float | None  # for the measured batch, to compare
    gpus: int
    hours: float | None  # estimated from the measured speed, `gpus` times as fast
    cost: float | None
    paper_hours: float | None  # estimated for `chips` of a stated speed
    paper_cost: float | None
    notes: tuple[str, ...]

    def lines(self) -> list[tuple[str, str]]:
        """For people: a label and a sentence each, which says whether it was counted, estimated or measured."""
        rows, cols = self.image_size
        cost = f"{self.params:,} parameters, {_number(self.macs / 1e9)} G multiply-adds per {rows}x{cols} image"
        steps = f"{self.steps:,} steps of {self.batch_size:,} images, {self.images_seen:,} in all"
        room = f"{self.device_memory_gb:.1f} GB of {self.device}, {self.precision}"
        memory = ", ".join(f"{name} {size:.3g}" for name, size in self.memory_gb.items() if size)
        said = [
            ("model", f"{self.model}: {cost}"),
            ("length", f"{self.length}: {steps}"),
            ("compute", f"{_number(self.exaflops)} exaFLOPs"),
            ("micro-batch", f"{self.micro_batch:,} images fit into {room}"),
            ("memory", f"estimated, in GB: {memory}"),
        ]
        if self.measured_images_per_second is not None:
            speed = f"{self.measured_images_per_second:,.1f} images/s at {self.measured_batch:,} images a step"
            used = f"{self.measured_memory_gb:.3g} GB, where {self.estimated_memory_gb:.3g} were estimated"
            said.append(("speed", f"measured: {speed}; {used}"))
        if self.hours is not None:
            where = f"{self.gpus} x {self.device}" + ("" if self.cost is None else f", cost {self.cost:,.2f}")
            said.append(("time", f"estimated: {_duration(self.hours)} on {where}; reading images not counted"))
        if self.paper_hours is not None:
            price = "" if self.paper_cost is None else f", cost {self.paper_cost:,.2f}"
            said.append(("on paper", f"estimated: {_duration(self.paper_hours)} on the chips described{price}"))
        return [*said, *(("note", note) for note in self.notes)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # three digits, never a power of ten above them


def _duration(hours: float) -> str:
    """In the unit that people would say it in."""
    if hours >= 1:
        return f"{_number(hours)} hours"
    return f"{_number(hours * 60)} minutes" if hours * 60 >= 1 else f"{_number(hours * _SECONDS)} seconds"


def plan(
    recipe: str | None = None,
    *,
    model: str | None = None,
    image_size: int | Sequence[int] | None = None,
    classes: int | None = None,
    batch_size: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    images: int | None = None,
    overrides: Iterable[str] = (),
    device: str = "auto",
    threads: int | None = None,
    gpus: int = 1,
    price_per_hour: float | None = None,
    chips: int | None = None,
    chip_tflops: float | None = None,
    utilisation: float | None = None,
    measure: bool = True,
    quiet: bool = False,
) -> RunPlan:
    """Parameters, compute, memory, speed on this machine, hours and cost of a recipe, or of a model trained with AdamW.

    Measured speed leaves out reading the images. `gpus` of this kind are taken to be that many times as fast. `chips`,
    `chip_tflops` and `utilisation` describe a machine that is not here, and then nothing is measured.
    """
    _check(recipe, model, images, gpus, price_per_hour, (chips, chip_tflops, utilisation))
    own = {"image_size": image_size, "classes": classes, "batch_size": batch_size, "epochs": epochs, "steps": steps}
    _require_recipe_alone(recipe, own)
    measure = measure and chips is None  # a machine on paper is for what is too large to be tried here
    if price_per_hour is not None and not measure and chips is None:
        raise UsageError("a cost needs hours: leave --no-measure out, or describe the machine with --chips")
    if recipe is not None:
        table = with_changes(read_recipe(recipe), overrides)
        whole, known = resolved(table)
    else:
        table = _model_table(model or "", image_size, batch_size, epochs, steps)
        whole, known = recipe_from_dict(with_changes(table, overrides), _CLASSES if classes is None else classes), None
    total = _steps(whole, images or known)
    with unchanged():
        runtime = prepare(device, whole.seed, threads)
        world = World(0, 1, runtime.device)
        memory, free = estimate_memory(whole), free_memory(runtime.device)
        fits = min(whole.train.batch_size, memory.largest_micro_batch(free))
        if measure and fits:  # a large model on a CPU takes minutes
            said = (
                f"measuring a few steps of {format_name(whole.model)} on {runtime.device}; --no-measure leaves that out"
            )
            Console(quiet=quiet).say(said)
        probe = _probe(whole, fits, world) if measure else None
    fits = min(fits, probe.largest) if probe and probe.largest else fits
    seen = total * whole.train.batch_size
    exaflops = training_exaflops(whole.model, 1, seen)
    hours = None if probe is None else seen / (probe.speed * gpus) / _SECONDS
    on_paper = _paper_hours(exaflops, chips, chip_tflops, utilisation)
    return RunPlan(
        recipe=recipe or "",
        model=format_name(whole.model),
        image_size=whole.model.image_size,
        classes=whole.model.num_classes,
        params=count_params(whole.model),
        macs=count_macs(whole.model),
        length=written_length(whole),
        batch_size=whole.train.batch_size,
        steps=total,
        images_seen=seen,
        exaflops=exaflops,
        device=str(runtime.device),
        device_memory_gb=free / _GB,
        precision=whole.train.precision,
        micro_batch=fits,
        memory_gb=_in_gb(memory, fits, whole),
        measured_batch=None if probe is None else probe.batch,
        measured_memory_gb=None if probe is None else probe.memory / _GB,
        measured_images_per_second=None if probe is None else probe.speed,
        estimated_memory_gb=None if probe is None else memory.peak(probe.batch, accumulates=False) / _GB,
        gpus=gpus,
        hours=hours,
        cost=None if hours is None or price_per_hour is None else hours * gpus * price_per_hour,
        paper_hours=on_paper,
        paper_cost=None if on_paper is None or price_per_hour is None else on_paper * (chips or 0) * price_per_hour,
        notes=_notes(whole, fits, free),
    )


def _check(
    recipe: str | None,
    model: str | None,
    images: int | None,
    gpus: int,
    price: float | None,
    chips: tuple[int | None, float | None, float | None],
) -> None:
    if (recipe is None) == (model is None):
        raise UsageError("plan what? Give a recipe or a model, one of them", hint="See `vitlab recipes list`.")
    for name, number in (("--images", images), ("--gpus", gpus)):
        if number is not None and number < 1:
            raise UsageError(f"{name} must be at least 1, not {number}")
    if price is not None and not 0 <= price < math.inf:
        raise UsageError(f"--price-per-hour must not be negative, not {price}")
    given = [value for value in chips if value is not None]
    if given and gpus > 1:
        raise UsageError("--gpus counts devices like the one here, --chips others: leave one of them out")
    if given and (len(given) < len(chips) or not all(0 < value < math.inf for value in given) or given[-1] > 1):
        raise UsageError(
            "a machine on paper needs --chips, --chip-tflops and --utilisation, all positive, the last at most 1"
        )


def _require_recipe_alone(recipe: str | None, own: Mapping[str, object]) -> None:
    """An error where what describes a bare model stands beside a recipe, which would take no notice."""
    beside = [name for name, value in own.items() if value is not None]
    if recipe is not None and beside:
        raise UsageError(
            f"a recipe has its own {', '.join(beside)}",
            hint="Change it with --set, as in --set train.epochs=N, train.batch_size=N or data.image_size=[H,W].",
        )


def _model_table(
    model: str,
    image_size: int | Sequence[int] | None,
    batch_size: int | None,
    epochs: float | None,
    steps: int | None,
) -> dict[str, Any]:
    """A recipe for a bare model: what is not asked for stays at its default."""
    if epochs is None and steps is None:
        epochs = 1
    image_size = _IMAGE_SIZE if image_size is None else image_size
    batch_size = _BATCH_SIZE if batch_size is None else batch_size
    size = [image_size, image_size] if isinstance(image_size, int) else list(image_size)
    lengths = {"epochs": epochs, "steps": steps}
    return {
        "title": model,
        "data": {"source": "", "image_size": size},
        "model": {"name": model},
        "train": {"batch_size": batch_size, **{unit: value for unit, value in lengths.items() if value is not None}},
        "optim": {"lr": _DEFAULT_LR},
    }


def _steps(recipe: Recipe, images: int | None) -> int:
    if images is None and recipe.train.epochs is not None:
        raise UsageError("an epoch of how many images? Give --images, or --steps instead")
    return recipe.train.in_steps((images or 0) * recipe.data.repeats, recipe.train.batch_size)


def _paper_hours(
    exaflops: float, chips: int | None, chip_tflops: float | None, utilisation: float | None
) -> float | None:
    if chips is None or chip_tflops is None or utilisation is None:
        return None
    return exaflops * 1e18 / (chips * chip_tflops * 1e12 * utilisation) / _SECONDS


def _in_gb(memory: MemoryEstimate, micro_batch: int, recipe: Recipe) -> dict[str, float]:
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "average": memory.average,
        "activations": micro_batch * memory.per_image + memory.fixed,
        "peak": memory.peak(micro_batch, accumulates=micro_batch < recipe.train.batch_size),
    }
    return {name: size / _GB for name, size in parts.items()}


def _notes(recipe: Recipe, fits: int, free: int) -> tuple[str, ...]:
    notes: list[str] = []
    if fits < 1:
        notes.append(f"one image does not fit into the {free / _GB:.1f} GB that are free here: nothing was measured")
    elif fits < recipe.train.batch_size:
        notes.append(
            f"a batch of {recipe.train.batch_size} does not fit at once: it is cut into micro-batches of {fits}"
        )
    if recipe.train.recompute or recipe.train.compiled or recipe.optim.train != "full":
        notes.append("memory and speed are those of training everything, with no recomputing and no compiling")
    return tuple(notes)


# --- a few real steps -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Probe:
    speed: float  # images per second
    batch: int
    memory: int  # bytes at the peak
    largest: int  # micro-batch that was tried, or 0


def _probe(recipe: Recipe, fits: int, world: World) -> _Probe | None:
    """Trains on noise: one image first, to choose a batch that takes a few seconds, then the steps that count."""
    if fits < 1:
        return None
    on_gpu = world.device.type == "cuda"
    before = torch.cuda.memory_allocated(world.device) if on_gpu else _peak_memory(world.device)
    model = build(recipe.model, seed=recipe.seed).to(world.device)
    average = start_average(model) if recipe.train.average else None
    state = TrainState(model, model, make_optimizer(model, recipe.optim), average)
    one = min(_time_steps(state, recipe, 1, 2, world))
    if one > _PATIENCE:  # a large model on a CPU: more steps would say the same, minutes later
        return _Probe(1 / one, 1, _peak_memory(world.device) - before, 0)
    batch = min(fits, _LARGEST_TIMED, 2 ** max(0, int(math.log2(_PATIENCE / (_WARM_UP + _TIMED) / one))))
    tried = 0
    if on_gpu:
        tried = _largest_that_runs(state, recipe, fits, world)
        batch = min(_LARGEST_TIMED, tried)  # one image leaves a GPU idle, so its time tells nothing of a batch's
        torch.cuda.reset_peak_memory_stats(world.device)
    times = _time_steps(state, recipe, batch, _WARM_UP + _TIMED, world)[-_TIMED:]
    speed = batch * len(times) / sum(times)
    return _Probe(speed, batch, _peak_memory(world.device) - before, tried)


def _largest_that_runs(state: TrainState, recipe: Recipe, batch: int, world: World) -> int:
    """The formula's micro-batch, or half of it, and so on: whatever the GPU does take."""
    while True:
        with contextlib.suppress(torch.OutOfMemoryError):
            _time_steps(state, recipe, batch, 1, world)
            return batch
        state.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        if batch == 1:
            raise UsageError(f"{format_name(recipe.model)} does not fit on {world.device}, not even with one image")
        batch //= 2


def _time_steps(state: TrainState, recipe: Recipe, batch_size: int, count: int, world: World) -> list[float]:
    """Seconds of each of `count` real updates on noise, images made and prepared beforehand."""
    rule, classes = recipe.data.preprocess(), recipe.model.num_classes
    shape = (batch_size, recipe.model.in_channels, *recipe.model.image_size)
    rest = torch.arange(batch_size)
    batch = Batch(
        torch.randint(256, shape, dtype=torch.uint8),
        rest % classes,
        torch.ones(batch_size).bool(),
        rest,
        rest,
        rest,
        rest,
    )

    def on_device(batch: Batch, _step: int) -> tuple[Tensor, Tensor]:
        return normalise(rule, batch.images.to(world.device)), batch.targets.to(world.device)

    objective = dataclasses.replace(recipe.objective, class_weights="none", distillation=None)
    steps = StepRule(
        prepare=on_device,
        losses=lambda _images, logits, targets: losses(objective, logits, targets),
        lr_at=lambda _step: 0.0,  # takes as long as any other, and noise cannot lead training astray
        seed=recipe.seed,
        max_grad_norm=recipe.optim.max_grad_norm,
        precision=recipe.train.precision,
        average_decay=recipe.train.average,
    )
    times: list[float] = []
    started = time.perf_counter()
    for _ in fit(state, [batch] * count, steps, world):
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
    return times


def _peak_memory(device: torch.device) -> int:
    """Bytes at most so far: of tensors on a GPU, of the whole process on a CPU (0 where the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
