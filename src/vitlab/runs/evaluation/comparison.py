"""`vitlab compare`: two models on the same images, with what chance makes of the difference; and the curves of two runs.

Letters: B images, K classes.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.core import config, fsio, reading
from vitlab.core.command import command_line
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.planned import counted, stop_if_dry_run
from vitlab.core.runtime import require_threads
from vitlab.core.session import Session, open_session
from vitlab.data.dataset import Opened
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import (
    Classifier,
    describe_model,
    hint_swapped_arguments,
    load,
    stop_dry_run_before_download,
)
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation.answers import OTHER, Answers, judge
from vitlab.evaluation.intervals import require_resamples
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.paired import Comparison, compare_answers
from vitlab.evaluation.records import (
    Record,
    Subject,
    hash_weights,
    new_record,
    pretraining_of,
    read_records,
    write_record,
)
from vitlab.evaluation.result import PAGE
from vitlab.evaluation.scoring import known_images, match_classes, require_answers, score_images
from vitlab.models.names import format_name
from vitlab.options.evaluation_options import CompareOptions
from vitlab.options.option import LAST_BITS, command_of, takes
from vitlab.report.charts import Point
from vitlab.report.comparison_page import build_comparison_page
from vitlab.report.curves_page import RunCurves, build_curves_page
from vitlab.report.evaluation_tables import both_answers_table
from vitlab.report.page import render
from vitlab.runs.evaluation.parts import EvalParts, as_in_the_run, choose_parts, columns_of_run, data_of_run, start_of
from vitlab.runs.evaluation.store import RECORDS
from vitlab.runs.training import run_folder
from vitlab.runs.training.live_run import primary_metric
from vitlab.training.checkpoint import PROGRESS

NUMBERS = "comparison.json"


@takes(CompareOptions)
def compare(options: CompareOptions) -> Comparison:
    """Two models (bundle, run, file or published name) on the images of `data`, or on those of A's run.

    Where a run has split this data itself, images that one of the two learnt from are left out. Each sees the images in its own
    preprocessing. Images that one of them cannot read are left out for both. With `out`, a new folder, numbers, records,
    answers and the page are stored there.
    """
    require_threads(options.threads)
    a, b = options.a, options.b
    inference = InferenceOptions(options.batch_size, options.workers)
    require_resamples(options.resamples)
    data = options.data or data_of_run(a)
    if data is None:
        raise UsageError("give the data to compare on: a folder, a table, shards, or a name")
    folder = None if options.out is None else fsio.require_free(Path(options.out))
    started = time.perf_counter()
    with open_session(
        options.device, options.seed, options.threads, quiet=options.quiet, verbose=options.verbose
    ) as session:
        with hint_swapped_arguments([a, b], [data]):
            columns = options.columns or columns_of_run(a, data) or columns_of_run(b, data)
            opened = open_data(data, columns=columns, console=session.console)
        chosen = _held_out_by_both(a, b, data, opened, options.part)
        if chosen.dataset.labels.multi:
            raise UsageError("images with several labels each have no single answer to compare")
        images = counted(len(chosen.dataset), len(chosen.dataset.classes))
        would: dict[str, object] = {"data": f"{data}, {chosen.part} part: {images}", "out": folder}
        stop_dry_run_before_download(options.dry_run, [a, b], would)
        work = _Work(options, chosen, str(data), inference, session)
        # Both are checked before the first is run, which takes its time.
        loaded = {label: _load(work, model, label) for label, model in (("A", a), ("B", b))}
        stop_if_dry_run(
            options.dry_run, {**{label: describe_model(found[0]) for label, found in loaded.items()}, **would}
        )
        first, second = _in_common(*(_answer(work, *found, label) for label, found in loaded.items()))
        classes = chosen.dataset.classes
        numbers = compare_answers(
            first.answers, second.answers, classes, resamples=options.resamples, seed=options.seed
        )
        names: dict[str, Any] = {
            "a": str(a),
            "b": str(b),
            "data": str(data),
            "part": chosen.part,
            "notes": list(chosen.notes),
        }
        result = Comparison(**numbers, **names, seconds=round(time.perf_counter() - started, 3))
        if folder is not None:
            result = _store(result, work, first, second, folder)
            if session.world.is_main:
                result = _with_curves(result, folder)
        session.world.barrier()
        return result


def _with_curves(result: Comparison, folder: Path) -> Comparison:
    """Beside the answers of two runs, how each was trained: their curves over each other."""
    try:
        found = [read_curves(Path(run), name) for run, name in zip((result.a, result.b), "AB", strict=True)]
    except VitlabError:  # they are not both runs with steps, and need not be
        return result
    page = folder / "curves.html"
    fsio.write_file(page, render(build_curves_page(found, command_line("compare", result.a, result.b))))
    return dataclasses.replace(result, notes=[*result.notes, f"the curves of both runs: {page}"])


def _held_out_by_both(a: str | Path, b: str | Path, data: str | Path, opened: Opened, part: str | None) -> EvalParts:
    """Where runs have split this data themselves, only images that none of the two has learnt from."""
    if part in opened.parts:
        return choose_parts(opened, part, None)
    of_a, of_b = (as_in_the_run(model, data, opened) for model in (a, b))
    chosen = choose_parts(of_b if of_a is opened else of_a, part, None)
    if of_b is opened or chosen.part not in of_b.parts:
        return chosen
    others = set(of_b.parts[chosen.part].keys)
    kept = [i for i, key in enumerate(chosen.dataset.keys) if key in others]
    if len(kept) == len(chosen.dataset):
        return chosen
    if not kept:
        raise UsageError(
            "there is no image that both runs held out, so one of them has learnt each",
            hint="Give other data, or train both with the same data.split_seed.",
        )
    note = f"{len(kept):,} of {len(chosen.dataset):,} images: the run B was trained with the others"
    dataset = chosen.dataset.subset(torch.tensor(kept))
    return dataclasses.replace(chosen, dataset=dataset, notes=(*chosen.notes, note))


@dataclasses.dataclass(frozen=True)
class _Work:
    """What both are run on, and how."""

    options: CompareOptions
    chosen: EvalParts
    data: str
    inference: InferenceOptions
    session: Session


@dataclasses.dataclass(frozen=True)
class _Side:
    """One of the two models, and its answers; row i is of image `ids_B[i]` of the part."""

    classifier: Classifier
    answers: Answers
    ids_B: Tensor

    def among(self, ids_B: Tensor) -> "_Side":
        kept_B = torch.isin(self.ids_B, ids_B)
        return dataclasses.replace(self, answers=self.answers.chosen(kept_B), ids_B=self.ids_B[kept_B])

    def about(self, name: str) -> dict[str, Any]:
        """For the records: which model it was, and how it saw the images."""
        return {
            "name": name,
            "model": format_name(self.classifier.model.spec),
            "weights": hash_weights(self.classifier.bundle.model),
            "preprocess": config.to_dict(self.classifier.preprocess),
        }


def _load(work: _Work, model: str | Path, label: str) -> tuple[Classifier, Match]:
    """A model that can answer, and what its classes mean in this data."""
    with hint_swapped_arguments([model], [work.data]):
        classifier = load(
            model,
            device=str(work.session.world.device),
            quiet=work.session.console.quiet,
            trust_pickle=work.options.trust_pickle,
        )
    label_map = None if work.options.label_map is None else Path(work.options.label_map)
    try:
        require_answers(classifier, force=work.options.force)
        return classifier, match_classes(classifier, work.chosen.dataset, label_map, data=work.data)
    except UsageError as error:  # of two models, it must say which
        raise UsageError(f"{label} ({model}): {error.what}", hint=error.hint) from None


def _answer(work: _Work, classifier: Classifier, match: Match, label: str) -> _Side:
    dataset = work.chosen.dataset
    known = known_images(dataset, match)
    scored = score_images(classifier, known, match, work.inference, work.session, label)
    places_B = torch.arange(len(dataset))
    if len(known) < len(dataset):
        places_B = match.known[dataset.labels.single()].nonzero()[:, 0]
    answers = judge(scored.logits_BM, scored.targets, match, classifier.bundle.temperature)
    return _Side(classifier, answers, places_B[scored.ids_B])


def _in_common(first: _Side, second: _Side) -> tuple[_Side, _Side]:
    """The answers about images that both could read and knew a class for."""
    both = torch.tensor(sorted({*first.ids_B.tolist()} & {*second.ids_B.tolist()}), dtype=torch.int64)
    if not len(both):
        raise UsageError("there is no image that both models could be run on")
    return first.among(both), second.among(both)


def _store(result: Comparison, work: _Work, first: _Side, second: _Side, folder: Path) -> Comparison:
    result = dataclasses.replace(result, out=str(folder))
    if not work.session.world.is_main:
        return result
    dataset, ids_B = work.chosen.dataset, first.ids_B
    command = command_of("compare", work.options, LAST_BITS, data=result.data, part=result.part)
    page = build_comparison_page(result, command, first.answers, second.answers, dataset, ids_B)
    names = (*dataset.classes, OTHER)
    keys = [str(dataset.keys[i]) for i in ids_B.tolist()]
    with fsio.new_folder(folder) as new:
        new.write_json(NUMBERS, dataclasses.asdict(result))
        new.write("answers.csv", both_answers_table(keys, first.answers, second.answers, names))
        new.write(PAGE, render(page))
    for record in _records(result, work, first, second, command):
        write_record(folder / RECORDS, record)
    return result


def _records(result: Comparison, work: _Work, first: _Side, second: _Side, command: str) -> list[Record]:
    """The difference and what chance makes of it. B is the model of the record, and A what it is set against."""
    about: dict[str, Any] = {
        "a": first.about(result.a),
        "b": second.about(result.b),
        "precision": "float32",
        "batch_size": work.inference.batch_size,
    }
    subject = Subject(
        model=second.classifier.model,
        dataset=work.chosen.dataset,
        data=result.data,
        part=result.part,
        settings=about,
        device=work.session.world.device,
        seconds=result.seconds,
        command=command,
        pretrained_on=pretraining_of(start_of(result.b)),
        weights=about["b"]["weights"],
    )
    drawn = f"bootstrap of pairs, {work.options.resamples} resamples, seed {work.session.runtime.seed}"
    test = {"only_a": result.only_a, "only_b": result.only_b}  # all that the test is made of
    numbers: list[tuple[str, float, tuple[float, float] | None, dict[str, Any]]] = [
        ("top1-difference", result.difference, result.interval, {"interval": drawn}),
        ("mcnemar-p", result.p, None, {"test": "exact", **test}),
        ("mcnemar-p-mid", result.p_mid, None, {"test": "mid-p", **test}),
    ]
    return [
        new_record(subject, name, [value], interval=interval, n=result.n, settings=settings)
        for name, value, interval, settings in numbers
    ]


# --- the curves of a run: no data is opened, and no weights are read ---------------------------------------------------


def read_curves(folder: Path, name: str) -> RunCurves:
    """From a run that is done, still running, or stopped."""
    if not run_folder.is_run(folder):
        raise UsageError(f"{folder} is not a run", hint="Name the folder that `vitlab train` made.")
    try:
        records = run_folder.read_metrics(folder)
    except FileNotFoundError:
        records = []
    settings = _settings(folder)
    if not records:
        probe = settings.get("train.method") == "probe"
        why = "a linear probe has no steps" if probe else "it has not taken a step yet"
        raise UsageError(
            f"{folder} has no curve: {why}", hint="Compare models on images with `vitlab compare A B DATA`."
        )
    rows = _evaluations(folder)
    batch = settings.get("train.batch_size", 0)
    return RunCurves(
        name=name,
        loss=[(record.step, record.loss) for record in records],
        lr=[(record.step, record.lr) for record in records],
        val_loss=_curve(rows, lambda row: row["loss"]),
        val_metric=_curve(rows, primary_metric),
        metric="mean average precision" if any("mean_ap" in row for row in rows) else "accuracy",
        test=_tested(folder),
        seconds=round(sum(batch / record.images_per_second for record in records), 1),
        settings={key: str(value) for key, value in settings.items()},
    )


def _settings(folder: Path) -> Mapping[str, Any]:
    path = folder / run_folder.CONFIG
    try:
        return config.flat(config.parse_toml(reading.read_text(path), str(path)))
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from None


def _evaluations(folder: Path) -> list[dict[str, float]]:
    """Of the newest checkpoint that can be read; each holds all that came before it."""
    for path in sorted((folder / run_folder.CHECKPOINTS).glob(f"step-*/{PROGRESS}"), reverse=True):
        try:
            rows = reading.read_json(path)["evaluations"]
            return [{key: float(value) for key, value in row.items()} for row in rows]
        except (OSError, FileProblem, LookupError, TypeError, ValueError, AttributeError):  # damaged: the one before it
            continue
    return []


def _curve(rows: Sequence[Mapping[str, float]], value: Callable[[Mapping[str, float]], float]) -> list[Point]:
    points = [(row["step"], value(row)) for row in rows if {"step", "top1", "loss"} <= row.keys()]
    return [point for point in points if all(map(math.isfinite, point))]


def _tested(folder: Path) -> float | None:
    """Of the record that a finished run has; a measurement of its own, as the accuracy of one seed."""
    if not (folder / RECORDS).is_dir():
        return None
    values = [record.value for record in read_records(folder / RECORDS) if record.measure in ("top1", "mean_ap")]
    return values[-1] if values else None
