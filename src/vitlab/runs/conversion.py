"""`vitlab convert`: weights from one format to another, and surgery on the way."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from vitlab.core.console import Console
from vitlab.core.errors import UsageError, require_choice
from vitlab.engines.classifier import open_weights, tell_zero_head
from vitlab.models.spec import GridResize
from vitlab.weights.bundle import Bundle
from vitlab.weights.foreign import ConvertReport, Gelu, Reading
from vitlab.weights.rules import split_drop
from vitlab.weights.surgery import Changes, average, operate
from vitlab.weights.targets import TARGETS, Target, require_place, write_foreign


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: Target = "vitlab",
    drop: Sequence[str] = (),
    part: str | None = None,
    average_with: Sequence[str | Path] = (),
    preprocess: str | None = None,
    heads: int | None = None,
    gelu: Gelu | None = None,
    norm_eps: float | None = None,
    grid: Sequence[int] | None = None,
    classes: int | None = None,
    labels: Sequence[str] = (),
    image_size: int | Sequence[int] | None = None,
    pos_resize: GridResize | None = None,
    patch_size: int | None = None,
    channels: int | None = None,
    cls_in_pos: bool | None = None,
    quiet: bool = True,
) -> ConvertReport:
    """Convert `source`, whatever it is, to the new place `out` in the format `to`.

    Nothing is left out that `drop` does not name: arrays of the source, or `pre_logits` and `head` of the model. `part` picks
    one of several models in a torch file, `average_with` takes the mean with other checkpoints. `preprocess`, `heads`, `gelu`,
    `norm_eps` and `grid` (rows and columns of the positions) state what a file does not. The rest is surgery: `classes` makes a
    new head of zeros, `labels` keeps a part of the old one, `image_size` carries the positions to another grid (by
    `pos_resize`, else by the model's own rule), `patch_size` and `channels` change the first layer, and `cls_in_pos` folds the
    class token's position into the token or splits it off.
    """
    changes = Changes(
        classes=classes,
        labels=tuple(labels),
        image_size=image_size,
        pos_resize=pos_resize,
        patch_size=patch_size,
        channels=channels,
        cls_in_pos=cls_in_pos,
    )
    how = Reading(
        drop=tuple(drop), part=part, preprocess=preprocess, heads=heads, gelu=gelu, norm_eps=norm_eps, grid=grid
    )
    return run_conversion(source, out, to, how, changes, average_with, quiet=quiet)


def run_conversion(
    source: str | Path,
    out: str | Path,
    to: Target,
    how: Reading,
    changes: Changes,
    average_with: Sequence[str | Path] = (),
    *,
    quiet: bool = True,
) -> ConvertReport:
    """As `convert`, for the command line, which may trust a file to run code."""
    require_choice("to", to, TARGETS)
    require_place(Path(out), to)
    arrays, parts = split_drop(how.drop)
    changes, how = dataclasses.replace(changes, drop=parts), dataclasses.replace(how, drop=arrays)
    console = Console(quiet=quiet)
    bundle, read = open_weights(Path(source), how, console)
    shapes = {name: tensor.shape for name, tensor in bundle.model.state_dict().items()}
    if average_with:
        bundle = _averaged([bundle, *(open_weights(Path(path), how, console)[0] for path in average_with)])
    done = [f"mean of {1 + len(average_with)} checkpoints"] if average_with else []
    bundle, notes = operate(bundle, changes, Path(source).name, done)
    written = write_foreign(bundle, Path(out), to, console)
    new = bundle.model.state_dict()
    zeros = [] if changes.classes else tell_zero_head(bundle)
    return dataclasses.replace(
        written,
        source=read.source,
        matched=written.matched if read.source == "vitlab" else read.matched,
        unexpected=read.unexpected,
        reshaped=tuple(name for name in new if name in shapes and new[name].shape != shapes[name]),
        notes=(*notes, *read.notes, *zeros, *written.notes),
    )


def _averaged(bundles: Sequence[Bundle]) -> Bundle:
    first = bundles[0]
    if any(other.labels != first.labels or other.preprocess != first.preprocess for other in bundles):
        raise UsageError("the checkpoints have other labels or another preprocessing, so their mean has no meaning")
    return dataclasses.replace(first, model=average([bundle.model for bundle in bundles]))
