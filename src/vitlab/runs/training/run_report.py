"""What a person should see of a run: the number, the curves, the mistakes, and where the model looked."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core import fsio
from vitlab.core.environment import package_version
from vitlab.data.decode import read
from vitlab.data.preprocess import normalise
from vitlab.evaluation.classify import Scores
from vitlab.evaluation.metrics import average_precision, label_scores
from vitlab.inspection.attention import rollout_heat, upsample_heat
from vitlab.inspection.embeddings import position_similarity
from vitlab.inspection.overlays import overlay, to_picture
from vitlab.models.cost import count_macs, count_params
from vitlab.models.names import format_name
from vitlab.models.vit import ViT
from vitlab.report import figures
from vitlab.report.page import Figure, Gallery, Report, Section, Table, Tile
from vitlab.runs.training.finish import RunResult
from vitlab.runs.training.live_run import best_of, describe_validation

_BESIDE = 12  # classes whose names and numbers can be read in half a page
_SHOWN = 12
_SIDE_PX = 96  # small images are enlarged to about this, in whole pixels
_PHOTO_PX = 272  # twice a tile of the page, for screens that draw two pixels for one
_MOST_ROWS = 40  # classes in the table
_MANY_CLASSES = 60  # beyond, a confusion matrix is a grey square


def build_report(
    result: RunResult,
    pretraining: RunResult | None = None,
    scratch: RunResult | None = None,
    tables: Sequence[Table] = (),
) -> Report:
    """The page of a run; with `pretraining`, of the run it started from too, and with `scratch` of one without that start.

    `tables` come first, as that of a sweep.
    """
    seconds = result.seconds + (pretraining.seconds if pretraining else 0.0)
    model = result.classifier.model
    headline, subline = _headline(result.scores)
    sections: list[Section] = [_curves("Training", result, scratch)] if result.records else []
    if pretraining is not None:
        sections.insert(0, _curves("Pre-training", pretraining))
    sections += [*tables, *_mistakes(result.scores, result), *_per_class(result.scores, result.classifier.labels)]
    if isinstance(model, ViT) and model.spec.pos == "learned":
        caption = "Learned, not given: each map shows how alike one patch's position is to all others (Figure 7 of the paper)."
        drawn = figures.position_maps(position_similarity(model).cpu())
        sections.append(Figure("Positions", caption, drawn))
    sections += _galleries(result)
    return Report(
        title=result.recipe.title,
        headline=headline,
        subline=f"{subline}{format_name(result.recipe.model)}, {seconds:.0f} s of training",
        facts=_facts(result, pretraining, scratch),
        sections=sections,
        footer=f"vitlab {package_version('vitlab')} · everything on this page is in the run folder as well",
        warnings=result.warnings,
    )


def write_plots(folder: Path, report: Report) -> None:
    """The page's figures as files of their own."""
    with fsio.new_folder(folder) as new:
        for part in report.sections:
            if isinstance(part, Figure):
                kind = "png" if part.data.startswith(b"\x89PNG") else "svg"
                new.write(f"{part.title.lower().replace(' ', '-')}.{kind}", part.data)


def _headline(scores: Scores | None) -> tuple[str, str]:
    if scores is None:
        return "Trained; there was nothing to test on", ""
    low, high = scores.interval
    several, headline = "", f"{scores.top1:.1%} right on {scores.n} held-out images"
    if scores.mean_ap is not None:
        several = f"mean average precision {scores.mean_ap:.3f} · "
        headline = f"The likeliest label is right on {scores.top1:.1%} of {scores.n} held-out images"
    return headline, f"95 % interval {low:.1%} to {high:.1%} · {several}"


def _curves(title: str, result: RunResult, scratch: RunResult | None = None) -> Figure:
    records = result.records
    beside = None if scratch is None else [record.loss for record in scratch.records]
    tuned = [(int(row["step"]), row["loss"]) for row in result.evaluations]
    drawn = figures.curves([r.step for r in records], [r.loss for r in records], [r.lr for r in records], beside, tuned)
    size = result.recipe.data.image_size
    reached = "" if result.scores is None else f": test accuracy {result.scores.top1:.1%}"
    also = "" if scratch is None or scratch.scores is None else f"; from scratch {scratch.scores.top1:.1%} (dashed)"
    dots = " Dots: the loss on validation images." if tuned else ""
    return Figure(title, f"{result.recipe.title}, {size[0]}x{size[1]} pixels{reached}{also}.{dots}", drawn)


def _mistakes(scores: Scores | None, result: RunResult) -> list[Section]:
    if scores is None or scores.confusion_KK is None or len(scores.confusion_KK) > _MANY_CLASSES:
        return []
    caption = "Rows are the truth, columns the answer; coloured cells are mistakes."
    labels = result.classifier.labels
    return [Figure("Confusion", caption, figures.confusion(scores.confusion_KK, labels), wide=len(labels) > _BESIDE)]


def _per_class(scores: Scores | None, labels: Sequence[str]) -> list[Section]:
    """A row for each class, the weakest first."""
    if scores is None:
        return []
    if scores.confusion_KK is None:
        return [_per_label(scores, labels)]
    rows: list[tuple[float, Sequence[str]]] = []
    for k, label in enumerate(labels):
        answers_K = scores.confusion_KK[k].clone()
        images, right = int(answers_K.sum()), int(answers_K[k])
        if not images:
            continue
        answers_K[k] = 0
        most = int(answers_K.argmax())
        taken = f"{labels[most]} ({int(answers_K[most])})" if int(answers_K[most]) else ""
        rows.append((right / images, (label, f"{images:,}", f"{right / images:.1%}", taken)))
    caption = (
        "The weakest first: share of a class's images that were recognised, and what the others were taken for most."
    )
    return [_weakest_first(caption, ("class", "images", "right", "taken for"), rows)]


def _per_label(scores: Scores, labels: Sequence[str]) -> Table:
    """The same where an image may have several labels."""
    at_even = label_scores(scores.logits_BK > 0, scores.targets)
    rows: list[tuple[float, Sequence[str]]] = []
    for k, precision in enumerate(average_precision(scores.logits_BK, scores.targets).tolist()):
        images = int(at_even.support_K[k])
        if images:
            shares = (precision, float(at_even.recall_K[k]), float(at_even.precision_K[k]))
            rows.append((precision, (labels[k], f"{images:,}", *(f"{share:.1%}" for share in shares))))
    caption = (
        "The weakest first, by average precision. Said where its chance is above one half: how many of a label's images "
        "are then found, and how often it is then right."
    )
    return _weakest_first(caption, ("class", "images", "average precision", "found", "right when said"), rows)


def _weakest_first(caption: str, header: Sequence[str], rows: list[tuple[float, Sequence[str]]]) -> Table:
    rows.sort(key=lambda row: row[0])
    left = len(rows) - _MOST_ROWS
    caption += f" {left:,} stronger ones are not shown." if left > 0 else ""
    return Table("Classes", caption, header, [row for _, row in rows[:_MOST_ROWS]])


def _galleries(result: RunResult) -> list[Section]:
    scores = result.scores
    if scores is None:
        return []
    if scores.targets.ndim == 2:  # a label too many or too few is a mistake
        wrong = ((scores.logits_BK > 0) != (scores.targets > 0)).any(dim=1)
        each_BK = F.binary_cross_entropy_with_logits(scores.logits_BK, scores.targets.float(), reduction="none")
        confidence_B = each_BK.sum(dim=1)
    else:
        confidence_B, answer_B = scores.logits_BK.softmax(dim=1).max(dim=1)
        wrong = answer_B != scores.targets
    # The most confident mistakes first: those are the ones that teach something.
    worst = torch.argsort(torch.where(wrong, confidence_B, -1.0), descending=True, stable=True)[: int(wrong.sum())]
    spread = torch.linspace(0, scores.n - 1, min(_SHOWN, scores.n)).long()
    galleries: list[Section] = []
    photos = _are_photos(result)
    if len(worst):
        caption = f"{int(wrong.sum())} of {scores.n}, the most confident first."
        galleries.append(Gallery("Mistakes", caption, _tiles(result, scores, worst[:_SHOWN]), photos))
    answers = _tiles(result, scores, spread)
    galleries.append(Gallery("Answers", "An even sample of the held-out images.", answers, photos))
    model = result.classifier.model
    if model.spec.has_attention_maps:
        caption = "Attention rollout (appendix D.8 of the paper): the parts that fed the answer glow."
        tiles = _tiles(result, scores, spread, rollout=True)
        galleries.append(Gallery("What the model looked at", caption, tiles, photos))
    return galleries


def _tiles(result: RunResult, scores: Scores, rows: Tensor, *, rollout: bool = False) -> list[Tile]:
    assert result.test is not None
    rule, model, labels = result.classifier.preprocess, result.classifier.model, result.classifier.labels
    seen_BCYX = torch.stack([read(result.test.read(int(scores.ids[i])), rule) for i in rows])
    heat_BYX = torch.ones(len(rows), *rule.image_size)
    if rollout:
        x_BCYX = normalise(rule, seen_BCYX).to(result.classifier.device)
        heat_BYX = upsample_heat(rollout_heat(model, x_BCYX).cpu(), rule.image_size)
    tiles: list[Tile] = []
    zoom = max(1, round(_SIDE_PX / rule.image_size[1]))
    for image_CYX, heat_YX, i in zip(seen_BCYX, heat_BYX, rows.tolist(), strict=True):
        caption, good = _told(scores, labels, i)
        picture = overlay(image_CYX, heat_YX, scale=zoom) if rollout else to_picture(image_CYX, scale=zoom)
        drawn = figures.jpeg(picture, _PHOTO_PX) if _are_photos(result) else figures.png(picture)
        tiles.append(Tile(drawn, caption, good))
    return tiles


def _told(scores: Scores, labels: Sequence[str], i: int) -> tuple[str, bool]:
    """What was said of an image and, where it is wrong, what is true; and whether it is right."""
    if scores.targets.ndim == 2:
        answer = said = _named(scores.logits_BK[i] > 0, labels)
        truth = _named(scores.targets[i] > 0, labels)
    else:
        p, k = scores.logits_BK[i].softmax(dim=0).max(dim=0)
        answer, truth = labels[int(k)], labels[int(scores.targets[i])]
        said = f"{answer} ({p.item():.0%})"
    return (said, True) if answer == truth else (f"predicted {said}, true {truth}", False)


def _named(yes_K: Tensor, labels: Sequence[str]) -> str:
    return ", ".join(label for label, yes in zip(labels, yes_K.tolist(), strict=True) if yes) or "none"


def _are_photos(result: RunResult) -> bool:
    """Whether images are shown as photos, and not as pixels that one can count."""
    return max(result.classifier.preprocess.image_size) > _SIDE_PX


def _how(result: RunResult) -> tuple[str, str]:
    if result.recipe.train.method == "probe":
        return "training", "a linear probe on features of the frozen body"
    speed = f"{result.images_per_second:,.0f} images/s on {result.classifier.device}"
    return "training", f"{len(result.records):,} steps of {result.recipe.train.batch_size} images, {speed}"


def _facts(result: RunResult, pretraining: RunResult | None, scratch: RunResult | None) -> list[tuple[str, str]]:
    spec, recipe = result.recipe.model, result.recipe
    size = f"{count_params(spec):,} parameters, {count_macs(spec) / 1e6:,.1f} M MACs per image"
    facts = [
        ("model", f"{format_name(spec)}: {size}"),
        ("data", f"{recipe.data.source}, seed {recipe.seed}"),
        _how(result),
        ("run folder", str(result.folder)),
    ]
    if result.reason:
        facts.insert(0, ("chosen", f"{result.reason}."))
    if result.evaluations:
        best = best_of(result.evaluations)
        where = f"l2 {best['l2']:.2g}" if "l2" in best else f"step {int(best['step']):,}"
        facts.append(("best validation", f"{describe_validation(best)}, at {where}"))
    if result.scores is not None:
        facts.append(("test loss", f"{result.scores.loss:.4f}"))
    if pretraining is not None and pretraining.scores is not None:
        facts.append(
            ("started from", f"{pretraining.recipe.title.lower()}: {pretraining.scores.top1:.1%} test accuracy")
        )
    if scratch is not None and scratch.scores is not None:
        facts.append(("from scratch, same budget", f"{scratch.scores.top1:.1%} test accuracy"))
    if result.bad:
        named = "; ".join(f"{name} {why}" for name, why in list(result.bad.items())[:_SHOWN])
        facts.append(("images left out", f"{len(result.bad)}: {named}{' …' if len(result.bad) > _SHOWN else ''}"))
    return facts
