"""`vitlab inspect`: the paper's figures for a model, and what people ask for beyond them, with a viewer to hover over."""

import dataclasses
import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.errors import UsageError, require_choice
from vitlab.core.planned import counted, stop_if_dry_run
from vitlab.core.session import open_session, require_single_process
from vitlab.data.dataset import Dataset
from vitlab.data.parts import test_part, train_part
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.unlabelled import open_for_inference
from vitlab.engines.classifier import (
    Classifier,
    describe_model,
    hint_swapped_arguments,
    load,
    require_weights,
    stop_dry_run_before_download,
)
from vitlab.engines.inference import InferenceOptions
from vitlab.engines.inspecting import (
    Inspected,
    Photos,
    Request,
    choose_photos,
    inspect_photos,
    inspect_weights,
    measure_attention,
    require_request,
)
from vitlab.models.spec import Pair
from vitlab.options.inspection_options import FIGURES, OF_WEIGHTS, InspectOptions
from vitlab.options.option import LAST_BITS, command_of, takes
from vitlab.report.inspection_page import build_inspection_page
from vitlab.report.inspection_tables import to_arrays, to_numbers
from vitlab.report.page import render
from vitlab.runs.evaluation.parts import as_in_the_run, columns_of_run, data_of_run
from vitlab.runs.training.run_folder import next_free

NUMBERS, ARRAYS, PAGE = "inspection.json", "arrays.npz", "report.html"
Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class InspectResult:
    """`arrays` are those of the .npz, `figures` the pictures by the names of their files; all lie in `out` as well.

    Row t of whatever has a row for each token is `tokens[t]`, and the patches among them lie on `grid` in raster order.
    """

    model: str
    photos: tuple[str, ...]  # the images that are shown
    grid: Pair  # rows and columns of patches
    tokens: tuple[str, ...]  # cls, register0, ..., patch(0,0), ...
    numbers: Mapping[str, Any]
    arrays: Mapping[str, Array] = dataclasses.field(repr=False)
    figures: Mapping[str, bytes] = dataclasses.field(repr=False)
    out: Path
    report: Path
    seconds: float
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **found,
            "arrays": {name: list(array.shape) for name, array in self.arrays.items()},
            "figures": list(self.figures),
        }

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        shown = f"{len(self.photos)} photos" if len(self.photos) != 1 else "1 photo"
        first = f"{len(self.figures)} figures of {self.model}, {shown}, {self.seconds:.0f} s: {self.out}"
        return [first, *self._verdicts(), *self.notes, f"Report: {self.report}"]

    def _verdicts(self) -> list[str]:
        """Which of the saliency maps pass both checks."""
        judged: Mapping[str, Any] = self.numbers["model"].get("saliency", {})
        if not judged or any(each["beats_random_order"] is None for each in judged.values()):
            return []
        good = [name for name, each in judged.items() if each["beats_random_order"] and each["follows_weights"]]
        poor = [name for name in judged if name not in good]
        lines = [f"Saliency maps that pass both checks: {', '.join(good) or 'none'}"]
        return [*lines, f"Maps to read nothing into: {', '.join(poor)}"] if poor else lines


@takes(InspectOptions)
def inspect(options: InspectOptions) -> InspectResult:
    """Look inside a model: numbers, pictures and one page with a viewer, in a new folder.

    Figure 7 and 10 of the paper need no image: principal components of the patch embedding, position similarity. With images
    come attention distance (Figures 7 and 11), rollout (Figures 6 and 14) and the other saliency maps, each with deletion and
    insertion curves and a check against random weights, head maps, entropy, patch features in colour, nearest patches, token
    norms, the logit lens, and CKA between layers. With `compare`, a second model stands beside the first everywhere.
    Models without a sequence of tokens have those figures that make sense for them, and the result's notes say what is missing.
    """
    started = time.perf_counter()
    figures = _wanted(options)
    folder = fsio.require_free(next_free("inspect") if options.out is None else Path(options.out))
    inference = InferenceOptions(options.batch_size, options.workers)
    models = [options.model, *([] if options.compare is None else [options.compare])]
    with open_session(options.device, options.seed, options.threads, quiet=options.quiet, verbose=options.verbose) as (
        _,
        world,
        console,
    ):
        require_single_process(world, "a model is inspected")
        named = [options.images] if isinstance(options.images, str | Path) else list(options.images)
        with hint_swapped_arguments(models, named):
            dataset = _open(options, named, console)
            if dataset is None:
                _require_no_images(options)
            images = "none: only what the weights show" if dataset is None else counted(len(dataset))
            stop_dry_run_before_download(options.dry_run, models, {"images": images, "out": folder})
            loaded = [_load(options, model, world.device) for model in models]
        request = Request(
            figures=figures,
            named=options.figures is not None,
            components=options.components,
            label=options.label,
            layers=options.layers,
            heads=options.heads,
            query=options.query,
            depth=options.depth,
            add_identity=options.identity,
            seed=options.seed,
        )
        for classifier in loaded:
            require_request(classifier, request)
        stop_if_dry_run(
            options.dry_run,
            {
                **{name: describe_model(one) for name, one in zip(("model", "compare"), loaded, strict=False)},
                "images": images,
                "figures": ", ".join(figures),
                "out": folder,
            },
        )
        found = [inspect_weights(name, one, request) for name, one in zip(_short_names(models), loaded, strict=True)]
        photos = Photos((), ())
        if dataset is not None:
            photos = choose_photos(dataset, loaded[0], options.photos, console)
            measured = _spread(dataset, options.max_images, options.seed)
            found = [measure_attention(one, measured, inference, request, console) for one in found]
            found = [inspect_photos(one, photos, request, console) for one in found]
        console.say("drawing")
        return _store(options, request, found, photos, folder, started)


def _store(
    options: InspectOptions,
    request: Request,
    found: Sequence[Inspected],
    photos: Photos,
    folder: Path,
    started: float,
) -> InspectResult:
    command = command_of("inspect", options, LAST_BITS)
    arrays, numbers = to_arrays(found, photos), to_numbers(found, photos)
    page, figures = build_inspection_page(found, photos, request, command)
    seconds = round(time.perf_counter() - started, 2)
    with fsio.new_folder(folder) as new:
        new.write_json(NUMBERS, {**numbers, "command": command, "seconds": seconds})
        new.write(ARRAYS, _npz(arrays))
        for name, data in figures.items():
            new.write(name, data)
        new.write(PAGE, render(page))
    return InspectResult(
        model=found[0].name,
        photos=photos.names,
        grid=found[0].grid,
        tokens=found[0].tokens,
        numbers=numbers,
        arrays=arrays,
        figures=figures,
        out=folder,
        report=folder / PAGE,
        seconds=seconds,
        notes=tuple(dict.fromkeys(why for one in found for why in one.missing.values())),
    )


def _wanted(options: InspectOptions) -> tuple[str, ...]:
    """The figures to make, in the order of the page."""
    if options.figures is not None and not options.figures:
        raise UsageError("--figures names none", hint=f"There are: {', '.join(FIGURES)}.")
    for name in options.figures or ():
        require_choice("--figures", name, FIGURES)
    for name, value in (
        ("photos", options.photos),
        ("max-images", options.max_images),
        ("components", 1 if options.components is None else options.components),
    ):
        if value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}")
    return tuple(name for name in FIGURES if options.figures is None or name in options.figures)


def _require_no_images(options: InspectOptions) -> None:
    """Raise where figures were named that cannot be made of the weights alone."""
    of_images = [name for name in options.figures or () if name not in OF_WEIGHTS]
    if of_images:
        raise UsageError(f"--figures {','.join(of_images)} is made of images, and there are none", hint="Name some.")


def _open(options: InspectOptions, images: Sequence[str | Path], console: Console) -> Dataset | None:
    """The images that were named, or those that a run held out; None where there are none."""
    if images:
        opened = open_for_inference(images, options.columns, console)
    elif (data := data_of_run(options.model)) is not None:
        columns = options.columns or columns_of_run(options.model, data)
        opened = as_in_the_run(options.model, data, open_data(data, columns=columns, console=console))
    else:
        return None
    return opened.part(options.part or test_part(opened.parts) or train_part(opened.parts))


def _load(options: InspectOptions, model: str | Path, device: torch.device) -> Classifier:
    classifier = load(
        model, device=str(device), quiet=options.quiet, preprocess=options.preprocess, image_size=options.image_size
    )
    require_weights(classifier)
    return classifier


def _short_names(models: Sequence[str | Path]) -> list[str]:
    """The last part of each path, without its suffix; two that are alike are A and B."""
    names = [Path(model).name.removesuffix(".safetensors").removesuffix(".npz") or str(model) for model in models]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({letter})" for name, letter in zip(names, "AB", strict=False)]


def _spread(dataset: Dataset, count: int, seed: int) -> Dataset:
    """`count` images, evenly spread; those of another seed are others, as long as there are enough."""
    if len(dataset) <= count:
        return dataset
    chosen = torch.linspace(0, len(dataset) - 1, count).round().long()
    if sets := seed % (len(dataset) // count):  # of the images that seed 0 leaves, so many sets, each evenly spread
        left = torch.arange(len(dataset))[~torch.isin(torch.arange(len(dataset)), chosen)]
        chosen = left[sets - 1 :: max(1, len(dataset) // count - 1)][:count]
    return dataset.subset(chosen)


def _npz(arrays: Mapping[str, Array]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()
