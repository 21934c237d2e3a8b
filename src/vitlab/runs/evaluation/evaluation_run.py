"""`vitlab evaluate`: what a model is worth on labelled images, in numbers with intervals, and as a page.

Letters: B images, K classes of the data, M classes of the model.
"""

import dataclasses
import functools
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import config, dist, fsio
from vitlab.core.console import Console
from vitlab.core.errors import UsageError
from vitlab.core.runtime import prepare, require_threads, unchanged
from vitlab.data.dataset import Opened
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import Classifier, load
from vitlab.evaluation.answers import first_answers
from vitlab.evaluation.features import FeatureRule
from vitlab.evaluation.intervals import RESAMPLES
from vitlab.evaluation.knn import NEIGHBOURS
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.real_labels import read_real, score_real
from vitlab.models.spec import TokenKind
from vitlab.runs.evaluation.answering import (
    AskRule,
    ask,
    known_images,
    match_classes,
    require_answers,
    require_resamples,
    restricted,
)
from vitlab.runs.evaluation.evaluated_parts import Measured, as_in_the_run, choose_parts, data_of_run, start_of
from vitlab.runs.evaluation.numbers import CountRule, Found, count
from vitlab.runs.evaluation.representation import RepresentationRule, measure
from vitlab.runs.evaluation.result import EvaluationResult
from vitlab.runs.evaluation.store import Work, store
from vitlab.runs.evaluation.store import save_temperature as store_temperature
from vitlab.runs.evaluation.vtab_runs import run_vtab
from vitlab.runs.training.run_record import pretraining_of
from vitlab.weights.bundle import require_consistent
from vitlab.weights.catalogue import Expected, find


def evaluate(
    model: str | Path | None = None,
    data: str | Path | None = None,
    *,
    part: str | None = None,
    out: str | Path | None = None,
    label_map: str | Path | None = None,
    restrict: bool = False,
    real: str | Path | None = None,
    fit_on: str | None = None,
    save_temperature: str | Path | None = None,
    few_shot: Sequence[int] = (),
    knn: bool = False,
    probe: bool = False,
    layers: Sequence[int] = (),
    tokens: TokenKind | None = None,
    vtab: bool = False,
    tasks: Sequence[str] = (),
    sweep: Sequence[str] = (),
    overrides: Sequence[str] = (),
    seeds: int = 1,
    download: bool = False,
    as_published: str | None = None,
    preprocess: str | None = None,
    force: bool = False,
    batch_size: int = 64,
    workers: int | None = None,
    resamples: int = RESAMPLES,
    device: str = "auto",
    seed: int = 0,
    threads: int | None = None,
    quiet: bool = False,
) -> EvaluationResult:
    """Measures a model (bundle, run, file or published name) on `data`, or on that of its run.

    `part` is test, val, train or all; by default the first of test, val and all that there is. `fit_on` names the part on which
    a temperature, and thresholds where images have several labels, are fitted: val where it is not measured on.
    `save_temperature` is a new folder for the bundle with that temperature. `label_map` says in JSON which of the model's
    classes stand for the data's, and `restrict` leaves it no others; `real` is the file of ImageNet-ReaL. `few_shot`, `knn`
    and `probe` measure features: what the head sees, or those of `layers` and `tokens`, as in `embed`. `vtab` fine-tunes on the
    tasks of VTAB-1k: on `tasks` or all of them, with `overrides` of its recipe and the best of `sweep`, `seeds` times;
    `download` fetches data. `as_published` is a name of the catalogue whose settings are used and whose accuracy is compared.
    With `out`, a new folder, all is stored there: numbers, records, page.
    """
    require_threads(threads)
    rule = AskRule(batch_size, workers)
    require_resamples(resamples)
    expected = _published_row(as_published)
    if expected is not None and preprocess is not None:
        raise UsageError("--as-published decides the preprocessing; leave --preprocess out")
    model = model if model is not None else as_published
    if model is None:
        raise UsageError("give the model to evaluate: a bundle, a run, a file or a published name")
    options = {"part": part, "label-map": label_map, "restrict": restrict, "real": real, "fit-on": fit_on}
    options |= {"save-temperature": save_temperature, "few-shot": ",".join(map(str, few_shot)), "knn": knn}
    options |= {"probe": probe, "layers": ",".join(map(str, layers)), "tokens": tokens, "as-published": as_published}
    options |= {"preprocess": preprocess, "force": force}
    if data is None and not vtab:
        data = data_of_run(model) or ("imagenet" if as_published else None)
    if data is None and not vtab:
        raise UsageError("give the data to evaluate on: a folder, a table, shards, or a name")
    if data is None and (needy := [name for name, value in options.items() if value]):
        raise UsageError(f"VTAB has data of its own, and --{needy[0]} needs some to work on", hint="Name the data.")
    if not vtab and (tasks or sweep or overrides or seeds != 1 or download):
        raise UsageError("--task, --sweep, --set, --seeds and --download go with --vtab")
    features = _features_to_measure(few_shot, knn, probe, FeatureRule(tuple(layers), tokens), expected)
    fine_tune = functools.partial(run_vtab, str(model), tasks=tasks, sweep=sweep, overrides=overrides, seeds=seeds)
    fine_tune = functools.partial(fine_tune, download=download, device=device, seed=seed, threads=threads, quiet=quiet)
    if data is None:  # VTAB alone: `out` is the folder of its runs, and a second call goes on in it
        done = fine_tune(out=out)
        return EvaluationResult(model=str(model), data="vtab", vtab=done.to_json(), seconds=done.seconds)
    folder = None if out is None else fsio.require_free(Path(out))
    bundle_folder = None if save_temperature is None else fsio.require_free(Path(save_temperature))
    started = time.perf_counter()
    with unchanged():
        runtime = prepare(device, seed, threads)
        with dist.join(runtime.device) as world:
            console = Console(quiet=quiet or not world.leads)
            if features is not None and world.size > 1:
                raise UsageError("features are measured in one process", hint="Leave torchrun or srun out.")
            classifier = load(model, preprocess=preprocess, device=str(world.device), quiet=console.quiet)
            if expected is not None and expected.preprocess is not None:
                classifier = _with_preprocess(classifier, expected.preprocess)
            pretrained_on = pretraining_of(start_of(model))
            work = Work(str(model), classifier, pretrained_on, world, console, rule, resamples, seed)
            result = EvaluationResult(model=str(model), data=str(data))
            found: Found | None = None
            opened = open_data(data, console=console)
            opened = opened if part in opened.parts else as_in_the_run(model, data, opened)
            chosen = choose_parts(opened, part, fit_on)
            if bundle_folder is not None:
                _require_fit(chosen, restrict)
            alone = features is not None and (expected is None or expected.measure != "top1")
            match, why_not = _match(work, chosen, str(data), label_map, features=alone, force=force)
            if features is not None:  # first, because they are kept: whatever fails behind them costs nothing twice
                result = _with_features(result, work, opened, features)
            if match is not None:
                found = _measure_answers(work, chosen, match, restrict, real)
                result = dataclasses.replace(result, **found.numbers)
            result = dataclasses.replace(result, notes=[*chosen.notes, *result.notes, *why_not])
            if vtab:
                beside = None if folder is None else folder.with_name(f"{folder.name}-vtab")
                result = dataclasses.replace(result, vtab=fine_tune(out=beside).to_json())
            if expected is not None:
                result = dataclasses.replace(result, published=_compared(result, expected))
            result = dataclasses.replace(result, seconds=round(time.perf_counter() - started, 3))
            options |= {"resamples": resamples if resamples != RESAMPLES else None, "seed": seed}
            command = _command(model, data, {**options, "save-temperature": None})
            if bundle_folder is not None:
                result = store_temperature(result, work, bundle_folder, command)
            if folder is not None and world.leads:
                result = store(result, work, found, opened, folder, command)
            world.meet()
            return result


# --- what goes in -----------------------------------------------------------------------------------------------------


def _published_row(name: str | None) -> Expected | None:
    if name is None:
        return None
    entry = find(name)
    if entry.expected is None:
        raise UsageError(f"no accuracy is published for {name}, as far as the catalogue knows")
    return entry.expected


def _features_to_measure(
    few_shot: Sequence[int], knn: bool, probe: bool, rule: FeatureRule, expected: Expected | None
) -> RepresentationRule | None:
    knn = knn or (expected is not None and expected.measure == "knn")
    if few_shot or knn or probe:
        return RepresentationRule(tuple(few_shot), NEIGHBOURS if knn else None, probe, rule)
    if rule != FeatureRule():
        raise UsageError("--layers and --tokens go with --few-shot, --knn or --probe")
    return None


def _with_preprocess(classifier: Classifier, table: Mapping[str, Any]) -> Classifier:
    rule = config.from_dict(Preprocess, dict(table), "measured_with.")
    bundle = classifier.bundle
    require_consistent(bundle.model.spec, rule, bundle.labels, "the published measurement")
    return Classifier(dataclasses.replace(bundle, preprocess=rule), str(classifier.device))


def _match(
    work: Work, chosen: Measured, data: str, label_map: str | Path | None, *, features: bool, force: bool
) -> tuple[Match | None, list[str]]:
    """What the model's classes mean in this data. Where features are measured, a head that cannot answer is no fault."""
    try:
        require_answers(work.classifier, force=force)
        path = None if label_map is None else Path(label_map)
        return match_classes(work.classifier, chosen.dataset, path, data=data), []
    except UsageError as error:
        if not features or label_map is not None:
            raise
        return None, [f"the head was not measured: {error.what}"]


def _command(model: str | Path, data: str | Path | None, options: Mapping[str, object]) -> str:
    """One that can be pasted: only what was given and changes a number."""
    words = ["vitlab", "evaluate", str(model), *([] if data is None else [str(data)])]
    for name, value in options.items():
        if value:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(words)


def _require_fit(chosen: Measured, restrict: bool) -> None:
    """An error before the work where there would be no temperature to save."""
    if chosen.fit is None:
        raise UsageError(
            "there is nothing to fit a temperature on beside the images that are measured",
            hint="Give data with a validation part, or name another part with --fit-on.",
        )
    if restrict:
        raise UsageError(
            "a temperature of restricted answers is not that of the model's own", hint="Leave --restrict out."
        )


# --- what is measured -------------------------------------------------------------------------------------------------


def _measure_answers(work: Work, chosen: Measured, match: Match, restrict: bool, real: str | Path | None) -> Found:
    classifier = work.classifier
    dataset = known_images(chosen.dataset, match)
    if not len(dataset.labels.values):
        raise UsageError(f"no image of {dataset.name} has a label, so no answer can be right or wrong")
    sets = None if real is None else read_real(Path(real), dataset.keys, len(classifier.labels))
    scored = ask(classifier, dataset, match, work.rule, world=work.world, console=work.console, label="evaluate")
    real_numbers = None
    if sets is not None:
        labels = [sets[i] for i in scored.ids_B.tolist()]
        real_numbers = dataclasses.asdict(score_real(first_answers(scored.logits_BM), labels))
    fit = None
    if chosen.fit is not None:
        known = known_images(chosen.fit, match)
        fit = ask(classifier, known, match, work.rule, world=work.world, console=work.console, label=chosen.fit_part)
    if restrict:
        scored, fit = restricted(scored), None if fit is None else restricted(fit)
    found = count(scored, fit, chosen, CountRule(classifier.bundle.temperature, work.resamples, work.seed))
    notes = [*([match.note] if match.note else []), *found.numbers["notes"]]
    speed = len(scored.ids_B) / scored.seconds
    numbers = {
        **found.numbers,
        "part": chosen.part,
        "real": real_numbers,
        "left_out": scored.bad,
        "notes": notes,
        "images_per_second": round(speed, 1),
    }
    return dataclasses.replace(found, numbers=numbers)


def _with_features(result: EvaluationResult, work: Work, opened: Opened, rule: RepresentationRule) -> EvaluationResult:
    found = measure(
        work.classifier,
        opened,
        rule,
        console=work.console,
        workers=work.rule.workers,
        batch_size=work.rule.batch_size,
    )
    return dataclasses.replace(
        result,
        few_shot=found.get("few_shot"),
        knn=found.get("knn"),
        probe=found.get("probe"),
        features=found,
    )


def _compared(result: EvaluationResult, expected: Expected) -> dict[str, Any]:
    ours = result.top1 if expected.measure == "top1" else (result.knn or {}).get("top1")
    assert ours is not None  # `evaluate` asks the head, or the neighbours, where that was published
    published = expected.top1 / 100
    table = {"top1": published, "measure": expected.measure, "ours": ours, "difference": ours - published}
    return {**table, "settings": expected.settings, "source": expected.source}
