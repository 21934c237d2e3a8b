"""The test of a trained run as a record, so that fine-tuning fills the cells of published tables like any other measurement."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from vitlab.core import config
from vitlab.core.errors import UnknownName
from vitlab.data.parts import test_part
from vitlab.data.sources.named import find_named
from vitlab.evaluation.records import Subject, new_record, read_records, write_record
from vitlab.runs.training.finish import RunResult
from vitlab.training.recipe import recipe_to_dict

RECORDS = "records"
# What the weights behind a tag of the catalogue were first trained on, in the words of the published tables.
_PRETRAINING = {
    **dict.fromkeys(("i21k", "i21k-i1k-384", "i21k-i1k-224", "bit-m", "bit-m-i1k"), "imagenet21k"),
    **dict.fromkeys(("augreg-i21k", "augreg-i21k-i1k-384", "augreg-i21k-i1k-224"), "imagenet21k-augreg"),
    "bit-s": "imagenet",
}


def pretraining_of(start: str) -> str:
    """What the weights of that catalogue name were first trained on; empty for a file or a run, which does not say it."""
    return _PRETRAINING.get(start.partition("@")[2], "")


def part_to_test(data: str) -> str:
    """`val` is what a set without `test` is tested on, as ImageNet is everywhere."""
    try:
        parts = find_named(data).parts
    except UnknownName:
        return "test"
    return test_part(parts) or "test"


def record_runs(results: Sequence[RunResult], folder: Path, *, recipe: str, command: str) -> Path | None:
    """One record for runs that differ by their seed alone, in `records/` of `folder`; None where nothing was tested.

    A run that is resumed after its end was measured before, and gets no second one.
    """
    first = results[0]
    scores = [result.scores for result in results if result.scores is not None]
    if first.test is None or len(scores) < len(results):
        return None
    whole = first.recipe
    precisions = [score.mean_ap for score in scores if score.mean_ap is not None] or None  # of several labels
    settings = {
        "start": whole.init,
        "train_images": first.num_fitted,
        "image_size": list(whole.data.image_size),
        "train": whole.train.method,
        "batch_size": whole.train.batch_size,
        "lr": whole.optim.lr,
        "precision": whole.train.precision,
        "average": whole.train.ema,
        "dropout": getattr(whole.model, "dropout", 0.0),  # what tells the columns of the authors' replication apart
        "config": config.fingerprint(recipe_to_dict(whole)),
    }
    subject = Subject(
        model=first.classifier.model,
        dataset=first.test,
        data=whole.data.source,
        part=part_to_test(whole.data.source),
        settings=settings,
        pretrained_on=pretraining_of(whole.init),
        recipe=recipe,
        device=first.classifier.device,
        seconds=sum(result.seconds for result in results),
        command=command,
    )
    record = new_record(
        subject,
        "top1" if precisions is None else "mean_ap",
        [score.top1 for score in scores] if precisions is None else precisions,
        seeds=[result.recipe.seed for result in results],
        interval=scores[0].interval if len(scores) == 1 and precisions is None else None,
        n=scores[0].n,
    )
    known = read_records(folder / RECORDS) if (folder / RECORDS).is_dir() else []
    if any(dataclasses.replace(one, date=record.date, seconds=record.seconds) == record for one in known):
        return None
    return write_record(folder / RECORDS, record)
