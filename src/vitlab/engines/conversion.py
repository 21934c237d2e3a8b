"""`vitlab convert`: weights from one format to another, and surgery on the way."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from vitlab.core.console import Console
from vitlab.core.errors import UsageError, require_choice
from vitlab.core.planned import stop_if_dry_run
from vitlab.engines.classifier import open_weights, reading_of, stop_dry_run_before_download, tell_zero_head
from vitlab.models.names import format_name
from vitlab.options.option import command_of, takes
from vitlab.options.weights_options import ConvertOptions
from vitlab.weights.bundle import Bundle
from vitlab.weights.card import with_command
from vitlab.weights.foreign import ConvertReport
from vitlab.weights.surgery import Changes, average, operate
from vitlab.weights.targets import TARGETS, require_place, tell_target, write_foreign


@takes(ConvertOptions)
def convert(options: ConvertOptions) -> ConvertReport:
    """Convert `source`, whatever it is, to the new place `out` in the format `to`.

    Nothing is left out that `drop` does not name: arrays of the source, or `pre_logits` and `head` of the model. `classes`,
    `labels`, `image_size`, `patch_size`, `channels` and `cls_in_pos` are surgery: they change the model on the way.
    """
    require_choice("to", options.to, TARGETS)
    out, source, others = Path(options.out), Path(options.source), options.average_with
    require_place(out, options.to)
    how, dropped = reading_of(options)
    changes = Changes(
        drop=dropped,
        classes=options.classes,
        labels=tuple(options.labels),
        image_size=options.image_size,
        pos_resize=options.pos_resize,
        patch_size=options.patch_size,
        channels=options.channels,
        cls_in_pos=options.cls_in_pos,
    )
    console = Console(quiet=options.quiet)
    stop_dry_run_before_download(options.dry_run, [source, *others], {"to": options.to, "out": out})
    bundle, read = open_weights(source, how, console)
    shapes = {name: tensor.shape for name, tensor in bundle.model.state_dict().items()}
    if others:
        bundle = _averaged([bundle, *(open_weights(Path(path), how, console)[0] for path in others)])
    done = [f"mean of {1 + len(others)} checkpoints"] if others else []
    bundle, notes = operate(bundle, changes, source.name, done)
    if notes or read.source != "vitlab":  # else the card is the source's own, with the command that made it
        bundle = dataclasses.replace(bundle, card=with_command(bundle.card, command_of("convert", options)))
    stop_if_dry_run(
        options.dry_run,
        {
            "model": f"{format_name(bundle.model.spec)} in the format {read.source}, {read.matched:,} arrays",
            "changes": "; ".join(notes) or None,
            "notes": "; ".join(tell_target(bundle, options.to)) or None,
            "to": options.to,
            "out": out,
        },
    )
    written = write_foreign(bundle, out, options.to, console)
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
        raise UsageError("the checkpoints have other labels or another preprocessing, so they cannot be averaged")
    return dataclasses.replace(first, model=average([bundle.model for bundle in bundles]))
