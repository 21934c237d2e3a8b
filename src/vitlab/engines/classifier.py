"""A model ready for use: weights, preprocessing and labels as one object that cannot be fed the wrong pixels.

clf = vitlab.load("runs/demo/transfer")
clf("photo.jpg")          # [Prediction(label='7', index=7, p=0.99), ...]
clf(torch.rand(3, 32, 32))    # uint8, or float from 0 to 1; a batch [B, C, Y, X] gives a list for each
"""

import contextlib
import copy
import dataclasses
import typing
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitlab.core.command import command_line
from vitlab.core.console import Console
from vitlab.core.download import shown
from vitlab.core.errors import FileProblem, UsageError, VitlabError, nearest_names, require_choice
from vitlab.core.planned import stop_if_dry_run
from vitlab.core.reading import load_json
from vitlab.core.runtime import pick_device
from vitlab.data.decode import ImageInput, decode, read
from vitlab.data.preprocess import Preprocess, normalise, seen_region
from vitlab.data.sources.folders import SUFFIXES, is_run
from vitlab.engines.exported import ExportedModel, holds_export, no_weights, read_exported
from vitlab.engines.inference import ModelFunction, infer, loose_batches
from vitlab.inspection.meanings import Meaning, meanings_of
from vitlab.inspection.overlays import Look, framed_with_legend, overlay, whole_zoom
from vitlab.inspection.saliency import METHODS, Method, Target, methods_of, saliency
from vitlab.inspection.scales import Scale, measured
from vitlab.models.model import Model
from vitlab.models.names import format_name
from vitlab.options.option import command_of, takes
from vitlab.options.weights_options import ConvertOptions, LoadOptions, Stated
from vitlab.weights import conventions
from vitlab.weights.adapter import ABOUT, adapted, read_adapter
from vitlab.weights.bundle import (
    PREPROCESS,
    WEIGHTS,
    Bundle,
    read_bundle,
    require_consistent,
    save_bundle,
    tell_nonfinite,
)
from vitlab.weights.card import with_command
from vitlab.weights.catalogue import find, is_name, list_pretrained
from vitlab.weights.foreign import WEIGHT_FILES, WEIGHT_SUFFIXES, ConvertReport, Reading, read_foreign
from vitlab.weights.published import read_published
from vitlab.weights.rules import PARTS, split_drop
from vitlab.weights.surgery import Changes, operate

_NOISY_STUDENT = "noisy_student.json"  # what a folder with the runs of all generations is known by
_BATCHED = 4  # dimensions of a batch of images
CUT_OFF = "What lies outside of the white line was cut off before the model saw the photo."


@dataclasses.dataclass(frozen=True)
class Prediction:
    """`has` says whether the image has this label, by the bundle's thresholds; None where every image has just one."""

    label: str
    index: int  # of the label in `clf.labels`
    p: float  # probability, after the bundle's temperature
    has: bool | None = None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """An answer with a saliency map, on the patch grid and drawn over the whole photo."""

    top: list[Prediction]  # best first
    heat_YX: Tensor  # on the grid of patches, the strongest at 1
    overlay: Image.Image  # that heat over the photo, as large as the photo; tiny images are enlarged in whole pixels
    scale: Scale  # what its colours stand for
    caption: str  # what the map is, and what it is not

    def figure(self) -> Image.Image:
        """The overlay with its colour bar below it."""
        return framed_with_legend(self.overlay, self.scale)


class Classifier:
    """Call it with an image or a list of images. It batches, and runs on the best device present.

    An image is a path, bytes, a PIL image, or a uint8 array [rows, columns] or [rows, columns, 1 or 3]. Its parts are
    `clf.model`, an `nn.Module` in float32, `clf.preprocess`, `clf.labels` and `clf.device`.
    """

    def __init__(self, bundle: Bundle, device: str = "auto") -> None:
        self.bundle = bundle
        self.device = pick_device(device)
        # What computes does so in float32; the bundle keeps the precision it was stored in, to be saved in it again.
        stored = {parameter.dtype for parameter in bundle.model.parameters()}
        model = copy.deepcopy(bundle.model) if stored - {torch.float32} else bundle.model
        self.model = model.to(self.device, torch.float32).eval()
        self.preprocess = bundle.preprocess
        self.labels = bundle.labels

    def __repr__(self) -> str:
        rows, cols = self.preprocess.image_size
        return f"Classifier({format_name(self.model.spec)}, {rows}x{cols}, {len(self.labels)} labels, on {self.device})"

    @overload
    def __call__(self, images: ImageInput, top: int = 5) -> list[Prediction]: ...
    @overload
    def __call__(self, images: Sequence[ImageInput], top: int = 5) -> list[list[Prediction]]: ...
    def __call__(
        self, images: ImageInput | Sequence[ImageInput], top: int = 5
    ) -> list[Prediction] | list[list[Prediction]]:
        """The `top` most probable labels, best first: one list for one image, a list of lists for several.

        Where images can have several labels, those that an image has are all in its list, also beyond `top`.
        """
        if not isinstance(top, int) or top < 1:
            raise UsageError(f"top must be a whole number of at least 1, not {top!r}")
        if not self.labels:
            raise UsageError("this model has no classes, so it cannot name anything", hint="Use embed(...) instead.")
        ranked = rank_labels(self.bundle, self.logits(images), top)
        return ranked if _are_several(images) else ranked[0]

    def pixels(self, images: ImageInput | Sequence[ImageInput]) -> Tensor:
        """The tensor that the model sees, [B, C, Y, X] on `clf.device`: decoded, resized, cropped and normalised."""
        pixels_BCYX = torch.stack([read(image, self.preprocess) for image in _as_list(images)])
        return normalise(self.preprocess, pixels_BCYX.to(self.device))

    @torch.inference_mode()
    def logits(self, images: ImageInput | Sequence[ImageInput]) -> Tensor:
        """Raw scores [B, K] on the CPU, before the bundle's temperature."""
        return self._run(images, self.model)

    @torch.inference_mode()
    def embed(self, images: ImageInput | Sequence[ImageInput]) -> Tensor:
        """One vector per image, [B, D]: what the head sees. A folder means its images in name order."""
        if isinstance(images, str | Path):
            images = list_images(Path(images))
        return self._run(images, self.model.represent)

    @torch.inference_mode()
    def explain(
        self, image: ImageInput, method: Method | None = None, *, label: str | None = None, grid: bool = False
    ) -> Explanation:
        """The answer with a saliency map, over the photo at its own size; what was cut off before the model saw it fades.

        Args:
            image: A path, bytes, a PIL image, an array or a tensor.
            method: attention, rollout, gradient-rollout, grad-cam or integrated-gradients; default rollout. The first two are
                the same for every class. Models without a sequence of tokens have the last two; default grad-cam.
            label: Which class the others are about; default: the likeliest.
            grid: Whether the borders of the patches are drawn.
        """
        require_weights(self)
        rule = self.preprocess
        found = salient(self, normalise(rule, read(image, rule)[None]).to(self.device), method, label)
        photo_CYX = decode(image, rule.mode, rule.bits)
        rows, cols = photo_CYX.shape[1:]
        region = seen_region(rule, rows, cols)
        cut_off = round(region.rows) < rows or round(region.cols) < cols
        values_YX, scale = measured(found.heat_YX, found.meaning.unit)
        seen, look, zoom = region if cut_off else None, Look(grid=grid), whole_zoom(rows, cols)
        picture = overlay(photo_CYX, values_YX, scale, region=seen, look=look, zoom=zoom)
        caption = found.meaning.caption_for(found.label) + (f" {CUT_OFF}" if cut_off else "")
        return Explanation(found.top, found.strongest_at_1(), picture, scale, caption)

    def save(self, path: str | Path) -> None:
        """Writes the bundle to a new folder."""
        require_weights(self)
        save_bundle(Path(path), self.bundle)

    def _run(self, images: ImageInput | Sequence[ImageInput], function: ModelFunction) -> Tensor:
        """`function` over the prepared images, in batches, results on the CPU."""
        batches = loose_batches(_as_list(images), self.preprocess)
        return torch.cat([output.cpu() for output, _ in infer(function, batches, self.preprocess, self.device)])


def save(
    model: nn.Module,
    out: str | Path,
    *,
    labels: Sequence[str] = (),
    preprocess: str | Preprocess = "minus-one-to-one",
    card: str = "",
) -> None:
    """Write a model of `create_model`, trained by you, to the new folder `out` as a bundle, which `load` reads.

    Args:
        model: What `create_model` or `load(...).model` gave; also inside DistributedDataParallel or torch.compile.
        out: A new folder.
        labels: Names of the classes, in the order of the outputs; default: their numbers.
        preprocess: How its images were prepared: minus-one-to-one, imagenet, a preprocess.json, or `load(...).preprocess`.
        card: What people should know about the model, in Markdown.
    """
    # Those of torch.compile, outside and inside of DistributedDataParallel.
    for wrapper in ("_orig_mod", "module", "_orig_mod"):
        model = getattr(model, wrapper, model)
    if not isinstance(model, Model):
        raise UsageError(f"save takes a model of vitlab's, not {type(model).__name__}", hint="See vitlab.create_model.")
    names = tuple(labels) or tuple(map(str, range(model.spec.num_classes)))
    rule = conventions.named(preprocess, model.spec) if isinstance(preprocess, str) else preprocess
    save_bundle(Path(out), Bundle(model, rule, names, card or f"# {format_name(model.spec)}\n", {}))


@dataclasses.dataclass(frozen=True)
class Salient:
    """What a saliency method finds in one image, and what it means."""

    top: list[Prediction]  # best first; none without labels
    method: Method
    label: str | None  # the class that the question was about; None for a model without classes
    heat_YX: Tensor  # in units of the method
    meaning: Meaning

    def strongest_at_1(self) -> Tensor:
        return self.heat_YX / self.heat_YX.max().clamp(min=1e-30)


@torch.inference_mode()
def salient(clf: Classifier, x_BCYX: Tensor, method: Method | None, label: str | None) -> Salient:
    """One image, prepared and normalised, asked by a method: what `explain` draws."""
    spec = clf.model.spec
    method = method or ("rollout" if spec.has_attention_maps else "grad-cam")
    require_choice("method", method, METHODS)
    if method not in methods_of(spec):
        raise UsageError(
            f"{method} needs attention from token to token, which {format_name(spec)} does not have",
            hint=f"Use method={' or '.join(map(repr, methods_of(spec)))}.",
        )
    if label is not None and label not in clf.labels:
        near = ", ".join(nearest_names(label, clf.labels))
        raise UsageError(f"this model has no class '{label}'", hint=f"Nearest: {near}." if near else None)
    logits_BK = clf.model(x_BCYX).float().cpu() if clf.labels else None
    top = [] if logits_BK is None else rank_labels(clf.bundle, logits_BK, 5)[0]
    index = clf.labels.index(label) if label is not None else top[0].index if top else None
    target = Target.own(clf.model, x_BCYX) if index is None else Target.classes([index])
    heat_YX = saliency(clf.model, x_BCYX, method, target)[0].cpu()
    meaning = meanings_of(has_tokens=spec.has_attention_maps)[method]
    return Salient(top, method, None if index is None else clf.labels[index], heat_YX, meaning)


def _as_list(images: ImageInput | Sequence[ImageInput]) -> list[ImageInput]:
    several = list(images) if _are_several(images) else [typing.cast(ImageInput, images)]
    if not several:
        raise UsageError("no images were given")
    return several


def _are_several(images: ImageInput | Sequence[ImageInput]) -> TypeGuard[Sequence[ImageInput]]:
    """Whether these are images, or one: a tensor [B, C, Y, X] and an array [B, rows, columns, channels] are several."""
    if isinstance(images, Tensor | np.ndarray):
        return images.ndim == _BATCHED
    return isinstance(images, Sequence) and not isinstance(images, str | bytes)


def rank_labels(bundle: Bundle, logits_BK: Tensor, top: int) -> list[list[Prediction]]:
    """The `top` most probable labels of each row of scores, best first; all that an image has, where it can have several."""
    # Logits rank even where probabilities have all become 0; a stable sort puts the lower index first among equals.
    index_BK = logits_BK.sort(dim=1, descending=True, stable=True).indices
    if not bundle.thresholds:
        index_BK = index_BK[:, :top]
        p_BK = (logits_BK / bundle.temperature).softmax(dim=1).gather(1, index_BK)
        return [
            [Prediction(bundle.labels[i], i, p) for p, i in zip(row_p, row_i, strict=True)]
            for row_p, row_i in zip(p_BK.tolist(), index_BK.tolist(), strict=True)
        ]
    p_BK = (logits_BK / bundle.temperature).sigmoid()
    has_BK = logits_BK.double() > torch.tensor(bundle.thresholds, dtype=torch.float64)
    return [
        [
            Prediction(bundle.labels[i], i, row_p[i], row_has[i])
            for rank, i in enumerate(row_i)
            if rank < top or row_has[i]
        ]
        for row_i, row_p, row_has in zip(index_BK.tolist(), p_BK.tolist(), has_BK.tolist(), strict=True)
    ]


@takes(LoadOptions)
def load(options: LoadOptions) -> Classifier:
    """The classifier in a bundle or run folder, or in the weights of Google, timm, transformers, torchvision or DINOv2.

    A name of a published checkpoint, such as `ViT-B/16@augreg-i21k`, is downloaded once and kept in the cache folder.
    What had to be assumed about foreign weights is reported on standard error, unless `quiet`.
    """
    path, console, adapter = Path(options.path), Console(quiet=options.quiet), options.adapter
    if adapter is not None and options.preprocess is not None:
        raise UsageError("an adapter has its own preprocessing; leave preprocess out")
    if holds_export(path):
        return _load_exported(path, options)
    addition = None if adapter is None else read_adapter(Path(adapter))
    how, dropped = reading_of(options)
    bundle, report = open_weights(path, how, console)
    notes = list(report.notes) if report.source == "vitlab" else report.sentences()
    if addition is not None:
        bundle = adapted(bundle, addition, str(path))
        notes += tell_nonfinite(addition.tensors)
    bundle, done = operate(bundle, Changes(drop=dropped, image_size=options.image_size), path.name)
    if done or (report.source != "vitlab" and addition is None):  # else the card says already how it was made
        bundle = dataclasses.replace(bundle, card=with_command(bundle.card, _how_loaded(options)))
    for line in (*notes, *done, *tell_zero_head(bundle)):
        console.say(line)
    return Classifier(bundle, options.device)


def _how_loaded(options: LoadOptions) -> str:
    """The command that writes the model as it is loaded; the call in Python, where no command says it."""
    if options.adapter is not None or isinstance(options.preprocess, Preprocess):
        stated = {"adapter": options.adapter, "image_size": options.image_size, "drop": options.drop or None}
        words = [repr(str(options.path)), *(f"{name}={value!r}" for name, value in stated.items() if value is not None)]
        return f"vitlab.load({', '.join(words)}{'' if options.preprocess is None else ', preprocess=...'})"
    stated = {field.name: getattr(options, field.name) for field in dataclasses.fields(Stated)}
    return command_of("convert", ConvertOptions(options.path, "OUT", image_size=options.image_size, **stated))


def _load_exported(path: Path, options: LoadOptions) -> Classifier:
    """An exported file describes itself, and cannot be changed any more."""
    given = {
        "adapter": options.adapter,
        "image_size": options.image_size,
        "preprocess": options.preprocess,
        "drop": options.drop or None,
        "part": options.part,
    }
    if named := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"{path} is an exported file, and exported files cannot be modified; leave {named[0]} out")
    return Classifier(read_exported(path, trust_pickle=options.trust_pickle), options.device)


def reading_of(options: Stated) -> tuple[Reading, tuple[str, ...]]:
    """What is stated about a file, and which parts of the model, rather than arrays of the file, are to be dropped."""
    arrays, parts = split_drop([options.drop] if isinstance(options.drop, str) else options.drop)
    stated: dict[str, Any] = {field.name: getattr(options, field.name) for field in dataclasses.fields(Reading)}
    stated["drop"] = arrays
    return Reading(**stated), parts


def tell_zero_head(bundle: Bundle) -> list[str]:
    """A warning where every class would get the same score."""
    head = bundle.model.state_dict().get("head.weight")  # none in an exported file, which was looked at before
    if head is None or head.any():
        return []
    return ["The head is all zeros: this checkpoint is for fine-tuning, not for predicting."]


def open_weights(path: Path, how: Reading, console: Console | None = None) -> tuple[Bundle, ConvertReport]:
    """A bundle from wherever it lies, with the account of its arrays."""
    try:
        return _open(path, how, console)
    except OSError as error:  # a folder that may not be searched
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from error


def holds_weights(path: Path) -> bool:
    """Whether it looks like a model: by names alone, nothing is read."""
    if not path.exists():
        return is_name(path.as_posix())
    if path.is_file():
        return path.suffix in WEIGHT_SUFFIXES or holds_export(path)
    try:
        inside = any(entry.suffix in WEIGHT_SUFFIXES for entry in path.iterdir())
    except OSError:  # a folder that may not be searched is not known to hold none
        return True
    return inside or holds_export(path) or (path / "bundle" / PREPROCESS).is_file() or (path / PREPROCESS).is_file()


def require_weights(classifier: Classifier) -> None:
    """An error for an exported file, where more is needed than its answers."""
    if isinstance(classifier.model, ExportedModel):
        raise no_weights(classifier.model.path)


def describe_model(classifier: Classifier) -> str:
    """For the rows of a dry run: what was opened."""
    rows, cols = classifier.preprocess.image_size
    return f"{format_name(classifier.model.spec)}, {rows}x{cols}, {len(classifier.labels):,} labels, on {classifier.device}"


def stop_dry_run_before_download(dry_run: bool, models: Sequence[str | Path], would: Mapping[str, object]) -> None:
    """In a dry run, fetch no weights: where some are not here, that is where it ends."""
    for model in models if dry_run else ():
        name = Path(model).as_posix()
        if not Path(model).exists() and is_name(name) and not (entry := find(name)).path.is_file():
            stop_if_dry_run(True, {"model": f"{entry.name}, to be downloaded from {shown(entry.address)}", **would})


@contextlib.contextmanager
def hint_swapped_arguments(models: Sequence[str | Path], others: Sequence[str | Path | None]) -> Generator[None]:
    """Turn errors inside into a wrong call where one of `models` holds no weights, and say which of `others` does."""
    try:
        yield
    except VitlabError as error:
        if all(holds_weights(Path(model)) for model in models):
            raise
        found = [other for other in others if other is not None and holds_weights(Path(other))]
        if found:
            raise UsageError(error.what, hint=f"The model comes first, and {found[0]} holds one.") from error
        if isinstance(error, FileProblem):
            raise UsageError(error.what, hint=error.hint) from error
        raise


def _open(path: Path, how: Reading, console: Console | None) -> tuple[Bundle, ConvertReport]:
    if not path.exists():
        return _open_name(path, how, console)
    if holds_export(path):
        raise no_weights(path)
    if (path / "transfer" / "bundle").is_dir():
        raise FileProblem(f"{path} is a demo of two runs", hint=f"Load {path / 'transfer'}.")
    if (path / _NOISY_STUDENT).is_file():
        run = _delivered(path)
        resume = command_line("noisy-student", options={"resume": path})
        hint = f"Load {path / run}." if run else f"None is finished: {resume}"
        raise FileProblem(f"{path} holds the runs of `vitlab noisy-student`, and is not one itself", hint=hint)
    for folder in bundle_folders(path):  # a bundle is known by its preprocess.json
        if folder.is_dir() and (folder / PREPROCESS).is_file():
            return _open_bundle(folder, how)
    if (path / ABOUT).is_file():
        base = read_adapter(path).base
        both = f"vitlab.load({base!r}, adapter={str(path)!r})"
        raise FileProblem(
            f"{path} is an adapter, which needs the weights it was trained on: {base}",
            hint=f"Load both in Python: {both}; save() of that writes a bundle, which can be converted.",
        )
    if path.is_dir() and not any((path / name).is_file() for name in WEIGHT_FILES):
        path = _only_weights(path)
    return read_foreign(path, how)


def bundle_folders(path: Path) -> tuple[Path, ...]:
    """Where the bundle of a run may lie, or a bundle itself; whoever names the weights in one means it too."""
    return (path / "bundle", path, path.parent) if path.name == WEIGHTS else (path / "bundle", path)


def _delivered(folder: Path) -> str | None:
    """The run that a Noisy Student's record names as its result; before there is one, the last that is finished."""
    record = load_json(folder / _NOISY_STUDENT)
    if isinstance(record, dict) and isinstance(named := record.get("delivered"), str):
        return named
    generations = [path.parent.name for path in folder.glob("generation-*/bundle")]
    return max(generations, key=lambda name: (len(name), name), default=None)  # 10 comes after 9


def _open_name(path: Path, how: Reading, console: Console | None) -> tuple[Bundle, ConvertReport]:
    name = path.as_posix()
    if not is_name(name):
        known = list_pretrained(f"{name}@*")
        hint = f"Published weights of that name: {', '.join(known)}." if known else None
        if not known and not path.suffix and "/" not in name:  # meant as a name, perhaps
            near = ", ".join(nearest_names(name, list_pretrained()))
            hint = f"Nearest published weights: {near}. See `vitlab models list --pretrained`."
        raise FileProblem(f"{path} does not exist", hint=hint)
    if (entry := find(name)).shipped:
        return _open_bundle(entry.path.parent, how)
    if how.part is not None or how.preprocess is not None or how.stated:
        raise UsageError(f"{path} is a name: the catalogue has its preprocessing and its spec, and it holds one model")
    return read_published(name, drop=how.drop, console=console)


def _open_bundle(folder: Path, how: Reading) -> tuple[Bundle, ConvertReport]:
    """A bundle describes itself: what would be ignored is refused, and another preprocessing is reported."""
    if how.drop:
        raise UsageError(f"{folder} is a bundle: {' and '.join(PARTS)} can be left out, not '{how.drop[0]}'")
    if how.part is not None or how.stated:
        raise UsageError(f"{folder} is a bundle: it holds one model, and has its own spec")
    bundle = read_bundle(folder)
    spec, notes = bundle.model.spec, tell_nonfinite(bundle.model.state_dict())
    if isinstance(how.preprocess, str):
        rule = conventions.named(how.preprocess, spec)
        require_consistent(spec, rule, bundle.labels, f"{folder}, as {how.preprocess}")
        bundle = dataclasses.replace(bundle, preprocess=rule)
        notes.append(f"Its own preprocessing was replaced: {conventions.describe(rule)}")
    count = len(bundle.model.state_dict())
    return bundle, ConvertReport("vitlab", "vitlab", format_name(spec), count, (), (), (), tuple(notes))


def _only_weights(folder: Path) -> Path:
    found = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    if not found:
        runs = ", ".join(sorted(path.parents[1].name for path in folder.glob(f"*/bundle/{PREPROCESS}")))
        if not runs and is_run(folder):
            resume = command_line("train", options={"resume": folder})
            raise FileProblem(f"{folder} is a run that is not finished", hint=f"Finish it with:  {resume}")
        hint = f"Give one of the runs in it: {runs}." if runs else None
        raise FileProblem(f"{folder} holds no bundle and no weights", hint=hint)
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise FileProblem(f"{folder} holds several files of weights: {names}", hint="Give one of them.")
    return found[0]


def list_images(folder: Path) -> list[Path]:
    """Image files below `folder`, in name order."""
    if not folder.is_dir():
        raise FileProblem(f"{folder} is not a folder of images")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found:
        raise FileProblem(f"{folder} holds no images", hint=f"Looked for: {', '.join(SUFFIXES)}.")
    return found
