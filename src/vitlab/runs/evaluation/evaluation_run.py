"""`vitlab evaluate`: what a model is worth on labelled images, in numbers with intervals, and as a page.

Letters: B images, K classes of the data, M classes of the model.
"""

import dataclasses
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import config, fsio
from vitlab.core.errors import UsageError
from vitlab.core.runtime import require_threads
from vitlab.core.session import Session, open_session, require_single_process
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
    InferenceOptions,
    ask,
    known_images,
    match_classes,
    require_answers,
    require_resamples,
    restricted,
)
from vitlab.runs.evaluation.evaluated_parts import (
    Measured,
    as_in_the_run,
    choose_parts,
    data_of_run,
    start_of,
    without_learnt,
)
from vitlab.runs.evaluation.numbers import CountRule, Found, count
from vitlab.runs.evaluation.representation import RepresentationRule, measure
from vitlab.runs.evaluation.result import EvaluationResult
from vitlab.runs.evaluation.store import Work, store
from vitlab.runs.evaluation.store import save_temperature as store_temperature
from vitlab.runs.evaluation.vtab_runs import VtabRule, run_vtab
from vitlab.runs.evaluation.wrong_order import hint_swapped_arguments
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
    `save_temperature` is a new folder for the bundle with both. `label_map` says in JSON which of the model's
    classes stand for the data's, and `restrict` leaves it no others; `real` is the file of ImageNet-ReaL. `few_shot`, `knn`
    and `probe` measure features: what the head sees, or those of `layers` and `tokens`, as in `embed`. `vtab` fine-tunes on the
    tasks of VTAB-1k: on `tasks` or all of them, with `overrides` of its recipe and the best of `sweep`, `seeds` times;
    `download` fetches data. `as_published` is a name of the catalogue whose settings are used and whose accuracy is compared.
    With `out`, a new folder, all is stored there: numbers, records, page.
    """
    require_threads(threads)
    rule = InferenceOptions(batch_size, workers)
    require_resamples(resamples)
    expected = _published_row(as_published, preprocess)
    model = model if model is not None else as_published
    if model is None:
        raise UsageError("give the model to evaluate: a bundle, a run, a file or a published name")
    options = {"part": part, "label-map": label_map, "restrict": restrict, "real": real, "fit-on": fit_on}
    options |= {"save-temperature": save_temperature, "few-shot": ",".join(map(str, few_shot)), "knn": knn}
    options |= {"probe": probe, "layers": ",".join(map(str, layers)), "tokens": tokens, "as-published": as_published}
    options |= {"preprocess": preprocess, "force": force}
    data = _data_to_measure(model, data, options, vtab=vtab)
    if not vtab and (tasks or sweep or overrides or seeds != 1 or download):
        raise UsageError("--task, --sweep, --set, --seeds and --download go with --vtab")
    tuning = VtabRule(tasks, sweep, overrides, seeds, download) if vtab else None
    features = _features_to_measure(few_shot, knn, probe, FeatureRule(tuple(layers), tokens), expected)
    started = time.perf_counter()
    if data is None:  # VTAB alone: `out` is the folder of its runs, and a second call goes on in it
        assert tuning is not None
        with open_session(device, seed, threads, quiet=quiet) as session:
            done = run_vtab(str(model), tuning, session, out=out)
        return EvaluationResult(model=str(model), data="vtab", vtab=done.to_json(), seconds=done.seconds)
    asked = EvalOptions(
        part=part,
        fit_on=fit_on,
        label_map=None if label_map is None else Path(label_map),
        restrict=restrict,
        real=None if real is None else Path(real),
        features=features,
        expected=expected,
        tuning=tuning,
        force=force,
        out=None if out is None else fsio.require_free(Path(out)),
        bundle=None if save_temperature is None else fsio.require_free(Path(save_temperature)),
    )
    with open_session(device, seed, threads, quiet=quiet) as session:
        with hint_swapped_arguments([model], [data]):
            classifier = _loaded(model, preprocess, expected, session)
        work = Work(str(model), classifier, pretraining_of(start_of(model)), session, rule, resamples)
        result, found, opened = _measure(work, str(data), asked)
        result = dataclasses.replace(result, seconds=round(time.perf_counter() - started, 3))
        options |= {"resamples": resamples if resamples != RESAMPLES else None, "seed": seed}
        command = _command(model, data, {**options, "save-temperature": None})
        if asked.bundle is not None:
            assert found is not None  # `_require_fit` has looked for a part to fit on, and `_match` for classes
            result = store_temperature(result, work, found, asked.bundle, command)
        if asked.out is not None:
            result = store(result, work, found, opened, asked.out, command)
        session.world.barrier()
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What is to be measured, and where it goes; checked as far as the call alone can tell."""

    part: str | None
    fit_on: str | None
    label_map: Path | None
    restrict: bool
    real: Path | None
    features: RepresentationRule | None
    expected: Expected | None
    tuning: VtabRule | None
    force: bool
    out: Path | None
    bundle: Path | None

    @property
    def head(self) -> bool:
        """Whether the head must be able to answer. Beside features it need not, unless its answers were published."""
        return self.features is None or (self.expected is not None and self.expected.measure == "top1")


def _measure(work: Work, data: str, asked: EvalOptions) -> tuple[EvaluationResult, Found | None, Opened]:
    """All numbers; of the head, what page and tables are made of as well."""
    session = work.session
    if asked.features is not None:
        require_single_process(session.world, "features are measured")
    opened = open_data(data, console=session.console)
    if asked.part in opened.parts:
        opened = without_learnt(work.name, data, opened, asked.part)
    else:
        opened = as_in_the_run(work.name, data, opened)
    chosen = choose_parts(opened, asked.part, asked.fit_on)
    if asked.bundle is not None:
        _require_fit(chosen, asked.restrict, several=bool(work.classifier.bundle.thresholds))
    match, why_not = _match(work, chosen, data, asked)
    result = EvaluationResult(model=work.name, data=data)
    if asked.features is not None:  # first, because they are kept: whatever fails behind them costs nothing twice
        result = _with_features(result, work, opened, asked.features)
    found: Found | None = None
    if match is not None:
        found = _measure_answers(work, chosen, match, asked)
        result = dataclasses.replace(result, **found.numbers)
    result = dataclasses.replace(result, notes=[*chosen.notes, *result.notes, *why_not])
    if asked.tuning is not None:
        beside = None if asked.out is None else asked.out.with_name(f"{asked.out.name}-vtab")
        result = dataclasses.replace(result, vtab=run_vtab(work.name, asked.tuning, session, out=beside).to_json())
    if asked.expected is not None:
        result = dataclasses.replace(result, published=_compared(result, asked.expected))
    return result, found, opened


# --- what goes in -----------------------------------------------------------------------------------------------------


def _published_row(name: str | None, preprocess: str | None) -> Expected | None:
    if name is None:
        return None
    entry = find(name)
    if entry.expected is None:
        raise UsageError(f"no accuracy is published for {name}, as far as the catalogue knows")
    if preprocess is not None:
        raise UsageError("--as-published decides the preprocessing; leave --preprocess out")
    return entry.expected


def _data_to_measure(
    model: str | Path, data: str | Path | None, options: Mapping[str, object], *, vtab: bool
) -> str | Path | None:
    """What was named, else the data of the run, else ImageNet where a published row is repeated; None for VTAB alone."""
    if data is None and vtab:
        if needy := [name for name, value in options.items() if value]:
            raise UsageError(f"VTAB has data of its own, and --{needy[0]} needs some to work on", hint="Name the data.")
        return None
    data = data or data_of_run(model) or ("imagenet" if options["as-published"] else None)
    if data is None:
        raise UsageError("give the data to evaluate on: a folder, a table, shards, or a name")
    return data


def _features_to_measure(
    few_shot: Sequence[int], knn: bool, probe: bool, rule: FeatureRule, expected: Expected | None
) -> RepresentationRule | None:
    knn = knn or (expected is not None and expected.measure == "knn")
    if few_shot or knn or probe:
        return RepresentationRule(tuple(few_shot), NEIGHBOURS if knn else None, probe, rule)
    if rule != FeatureRule():
        raise UsageError("--layers and --tokens go with --few-shot, --knn or --probe")
    return None


def _loaded(model: str | Path, preprocess: str | None, expected: Expected | None, session: Session) -> Classifier:
    """The model, with the preprocessing of the published measurement where that is repeated."""
    classifier = load(model, preprocess=preprocess, device=str(session.world.device), quiet=session.console.quiet)
    if expected is None or expected.preprocess is None:
        return classifier
    rule = config.from_dict(Preprocess, dict(expected.preprocess), "measured_with.")
    bundle = classifier.bundle
    require_consistent(bundle.model.spec, rule, bundle.labels, "the published measurement")
    return Classifier(dataclasses.replace(bundle, preprocess=rule), str(classifier.device))


def _match(work: Work, chosen: Measured, data: str, asked: EvalOptions) -> tuple[Match | None, list[str]]:
    """What the model's classes mean in this data. Where features are measured, a head that cannot answer is no fault."""
    try:
        require_answers(work.classifier, force=asked.force)
        return match_classes(work.classifier, chosen.dataset, asked.label_map, data=data), []
    except UsageError as error:
        if asked.head or asked.label_map is not None or asked.bundle is not None:
            raise
        return None, [f"the head was not measured: {error.what}"]


def _command(model: str | Path, data: str | Path | None, options: Mapping[str, object]) -> str:
    """One that can be pasted: only what was given and changes a number."""
    words = ["vitlab", "evaluate", str(model), *([] if data is None else [str(data)])]
    for name, value in options.items():
        if value:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(words)


def _require_fit(chosen: Measured, restrict: bool, *, several: bool) -> None:
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
    if several and not chosen.dataset.labels.multi:
        raise UsageError(
            "the model answers every label by itself, and these images have one label each: a temperature that is fitted to "
            "them is not that of its answers",
            hint="Give images with several labels.",
        )


# --- what is measured -------------------------------------------------------------------------------------------------


def _measure_answers(work: Work, chosen: Measured, match: Match, asked: EvalOptions) -> Found:
    classifier, started = work.classifier, time.perf_counter()
    world, console = work.session.world, work.session.console
    dataset = known_images(chosen.dataset, match)
    if not len(dataset.labels.values):
        raise UsageError(f"no image of {dataset.name} has a label, so no answer can be right or wrong")
    sets = None if asked.real is None else read_real(asked.real, dataset.keys, len(classifier.labels))
    scored = ask(classifier, dataset, match, work.rule, world=world, console=console, label="evaluate")
    real_numbers = None
    if sets is not None:
        labels = [sets[i] for i in scored.ids_B.tolist()]
        real_numbers = dataclasses.asdict(score_real(first_answers(scored.logits_BM), labels))
    fit = None
    if chosen.fit is not None:
        known = known_images(chosen.fit, match)
        fit = ask(classifier, known, match, work.rule, world=world, console=console, label=chosen.fit_part)
    if asked.restrict:
        scored, fit = restricted(scored), None if fit is None else restricted(fit)
    bundle = classifier.bundle
    counting = CountRule(bundle.temperature, bundle.thresholds, work.resamples, work.session.runtime.seed)
    found = count(scored, fit, chosen, counting)
    numbers = {
        **found.numbers,
        "part": chosen.part,
        "real": real_numbers,
        "left_out": scored.bad,
        "notes": [*([match.note] if match.note else []), *found.numbers["notes"]],
        "images_per_second": round(len(scored.ids_B) / scored.seconds, 1),
    }
    return dataclasses.replace(found, numbers=numbers, seconds=time.perf_counter() - started)


def _with_features(result: EvaluationResult, work: Work, opened: Opened, rule: RepresentationRule) -> EvaluationResult:
    found = measure(
        work.classifier,
        opened,
        rule,
        console=work.session.console,
        options=work.rule,
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
