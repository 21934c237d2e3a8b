"""What an evaluation leaves on the disk: a folder with numbers, page, card, tables and records, or a bundle that is calmer.

Letters: B images, K classes of the data.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.core import config, fsio
from vitlab.core.session import Session
from vitlab.data.dataset import Opened
from vitlab.engines.classifier import Classifier
from vitlab.evaluation.records import Record, hash_weights, new_record, write_record
from vitlab.evaluation.summary import SeveralSummary, Summary
from vitlab.report.evaluation_page import (
    OTHER,
    PageFacts,
    build_evaluation_page,
    build_features_page,
    build_several_page,
)
from vitlab.report.page import Report, render
from vitlab.runs.evaluation.answering import InferenceOptions
from vitlab.runs.evaluation.files import CARD, NUMBERS, PAGE, RECORDS, answers_table, confusion_table, several_table
from vitlab.runs.evaluation.numbers import Found
from vitlab.runs.evaluation.representation import make_records
from vitlab.runs.evaluation.result import EvaluationResult, to_json
from vitlab.weights.bundle import Bundle, save_bundle
from vitlab.weights.card import with_measurements


@dataclasses.dataclass(frozen=True)
class Work:
    """Who is asked, how, and where: one object instead of six arguments."""

    name: str
    classifier: Classifier
    pretrained_on: str
    session: Session
    rule: InferenceOptions
    resamples: int


def save_temperature(
    result: EvaluationResult, work: Work, found: Found, folder: Path, command: str
) -> EvaluationResult:
    """A new bundle, with thresholds too where images have several labels.

    New, because the files of a bundle are sealed together: one of them cannot be changed alone.
    """
    calibration = result.calibration or {}
    fitted = float(calibration["temperature"])
    bundle = work.classifier.bundle
    row = f"{fitted:.4f}, fitted on the {calibration['fitted_on']} part of {result.data}"
    rows = [
        ("temperature", row, command),
        ("ECE", f"{result.ece:.4f} before, {calibration['ece_after']:.4f} after", command),
    ]
    thresholds = bundle.thresholds
    if isinstance(found.summary, SeveralSummary):
        thresholds = _thresholds_of_labels(found, bundle)
        macro, micro = (result.macro or {})["f1"], result.micro_f1
        told = f"one for each label, fitted on the {calibration['fitted_on']} part of {result.data}"
        rows.append(("thresholds", f"{told}; F1 {macro:.4f} over classes, {micro:.4f} over all labels", command))
    card = with_measurements(bundle.card, rows)
    if work.session.world.is_main:
        save_bundle(folder, dataclasses.replace(bundle, temperature=fitted, thresholds=thresholds, card=card))
    return dataclasses.replace(result, temperature_bundle=str(folder))


def _thresholds_of_labels(found: Found, bundle: Bundle) -> tuple[float, ...]:
    """As the bundle keeps them: before the temperature, and an even chance for labels that the data has not."""
    assert isinstance(found.summary, SeveralSummary)
    thresholds = [0.0] * len(bundle.labels)
    for label, score in zip(found.scored.match.table[:, 0].tolist(), found.summary.thresholds_K.tolist(), strict=True):
        thresholds[label] = score * bundle.temperature
    return tuple(thresholds)


def store(
    result: EvaluationResult, work: Work, found: Found | None, opened: Opened | None, folder: Path, command: str
) -> EvaluationResult:
    result = dataclasses.replace(result, out=str(folder))
    if not work.session.world.is_main:
        return result
    records = [] if found is None else _records(result, work, found, command)
    if result.features is not None and opened is not None:
        records += make_records(
            result.features,
            work.classifier,
            opened,
            data=result.data,
            command=command,
            pretrained_on=work.pretrained_on,
        )
    with fsio.new_folder(folder) as new:
        new.write_json(NUMBERS, to_json(result))
        new.write(CARD, with_measurements(work.classifier.bundle.card, [_card_row(record) for record in records]))
        new.write(PAGE, render(_page(result, work, found, command)))
        if found is not None:
            for name, text in _tables(found, work.classifier.bundle.temperature).items():
                new.write(name, text)
    for record in records:
        write_record(folder / RECORDS, record)
    return result


def _tables(found: Found, temperature: float) -> dict[str, str]:
    scored = found.scored
    keys = [str(scored.dataset.keys[i]) for i in scored.ids_B.tolist()]
    if found.answers is None or not isinstance(found.summary, Summary):
        p_BK = (scored.in_data_classes() / temperature).sigmoid()
        return {"answers.csv": several_table(keys, p_BK, scored.targets, scored.dataset.classes)}
    names = (*scored.dataset.classes, OTHER)
    table = answers_table(keys, found.answers, names)
    return {"answers.csv": table, "confusion.csv": confusion_table(found.summary.confusion_KA, names)}


def _page(result: EvaluationResult, work: Work, found: Found | None, command: str) -> Report:
    told = None if result.features is None else result.features["features"]
    facts = PageFacts(
        title=f"{work.name} on {result.data}",
        command=command,
        data=result.data if result.part is None else f"{result.data}, part {result.part}, {result.n:,} images",
        vectors=None if told is None else _vectors(told),
        notes=list(dict.fromkeys([*result.notes, *([] if told is None else told["notes"])])),
        left_out=list(result.left_out),
        temperature=(result.calibration or {}).get("temperature"),
        fitted_on=(result.calibration or {}).get("fitted_on") or "",
        own_thresholds=bool(work.classifier.bundle.thresholds),
        real=result.real,
        published=result.published,
        features=[(row.name, row.top1, row.short()) for row in result.feature_rows()],
        seconds=result.seconds,
    )
    if found is None:
        return build_features_page(facts, work.classifier)
    pictures = work.classifier, found.scored.dataset, found.scored.ids_B
    if found.answers is not None and isinstance(found.summary, Summary):
        return build_evaluation_page(facts, found.summary, found.answers, found.calibrated, *pictures)
    assert isinstance(found.summary, SeveralSummary)
    # In double, so that what is far beyond a threshold is not rounded to the same 1.
    p_BK = (found.scored.in_data_classes().double() / work.classifier.bundle.temperature).sigmoid()
    return build_several_page(facts, found.summary, p_BK, found.scored.targets, found.calibrated, *pictures)


def _vectors(told: Mapping[str, Any]) -> str:
    """Of the features, for people: what they are, who learns from them and who is tested."""
    layers = f"layers {', '.join(map(str, told['layers']))}" if told["layers"] else "what the head sees"
    tokens = f", {told['tokens']} tokens" if told["tokens"] else ""
    images = f"{told['train']:,} images to learn from, {told['test']:,} to test on (part {told['part']})"
    return f"{layers}{tokens}, {told['width']:,} numbers; {images}, {told['classes']:,} classes"


def _records(result: EvaluationResult, work: Work, found: Found, command: str) -> list[Record]:
    """One for every number of the head."""
    rule, dataset, seed = work.classifier.preprocess, found.scored.dataset, work.session.runtime.seed
    settings = {"preprocess": config.to_dict(rule), "precision": "float32", "batch_size": work.rule.batch_size}
    drawn = f"bootstrap, {work.resamples} resamples, seed {seed}; Wilson where all answers are right, or none"
    values = {name: getattr(result, name) for name in ("top1", "top5", "loss", "ece", "mean_ap", "micro_f1")}
    values |= {"macro_f1": None if result.macro is None else result.macro["f1"]}
    values |= {"aurc": None if result.selective is None else result.selective["aurc"]}
    counted = {
        name: (value, result.intervals.get(name), result.n) for name, value in values.items() if value is not None
    }
    if result.real is not None:
        counted["real"] = (result.real["top1"], result.real["interval"], result.real["n"])
    weights = hash_weights(work.classifier.bundle.model)
    return [
        new_record(
            work.classifier.model,
            dataset,
            data=result.data,
            part=str(result.part),
            measure=name,
            values=[value],
            interval=interval,
            n=n,
            settings=settings | ({} if interval is None else {"interval": "Wilson" if name == "real" else drawn}),
            device=work.session.world.device,
            seconds=found.seconds,
            command=command,
            pretrained_on=work.pretrained_on,
            weights=weights,
        )
        for name, (value, interval, n) in counted.items()
    ]


def _card_row(record: Record) -> tuple[str, str, str]:
    low, high = record.interval or (math.nan, math.nan)
    interval = "" if record.interval is None else f" (95 % interval {low:.4f} to {high:.4f})"
    return record.measure, f"{record.value:.4f}{interval}, {record.data}, {record.part}, n = {record.n}", record.command
