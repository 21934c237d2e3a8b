"""What a person should see of a run: the number, the curves, the mistakes, and where the model looked."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core import fsio
from vitlab.core.command import command_line
from vitlab.core.errors import FileProblem, UsageError
from vitlab.evaluation.answers import judge
from vitlab.evaluation.calibration import reliability
from vitlab.evaluation.classify import Scores
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.metrics import average_precision, label_scores
from vitlab.inspection.embeddings import position_similarity
from vitlab.models.cost import count_macs, count_params
from vitlab.models.names import format_name
from vitlab.models.vit import ViT
from vitlab.report import sections
from vitlab.report.charts import Chart, Series, smooth
from vitlab.report.inspection_figures import position_sheet
from vitlab.report.page import (
    Figure,
    Files,
    Gallery,
    Report,
    Section,
    Snippets,
    Table,
    Tile,
    percent,
    percent_range,
    plots,
    render,
)
from vitlab.report.pictures import Pictures, spread_over_classes, strip
from vitlab.runs.training import run_folder
from vitlab.runs.training.finish import RunResult
from vitlab.runs.training.live_run import best_of, describe_validation, primary_metric
from vitlab.training.loop import StepRecord

_SHOWN = 12  # pictures of a gallery
_MOST_ROWS = 40  # classes in the table
# What a reader may open, in the order of interest. All are there when the page is written.
_FILES = {
    run_folder.BUNDLE + "/card.md": "the model card",
    run_folder.BUNDLE + "/model.safetensors": "the weights",
    run_folder.CONFIG: "every setting, to run it again",
    run_folder.TABLE: "what was measured, as a table",
    run_folder.SPLIT: "which image is in which part",
    run_folder.LOG: "what was printed",
    run_folder.ENVIRONMENT: "the machine and the versions",
    "plots/": "the drawings of this page as files",
}


def build_report(
    result: RunResult,
    pretraining: RunResult | None = None,
    scratch: RunResult | None = None,
    tables: Sequence[Table] = (),
    folder: Path | None = None,
) -> Report:
    """The page of a run; with `pretraining`, of the run it started from too, and with `scratch` of one without that start.

    `tables` come first, as that of a sweep. `folder` is where the page will lie, if not in that of the run.
    """
    seconds, begun = result.seconds + (pretraining.seconds if pretraining else 0.0), _begun(result)
    scores, labels = result.scores, result.classifier.labels
    number, headline = _headline(scores, scratch) if result.knn is None else _neighbours(result.knn)
    parts: list[Section] = [*_curves(result, pretraining, scratch), *tables]
    if scores is not None:
        parts += _answers(scores, labels)
    parts += [
        *_positions(result),
        *_painted(result),
        *_galleries(result),
        _use(result, begun.repeat),
        _files(result, folder or result.folder),
    ]
    return Report(
        title=result.recipe.title,
        number=number,
        headline=headline,
        subline=result.reason or format_name(result.recipe.model),
        stats=_stats(result, seconds),
        facts=_facts(result, pretraining, scratch, begun.start),
        sections=parts,
        footer="everything on this page is in the run folder as well",
        warnings=result.warnings,
    )


def write_report(result: RunResult, report: Report) -> None:
    """The page in the folder of its run, and its figures beside it."""
    if not (result.folder / "plots").exists():
        write_plots(result.folder / "plots", report)
    fsio.write_file(result.folder / run_folder.REPORT, render(report))


def write_plots(folder: Path, report: Report) -> None:
    """The page's drawings as files of their own."""
    with fsio.new_folder(folder) as new:
        for name, data in plots(report).items():
            new.write(name, data)


# --- the top of the page ----------------------------------------------------------------------------------------------


def _headline(scores: Scores | None, scratch: RunResult | None) -> tuple[str, str]:
    """The large number, and the sentence that it begins."""
    if scores is None:
        return "", "Trained; there was nothing to test on"
    beside = f", {percent(scratch.scores.top1)} from scratch" if scratch and scratch.scores else ""
    if scores.mean_ap is not None:
        sentence = f"mean average precision on {scores.n:,} held-out images; the likeliest label is right on"
        return f"{scores.mean_ap:.3f}", f"{sentence} {percent(scores.top1)} of them"
    return percent(scores.top1), f"of {scores.n:,} held-out images right{beside}"


def _neighbours(knn: Mapping[str, Any]) -> tuple[str, str]:
    """The same for an encoder that was trained without labels."""
    sentence = f"of {knn['n']:,} held-out images named correctly by their {knn['k']} nearest neighbours, nothing trained on top"
    return percent(knn["top1"]), sentence


def _stats(result: RunResult, seconds: float) -> list[tuple[str, str]]:
    scores, stats = result.scores, list[tuple[str, str]]()
    is_refitted = result.recipe.train.method == "probe" and bool(result.evaluations)
    if result.knn is not None:
        stats = [("95 % interval", percent_range(*result.knn["interval"])), ("test images", f"{result.knn['n']:,}")]
    if scores is not None:
        low, high = scores.interval
        of = "95 % interval" if scores.mean_ap is None else "likeliest label, 95 % interval"
        stats = [(of, percent_range(low, high)), ("test images", f"{scores.n:,}")]
    return [
        *stats,
        ("training and validation images" if is_refitted else "training images", f"{result.num_fitted:,}"),
        ("classes", f"{len(labels):,}") if (labels := result.classifier.labels) else ("labels", "not used"),
        ("training time", f"{seconds:.0f} s"),
    ]


def _painted(result: RunResult) -> list[Section]:
    """What a task that hides patches makes of images."""
    if result.painted is None:
        return []
    tiles = [Tile(strip(images), "", None) for images in result.painted]
    kept = "held-out images" if result.test is not None else "images"
    caption = (
        f"{kept.capitalize()}: the encoder's, with hidden patches in grey; what was predicted there; the image itself."
    )
    if result.recipe.objective.mae is not None and result.recipe.objective.mae.norm_targets:
        caption += " Mean and contrast of each predicted patch are the true ones, which this loss leaves out."
    return [Gallery("Hidden patches", caption, tiles, photos=True, in_a_row=(2, 1))]


# --- curves -----------------------------------------------------------------------------------------------------------


def _loss_chart(title: str, result: RunResult, scratch: RunResult | None = None) -> Chart:
    series = loss_series("training loss" if scratch is None else "pre-trained", result.records, 0, raw=True)
    if scratch is not None:
        series += loss_series("from scratch", scratch.records, 1, dashed=True)
    validated = [(row["step"], row["loss"]) for row in result.evaluations]
    if validated:
        series.append(Series("validation loss", validated, "dots", 2))
    size = result.recipe.data.image_size
    reached = "" if result.scores is None else f": test accuracy {percent(result.scores.top1)}"
    reached += f": the loss of {result.recipe.objective.kind}" if result.recipe.objective.is_pretext else ""
    also = (
        "" if scratch is None or scratch.scores is None else f"; from scratch {percent(scratch.scores.top1)} (dashed)"
    )
    caption = f"{result.recipe.title}, {size[0]}x{size[1]} pixels{reached}{also}."
    return Chart(title, caption, series, "step", "loss" if len(series) > 2 else "training loss")


def loss_series(
    name: str, records: Sequence[StepRecord], colour: int, *, raw: bool = False, dashed: bool = False
) -> list[Series]:
    """The smoothed loss and, with `raw`, the loss of every step behind it."""
    steps = [record.step for record in records]
    losses = [record.loss for record in records]
    line = Series(name, list(zip(steps, smooth(losses), strict=True)), "dashed" if dashed else "line", colour)
    return [Series("every step", list(zip(steps, losses, strict=True)), "faint", colour), line] if raw else [line]


def _curves(result: RunResult, pretraining: RunResult | None, scratch: RunResult | None) -> list[Section]:
    """Training first, over the whole width where the others are two."""
    if not result.records:
        return []
    others = [] if pretraining is None else [_loss_chart("Pre-training", pretraining)]
    if result.evaluations:
        others.append(_validation_chart(result))
    rates = [Series("learning rate", [(record.step, record.lr) for record in result.records], colour=3)]
    caption = f"{result.recipe.optim.name}, {result.recipe.schedule.decay} decay."
    others.append(Chart("Learning rate", caption, rates, "step", "learning rate"))
    training = dataclasses.replace(_loss_chart("Training", result, scratch), wide=len(others) % 2 == 0)
    return [training, *others]


def _validation_chart(result: RunResult) -> Chart:
    best = best_of(result.evaluations)
    several, loss = "mean_ap" in best, "top1" not in best
    what = "loss" if loss else "mean average precision" if several else "accuracy"
    points = [(row["step"], row["loss"] if loss else primary_metric(row)) for row in result.evaluations]
    caption = f"The best: {_validation(best)}, at step {int(best['step']):,}."
    series = [Series(what, points, "dots", 2)]
    return Chart("Validation", caption, series, "step", f"validation {what}", percent=not (several or loss))


def _validation(row: Mapping[str, float]) -> str:
    return describe_validation(row).replace("%", " %")  # as in all else on the page


# --- answers ----------------------------------------------------------------------------------------------------------


def _answers(scores: Scores, labels: Sequence[str]) -> list[Section]:
    """What was answered and how surely: confusion, classes and calibration."""
    if scores.confusion_KK is None:
        return [_per_label(scores, labels)]
    confusion = sections.confusion(scores.confusion_KK, labels)
    answers = judge(scores.logits_BK, scores.targets, Match(tuple((k,) for k in range(len(labels)))))
    sure = sections.calibration(reliability(answers.confidence_B, answers.right))
    return [confusion[0], sections.class_bars(scores.confusion_KK, labels), *confusion[1:], sure]


def _per_label(scores: Scores, labels: Sequence[str]) -> Table:
    """The classes where an image may have several labels."""
    at_even = label_scores(scores.logits_BK > 0, scores.targets)
    rows: list[tuple[float, Sequence[str]]] = []
    for k, precision in enumerate(average_precision(scores.logits_BK, scores.targets).tolist()):
        images = int(at_even.support_K[k])
        if images:
            shares = (precision, float(at_even.recall_K[k]), float(at_even.precision_K[k]))
            rows.append((precision, (labels[k], f"{images:,}", *(percent(share) for share in shares))))
    caption = (
        "The weakest first, by average precision. A label is predicted where its probability is above one half: how many "
        "of its images are then found, and how often it is then right."
    )
    rows.sort(key=lambda row: row[0])
    left = len(rows) - _MOST_ROWS
    caption += f" {left:,} stronger ones are not shown." if left > 0 else ""
    header = ("class", "images", "average precision", "found", "right when predicted")
    return Table("Classes", caption, header, [row for _, row in rows[:_MOST_ROWS]])


def _positions(result: RunResult) -> list[Section]:
    model = result.classifier.model
    if not isinstance(model, ViT) or model.spec.pos != "learned":
        return []
    caption = (
        "Learned, not given: each map shows how alike one patch's position is to all others (Figure 7 of the paper)."
    )
    return [Figure("Positions", caption, position_sheet(position_similarity(model).similarity_YXYX).svg())]


# --- pictures ---------------------------------------------------------------------------------------------------------


def _galleries(result: RunResult) -> list[Section]:
    scores = result.scores
    if scores is None:
        return []
    assert result.test is not None
    pictures = Pictures(result.classifier, result.test, scores.ids)
    if scores.targets.ndim == 2:  # a label too many or too few is a mistake
        wrong_B = ((scores.logits_BK > 0) != (scores.targets > 0)).any(dim=1)
        each_BK = F.binary_cross_entropy_with_logits(scores.logits_BK, scores.targets.float(), reduction="none")
        loss_B, truth_B = each_BK.sum(dim=1), scores.targets.argmax(dim=1)
        doubt_B = loss_B + loss_B.max() * wrong_B
    else:
        confidence_B, answer_B = scores.logits_BK.softmax(dim=1).max(dim=1)
        wrong_B, truth_B = answer_B != scores.targets, scores.targets
        doubt_B = torch.where(wrong_B, 1 + confidence_B, 1 - confidence_B)
    # The most confident mistakes first: those are the ones that teach something.
    wrong_rows = wrong_B.nonzero()[:, 0]
    worst = wrong_rows[spread_over_classes(truth_B[wrong_rows], doubt_B[wrong_rows], _SHOWN)].tolist()
    right_B = (~wrong_B).nonzero()[:, 0]
    right = right_B[spread_over_classes(truth_B[right_B], doubt_B[right_B], _SHOWN)].tolist()
    labels, photos = result.classifier.labels, pictures.are_photos
    galleries: list[Section] = []
    if worst:
        caption = f"{len(wrong_rows):,} of {scores.n:,}, spread over the classes, the most confident first."
        galleries.append(Gallery("Mistakes", caption, _tiles(pictures, scores, labels, worst), photos))
    if right:
        caption = "Right answers, spread over the classes, the least sure first."
        galleries.append(Gallery("Answers", caption, _tiles(pictures, scores, labels, right), photos))
    if pictures.has_rollout:
        rows = [(row, *_caption(scores, labels, row)) for row in spread_over_classes(truth_B, doubt_B, _SHOWN)]
        galleries.append(pictures.rollout_gallery("What the model attended to", "", rows))
    return galleries


def _tiles(pictures: Pictures, scores: Scores, labels: Sequence[str], rows: Sequence[int]) -> list[Tile]:
    captions = [_caption(scores, labels, row) for row in rows]
    return [pictures.tile(row, caption, good=good) for row, (caption, good) in zip(rows, captions, strict=True)]


def _caption(scores: Scores, labels: Sequence[str], i: int) -> tuple[str, bool]:
    """What was predicted for an image and, where it is wrong, what is true; and whether it is right."""
    if scores.targets.ndim == 2:
        answer = predicted = _named(scores.logits_BK[i] > 0, labels)
        truth = _named(scores.targets[i] > 0, labels)
    else:
        p, k = scores.logits_BK[i].softmax(dim=0).max(dim=0)
        answer, truth = labels[int(k)], labels[int(scores.targets[i])]
        predicted = f"{answer} ({percent(p.item(), 0)})"
    return (predicted, True) if answer == truth else (f"predicted {predicted}, true {truth}", False)


def _named(yes_K: Tensor, labels: Sequence[str]) -> str:
    return ", ".join(label for label, yes in zip(labels, yes_K.tolist(), strict=True) if yes) or "none"


# --- how to resume ----------------------------------------------------------------------------------------------------


def _use(result: RunResult, repeat: str) -> Snippets:
    run = str(result.folder)
    if result.recipe.objective.is_pretext:
        lines = [
            ("In Python", f"import vitlab\nencoder = vitlab.load({run!r})\nencoder.embed(['picture.jpg'])"),
            ("Train a classifier on labels", command_line("train", "DATA", options={"init": run})),
            ("Measure what it knows", command_line("evaluate", run, "DATA", options={"knn": True, "probe": True})),
        ]
    else:
        lines = [
            ("In Python", f"import vitlab\nclassifier = vitlab.load({run!r})\nclassifier('picture.jpg')"),
            ("On the command line", command_line("predict", run, "picture.jpg")),
            ("Measure it in detail", command_line("evaluate", run)),
        ]
    if repeat:
        lines.append(("Train it again, into a new folder", repeat))
    return Snippets("Use it", "", lines)


def _begun(result: RunResult) -> run_folder.RunFile:
    """What the run knew when it began."""
    try:
        return run_folder.read_run(result.folder)
    except (FileProblem, UsageError):  # the page is worth more than some of its lines
        return run_folder.RunFile("", "")


def _files(result: RunResult, folder: Path) -> Files:
    def path(name: str) -> str:
        return Path(os.path.relpath(result.folder / name, folder)).as_posix() + ("/" if name.endswith("/") else "")

    return Files(
        "Files", "Of the run, from where this page lies.", [(path(name), what) for name, what in _FILES.items()]
    )


def _how(result: RunResult) -> tuple[str, str]:
    if result.recipe.train.method == "probe":
        return "training", "a linear probe on features of the frozen backbone"
    speed = f"{result.images_per_second:,.0f} images/s on {result.classifier.device}"
    return "training", f"{len(result.records):,} steps of {result.recipe.train.batch_size} images, {speed}"


def _facts(
    result: RunResult, pretraining: RunResult | None, scratch: RunResult | None, start: Mapping[str, str]
) -> list[tuple[str, str]]:
    spec, recipe = result.recipe.model, result.recipe
    size = f"{count_params(spec):,} parameters, {count_macs(spec) / 1e6:,.1f} M MACs per image"
    facts = [
        ("model", f"{format_name(spec)}: {size}"),
        ("data", f"{recipe.data.source}, seed {recipe.seed}"),
        _how(result),
        *([("start weights", start["start"]), ("licence", start["licence"])] if start else []),
        ("run folder", str(result.folder)),
    ]
    if result.evaluations:
        best = best_of(result.evaluations)
        where = f"l2 {best['l2']:.2g}" if "l2" in best else f"step {int(best['step']):,}"
        facts.append(("best validation", f"{_validation(best)}, at {where}"))
    if result.scores is not None:
        facts.append(("test loss", f"{result.scores.loss:.4f}"))
    if pretraining is not None and pretraining.scores is not None:
        facts.append(
            ("started from", f"{pretraining.recipe.title.lower()}: {percent(pretraining.scores.top1)} test accuracy")
        )
    if scratch is not None and scratch.scores is not None:
        facts.append(("from scratch, same budget", f"{percent(scratch.scores.top1)} test accuracy"))
    if result.bad:
        named = "; ".join(f"{name} {why}" for name, why in list(result.bad.items())[:_SHOWN])
        facts.append(("images left out", f"{len(result.bad)}: {named}{' …' if len(result.bad) > _SHOWN else ''}"))
    return facts
