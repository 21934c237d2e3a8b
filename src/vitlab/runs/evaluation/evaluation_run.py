"""`vitlab evaluate`: what a model is worth on labelled images, in numbers with intervals, and as a page.

Letters: B images, K classes of the data, M classes of the model.
"""

import contextlib
import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

from vitlab.core import config, fsio
from vitlab.core.errors import UsageError
from vitlab.core.planned import counted, stop_if_dry_run
from vitlab.core.runtime import require_threads
from vitlab.core.session import Session, open_session, require_single_process
from vitlab.data.dataset import Opened
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import (
    Classifier,
    describe_model,
    hint_swapped_arguments,
    load,
    stop_dry_run_before_download,
)
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation.answers import first_answers
from vitlab.evaluation.features import FeatureRule
from vitlab.evaluation.intervals import require_resamples
from vitlab.evaluation.knn import NEIGHBOURS
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.real_labels import read_real, score_real
from vitlab.evaluation.records import pretraining_of
from vitlab.evaluation.result import EvaluationResult
from vitlab.evaluation.scoring import (
    Account,
    CountRule,
    count,
    known_images,
    match_classes,
    require_answers,
    score_images,
)
from vitlab.options.evaluation_options import EvaluateOptions
from vitlab.options.option import LAST_BITS, command_of, declared, takes
from vitlab.runs.evaluation.features import RepresentationRule, measure
from vitlab.runs.evaluation.parts import (
    EvalParts,
    as_in_the_run,
    choose_parts,
    columns_of_run,
    data_of_run,
    start_of,
    without_learnt,
)
from vitlab.runs.evaluation.store import Work, save_temperature_bundle, store
from vitlab.runs.evaluation.vtab import VtabRule, run_vtab
from vitlab.weights.bundle import require_consistent
from vitlab.weights.catalogue import Expected, find

_ABOUT_THE_HEAD = ("label_map", "restrict", "real", "fit_on", "save_temperature", "as_published", "preprocess", "force")
_NEEDS_DATA = ("part", *_ABOUT_THE_HEAD, "few_shot", "knn", "probe", "layers", "tokens")


@dataclasses.dataclass(frozen=True)
class EvalOptions(EvaluateOptions):
    """The options of `evaluate`, checked as far as the call alone allows, and what follows from them."""

    def __post_init__(self) -> None:
        require_threads(self.threads)
        require_resamples(self.resamples)
        _ = self.inference, self.expected, self.name, self.source, self.tuning, self.features

    @functools.cached_property
    def name(self) -> str:
        """The model, as it was named."""
        model = self.model if self.model is not None else self.as_published
        if model is None:
            raise UsageError("give the model to evaluate: a bundle, a run, a file or a published name")
        return str(model)

    @functools.cached_property
    def source(self) -> str | None:
        """The data as named, else that of the run, else ImageNet where a published row is repeated; None: VTAB alone."""
        if self.data is None and self.vtab:
            needy = [each for each in declared(EvaluateOptions) if each.name in _NEEDS_DATA]
            if given := [each.flag for each in needy if getattr(self, each.name) != each.default]:
                raise UsageError(
                    f"VTAB has data of its own, and --{given[0]} needs some to work on", hint="Name the data."
                )
            return None
        data = self.data or data_of_run(self.name) or ("imagenet" if self.as_published else None)
        if data is None:
            raise UsageError("give the data to evaluate on: a folder, a table, shards, or a name")
        return str(data)

    @functools.cached_property
    def inference(self) -> InferenceOptions:
        return InferenceOptions(self.batch_size, self.workers)

    @functools.cached_property
    def expected(self) -> Expected | None:
        """The published accuracy that is repeated."""
        if self.as_published is None:
            return None
        entry = find(self.as_published)
        if entry.expected is None:
            raise UsageError(f"no accuracy is published for {self.as_published}, as far as the catalogue knows")
        if self.preprocess is not None:
            raise UsageError("--as-published decides the preprocessing; leave --preprocess out")
        return entry.expected

    @functools.cached_property
    def tuning(self) -> VtabRule | None:
        if self.vtab:
            return VtabRule(self.tasks, self.sweep, config.override_texts(self.overrides), self.seeds, self.download)
        if self.tasks or self.sweep or self.overrides or self.seeds != 1 or self.download:
            raise UsageError("--task, --sweep, --set, --seeds and --download go with --vtab")
        return None

    @functools.cached_property
    def features(self) -> RepresentationRule | None:
        rule = FeatureRule(tuple(self.layers or ()), self.tokens)
        knn = self.knn or (self.expected is not None and self.expected.measure == "knn")
        if self.few_shot or knn or self.probe:
            return RepresentationRule(tuple(self.few_shot or ()), NEIGHBOURS if knn else None, self.probe, rule)
        if rule != FeatureRule():
            raise UsageError("--layers and --tokens go with --few-shot, --knn or --probe")
        return None

    @property
    def needs_head(self) -> bool:
        """Whether the head must be able to answer. Beside features it need not, unless its answers were published."""
        published = self.expected is not None and self.expected.measure == "top1"
        return self.features is None or published or self.label_map is not None or self.save_temperature is not None

    def session(self) -> contextlib.AbstractContextManager[Session]:
        return open_session(self.device, self.seed, self.threads, quiet=self.quiet, verbose=self.verbose)

    def command(self) -> str:
        """The command line, to be pasted: only what was given and changes a number."""
        return command_of("evaluate", self, LAST_BITS, model=self.name, data=self.source)


@takes(EvalOptions)
def evaluate(options: EvalOptions) -> EvaluationResult:
    """Measure a model (bundle, run, file or published name) on `data`, or on that of its run.

    With `few_shot`, `knn` or `probe`, features are measured as well: what the head sees, or those of `layers` and `tokens`, as
    in `embed`. `vtab` fine-tunes on the tasks of VTAB-1k. `as_published` is a name of the catalogue whose settings are used and
    whose accuracy is compared. With `out`, a new folder, all is stored there: numbers, records, page.
    """
    started = time.perf_counter()
    if options.source is None:  # VTAB alone: `out` is the folder of its runs, and a second call resumes in it
        assert options.tuning is not None
        with options.session() as session:
            stop_dry_run_before_download(
                options.dry_run, [options.name], {"tasks": _tasks(options), "out": options.out}
            )
            stop_if_dry_run(
                options.dry_run,
                {
                    "model": describe_model(_load(options, session)) if options.dry_run else None,
                    "tasks": _tasks(options),
                    "out": options.out,
                },
            )
            start = pretraining_of(start_of(options.name))
            done = run_vtab(options.name, options.tuning, session, out=options.out, pretrained_on=start)
        return EvaluationResult(model=options.name, data="vtab", vtab=done.to_json(), seconds=done.seconds)
    for folder in (options.out, options.save_temperature):
        if folder is not None:
            fsio.require_free(Path(folder))
    with options.session() as session:
        stop_dry_run_before_download(options.dry_run, [options.name], {"data": options.source, "out": options.out})
        with hint_swapped_arguments([options.name], [options.data]):
            classifier = _load(options, session)
        pretrained_on = pretraining_of(start_of(options.name))
        work = Work(options.name, classifier, pretrained_on, session, options.inference, options.resamples)
        result, account, opened = _measure(work, options)
        result = dataclasses.replace(result, seconds=round(time.perf_counter() - started, 3))
        if options.save_temperature is not None:
            assert account is not None  # `_require_fit` has looked for a part to fit on, and `_match` for classes
            folder = Path(options.save_temperature)
            result = save_temperature_bundle(result, work, account, folder, options.command())
        if options.out is not None:
            result = store(result, work, account, opened, Path(options.out), options.command())
        session.world.barrier()
        return result


def _load(options: EvalOptions, session: Session) -> Classifier:
    """The model, with the preprocessing of the published measurement where that is repeated."""
    device, expected = str(session.world.device), options.expected
    classifier = load(
        options.name,
        preprocess=options.preprocess,
        device=device,
        quiet=session.console.quiet,
        trust_pickle=options.trust_pickle,
    )
    if expected is None or expected.preprocess is None:
        return classifier
    rule = config.from_dict(Preprocess, dict(expected.preprocess), "measured_with.")
    bundle = classifier.bundle
    require_consistent(bundle.model.spec, rule, bundle.labels, "the published measurement")
    return Classifier(dataclasses.replace(bundle, preprocess=rule), device)


def _measure(work: Work, options: EvalOptions) -> tuple[EvaluationResult, Account | None, Opened]:
    """All numbers; of the head, what page and tables are made of as well."""
    session, data = work.session, str(options.source)
    if options.features is not None:
        require_single_process(session.world, "features are measured")
    columns = options.columns or columns_of_run(work.name, data)
    opened = open_data(data, columns=columns, console=session.console)
    if options.part in opened.parts:
        opened = without_learnt(work.name, data, opened, options.part)
    else:
        opened = as_in_the_run(work.name, data, opened)
    chosen = choose_parts(opened, options.part, options.fit_on)
    if options.save_temperature is not None:
        _require_fit(chosen, options.restrict, several=bool(work.classifier.bundle.thresholds))
    match, why_not = _match(work.classifier, chosen, data, options)
    stop_if_dry_run(
        options.dry_run,
        {
            "model": describe_model(work.classifier),
            "data": f"{data}, {chosen.part} part: {counted(len(chosen.dataset), len(chosen.dataset.classes))}",
            "measures": _measures(options, head=match is not None),
            "tasks": _tasks(options),
            "out": options.out,
        },
    )
    found: dict[str, Any] = {}
    if options.features is not None:  # first, because they are kept: whatever fails after them costs nothing twice
        numbers = measure(work.classifier, opened, options.features, console=session.console, options=options.inference)
        found |= {name: numbers.get(name) for name in ("few_shot", "knn", "probe")} | {"features": numbers}
    account = None
    if match is not None:
        account = _measure_head(work, chosen, match, options)
        found |= account.numbers
    found["notes"] = [*chosen.notes, *found.get("notes", ()), *why_not]
    if options.tuning is not None:
        beside = None if options.out is None else f"{Path(options.out)}-vtab"
        found["vtab"] = run_vtab(
            work.name, options.tuning, session, out=beside, pretrained_on=work.pretrained_on
        ).to_json()
    result = EvaluationResult(model=work.name, data=data, **found)
    if options.expected is not None:
        result = dataclasses.replace(result, published=_compare_published(result, options.expected))
    return result, account, opened


def _measures(options: EvalOptions, *, head: bool) -> str:
    rule = options.features
    few = [f"few-shot {','.join(map(str, rule.shots))}"] if rule and rule.shots else []
    knn, probe = (["kNN"] if rule and rule.knn else []), (["linear probe"] if rule and rule.probe else [])
    return ", ".join([*(["answers of the head"] if head else []), *few, *knn, *probe])


def _tasks(options: EvalOptions) -> str | None:
    return None if options.tuning is None else ", ".join(task.name for task in options.tuning.wanted())


def _match(
    classifier: Classifier, chosen: EvalParts, data: str, options: EvalOptions
) -> tuple[Match | None, list[str]]:
    """What the model's classes mean in this data. Where features are measured, a head that cannot answer is not an error."""
    label_map = None if options.label_map is None else Path(options.label_map)
    try:
        require_answers(classifier, force=options.force)
        return match_classes(classifier, chosen.dataset, label_map, data=data), []
    except UsageError as error:
        if options.needs_head:
            raise
        return None, [f"the head was not measured: {error.what}"]


def _require_fit(chosen: EvalParts, restrict: bool, *, several: bool) -> None:
    """Raise an error, before the work, where there would be no temperature to save."""
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


def _measure_head(work: Work, chosen: EvalParts, match: Match, options: EvalOptions) -> Account:
    """Every number about the head's answers."""
    classifier, session, started = work.classifier, work.session, time.perf_counter()
    dataset = known_images(chosen.dataset, match)
    if not len(dataset.labels.values):
        raise UsageError(f"no image of {dataset.name} has a label, so no answer can be right or wrong")
    sets = None if options.real is None else read_real(Path(options.real), dataset.keys, len(classifier.labels))
    scored = score_images(classifier, dataset, match, options.inference, session, "evaluate")
    real = None
    if sets is not None:
        labels = [sets[i] for i in scored.ids_B.tolist()]
        real = dataclasses.asdict(score_real(first_answers(scored.logits_BM), labels))
    fit = None
    if chosen.fit is not None:
        known = known_images(chosen.fit, match)
        fit = score_images(classifier, known, match, options.inference, session, chosen.fit_part)
    if options.restrict:
        scored, fit = scored.restricted(), None if fit is None else fit.restricted()
    bundle = classifier.bundle
    rule = CountRule(bundle.temperature, bundle.thresholds, options.resamples, session.runtime.seed)
    account = count(scored, fit, chosen.fit_part, rule)
    numbers = {
        **account.numbers,
        "part": chosen.part,
        "real": real,
        "left_out": scored.bad,
        "notes": [
            *([f"warning: {scored.unlike}"] if scored.unlike else []),
            *([match.note] if match.note else []),
            *account.numbers["notes"],
        ],
        "images_per_second": round(len(scored.ids_B) / scored.seconds, 1),
    }
    return dataclasses.replace(account, numbers=numbers, seconds=time.perf_counter() - started)


def _compare_published(result: EvaluationResult, expected: Expected) -> dict[str, Any]:
    ours = result.top1 if expected.measure == "top1" else (result.knn or {}).get("top1")
    assert ours is not None  # `evaluate` runs the head, or the neighbours, where that was published
    published = expected.top1 / 100
    table = {"top1": published, "measure": expected.measure, "ours": ours, "difference": ours - published}
    return {**table, "settings": expected.settings, "source": expected.source}
