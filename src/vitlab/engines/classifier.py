"""A model ready for use: weights, preprocessing and labels as one object that cannot be fed the wrong pixels.

clf = vitlab.load("runs/demo/transfer")
clf("photo.jpg")          # [Prediction(label='7', index=7, p=0.99), ...]
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import overload

import torch
from PIL import Image
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.runtime import pick_device
from vitlab.data.decode import ImageInput, read
from vitlab.data.preprocess import normalise
from vitlab.inspection.attention import rollout_heat, upsample_heat
from vitlab.inspection.overlays import overlay
from vitlab.models.names import format_name
from vitlab.models.vit import ViT
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle
from vitlab.weights.catalogue import is_name
from vitlab.weights.foreign import WEIGHT_FILES, ConvertReport, read_foreign
from vitlab.weights.published import read_published
from vitlab.weights.surgery import PARTS

_BATCH = 64
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


@dataclasses.dataclass(frozen=True)
class Prediction:
    label: str
    index: int
    p: float


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Where an answer comes from: attention rollout on the patch grid, and drawn over the image the model saw."""

    top: list[Prediction]
    heat_YX: Tensor
    overlay: Image.Image


class Classifier:
    """Call it with an image or a list of images. It batches, and runs on the best device present."""

    def __init__(self, bundle: Bundle, device: str = "auto") -> None:
        self.bundle = bundle
        self.device = pick_device(device)
        # Files keep the precision they were stored in; what computes does so in float32, also on half-precision weights.
        self.model = bundle.model.to(self.device, torch.float32).eval()
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
        """The `top` most probable labels, best first: one list for one image, a list of lists for several."""
        if not isinstance(top, int) or top < 1:
            raise UsageError(f"top must be a whole number of at least 1, not {top!r}")
        if not self.labels:
            raise UsageError("this model has no classes, so it cannot name anything", hint="Use embed(...) instead.")
        if isinstance(images, Sequence) and not isinstance(images, str | bytes):
            return self._rank(self.logits(images), top)
        return self._rank(self.logits([images]), top)[0]

    @torch.inference_mode()
    def logits(self, images: Sequence[ImageInput]) -> Tensor:
        """Raw scores [B, K] on the CPU."""
        return self._run(images, self.model)

    @torch.inference_mode()
    def embed(self, images: str | Path | Sequence[ImageInput]) -> Tensor:
        """One vector per image, [B, D]: what the head sees. A folder means its images in name order."""
        if isinstance(images, str | Path):
            images = list_images(Path(images))
        return self._run(images, self.model.represent)

    @torch.inference_mode()
    def explain(self, image: ImageInput) -> Explanation:
        """The answer with its attention-rollout overlay."""
        if not isinstance(self.model, ViT) or not self.model.spec.has_attention_maps:
            raise UsageError(f"attention rollout needs full attention, which {format_name(self.model.spec)} has not")
        seen_CYX = read(image, self.preprocess)
        x_BCYX = normalise(self.preprocess, seen_CYX[None]).to(self.device)
        heat_YX = rollout_heat(self.model, x_BCYX)[0].cpu()
        top = self._rank(self.model(x_BCYX).float().cpu(), 5)[0] if self.labels else []
        return Explanation(top, heat_YX, overlay(seen_CYX, upsample_heat(heat_YX[None], self.preprocess.image_size)[0]))

    def save(self, path: str | Path) -> None:
        """Writes the bundle to a new folder."""
        save_bundle(Path(path), self.bundle)

    def _run(self, images: Sequence[ImageInput], function: Callable[[Tensor], Tensor]) -> Tensor:
        """`function` over the prepared images, in batches, results on the CPU."""
        if not images:
            raise UsageError("no images were given")
        outputs: list[Tensor] = []
        for start in range(0, len(images), _BATCH):
            pixels_BCYX = torch.stack([read(image, self.preprocess) for image in images[start : start + _BATCH]])
            x_BCYX = normalise(self.preprocess, pixels_BCYX.to(self.device))
            outputs.append(function(x_BCYX).float().cpu())
        return torch.cat(outputs)

    def _rank(self, logits_BK: Tensor, top: int) -> list[list[Prediction]]:
        # Logits rank even where probabilities have all become 0; a stable sort puts the lower index first among equals.
        index_BK = logits_BK.sort(dim=1, descending=True, stable=True).indices[:, :top]
        p_BK = logits_BK.softmax(dim=1).gather(1, index_BK)
        return [
            [Prediction(self.labels[i], i, p) for p, i in zip(row_p, row_i, strict=True)]
            for row_p, row_i in zip(p_BK.tolist(), index_BK.tolist(), strict=True)
        ]


def load(
    path: str | Path,
    *,
    preprocess: str | None = None,
    part: str | None = None,
    device: str = "auto",
    quiet: bool = False,
) -> Classifier:
    """The classifier in a bundle or run folder, or in the weights of Google, timm, transformers, torchvision or DINOv2.

    A name of a published checkpoint, such as `ViT-B/16@augreg-i21k`, is downloaded once and kept in the cache folder.
    What had to be assumed about foreign weights is said on standard error, unless `quiet`; `preprocess` says it instead, as
    'minus-one-to-one', 'imagenet' or the path of a preprocess.json. `part` picks one of several models in a torch file.
    """
    console = Console(quiet=quiet)
    bundle, report = open_weights(Path(path), preprocess=preprocess, part=part, console=console)
    if report is not None:
        console.say("\n".join(report.sentences()))
    return Classifier(bundle, device)


def open_weights(
    path: Path,
    *,
    drop: Sequence[str] = (),
    trust_pickle: bool = False,
    part: str | None = None,
    preprocess: str | None = None,
    console: Console | None = None,
) -> tuple[Bundle, ConvertReport | None]:
    """A bundle from wherever it lies; foreign weights come with the account of their arrays."""
    if not path.exists() and is_name(path.as_posix()):
        if part is not None or preprocess is not None:
            raise UsageError(f"{path} is a name: the catalogue tells its preprocessing, and it holds one model")
        return read_published(path.as_posix(), drop=drop, console=console)
    if not path.exists():
        raise FileProblem(f"{path} does not exist")
    if (path / "transfer" / "bundle").is_dir():
        raise FileProblem(f"{path} is a demo of two runs", hint=f"Load {path / 'transfer'}.")
    for folder in (path / "bundle", path):
        if folder.is_dir() and (folder / "preprocess.json").is_file():
            _require_nothing_foreign(folder, drop, part, preprocess)
            return read_bundle(folder), None
    if path.is_dir() and not any((path / name).is_file() for name in WEIGHT_FILES):
        return read_bundle(path), None  # says what is missing
    return read_foreign(path, drop=drop, trust_pickle=trust_pickle, part=part, preprocess=preprocess)


def _require_nothing_foreign(folder: Path, drop: Sequence[str], part: str | None, preprocess: str | None) -> None:
    """A bundle tells everything itself: what would be ignored is refused."""
    if strange := [name for name in drop if name not in PARTS]:
        raise UsageError(f"{folder} is a bundle: {' and '.join(PARTS)} can be left out, not '{strange[0]}'")
    if part is not None or preprocess is not None:
        raise UsageError(f"{folder} is a bundle: it holds one model and brings its own preprocessing")


def list_images(folder: Path) -> list[Path]:
    """Image files below `folder`, in name order."""
    if not folder.is_dir():
        raise FileProblem(f"{folder} is not a folder of images")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES and path.is_file())
    if not found:
        raise FileProblem(f"{folder} holds no images", hint=f"Looked for: {', '.join(sorted(_SUFFIXES))}.")
    return found
