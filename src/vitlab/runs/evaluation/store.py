"""What an evaluation leaves on the disk: a folder with numbers, page, card, tables and records, or a calibrated bundle.

Letters: B images, K classes of the data.
"""

import dataclasses
from pathlib import Path

from vitlab.core import config, fsio
from vitlab.core.session import Session
from vitlab.data.dataset import Opened
from vitlab.engines.classifier import Classifier
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation.answers import OTHER, SeveralLabels
from vitlab.evaluation.measures import MEASURES
from vitlab.evaluation.records import RECORDS, Record, Subject, hash_weights, new_record, write_record
from vitlab.evaluation.result import PAGE, EvaluationResult
from vitlab.evaluation.scoring import Account
from vitlab.report.evaluation_page import build_evaluation_page
from vitlab.report.evaluation_tables import answers_table, confusion_table, several_table
from vitlab.report.page import render
from vitlab.runs.evaluation.features import make_records
from vitlab.weights.bundle import Bundle, save_bundle
from vitlab.weights.card import with_measurements

NUMBERS, CARD = "evaluation.json", "card.md"


@dataclasses.dataclass(frozen=True)
class Work:
    """Which model is measured, how, and where."""

    name: str
    classifier: Classifier
    pretrained_on: str
    session: Session
    inference: InferenceOptions
    resamples: int


def save_temperature_bundle(
    result: EvaluationResult, work: Work, account: Account, folder: Path, command: str
) -> EvaluationResult:
    """Save the bundle with the fitted temperature, and thresholds where images have several labels, in a new folder.

    New, because the files of a bundle are sealed together: one of them cannot be changed alone.
    """
    calibration = result.calibration or {}
    fitted = float(calibration["temperature"])
    bundle = work.classifier.bundle
    fitted_on = f"fitted on the {calibration['fitted_on']} part of {result.data}"
    rows = [
        ("temperature", f"{fitted:.4f}, {fitted_on}", command),
        ("ECE", f"{result.ece:.4f} before, {calibration['ece_after']:.4f} after", command),
    ]
    thresholds = bundle.thresholds
    if isinstance(account.case, SeveralLabels):
        thresholds = _thresholds_of_labels(account, account.case, bundle)
        macro, micro = (result.macro or {})["f1"], result.micro_f1
        scores = f"F1 {macro:.4f} over classes, {micro:.4f} over all labels"
        rows.append(("thresholds", f"one for each label, {fitted_on}; {scores}", command))
    card = with_measurements(bundle.card, rows)
    if work.session.world.is_main:
        save_bundle(folder, dataclasses.replace(bundle, temperature=fitted, thresholds=thresholds, card=card))
    return dataclasses.replace(result, temperature_bundle=str(folder))


def _thresholds_of_labels(account: Account, case: SeveralLabels, bundle: Bundle) -> tuple[float, ...]:
    """As the bundle keeps them: before the temperature, and an even chance for labels that the data has not."""
    thresholds = [0.0] * len(bundle.labels)
    for label, score in zip(account.scored.match.table[:, 0].tolist(), case.thresholds_K.tolist(), strict=True):
        thresholds[label] = score * bundle.temperature
    return tuple(thresholds)


def store(
    result: EvaluationResult, work: Work, account: Account | None, opened: Opened, folder: Path, command: str
) -> EvaluationResult:
    """Write numbers, page, card, tables and records to the new folder."""
    result = dataclasses.replace(result, out=str(folder))
    if not work.session.world.is_main:
        return result
    records = [] if account is None else _records(result, work, account, command)
    if result.features is not None:
        facts = {"data": result.data, "command": command, "pretrained_on": work.pretrained_on}
        records += make_records(result.features, work.classifier, opened, **facts)
    with fsio.new_folder(folder) as new:
        new.write_json(NUMBERS, result.to_json())
        new.write(CARD, with_measurements(work.classifier.bundle.card, [_card_row(record) for record in records]))
        new.write(PAGE, render(build_evaluation_page(result, work.classifier, command, account)))
        for name, text in ({} if account is None else _tables(account)).items():
            new.write(name, text)
    for record in records:
        write_record(folder / RECORDS, record)
    return result


def _tables(account: Account) -> dict[str, str]:
    scored, case = account.scored, account.case
    keys = [str(scored.dataset.keys[i]) for i in scored.ids_B.tolist()]
    if isinstance(case, SeveralLabels):
        p_BK = case.logits_BK.float().sigmoid()
        return {"answers.csv": several_table(keys, p_BK, scored.targets, scored.dataset.classes)}
    names = (*scored.dataset.classes, OTHER)
    table = answers_table(keys, case.answers, names)
    return {"answers.csv": table, "confusion.csv": confusion_table(case.confusion_KA, names)}


def _records(result: EvaluationResult, work: Work, account: Account, command: str) -> list[Record]:
    """One for every measure of the head."""
    subject = Subject(
        model=work.classifier.model,
        dataset=account.scored.dataset,
        data=result.data,
        part=str(result.part),
        settings={
            "preprocess": config.to_dict(work.classifier.preprocess),
            "precision": "float32",
            "batch_size": work.inference.batch_size,
        },
        device=work.session.world.device,
        seconds=account.seconds,
        command=command,
        pretrained_on=work.pretrained_on,
        weights=hash_weights(work.classifier.bundle.model),
    )
    seed = work.session.runtime.seed
    how = f"bootstrap, {work.resamples} resamples, seed {seed}; Wilson where all answers are right, or none"
    counted = {
        measure.key: (value, result.intervals.get(measure.key), result.n, how)
        for measure in MEASURES
        if (value := result.measures.get(measure.key)) is not None
    }
    if result.real is not None:
        counted["real"] = (result.real["top1"], result.real["interval"], result.real["n"], "Wilson")
    return [
        new_record(
            subject, name, [value], interval=interval, n=n, settings={} if interval is None else {"interval": how}
        )
        for name, (value, interval, n, how) in counted.items()
    ]


def _card_row(record: Record) -> tuple[str, str, str]:
    interval = "" if record.interval is None else " (95 % interval {:.4f} to {:.4f})".format(*record.interval)
    return record.measure, f"{record.value:.4f}{interval}, {record.data}, {record.part}, n = {record.n}", record.command
