"""`vitlab predict`: labels for any number of images, in batches; a bad file is reported and skipped."""

import csv
import dataclasses
import io
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.errors import UsageError, VitlabError
from vitlab.core.parquet import parquet_chunks, require_parquet
from vitlab.core.planned import counted, end_dry_run
from vitlab.core.session import open_session, require_single_process
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages
from vitlab.data.pixel_stats import InputWatch
from vitlab.data.sources.loose_images import open_loose
from vitlab.engines.classifier import (
    Classifier,
    Prediction,
    describe_model,
    end_dry_run_before_download,
    hint_swapped_arguments,
    load,
    rank_labels,
)
from vitlab.engines.inference import InferenceOptions, infer, inference_progress, unpadded_batches
from vitlab.options.evaluation_options import PredictOptions
from vitlab.options.option import takes

FORMATS = (".json", ".csv", ".parquet")
_SHOWN = 5  # bad files by name; `bad` has all


@dataclasses.dataclass(frozen=True)
class ImageAnswer:
    """The most probable labels of one image, best first."""

    path: str
    top: list[Prediction]


@dataclasses.dataclass(frozen=True)
class Predictions:
    """`rows` in the order in which the images were given; `bad` says why each of the others is not among them."""

    rows: list[ImageAnswer]
    bad: Mapping[str, str]  # the reason, by path
    seconds: float
    images_per_second: float
    out: Path | None = None  # the file of the answers, if there is one

    def stored(self) -> str:
        """For people who get the answers as a file."""
        skipped = f", {len(self.bad):,} skipped because they could not be read" if self.bad else ""
        return f"{len(self.rows):,} images in {self.out}, {self.images_per_second:.0f} img/s{skipped}"

    def to_json(self) -> list[dict[str, Any]]:
        return [{"path": row.path, "top": [_to_dict(answer) for answer in row.top]} for row in self.rows]

    def sentences(self) -> list[str]:
        """A table: path, then label and probability of each answer; a star where images can have several labels."""
        if not self.rows:
            return []
        width = max(len(row.path) for row in self.rows)
        labels = max(len(answer.label) for row in self.rows for answer in row.top)
        star = {True: "*", False: " ", None: ""}
        lines = [
            "  ".join(
                [
                    f"{row.path:<{width}}",
                    *(f"{answer.label:<{labels}} {answer.p:6.1%}{star[answer.has]}" for answer in row.top),
                ]
            )
            for row in self.rows
        ]
        return lines + ["* the image has this label, by the model's thresholds"] * _several(self.rows)


def _several(rows: Sequence[ImageAnswer]) -> bool:
    """Whether images can have several labels."""
    return any(answer.has is not None for row in rows for answer in row.top)


def _to_dict(answer: Prediction) -> dict[str, Any]:
    table = dataclasses.asdict(answer)
    return table if answer.has is not None else {name: value for name, value in table.items() if name != "has"}


@takes(PredictOptions)
def predict(options: PredictOptions) -> Predictions:
    """The `top` most probable labels of every image: files, folders and patterns, any number of them, in the order given.

    The same answers as `vitlab.load(model)(images)`, with the images decoded by `workers` processes beside the model. A file
    that cannot be read is reported and skipped; it is an error only where all are bad. Where the model has thresholds, each
    label says whether the image has it, and all that it has are there. With `out`, a new .json, .csv or .parquet, the answers
    are stored there too.
    """
    model, images = options.model, options.images
    if options.top < 1:
        raise UsageError(f"--top must be at least 1, not {options.top}")
    inference = InferenceOptions(options.batch_size, options.workers)
    path = None if options.out is None else _require_new(Path(options.out))
    with open_session(options.device, options.seed, options.threads, quiet=options.quiet, verbose=options.verbose) as (
        _,
        world,
        console,
    ):
        require_single_process(world, "names are given")
        named = [images] if isinstance(images, str | Path) else images
        with hint_swapped_arguments([model], named):
            dataset = open_loose(named)
            images_row = _look_at(dataset.keys) if options.dry_run else None
            end_dry_run_before_download(options.dry_run, [model], {"images": images_row, "out": path})
            classifier = load(model, device=str(world.device), quiet=options.quiet)
        if not classifier.labels:
            raise UsageError(f"{model} has no classes, so it cannot name anything", hint="Use `vitlab embed` instead.")
        end_dry_run(options.dry_run, {"model": describe_model(classifier), "images": images_row, "out": path})
        started = time.perf_counter()
        rows, bad = _predict(classifier, dataset, options.top, inference, console)
    seconds = time.perf_counter() - started
    if not rows:
        raise _none_readable(len(dataset), *next(iter(bad.items())))
    tell_bad(bad, console)
    found = Predictions(rows, bad, round(seconds, 3), round(len(rows) / seconds, 1), path)
    if path is not None:
        fsio.make_folder(path.parent)
        fsio.write_new_file(path, _encode(found, path.suffix.lower()))
    return found


def _predict(
    classifier: Classifier, dataset: Dataset, top: int, options: InferenceOptions, console: Console
) -> tuple[list[ImageAnswer], Mapping[str, str]]:
    bad = BadImages(most=len(dataset))
    rule, device = classifier.preprocess, classifier.device
    rows: list[ImageAnswer] = []
    done = 0
    with inference_progress(console, "predict", len(dataset), options) as advance:
        watch = InputWatch(classifier.bundle.pixels)
        batches = watch.watching(unpadded_batches(dataset, rule, options, device, bad), rule)
        for logits_BK, batch in infer(classifier.model, batches, rule, device):
            answers = rank_labels(classifier.bundle, logits_BK.cpu(), top)
            for i, valid, answer in zip(batch.ids.tolist(), batch.valid.tolist(), answers, strict=True):
                if valid:
                    rows.append(ImageAnswer(str(dataset.keys[i]), answer))
            done += len(answers)
            advance(done)
    if unlike := watch.sentence():
        console.say(f"warning: {unlike}")
    return rows, bad.found


def _look_at(paths: Sequence[str]) -> str:
    """For a dry run: how many files there are; an error where there is none."""
    missing = [path for path in paths if not Path(path).exists()]
    if len(missing) == len(paths):
        raise _none_readable(len(paths), missing[0], "does not exist")
    return counted(len(paths)) + (f", of which {len(missing):,} do not exist" if missing else "")


def _none_readable(count: int, first: str, why: str) -> VitlabError:
    if count == 1:
        return VitlabError(f"cannot read {first}: {why}")
    return VitlabError(f"none of the {count:,} images could be read, the first is {first}: {why}")


def tell_bad(bad: Mapping[str, str], console: Console) -> None:
    """Says which files were skipped, and why."""
    for name, why in list(bad.items())[:_SHOWN]:
        console.say(f"skipped {name}: {why}")
    if len(bad) > _SHOWN:
        console.say(f"skipped {len(bad) - _SHOWN:,} more")


# --- storing ----------------------------------------------------------------------------------------------------------


def _require_new(path: Path) -> Path:
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path} should end in {', '.join(FORMATS)}: that says how the answers are stored")
    if path.suffix.lower() == ".parquet":
        require_parquet()
    return fsio.require_free(path)


def _encode(found: Predictions, suffix: str) -> bytes:
    if suffix == ".json":
        return json.dumps(found.to_json(), indent=2).encode()
    table = [
        (row.path, rank, *_to_dict(answer).values())
        for row in found.rows
        for rank, answer in enumerate(row.top, start=1)
    ]
    names = ("path", "rank", "label", "index", "p", *(["has"] if _several(found.rows) else []))
    if suffix == ".parquet":
        return b"".join(parquet_chunks([dict(zip(names, map(list, zip(*table, strict=True)), strict=True))]))
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(names)
    rows.writerows(table)
    return text.getvalue().encode("utf-8", "surrogateescape")
