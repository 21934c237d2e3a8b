"""`vitlab evaluate --few-shot --knn --probe`: how good a model's features are, of any layer and token.

Who trains and who tests is the rule of `data.parts`; where a part is missing, a fifth is held out.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitlab.core import config
from vitlab.core.console import Console
from vitlab.core.environment import cache_folder
from vitlab.core.errors import VitlabError, amount
from vitlab.data.dataset import Opened
from vitlab.data.parts import held_out_images, test_part, train_part, validation_part
from vitlab.data.sources.opening import require_trainable
from vitlab.engines.classifier import Classifier
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation import few_shot, knn
from vitlab.evaluation.features import FeatureRule, features_of
from vitlab.evaluation.records import Record, Subject, hash_weights, new_record
from vitlab.evaluation.representation import Vectors, few_shot_numbers, knn_numbers, probe_numbers
from vitlab.evaluation.row_store import ImageRows

HELD_OUT = 0.2  # of a part that has to serve as two: VTAB's share (800 and 200)
_SPLIT_SEED = 0  # by which these are chosen


@dataclasses.dataclass(frozen=True)
class RepresentationRule:
    """What to measure: at least one of few-shot, nearest neighbours and a probe."""

    shots: tuple[int, ...] = ()
    knn: int | None = None
    probe: bool = False
    features: FeatureRule = dataclasses.field(default_factory=FeatureRule)


class Role(NamedTuple):
    """Some images of a part, by number, that do one thing."""

    part: str
    images: Tensor


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
        notes.append(f"left out {amount(len(bad), 'image')} that could not be read, the first is {name}: {why}")
    for note in notes:
        console.say(note)
    given = {name: _vectors(opened, role, found[role.part]) for name, role in roles.items()}
    result: dict[str, Any] = {
        "features": {
            "layers": list(rule.features.layers),
            "tokens": rule.features.tokens,
            "width": found[roles["train"].part].width,
            "classes": len(opened.classes),
            "train": len(given["train"].labels),
            "test": len(given["test"].labels),
            "part": roles["test"].part,
            "fingerprint": opened.parts[roles["test"].part].fingerprint(),
            "bad": len(bad),
            "computed": sum(features.computed for features in found.values()),
            "seconds": sum(features.seconds for features in found.values()),
            "notes": notes,
        }
    }
    device = classifier.device if classifier.device.type != "mps" else torch.device("cpu")  # MPS has no float64
    train, test = given["train"], given["test"]
    if rule.shots:
        result |= few_shot_numbers(train, test, opened.classes, rule.shots, few_shot.SEEDS, device)
    if rule.knn is not None:
        result["knn"] = knn_numbers(train, test, len(opened.classes), rule.knn, device)
    if rule.probe:
        result["probe"] = probe_numbers(given["fit"], given["tune"], test, len(opened.classes), device, console)
    return result


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
    about = {"layers": features["layers"], "tokens": features["tokens"], "train_images": features["train"]}
    about |= {"preprocess": config.to_dict(classifier.preprocess)}
    about |= {key: getattr(spec, key) for key in ("pos", "pos_at") if hasattr(spec, key)}  # what Table 8 is about
    rows: dict[str, tuple[Mapping[str, Any], Sequence[str]]] = {  # the numbers, and which of them are settings
        **{f"few-shot-{shots}": (row, ("l2",)) for shots, row in found.get("few_shot_detail", {}).items()},
        **({f"knn-{found['knn']['k']}": (found["knn"], ("k", "weighting", "temperature"))} if "knn" in found else {}),
        **({"probe": (found["probe"], ("l2",))} if "probe" in found else {}),
    }
    subject = Subject(
        model=classifier.model,
        dataset=opened.parts[features["part"]],
        data=data,
        part=features["part"],
        settings=about,
        device=classifier.device,
        seconds=features["seconds"],
        command=command,
        pretrained_on=pretrained_on,
        weights=hash_weights(classifier.model),
    )
    return [
        new_record(
            dataclasses.replace(subject, seconds=features["seconds"] + row["seconds"]),
            name,
            row.get("values") or [row["top1"]],
            seeds=row.get("seeds", ()),
            interval=(row["interval"][0], row["interval"][1]) if "interval" in row else None,
            n=features["test"],
            settings={key: row[key] for key in settings},
        )
        for name, (row, settings) in rows.items()
    ]


# --- who does what ----------------------------------------------------------------------------------------------------


def assign_roles(opened: Opened, rule: RepresentationRule) -> tuple[dict[str, Role], list[str]]:
    """`train` and `test`, and for a probe `fit` and `tune`, with the sentences that say what had to be held out."""
    notes, parts = list(opened.notes), opened.parts
    train_name, test_name = train_part(parts), test_part(parts)
    if not opened.sparse:
        require_trainable(*(parts[name] for name in (train_name, test_name) if name is not None))
    train = _whole_part(opened, train_name)
    if test_name is None:
        train, test = _hold_out(opened, train)
        notes.append(f"{len(test.images):,} of {len(parts[train_name]):,} images held out to test on")
    else:
        test = _whole_part(opened, test_name)
    roles = {"train": train, "test": test}
    if rule.probe and (val_name := validation_part(parts)) is not None:
        roles |= {"fit": train, "tune": _whole_part(opened, val_name)}
    elif rule.probe:
        roles["fit"], roles["tune"] = _hold_out(opened, train)
        notes.append(f"{len(roles['tune'].images):,} training images held out to choose the probe's l2")
    return roles, notes


def _whole_part(opened: Opened, part: str) -> Role:
    return Role(part, torch.arange(len(opened.parts[part])))


def _hold_out(opened: Opened, role: Role) -> tuple[Role, Role]:
    held_N = held_out_images(opened.parts[role.part].subset(role.images), "test", HELD_OUT, _SPLIT_SEED)
    return Role(role.part, role.images[~held_N]), Role(role.part, role.images[held_N])


def _require_possible(opened: Opened, roles: dict[str, Role], rule: RepresentationRule) -> None:
    """Raise an error for what the labels alone rule out, before the model is run on a single image."""
    labels_N = opened.parts[roles["train"].part].labels.single()[roles["train"].images]
    for shots in rule.shots:
        few_shot.draw_shots(labels_N, shots, 0, opened.classes)
    if rule.knn is not None:
        knn.require_neighbours((rule.knn,), len(labels_N))


def _vectors(opened: Opened, role: Role, features: ImageRows) -> Vectors:
    index = role.images[features.readable()[role.images]]
    if not len(index):
        raise VitlabError(f"none of the {len(role.images):,} images of {role.part} could be read")
    return Vectors(features.rows(index), opened.parts[role.part].labels.single()[index])
