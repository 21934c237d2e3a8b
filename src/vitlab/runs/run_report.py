"""What a person should see of a run: the number, the curves, the mistakes, and where the model looked."""

from pathlib import Path

import torch
from torch import Tensor

from vitlab.core import fsio
from vitlab.core.environment import package_version
from vitlab.data.preprocess import normalise, resize
from vitlab.inspection.attention import rollout_heat, upsample_heat
from vitlab.inspection.embeddings import position_similarity
from vitlab.inspection.overlays import overlay, to_picture
from vitlab.models.cost import count_macs, count_params
from vitlab.models.names import format_name
from vitlab.models.vit import ViT
from vitlab.report import figures
from vitlab.report.page import Figure, Gallery, Report, Tile
from vitlab.runs.run import RunResult

_SHOWN = 12
_SIDE_PX = 96  # small images are enlarged to about this, in whole pixels


def build_report(result: RunResult, pretraining: RunResult | None = None) -> Report:
    """The page of a run; with `pretraining`, of the run it started from too."""
    scores = result.scores
    low, high = scores.interval
    seconds = result.seconds + (pretraining.seconds if pretraining else 0.0)
    sections: list[Figure | Gallery] = [_curves("Training", result)]
    if pretraining is not None:
        sections.insert(0, _curves("Pre-training", pretraining))
    caption = "Rows are the truth, columns the answer; coloured cells are mistakes."
    sections.append(Figure("Confusion", caption, figures.confusion(scores.confusion_KK, result.test.classes)))
    model = result.classifier.model
    if isinstance(model, ViT) and model.spec.pos == "learned":
        caption = "Learned, not given: each map shows how alike one patch's position is to all others (Figure 7 of the paper)."
        drawn = figures.position_maps(position_similarity(model).cpu())
        sections.append(Figure("Positions", caption, drawn))
    sections += _galleries(result)
    return Report(
        title=result.recipe.title,
        headline=f"{scores.top1:.1%} right on {scores.n} held-out images",
        subline=f"95 % interval {low:.1%} to {high:.1%} · {format_name(result.recipe.model)}, {seconds:.0f} s of training",
        facts=_facts(result, pretraining),
        sections=sections,
        footer=f"vitlab {package_version('vitlab')} · everything on this page is in the run folder as well",
    )


def write_plots(folder: Path, report: Report) -> None:
    """The page's figures as files of their own."""
    with fsio.new_folder(folder) as new:
        for part in report.sections:
            if isinstance(part, Figure):
                kind = "png" if part.data.startswith(b"\x89PNG") else "svg"
                new.write(f"{part.title.lower()}.{kind}", part.data)


def _curves(title: str, result: RunResult) -> Figure:
    records = result.records
    drawn = figures.curves([r.step for r in records], [r.loss for r in records], [r.lr for r in records])
    size = result.recipe.data.image_size
    caption = f"{result.recipe.title}, {size[0]}x{size[1]} pixels: test accuracy {result.scores.top1:.1%}."
    return Figure(title, caption, drawn)


def _galleries(result: RunResult) -> list[Figure | Gallery]:
    test, p_BK = result.test, result.scores.probabilities_BK
    confidence_B, answer_B = p_BK.max(dim=1)
    wrong = answer_B != test.labels
    # The most confident mistakes first: those are the ones that teach something.
    worst = torch.argsort(torch.where(wrong, confidence_B, -1.0), descending=True, stable=True)[: int(wrong.sum())][
        :_SHOWN
    ]
    spread = torch.linspace(0, len(test) - 1, _SHOWN).long()
    galleries: list[Figure | Gallery] = []
    if len(worst):
        caption = f"{int(wrong.sum())} of {len(test)}, the most confident first."
        galleries.append(Gallery("Mistakes", caption, _tiles(result, worst)))
    galleries.append(Gallery("Answers", "An even sample of the held-out images.", _tiles(result, spread)))
    model = result.classifier.model
    if isinstance(model, ViT) and model.spec.has_attention_maps:
        caption = "Attention rollout (appendix D.8 of the paper): the parts that fed the answer glow."
        galleries.append(Gallery("What the model looked at", caption, _tiles(result, spread, rollout=True)))
    return galleries


def _tiles(result: RunResult, index: Tensor, *, rollout: bool = False) -> list[Tile]:
    test, rule, model = result.test, result.classifier.preprocess, result.classifier.model
    seen_BCYX = resize(rule, test.images[index])
    heat_BYX = torch.ones(len(index), *rule.image_size)
    if rollout and isinstance(model, ViT):
        x_BCYX = normalise(rule, seen_BCYX).to(result.classifier.device)
        heat_BYX = upsample_heat(rollout_heat(model, x_BCYX).cpu(), rule.image_size)
    tiles: list[Tile] = []
    zoom = max(1, round(_SIDE_PX / rule.image_size[1]))
    for image_CYX, heat_YX, i in zip(seen_BCYX, heat_BYX, index.tolist(), strict=True):
        p, answer = result.scores.probabilities_BK[i].max(dim=0)
        truth = int(test.labels[i])
        good = int(answer) == truth
        caption = f"{test.classes[int(answer)]} ({p.item():.0%})" + ("" if good else f" but is {test.classes[truth]}")
        picture = overlay(image_CYX, heat_YX, scale=zoom) if rollout else to_picture(image_CYX, scale=zoom)
        tiles.append(Tile(figures.png(picture), caption, good))
    return tiles


def _facts(result: RunResult, pretraining: RunResult | None) -> list[tuple[str, str]]:
    spec, recipe = result.recipe.model, result.recipe
    facts = [
        (
            "model",
            f"{format_name(spec)}: {count_params(spec):,} parameters, {count_macs(spec) / 1e6:,.1f} M MACs per image",
        ),
        ("data", f"{recipe.data.name}, {recipe.data.test_frac:.0%} held out by class, seed {recipe.seed}"),
        ("test loss", f"{result.scores.loss:.4f}"),
        ("speed", f"{result.images_per_second:,.0f} images/s in training, on {result.classifier.device}"),
        ("steps", f"{len(result.records):,} of {recipe.train.batch_size} images"),
        ("run folder", str(result.folder)),
    ]
    if pretraining is not None:
        facts.append(
            ("started from", f"{pretraining.recipe.title.lower()}: {pretraining.scores.top1:.1%} test accuracy")
        )
    return facts
