"""`vitlab compare`: two models on the same images, with what chance makes of the difference. Letters: B images, K classes."""

import dataclasses
import shlex
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.core import dist, fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.core.runtime import prepare, require_threads, unchanged
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import Classifier, load
from vitlab.evaluation.answers import Answers, judge
from vitlab.evaluation.intervals import RESAMPLES, bootstrap, mcnemar, mean_of
from vitlab.report.comparison_page import ComparisonFacts, build_comparison_page
from vitlab.report.page import render
from vitlab.runs.evaluation.answering import (
    AskRule,
    ask,
    known_images,
    match_classes,
    require_answers,
    require_resamples,
)
from vitlab.runs.evaluation.evaluated_parts import Measured, as_in_the_run, choose_parts, data_of_run
from vitlab.runs.evaluation.files import PAGE, both_answers_table

NUMBERS = "comparison.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `vitlab compare --json` prints. `difference` is B minus A; `p` of McNemar's exact test, `p_mid` of its mid-p."""

    a: str
    b: str
    data: str
    part: str
    n: int
    top1_a: float
    top1_b: float
    difference: float
    interval: tuple[float, float]
    both_right: int
    only_a: int
    only_b: int
    both_wrong: int
    same_answer: int
    p: float
    p_mid: float
    per_class: list[dict[str, Any]]
    notes: list[str]
    out: str | None = None
    seconds: float = 0.0

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        low, high = self.interval
        said = [f"note       {note}" for note in self.notes]
        said += [
            f"A          {self.top1_a:.2%}  {self.a}",
            f"B          {self.top1_b:.2%}  {self.b}",
            f"B - A      {100 * self.difference:+.2f} points ({100 * low:+.2f} to {100 * high:+.2f}), "
            f"{self.n:,} images ({self.part})",
            f"only A     {self.only_a:,} right; only B {self.only_b:,}; both {self.both_right:,}; "
            f"neither {self.both_wrong:,}",
            f"McNemar    p = {self.p:.4g} (exact), {self.p_mid:.4g} (mid-p)",
        ]
        return said + ([f"page       {Path(self.out) / PAGE}"] if self.out is not None else [])


def compare(
    a: str | Path,
    b: str | Path,
    data: str | Path | None = None,
    *,
    part: str | None = None,
    out: str | Path | None = None,
    label_map: str | Path | None = None,
    force: bool = False,
    batch_size: int = 64,
    workers: int | None = None,
    resamples: int = RESAMPLES,
    device: str = "auto",
    seed: int = 0,
    threads: int | None = None,
    quiet: bool = False,
) -> Comparison:
    """Two models (bundle, run, file or published name) on the images of `data`, or on those of A's run.

    Where a run has split this data itself, images that one of the two learnt from are left out. Each sees the images in its own
    preprocessing. Images that one of them cannot read are left out for both. With `out`, a new folder, numbers, answers and the
    page are stored there.
    """
    require_threads(threads)
    rule = AskRule(batch_size, workers)
    require_resamples(resamples)
    data = data or data_of_run(a)
    if data is None:
        raise UsageError("give the data to compare on: a folder, a table, shards, or a name")
    folder = None if out is None else fsio.require_free(Path(out))
    started = time.perf_counter()
    with unchanged():
        runtime = prepare(device, seed, threads)
        with dist.join(runtime.device) as world:
            console = Console(quiet=quiet or not world.leads)
            chosen = _held_out_by_both(a, b, data, open_data(data, console=console), part)
            if chosen.dataset.labels.multi:
                raise UsageError("images with several labels each have no single answer to compare")
            work = _Work(
                chosen.dataset, None if label_map is None else Path(label_map), str(data), rule, world, console
            )
            first, first_ids_B = _answers(work, a, "A", force=force)
            second, second_ids_B = _answers(work, b, "B", force=force)
            first, second, ids_B = _common(first, first_ids_B, second, second_ids_B)
            found = _compared(first, second, chosen.dataset.classes, resamples, seed)
            seconds = round(time.perf_counter() - started, 3)
            told = {"a": str(a), "b": str(b), "data": str(data), "part": chosen.part, "notes": list(chosen.notes)}
            result = Comparison(**told, **found, seconds=seconds)
            if folder is not None and world.leads:
                result = _store(result, first, second, chosen.dataset, ids_B, folder)
            world.meet()
            return result


def _held_out_by_both(a: str | Path, b: str | Path, data: str | Path, opened: Opened, part: str | None) -> Measured:
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
    dataset: Dataset
    label_map: Path | None
    data: str
    rule: AskRule
    world: World
    console: Console


def _answers(work: _Work, model: str | Path, label: str, *, force: bool) -> tuple[Answers, Tensor]:
    """What a model says, and of which images of the whole part."""
    classifier: Classifier = load(model, device=str(work.world.device), quiet=work.console.quiet)
    require_answers(classifier, force=force)
    match = match_classes(classifier, work.dataset, work.label_map, data=work.data)
    asked = known_images(work.dataset, match)
    scored = ask(classifier, asked, match, work.rule, world=work.world, console=work.console, label=label)
    places_B = torch.arange(len(work.dataset))
    if len(asked) < len(work.dataset):
        places_B = match.known[work.dataset.labels.single()].nonzero()[:, 0]
    answers = judge(scored.logits_BM, scored.targets, match, classifier.bundle.temperature)
    return answers, places_B[scored.ids_B]


def _common(
    first: Answers, first_ids_B: Tensor, second: Answers, second_ids_B: Tensor
) -> tuple[Answers, Answers, Tensor]:
    both = torch.tensor(sorted({*first_ids_B.tolist()} & {*second_ids_B.tolist()}), dtype=torch.int64)
    if not len(both):
        raise UsageError("there is no image that both models were asked about")
    keep_first, keep_second = (torch.isin(ids_B, both) for ids_B in (first_ids_B, second_ids_B))
    return first.chosen(keep_first), second.chosen(keep_second), both


def _compared(first: Answers, second: Answers, classes: tuple[str, ...], resamples: int, seed: int) -> dict[str, Any]:
    a_B, b_B = first.right, second.right
    test = mcnemar(a_B, b_B)
    difference_B = b_B.double() - a_B.double()
    interval = bootstrap({"difference": mean_of(difference_B)}, len(a_B), resamples=resamples, seed=seed)
    rows: list[dict[str, Any]] = []
    for k, name in enumerate(classes):
        own_B = first.truth_B == k
        if bool(own_B.any()):
            of_a, of_b = (float(right_B[own_B].double().mean()) for right_B in (a_B, b_B))
            rows.append({"label": name, "n": int(own_B.sum()), "a": of_a, "b": of_b, "difference": of_b - of_a})
    return {
        "n": len(a_B),
        "top1_a": float(a_B.double().mean()),
        "top1_b": float(b_B.double().mean()),
        "difference": float(difference_B.mean()),
        "interval": interval["difference"],
        "both_right": int((a_B & b_B).sum()),
        "only_a": test.only_first,
        "only_b": test.only_second,
        "both_wrong": int((~a_B & ~b_B).sum()),
        "same_answer": int((first.answer_B == second.answer_B).sum()),
        "p": test.exact,
        "p_mid": test.mid,
        "per_class": rows,
    }


def _store(
    result: Comparison, first: Answers, second: Answers, dataset: Dataset, ids_B: Tensor, folder: Path
) -> Comparison:
    result = dataclasses.replace(result, out=str(folder))
    command = shlex.join(["vitlab", "compare", result.a, result.b, result.data, "--part", result.part])
    facts = ComparisonFacts(command=command, **_page_numbers(result))
    names = (*dataset.classes, "something else")
    keys = [str(dataset.keys[i]) for i in ids_B.tolist()]
    with fsio.new_folder(folder) as new:
        new.write_json(NUMBERS, dataclasses.asdict(result))
        new.write("answers.csv", both_answers_table(keys, first, second, names))
        new.write(PAGE, render(build_comparison_page(facts, first, second, dataset, ids_B)))
    return result


def _page_numbers(result: Comparison) -> dict[str, Any]:
    left = ("out", "seconds", "same_answer")
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name not in left}
