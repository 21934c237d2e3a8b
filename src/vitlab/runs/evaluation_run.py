"""`vitlab evaluate`: what a model is worth on labelled images, in numbers with intervals, and as a page.

Letters: B images, K classes of the data, M classes of the model.
"""

import dataclasses
import functools
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import config, dist, fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.core.runtime import prepare, require_threads, unchanged
from vitlab.data.dataset import Opened
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources import open_data
from vitlab.engines.classifier import Classifier, load
from vitlab.evaluation.answers import first_answers
from vitlab.evaluation.calibration import BINS
from vitlab.evaluation.intervals import RESAMPLES
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.metrics import SKEWED
from vitlab.evaluation.real_labels import read_real, score_real
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
from vitlab.runs.answering import AskRule, ask, known_images, match_classes, require_answers, restricted
from vitlab.runs.evaluated_parts import Measured, as_in_the_run, choose_parts, data_of_run
from vitlab.runs.evaluation_files import CARD, NUMBERS, PAGE, RECORDS, answers_table, confusion_table, several_table
from vitlab.runs.evaluation_numbers import CountRule, Found, count
from vitlab.runs.representation import RepresentationRule, make_records, measure
from vitlab.runs.run_record import pretraining_of
from vitlab.runs.vtab_runs import VtabResult, run_vtab
from vitlab.weights.bundle import require_consistent, save_bundle
from vitlab.weights.card import with_measurements
from vitlab.weights.catalogue import Expected, find

_NEIGHBOURS = 20  # of DINO's protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What `vitlab evaluate --json` prints. Accuracies are fractions; what was not measured is None."""

    model: str
    data: str
    part: str | None = None
    n: int | None = None
    top1: float | None = None
    top5: float | None = None
    loss: float | None = None
    ece: float | None = None
    mean_ap: float | None = None
    intervals: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    macro: dict[str, float] | None = None
    micro_f1: float | None = None
    skew: float | None = None
    per_class: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    confused: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    calibration: dict[str, Any] | None = None
    selective: dict[str, Any] | None = None
    real: dict[str, Any] | None = None
    few_shot: dict[str, Any] | None = None
    knn: dict[str, Any] | None = None
    probe: dict[str, Any] | None = None
    features: dict[str, Any] | None = None
    vtab: dict[str, Any] | None = None
    published: dict[str, Any] | None = None
    left_out: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    notes: list[str] = dataclasses.field(default_factory=list[str])
    out: str | None = None
    temperature_bundle: str | None = None
    seconds: float = 0.0
    images_per_second: float | None = None

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        said = [f"note       {note}" for note in self.notes]
        if self.top1 is not None:
            said.append(f"top-1      {self.top1:.2%}{self._range('top1')} of {self.n:,} images ({self.part})")
            said.append(f"top-5      {self.top5:.2%}{self._range('top5')}")
            said.append(f"loss       {self.loss:.4f}{self._range('loss', '.4f')}")
        if self.mean_ap is not None:
            said.append(f"mean AP    {self.mean_ap:.4f}{self._range('mean_ap', '.4f')}")
        if self.macro is not None:
            careful = f"; classes are skewed {self.skew:.0f} : 1" if self.skew and self.skew >= SKEWED else ""
            said.append(
                f"per class  recall {self.macro['recall']:.2%}, precision {self.macro['precision']:.2%}, "
                f"F1 {self.macro['f1']:.2%}{self._range('macro_f1')}, mean over classes{careful}"
            )
        if self.calibration is not None:
            said.append(f"ECE        {self.ece:.4f}{self._range('ece', '.4f')} ({BINS} bins of equal width)")
            if self.calibration["temperature"] is not None:
                said.append(
                    f"           {self.calibration['ece_after']:.4f} at temperature "
                    f"{self.calibration['temperature']:.3f}, fitted on {self.calibration['fitted_on']}"
                )
        if self.real is not None:
            said.append(f"ReaL       {self.real['top1']:.2%} of {self.real['n']:,} images with labels")
        for name, value in (self.few_shot or {}).items():
            said.append(f"{f'{name}-shot':<10} {value:.2%}")
        if self.knn is not None:
            said.append(f"k-NN       {self.knn['top1']:.2%} (k = {self.knn['k']})")
        if self.probe is not None:
            said.append(f"probe      {self.probe['top1']:.2%}")
        if self.vtab is not None:
            said += VtabResult(**self.vtab).sentences()
        if self.published is not None:
            said.append(
                f"published  {self.published['top1']:.2%}, ours {self.published['ours']:.2%}: "
                f"{100 * self.published['difference']:+.2f} points ({self.published['settings']})"
            )
        said += [f"left out   {name}: {reason}" for name, reason in self.left_out.items()]
        said += [f"page       {Path(self.out) / PAGE}"] if self.out is not None else []
        return said + ([f"bundle     {self.temperature_bundle}"] if self.temperature_bundle is not None else [])

    def _range(self, name: str, form: str = ".2%") -> str:
        if name not in self.intervals:
            return ""
        low, high = self.intervals[name]
        return f" ({low:{form}} to {high:{form}})"


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
    and `probe` measure features. `vtab` fine-tunes on the tasks of VTAB-1k: on `tasks` or all of them, with `overrides` of its
    recipe and the best of `sweep`, `seeds` times; `download` fetches data. `as_published` is a name of the catalogue whose
    settings are used and whose accuracy is compared. With `out`, a new folder, all is stored there: numbers, records, page.
    """
    require_threads(threads)
    rule = AskRule(batch_size, workers)
    if resamples < 1:
        raise UsageError(f"--resamples must be at least 1, not {resamples}")
    expected = _published_row(as_published)
    if expected is not None and preprocess is not None:
        raise UsageError("--as-published decides the preprocessing; leave --preprocess out")
    model = model if model is not None else as_published
    if model is None:
        raise UsageError("give the model to evaluate: a bundle, a run, a file or a published name")
    if data is None and not vtab:
        data = data_of_run(model) or ("imagenet" if as_published else None)
    wants_knn = knn or (expected is not None and expected.measure == "knn")
    wants_features = bool(few_shot) or wants_knn or probe
    if data is None and not vtab:
        raise UsageError("give the data to evaluate on: a folder, a table, shards, or a name")
    if not vtab and (tasks or sweep or overrides or seeds != 1 or download):
        raise UsageError("--task, --sweep, --set, --seeds and --download go with --vtab")
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
            classifier = load(model, preprocess=preprocess, device=str(world.device), quiet=console.quiet)
            if expected is not None and expected.preprocess is not None:
                classifier = _with_preprocess(classifier, expected.preprocess)
            work = _Work(str(model), classifier, world, console, rule, resamples, seed)
            result = EvaluationResult(model=str(model), data=str(data))
            found: Found | None = None
            opened = open_data(data, console=console)
            opened = opened if part in opened.parts else as_in_the_run(model, data, opened)
            chosen = choose_parts(opened, part, fit_on)
            if bundle_folder is not None:
                _require_fit(chosen, restrict)
            match, why_not = _match(work, chosen, str(data), label_map, features=wants_features, force=force)
            if match is not None:
                found = _measure_answers(work, chosen, match, restrict, real)
                result = dataclasses.replace(result, **found.numbers)
            if wants_features:
                result = _with_features(result, work, opened, tuple(few_shot), wants_knn, probe)
            result = dataclasses.replace(result, notes=[*chosen.notes, *result.notes, *why_not])
            if vtab:
                beside = None if folder is None else folder.with_name(f"{folder.name}-vtab")
                result = dataclasses.replace(result, vtab=fine_tune(out=beside).to_json())
            if expected is not None:
                result = dataclasses.replace(result, published=_compared(result, expected))
            result = dataclasses.replace(result, seconds=round(time.perf_counter() - started, 3))
            options = {"part": part, "label-map": label_map, "restrict": restrict, "real": real, "fit-on": fit_on}
            options |= {"few-shot": ",".join(map(str, few_shot)), "knn": knn, "probe": probe, "vtab": vtab}
            options |= {"as-published": as_published, "preprocess": preprocess, "force": force, "seed": seed}
            command = _command(model, data, options)
            if bundle_folder is not None:
                result = _save_temperature(result, work, bundle_folder, command)
            if folder is not None and world.leads:
                result = _store(result, work, found, opened, folder, command)
            world.meet()
            return result


# --- what goes in -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Work:
    """One object instead of seven arguments."""

    name: str
    classifier: Classifier
    world: World
    console: Console
    rule: AskRule
    resamples: int
    seed: int


def _published_row(name: str | None) -> Expected | None:
    if name is None:
        return None
    entry = find(name)
    if entry.expected is None:
        raise UsageError(f"no accuracy is published for {name}, as far as the catalogue knows")
    return entry.expected


def _with_preprocess(classifier: Classifier, table: Mapping[str, Any]) -> Classifier:
    rule = config.from_dict(Preprocess, dict(table), "measured_with.")
    bundle = classifier.bundle
    require_consistent(bundle.model.spec, rule, bundle.labels, "the published measurement")
    return Classifier(dataclasses.replace(bundle, preprocess=rule), str(classifier.device))


def _match(
    work: _Work, chosen: Measured, data: str, label_map: str | Path | None, *, features: bool, force: bool
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


# --- what is measured -------------------------------------------------------------------------------------------------


def _measure_answers(work: _Work, chosen: Measured, match: Match, restrict: bool, real: str | Path | None) -> Found:
    classifier = work.classifier
    dataset = known_images(chosen.dataset, match)
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


def _with_features(
    result: EvaluationResult, work: _Work, opened: Opened, shots: tuple[int, ...], knn: bool, probe: bool
) -> EvaluationResult:
    rule = RepresentationRule(shots=shots, knn=_NEIGHBOURS if knn else None, probe=probe)
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
    assert ours is not None
    published = expected.top1 / 100
    table = {"top1": published, "measure": expected.measure, "ours": ours, "difference": ours - published}
    return {**table, "settings": expected.settings, "source": expected.source}


# --- what comes out ---------------------------------------------------------------------------------------------------


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


def _save_temperature(result: EvaluationResult, work: _Work, folder: Path, command: str) -> EvaluationResult:
    """A new bundle: the files of a bundle are sealed together, so that one of them cannot be changed alone."""
    calibration = result.calibration or {}
    fitted = float(calibration["temperature"])
    bundle = work.classifier.bundle
    row = f"{fitted:.4f}, fitted on the {calibration['fitted_on']} part of {result.data}"
    rows = [
        ("temperature", row, command),
        ("ECE", f"{result.ece:.4f} before, {calibration['ece_after']:.4f} after", command),
    ]
    card = with_measurements(bundle.card, rows)
    if work.world.leads:
        save_bundle(folder, dataclasses.replace(bundle, temperature=fitted, card=card))
    return dataclasses.replace(result, temperature_bundle=str(folder))


def _store(
    result: EvaluationResult, work: _Work, found: Found | None, opened: Opened | None, folder: Path, command: str
) -> EvaluationResult:
    result = dataclasses.replace(result, out=str(folder))
    records = [] if found is None else _records(result, work, found, command)
    if result.features is not None and opened is not None:
        records += make_records(result.features, work.classifier, opened, data=result.data, command=command)
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


def _page(result: EvaluationResult, work: _Work, found: Found | None, command: str) -> Report:
    facts = PageFacts(
        title=f"{work.name} on {result.data}",
        command=command,
        data=result.data if result.part is None else f"{result.data}, part {result.part}, {result.n:,} images",
        notes=result.notes,
        left_out=list(result.left_out),
        temperature=(result.calibration or {}).get("temperature"),
        fitted_on=(result.calibration or {}).get("fitted_on") or "",
        real=result.real,
        published=result.published,
        features=_feature_rows(result),
        seconds=result.seconds,
    )
    if found is None:
        return build_features_page(facts, work.classifier)
    pictures = work.classifier, found.scored.dataset, found.scored.ids_B
    if found.answers is not None and isinstance(found.summary, Summary):
        return build_evaluation_page(facts, found.summary, found.answers, found.calibrated, *pictures)
    assert isinstance(found.summary, SeveralSummary)
    p_BK = (found.scored.in_data_classes() / work.classifier.bundle.temperature).sigmoid()
    return build_several_page(facts, found.summary, p_BK, found.scored.targets, found.calibrated, *pictures)


def _feature_rows(result: EvaluationResult) -> list[tuple[str, float]]:
    rows = [(f"{shots}-shot linear", value) for shots, value in (result.few_shot or {}).items()]
    rows += [] if result.knn is None else [(f"{result.knn['k']}-NN", result.knn["top1"])]
    return rows + ([] if result.probe is None else [("linear probe", result.probe["top1"])])


def _records(result: EvaluationResult, work: _Work, found: Found, command: str) -> list[Record]:
    """One for every number of the head."""
    rule, dataset = work.classifier.preprocess, found.scored.dataset
    settings = {"preprocess": config.to_dict(rule), "precision": "float32", "batch_size": work.rule.batch_size}
    settings |= {"interval": f"bootstrap, {work.resamples} resamples, seed {work.seed}"}
    values = {name: getattr(result, name) for name in ("top1", "top5", "loss", "ece", "mean_ap")}
    values |= {"macro_f1": None if result.macro is None else result.macro["f1"]}
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
            settings=settings,
            device=work.world.device,
            seconds=found.scored.seconds,
            command=command,
            pretrained_on=pretraining_of(work.name),
            weights=weights,
        )
        for name, (value, interval, n) in counted.items()
    ]


def _card_row(record: Record) -> tuple[str, str, str]:
    low, high = record.interval or (math.nan, math.nan)
    interval = "" if record.interval is None else f" (95 % interval {low:.4f} to {high:.4f})"
    return record.measure, f"{record.value:.4f}{interval}, {record.data}, {record.part}, n = {record.n}", record.command


def to_json(result: EvaluationResult) -> dict[str, Any]:
    """As it is printed and stored. NaN is not JSON: what is not defined is null."""
    return _plain(dataclasses.asdict(result))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
