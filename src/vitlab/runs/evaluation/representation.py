"""How good a model's vectors are: few-shot linear, nearest neighbours, linear probe, on features of any layer and token.

Owns who trains and who tests: the data's own parts, and where one is missing, a share that the split seed decides.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitlab.core import config
from vitlab.core.console import Console
from vitlab.core.environment import cache_folder
from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.dataset import Opened
from vitlab.data.sources.opening import require_trainable
from vitlab.data.splits import split_shares
from vitlab.engines.classifier import Classifier
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation import few_shot, knn, linear_probe
from vitlab.evaluation.features import FeatureRule, FeatureSet, features_of, pick_rows
from vitlab.evaluation.metrics import wilson_interval
from vitlab.evaluation.records import Record, hash_weights, new_record
from vitlab.models.spec import ViTSpec

HELD_OUT = 0.2  # of a part that has to serve as two: VTAB's share (800 and 200)


@dataclasses.dataclass(frozen=True)
class RepresentationRule:
    """What to measure. The few-shot draws have the seeds 0 to `seeds` - 1, as in the published code."""

    shots: tuple[int, ...] = ()
    knn: int | None = None
    probe: bool = False
    features: FeatureRule = dataclasses.field(default_factory=FeatureRule)
    seeds: int = few_shot.SEEDS
    split_seed: int = 0

    def __post_init__(self) -> None:
        if not (self.shots or self.knn is not None or self.probe):
            raise UsageError("nothing to measure was named", hint="Ask for few-shot, k-NN or a probe.")
        if self.seeds < 1:
            raise UsageError(f"few-shot needs at least 1 draw, not {self.seeds}")


class Role(NamedTuple):
    """Some images of a part, by number, that do one thing."""

    part: str
    images: Tensor


class Vectors(NamedTuple):
    """The readable images of a role: chunks of [n, D], and a label for each row."""

    chunks: list[Tensor]
    labels: Tensor


def measure(
    classifier: Classifier,
    opened: Opened,
    rule: RepresentationRule,
    *,
    console: Console,
    options: InferenceOptions | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """The measures that `rule` asks for, ready for JSON; accuracies are fractions.

    The seconds of `features` are those of the model, and each measure has its own beside them.
    """
    roles, notes = assign_roles(opened, rule)
    _require_possible(opened, roles, rule)
    found = {
        part: features_of(
            classifier,
            opened.parts[part],
            rule.features,
            cache=cache or cache_folder() / "features",
            console=console,
            options=options,
            label=part,
        )
        for part in dict.fromkeys(role.part for role in roles.values())
    }
    bad = {name: why for features in found.values() for name, why in features.bad.items()}
    if bad:
        name, why = next(iter(bad.items()))
        notes.append(f"{len(bad)} image(s) could not be read and were left out, the first is {name}: {why}")
    for note in notes:
        console.say(note)
    given = {name: _vectors(opened, role, found[role.part]) for name, role in roles.items()}
    test = opened.parts[roles["test"].part]
    result: dict[str, Any] = {
        "features": {
            "layers": list(rule.features.layers),
            "tokens": rule.features.tokens,
            "width": found[roles["train"].part].width,
            "classes": len(opened.classes),
            "train": len(given["train"].labels),
            "test": len(given["test"].labels),
            "part": roles["test"].part,
            "fingerprint": test.fingerprint(),
            "bad": len(bad),
            "computed": sum(features.computed for features in found.values()),
            "seconds": sum(features.seconds for features in found.values()),
            "notes": notes,
        }
    }
    return result | _measures(given, opened.classes, rule, classifier.device, console)


def _measures(
    given: Mapping[str, Vectors],
    classes: Sequence[str],
    rule: RepresentationRule,
    device: torch.device,
    console: Console,
) -> dict[str, Any]:
    device = device if device.type != "mps" else torch.device("cpu")  # MPS has no float64
    found: dict[str, Any] = {}
    if rule.shots:
        found |= few_shot_part(given["train"], given["test"], classes, rule, device)
    if rule.knn is not None:
        found["knn"] = knn_part(given["train"], given["test"], len(classes), rule.knn, device)
    if rule.probe:
        found["probe"] = probe_part(given["fit"], given["tune"], given["test"], len(classes), device, console)
    return found


def make_records(
    found: Mapping[str, Any],
    classifier: Classifier,
    opened: Opened,
    *,
    data: str,
    command: str,
    pretrained_on: str = "",
) -> list[Record]:
    """One record for each measure in the answer of `measure`; its seconds are those of the features and its own."""
    features = found["features"]
    spec = classifier.model.spec
    told = {"layers": features["layers"], "tokens": features["tokens"], "train_images": features["train"]}
    told |= {"preprocess": config.to_dict(classifier.preprocess)}
    told |= {"pos": spec.pos, "pos_at": spec.pos_at} if isinstance(spec, ViTSpec) else {}  # what Table 8 is about
    rows: dict[str, tuple[Mapping[str, Any], Sequence[str]]] = {  # the numbers, and which of them are settings
        **{f"few-shot-{shots}": (row, ("l2",)) for shots, row in found.get("few_shot_detail", {}).items()},
        **({f"knn-{found['knn']['k']}": (found["knn"], ("k", "weighting", "temperature"))} if "knn" in found else {}),
        **({"probe": (found["probe"], ("l2",))} if "probe" in found else {}),
    }
    weights = hash_weights(classifier.model)
    return [
        new_record(
            classifier.model,
            opened.parts[features["part"]],
            data=data,
            part=features["part"],
            measure=name,
            values=row.get("values") or [row["top1"]],
            seeds=row.get("seeds", ()),
            interval=(row["interval"][0], row["interval"][1]) if "interval" in row else None,
            n=features["test"],
            settings=told | {key: row[key] for key in settings},
            device=classifier.device,
            seconds=features["seconds"] + row["seconds"],
            command=command,
            pretrained_on=pretrained_on,
            weights=weights,
        )
        for name, (row, settings) in rows.items()
    ]


# --- who does what ----------------------------------------------------------------------------------------------------


def assign_roles(opened: Opened, rule: RepresentationRule) -> tuple[dict[str, Role], list[str]]:
    """`train` and `test`, and for a probe `fit` and `tune`, with the sentences that say what had to be held out.

    A test part is never tuned on: `val` is one where there is no `test`.
    """
    notes = list(opened.notes)
    parts = opened.parts
    if "train" not in parts and "all" not in parts:
        raise UsageError(f"the data has {', '.join(parts)}, but no images to learn from")
    own = "train" if "train" in parts else "all"
    test = next((name for name in ("test", "val") if name in parts), None)
    if not opened.sparse:
        require_trainable(parts[own], *([] if test is None else [parts[test]]))
    train = Role(own, torch.arange(len(parts[own])))
    if test is None:
        train, tested = _hold_out(opened, train, rule.split_seed)
        notes.append(f"{len(tested.images):,} of {len(parts[own]):,} images held out to test on")
    else:
        tested = Role(test, torch.arange(len(parts[test])))
    roles = {"train": train, "test": tested}
    if rule.probe and test == "test" and "val" in parts:
        roles |= {"fit": train, "tune": Role("val", torch.arange(len(parts["val"])))}
    elif rule.probe:
        roles["fit"], roles["tune"] = _hold_out(opened, train, rule.split_seed)
        notes.append(f"{len(roles['tune'].images):,} training images held out to choose the probe's l2")
    return roles, notes


def _hold_out(opened: Opened, role: Role, seed: int) -> tuple[Role, Role]:
    dataset = opened.parts[role.part].subset(role.images)
    split = split_shares(dataset, {"train": 1 - HELD_OUT, "test": HELD_OUT}, seed, dataset.groups)
    kept = torch.tensor([name == "train" for name in split])
    return Role(role.part, role.images[kept]), Role(role.part, role.images[~kept])


def _require_possible(opened: Opened, roles: dict[str, Role], rule: RepresentationRule) -> None:
    """What the labels alone can tell is told before the model is run on a single image."""
    labels_N = opened.parts[roles["train"].part].labels.single()[roles["train"].images]
    for shots in rule.shots:
        few_shot.draw_shots(labels_N, shots, 0, opened.classes)
    if rule.knn is not None:
        knn.require_neighbours((rule.knn,), len(labels_N))


def _vectors(opened: Opened, role: Role, features: FeatureSet) -> Vectors:
    index = role.images[features.readable()[role.images]]
    if not len(index):
        raise VitlabError(f"none of the {len(role.images):,} images of {role.part} could be read")
    return Vectors(features.rows(index), opened.parts[role.part].labels.single()[index])


# --- the measures -----------------------------------------------------------------------------------------------------


def few_shot_part(
    train: Vectors, test: Vectors, classes: Sequence[str], rule: RepresentationRule, device: torch.device
) -> dict[str, Any]:
    """`few_shot`, the mean over the draws, and `few_shot_detail` with every draw."""
    detail: dict[str, Any] = {}
    for shots in rule.shots:
        values, started = list[float](), time.perf_counter()
        for seed in range(rule.seeds):
            index = few_shot.draw_shots(train.labels, shots, seed, classes)
            fitted = few_shot.fit_ridge(
                pick_rows(train.chunks, index).to(device), train.labels[index].to(device), len(classes)
            )
            values.append(few_shot.count_right(fitted, test.chunks, test.labels) / len(test.labels))
        detail[str(shots)] = {
            "seeds": list(range(rule.seeds)),
            "values": values,
            "low": min(values),
            "high": max(values),
            "l2": few_shot.L2,
            "seconds": time.perf_counter() - started,
        }
    means = {shots: sum(found["values"]) / len(found["values"]) for shots, found in detail.items()}
    return {"few_shot": means, "few_shot_detail": detail}


def knn_part(train: Vectors, test: Vectors, num_classes: int, k: int, device: torch.device) -> dict[str, Any]:
    """`k` neighbours with weighted votes are the answer; other numbers and plain votes stand beside it."""
    started = time.perf_counter()
    ks = sorted({k, *(other for other in knn.GRID if other <= len(train.labels))})
    votes = knn.knn_votes(train.chunks, train.labels, test.chunks, test.labels, num_classes, ks=ks, device=device)
    total = len(test.labels)
    return {
        "k": k,
        "top1": votes.weighted[k] / total,
        "interval": list(wilson_interval(votes.weighted[k], total)),
        "weighting": "weighted",
        "temperature": knn.TEMPERATURE,
        "seconds": time.perf_counter() - started,
        "grid": [{"k": n, "plain": votes.plain[n] / total, "weighted": votes.weighted[n] / total} for n in ks],
    }


def probe_part(
    fit: Vectors, tune: Vectors, test: Vectors, num_classes: int, device: torch.device, console: Console
) -> dict[str, Any]:
    """l2 chosen on `tune`, then fitted again on `fit` and `tune` together, and tested once."""
    started = time.perf_counter()
    problem = linear_probe.pose(fit.chunks, fit.labels, num_classes, device)
    with console.progress("probe", linear_probe.TRIALS) as advance:
        trials = linear_probe.sweep(
            problem,
            tune.chunks,
            tune.labels,
            lambda number, trial: advance(number, f"l2 {trial.l2:.1e}: {trial.right / len(tune.labels):.2%}"),
        )
    l2 = linear_probe.choose(trials)
    everything = Vectors([*fit.chunks, *tune.chunks], torch.cat([fit.labels, tune.labels]))
    problem = linear_probe.pose(everything.chunks, everything.labels, num_classes, device)
    head = linear_probe.plain_head(problem, linear_probe.fit(problem, l2))
    right, loss = linear_probe.judge(head, test.chunks, test.labels)
    learnt, _ = linear_probe.judge(head, everything.chunks, everything.labels)
    return {
        "top1": right / len(test.labels),
        "interval": list(wilson_interval(right, len(test.labels))),
        "loss": loss,
        "l2": l2,
        "seconds": time.perf_counter() - started,
        "train_top1": learnt / len(everything.labels),
        "val_top1": max(trial.right for trial in trials) / len(tune.labels),
        "sweep": [
            {"l2": trial.l2, "val_top1": trial.right / len(tune.labels), "val_loss": trial.loss} for trial in trials
        ],
    }
