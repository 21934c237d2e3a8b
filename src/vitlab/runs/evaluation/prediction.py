"""`vitlab predict`: labels for any number of images, in batches; a bad file is reported and skipped.

What was answered before an interruption is not computed again, and several processes share the work.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.environment import cache_folder
from vitlab.core.errors import UsageError
from vitlab.core.parquet import Column, parquet_chunks, require_parquet
from vitlab.core.planned import counted, stop_if_dry_run
from vitlab.core.session import open_session
from vitlab.core.signals import Stopped
from vitlab.data.dataset import Dataset, join_without_labels
from vitlab.data.pixel_stats import InputWatch
from vitlab.data.sources.loose_images import LooseReader
from vitlab.data.sources.unlabelled import open_for_inference
from vitlab.engines.classifier import (
    Classifier,
    Prediction,
    describe_model,
    hint_swapped_arguments,
    load,
    stop_dry_run_before_download,
)
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation.answer_rows import AnswerCode, ImageAnswer, StoredAnswers
from vitlab.evaluation.features import FeatureRule, feature_key
from vitlab.evaluation.row_store import RowWork, compute_rows, named_store, none_readable
from vitlab.options.evaluation_options import PredictOptions
from vitlab.options.option import takes
from vitlab.weights.hashing import hash_weights

RESUMES = "What is computed is kept: the same command resumes from there"
_SHOWN = 5  # bad files by name; `bad` has all


@dataclasses.dataclass(frozen=True)
class Predictions:
    """`rows` in the order in which the images were given; `bad` says why each of the others is not among them."""

    rows: Sequence[ImageAnswer]
    bad: Mapping[str, str]  # the reason, by path
    seconds: float
    images_per_second: float
    computed: int  # images that the model was run on; the others were in the cache
    out: Path | None = None  # the file of the answers, if there is one

    def stored(self) -> str:
        """For people who get the answers as a file."""
        skipped = f", {len(self.bad):,} skipped because they could not be read" if self.bad else ""
        kept = len(self.rows) + len(self.bad) - self.computed
        resumed = f", {kept:,} of them from the cache" if kept else ""
        return f"{len(self.rows):,} images in {self.out}, {self.images_per_second:.0f} img/s{resumed}{skipped}"

    def printed(self) -> list[str]:
        """What a shell shows: answers that are in a file are not printed too."""
        return self.sentences() if self.out is None else [self.stored()]

    def to_json(self) -> list[dict[str, Any]]:
        return [_row(row) for row in self.rows]

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


def _row(row: ImageAnswer) -> dict[str, Any]:
    return {"path": row.path, "top": [_to_dict(answer) for answer in row.top]}


def _to_dict(answer: Prediction) -> dict[str, Any]:
    table = dataclasses.asdict(answer)
    return table if answer.has is not None else {name: value for name, value in table.items() if name != "has"}


@takes(PredictOptions)
def predict(options: PredictOptions) -> Predictions:
    """The `top` most probable labels of every image, in order: of files, folders, patterns, shards, data sets and addresses.

    The same answers as `vitlab.load(model)(images)`, with the images decoded by `workers` processes beside the model. A file
    that cannot be read is reported and skipped; it is an error only where all are bad. Where the model has thresholds, each
    label says whether the image has it, and all that it has are there. With `out`, a new .json, .csv or .parquet, the answers
    are stored there too; until then they are kept in `cache` in chunks, so that the same call after an interruption resumes
    from there. Under torchrun or srun each process answers for its share, in a `cache` that all of them see, and the first
    writes the file: the same bytes, however many they are.
    """
    model, images = options.model, options.images
    if options.top < 1:
        raise UsageError(f"--top must be at least 1, not {options.top}")
    inference = InferenceOptions(options.batch_size, options.workers)
    path = None if options.out is None else require_new(Path(options.out), _FORMATS, "answers")
    with open_session(options.device, options.seed, options.threads, quiet=options.quiet, verbose=options.verbose) as (
        _,
        world,
        console,
    ):
        require_out(world, path)
        with hint_swapped_arguments([model], [images] if isinstance(images, str | Path) else images):
            dataset = _open(options, console)
            images_row = _look_at(dataset) if options.dry_run else None
            stop_dry_run_before_download(options.dry_run, [model], {"images": images_row, "out": path})
            quiet = options.quiet or not world.is_main
            classifier = load(model, device=str(world.device), quiet=quiet, trust_pickle=options.trust_pickle)
        if not classifier.labels:
            raise UsageError(f"{model} has no classes, so it cannot name anything", hint="Use `vitlab embed` instead.")
        stop_if_dry_run(options.dry_run, {"model": describe_model(classifier), "images": images_row, "out": path})
        cache = cache_folder() / "answers" if options.cache is None else Path(options.cache)
        watch = InputWatch(classifier.bundle.pixels)
        coded = AnswerCode(classifier.bundle, min(options.top, len(classifier.labels)))
        try:
            found = compute_rows(
                RowWork(classifier.model, classifier.preprocess, coded.rows, watch),
                dataset,
                inference,
                store=None if path is None else named_store(cache, _key(classifier, coded.top), dataset),
                world=world,
                console=console,
                label="predict",
            )
        except Stopped as stopped:
            stopped.advice = "" if path is None else RESUMES
            raise
        if unlike := watch.sentence():
            console.say(f"warning: {unlike}")
        answers = StoredAnswers(dataset.keys, found, coded)
        if path is not None:
            world.run_or_fail_everywhere(lambda: _write(path, answers) if world.is_main else None)
    tell_bad(found.bad, console)
    rows = list(answers) if path is None else answers
    speed = found.computed / found.seconds
    return Predictions(rows, found.bad, round(found.seconds, 3), round(speed, 1), found.computed, path)


def _open(options: PredictOptions, console: Console) -> Dataset:
    """All images, or those of one part, as one set."""
    opened = open_for_inference(options.images, options.columns, console, class_folders=options.part is not None)
    for note in opened.notes:
        console.say(note)
    if options.part is not None:
        return opened.part(options.part)
    parts = list(opened.parts.values())
    return parts[0] if len(parts) == 1 else join_without_labels(parts)


def require_out(world: World, path: Path | None) -> None:
    """An error where several processes would have nowhere to put what they found together."""
    if world.size > 1 and path is None:
        raise UsageError(f"{world.size} processes write one file, and none is named", hint="Give --out FILE.")


def _key(classifier: Classifier, top: int) -> dict[str, Any]:
    """What decides the answers for an image."""
    bundle = classifier.bundle
    key = feature_key(classifier.model, classifier.preprocess, FeatureRule(), classifier.device)
    scale = {"temperature": bundle.temperature, "thresholds": list(bundle.thresholds or ()), "top": top}
    return key | {"weights": hash_weights(classifier.model), "labels": list(bundle.labels), **scale}


def _look_at(dataset: Dataset) -> str:
    """For a dry run: how many images there are; of loose files, an error where none exists."""
    paths = dataset.keys
    missing = [path for path in paths if not Path(path).exists()] if isinstance(dataset.read, LooseReader) else []
    if missing and len(missing) == len(paths):
        raise none_readable(len(paths), missing[0], "does not exist")
    return counted(len(paths)) + (f", of which {len(missing):,} do not exist" if missing else "")


def tell_bad(bad: Mapping[str, str], console: Console) -> None:
    """Says which files were skipped, and why."""
    for name, why in list(bad.items())[:_SHOWN]:
        console.say(f"skipped {name}: {why}")
    if len(bad) > _SHOWN:
        console.say(f"skipped {len(bad) - _SHOWN:,} more")


# --- storing ----------------------------------------------------------------------------------------------------------


def require_new(path: Path, formats: Collection[str], what: str) -> Path:
    """The file for `what`; an error where its name does not say how that is stored, or it is there already."""
    if path.suffix.lower() not in formats:
        raise UsageError(f"{path} should end in {', '.join(formats)}: that says how the {what} are stored")
    if path.suffix.lower() == ".parquet":
        require_parquet()
    return fsio.require_free(path)


def _write(path: Path, answers: StoredAnswers) -> None:
    fsio.make_folder(path.parent)
    fsio.write_new_file(path, _FORMATS[path.suffix.lower()](answers))


def _json(answers: StoredAnswers) -> Iterator[bytes]:
    between = "[\n"
    for piece in answers.pieces():
        yield (between + ",\n".join(json.dumps(_row(row)) for row in piece)).encode()
        between = ",\n"
    yield b"\n]\n"


def _tables(answers: StoredAnswers) -> Iterator[dict[str, Column]]:
    """A row for each label of each image, some thousand images at a time."""
    for piece in answers.pieces():
        rows = [
            {"path": row.path, "rank": rank, **_to_dict(answer)}
            for row in piece
            for rank, answer in enumerate(row.top, start=1)
        ]
        yield {name: [row[name] for row in rows] for name in rows[0]}


def _csv(answers: StoredAnswers) -> Iterator[bytes]:
    for number, table in enumerate(_tables(answers)):
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        if not number:
            rows.writerow(table)
        rows.writerows(zip(*table.values(), strict=True))
        yield text.getvalue().encode("utf-8", "surrogateescape")


def _parquet(answers: StoredAnswers) -> Iterator[bytes]:
    return parquet_chunks(_tables(answers))


_FORMATS: Mapping[str, Callable[[StoredAnswers], Iterator[bytes]]] = {
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
