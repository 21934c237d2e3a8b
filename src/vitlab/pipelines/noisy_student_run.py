"""`vitlab noisy-student`: a teacher labels unlabelled images, a noisy student learns from them, and becomes the teacher.

Every teacher and student is an ordinary run, in `generation-N` of one folder. What is finished is not repeated: the runs resume
at their step, and pseudo-labels are stored whole before a student sees them. Letters: B images, K classes.
"""

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.core import fsio, reading
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.planned import stop_if_dry_run
from vitlab.core.runtime import pick_device
from vitlab.core.session import Session, open_session, require_single_process
from vitlab.core.signals import Stopped
from vitlab.data.auditing.overlap import shared_pictures
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages
from vitlab.data.parts import Parts
from vitlab.engines.classifier import Classifier
from vitlab.engines.inference import InferenceOptions, inference_progress, predict_logits
from vitlab.evaluation.answers import Answers, judge
from vitlab.evaluation.classify import Scores, score
from vitlab.evaluation.intervals import RESAMPLES
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.paired import compare_answers
from vitlab.models.cost import count_params
from vitlab.models.names import format_name
from vitlab.options.option import takes
from vitlab.pipelines.noisy_student_plan import (
    FINISH,
    RECIPE,
    STATE,
    NoisyCall,
    NoisyJob,
    new_state,
    read_state,
    resolve_noisy,
)
from vitlab.report.noisy_student_page import build_noisy_student_page, confident_tiles
from vitlab.report.page import Tile, render
from vitlab.runs.training import run_folder
from vitlab.runs.training.execute import execute
from vitlab.runs.training.finish import RunResult, record_runs
from vitlab.runs.training.resolve import Job
from vitlab.runs.training.run_report import build_report, write_report
from vitlab.training.pseudo_labels import (
    PseudoLabels,
    Selection,
    read_pseudo_labels,
    select,
    sentence,
    student_set,
    summary,
    write_pseudo_labels,
)
from vitlab.training.recipe import Recipe, recipe_to_toml
from vitlab.weights.hashing import hash_weights

LEFT_OUT = "left_out.json"
_COMPARED = ("n", "difference", "interval", "p", "p_mid")  # what is kept of a paired test, besides who is right alone


@dataclasses.dataclass(frozen=True)
class NoisyStudentResult:
    """What `vitlab noisy-student --json` prints. Each test has top1, its interval, top5, loss, n and ece."""

    out: Path  # the folder of all runs
    run: Path  # that of the last student, or of its finish where validation images do not speak against it
    bundle: Path  # in it, what `vitlab.load` reads
    report: Path
    teacher: dict[str, Any]  # model, weights and test of the first one
    generations: list[dict[str, Any]]  # of each: model, counts, thresholds, tests, and the margin over its teacher
    finish: dict[str, Any] | None
    test: dict[str, Any]  # of what is in `run`; empty without test images
    warnings: list[str]
    seconds: float

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        lines: list[str] = []
        if test := self.teacher["test"]:
            lines.append(f"Teacher       {_tested(test)}, {self.teacher['model']}")
        rows = [(f"Generation {row['generation']}", row) for row in self.generations]
        rows += [] if self.finish is None else [("Finish", self.finish)]
        for name, row in rows:
            kept = f"; {row['pseudo_labels']['different']:,} pseudo-labelled images" if "pseudo_labels" in row else ""
            tested = f"{_tested(row['test'])}, {row['model']}" if row["test"] else row["model"]
            lines.append(f"{name:<12}  {tested}{kept}")
            if margin := row["margin"]:
                whose = "its teacher" if "pseudo_labels" in row else "the student that it came from"
                low, high = margin["interval"]
                side = "below" if margin["difference"] < 0 else "over"
                lines.append(
                    f"              {100 * abs(margin['difference']):.2f} points {side} {whose} "
                    f"({100 * low:+.2f} to {100 * high:+.2f}), McNemar p = {margin['p']:.3g}"
                )
        lines += [f"warning: {warning}" for warning in self.warnings]
        return [*lines, f"Took {self.seconds:.0f} s. Report: {self.report}", f"Use it: vitlab.load({str(self.run)!r})"]


def _tested(test: Mapping[str, Any]) -> str:
    low, high = test["top1_interval"]
    return f"{test['top1']:.1%} of {test['n']:,} test images right ({low:.1%} to {high:.1%})"


@takes(NoisyCall)
def noisy_student(call: NoisyCall) -> NoisyStudentResult:
    """Train a teacher on labelled images, let it label others, and train a noisy student on both; repeat.

    The teacher labels images as they are tested, without noise; unsure answers are left out and the classes balanced. The
    student, equal or larger, learns under RandAugment, dropout and stochastic depth, and is the teacher of the next
    generation. Copies of labelled and test images are never pseudo-labelled. `resume` continues in that folder.
    """
    if call.dry_run:
        stop_if_dry_run(
            True, resolve_noisy(call, World(0, 1, pick_device(call.device)), Console(quiet=True)).describe()
        )
    with open_session(call.device, call.seed, call.threads, quiet=call.quiet, verbose=call.verbose) as session:
        require_single_process(session.world, "`vitlab noisy-student` runs")
        job = resolve_noisy(call, session.world, session.console)
        if not job.resume:
            left_out = _known_images(job, session.console)  # before there is a folder: it may leave nothing to label
            with fsio.new_folder(job.folder, manifest=False) as new:
                new.write_json(LEFT_OUT, left_out)
                new.write_json(STATE, new_state(job))
                new.write(RECIPE, recipe_to_toml(job.base))
        with _says_how_to_resume(job.folder), fsio.locked(job.folder):
            return _run(job, session)


@takes(NoisyCall)
def noisy_student_config(call: NoisyCall) -> dict[str, Any]:
    """The recipes of a call with every key written out, for `--print-config`."""
    if call.resume is not None:
        raise UsageError("--print-config cannot be combined with --resume")
    return resolve_noisy(call, World(0, 1, pick_device(call.device)), Console(quiet=True)).config()


@contextlib.contextmanager
def _says_how_to_resume(folder: Path) -> Generator[None]:
    try:
        yield
    except Stopped as stopped:
        stopped.advice = stopped.advice or run_folder.resume_command(folder)
        raise


# --- the generations ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Teacher:
    """Who labels the images, and what it scored."""

    name: str
    classifier: Classifier
    scores: Scores | None
    weights: str

    def about(self) -> dict[str, Any]:
        test = {} if self.scores is None else self.scores.test_summary()
        model = format_name(self.classifier.model.spec)
        return {"run": self.name, "model": model, "weights": self.weights, "test": test}


def _run(job: NoisyJob, session: Session) -> NoisyStudentResult:
    started, state = time.perf_counter(), read_state(job.folder)
    warnings = [*job.warnings]
    images, truth, left_out = _without_known(job, session.console)
    teacher, seconds = _first_teacher(job, session)
    first, rows, tiles = teacher.about(), list[dict[str, Any]](), list[list[Tile]]()
    for generation, student in enumerate(job.students, start=1):
        for warning in student.warnings:
            session.console.say(f"warning: {warning}")
        warnings += student.warnings
        labels, unreadable = _pseudo_labels(job, generation, teacher, images, session)
        rows_N = _rows_of(labels, images)
        chosen = select(labels, job.rule, shlex.quote(str(_path(job, teacher))))
        counts = summary(labels, chosen, job.rule)
        if empty := [labels.classes[k] for k in chosen.empty_classes]:
            warnings.append(f"generation {generation}: no pseudo-label for {', '.join(empty[:5])}")
        learnt = student_set(
            job.parts.train,
            images.subset(rows_N),
            labels,
            chosen,
            job.rule,
            seed=student.recipe.seed,
            foreign=job.foreign,
        )
        parts = dataclasses.replace(job.parts, train=learnt, unlabelled=_not_chosen(job, learnt))
        notes = (*student.notes, sentence(counts, job.rule))
        result = _execute(job, f"generation-{generation}", student.recipe, parts, session, notes=notes)
        labelled = len(learnt) - len(chosen.rows)
        counts |= {
            "left_out": len(left_out),
            "unreadable": unreadable,
            "accuracy": _accuracy(labels, chosen, truth, rows_N),
        }
        row = {
            "generation": generation,
            **_about(result),
            "teacher": teacher.about(),
            "pseudo_labels": {"file": _labels_path(job, generation).name, "targets": job.rule.targets, **counts},
            "train_images": len(learnt),
            "labelled_images": len(job.parts.train),
            "labelled_share": labelled / len(learnt),
            "noise": _noise(student.recipe, job.rule.label_smoothing),
            "margin": _margin(teacher, result.scores, job),
        }
        rows.append(row)
        warnings += _worse(row)
        tiles.append(confident_tiles(teacher.classifier, images.subset(rows_N), labels, chosen))
        seconds += result.seconds
        teacher = _as_teacher(result)
        fsio.write_json(job.folder / STATE, {**state, "teacher": first, "generations": rows})
    finish, last = None, job.folder / f"generation-{len(rows)}"
    if job.finish is not None:
        finished = _execute(job, FINISH, job.finish, job.parts, session)
        finish = {**_about(finished), "margin": _margin(teacher, finished.scores, job)}
        finish["validation"] = _validated(job, teacher, _as_teacher(finished), session)
        warnings += _worse(finish)
        delivered, why = _delivers(finish["validation"], last)
        warnings += why
        seconds += finished.seconds
        last, teacher = (finished.folder, _as_teacher(finished)) if delivered else (last, teacher)
    record = {
        **state,
        "teacher": first,
        "generations": rows,
        "finish": finish,
        "delivered": last.name,
        "warnings": warnings,
        "left_out": len(left_out),
        "finished": True,
    }
    fsio.write_json(job.folder / STATE, record)
    page = build_noisy_student_page(record, tiles, title=job.base.title)
    fsio.write_file(job.folder / run_folder.REPORT, render(page))
    return NoisyStudentResult(
        out=job.folder,
        run=last,
        bundle=last / run_folder.BUNDLE,
        report=job.folder / run_folder.REPORT,
        teacher=first,
        generations=rows,
        finish=finish,
        test=teacher.about()["test"],
        warnings=warnings,
        seconds=round(max(seconds, time.perf_counter() - started), 1),
    )


def _first_teacher(job: NoisyJob, session: Session) -> tuple[_Teacher, float]:
    """The one that was given, tested here, or one that is trained on the labelled images."""
    if job.classifier is None:
        result = _execute(job, "generation-0", job.base, job.parts, session)
        return _as_teacher(result), result.seconds
    classifier, test = job.classifier, job.parts.test
    scores = None
    if test is not None:
        logits_BK, ids_B = _logits(classifier, test, job, session, "testing")
        scores = score(logits_BK, test.labels.single()[ids_B], ids_B)
    assert job.teacher is not None
    return _Teacher(job.teacher, classifier, scores, hash_weights(classifier.model)), 0.0


def _as_teacher(result: RunResult) -> _Teacher:
    return _Teacher(result.folder.name, result.classifier, result.scores, hash_weights(result.classifier.model))


def _execute(
    job: NoisyJob, name: str, recipe: Recipe, parts: Parts, session: Session, notes: tuple[str, ...] = ()
) -> RunResult:
    """One run in its folder, with its report and its record; resumed where it was begun."""
    folder = job.folder / name
    first = name == "generation-0"
    run = Job(
        recipe=recipe,
        parts=parts,
        folder=folder,
        command=job.command,
        repeat=job.repeat,
        recipe_name=job.recipe_name,
        reason=job.reason,
        inner=not first,
        notes=job.notes if first else notes,
        warnings=job.warnings if first else (),
        resume=(folder / run_folder.CONFIG).is_file(),
    )
    result = execute(run, session)
    write_report(result, build_report(result))
    record_runs([result], folder, recipe=job.recipe_name, command=job.command)
    return result


def _about(result: RunResult) -> dict[str, Any]:
    spec = result.recipe.model
    return {
        "run": result.folder.name,
        "model": format_name(spec),
        "params": count_params(spec),
        "image_size": list(result.recipe.data.image_size),
        "seed": result.recipe.seed,
        "weights": hash_weights(result.classifier.model),
        "test": {} if result.scores is None else result.scores.test_summary(),
        "seconds": round(result.seconds, 1),
    }


def _noise(recipe: Recipe, label_smoothing: float) -> dict[str, Any]:
    augment = recipe.data.augment
    on = augment.randaugment != "none"
    return {
        "randaugment": f"{augment.randaugment}, {augment.layers} operations of {augment.magnitude:g}" if on else "none",
        "dropout": getattr(recipe.model, "dropout", 0.0),
        "stochastic_depth": getattr(recipe.model, "stochastic_depth", 0.0),
        "label_smoothing": label_smoothing,
    }


def _margin(teacher: _Teacher, after: Scores | None, job: NoisyJob) -> dict[str, Any] | None:
    """What a student is better by, on images that both were tested on, with what chance makes of that."""
    before = teacher.scores
    if before is None or after is None:
        return None
    both = torch.tensor(sorted({*before.ids.tolist()} & {*after.ids.tolist()}), dtype=torch.int64)
    first, second = (_answers(scores, both) for scores in (before, after))
    found = compare_answers(first, second, job.parts.train.classes, resamples=RESAMPLES, seed=job.base.seed)
    alone = {"only_teacher": found["only_a"], "only_student": found["only_b"]}
    return {"over": teacher.name, **{name: found[name] for name in _COMPARED}, **alone}


def _worse(row: Mapping[str, Any]) -> list[str]:
    """A warning where more than chance makes a run worse than what it came from."""
    margin = row["margin"]
    if margin is None or margin["interval"][1] >= 0:
        return []
    low, high = (100 * end for end in margin["interval"])
    points = f"{100 * margin['difference']:+.2f} points ({low:+.2f} to {high:+.2f})"
    return [f"{row['run']} is worse than {margin['over']} on the test images: {points}"]


def _validated(job: NoisyJob, student: _Teacher, finish: _Teacher, session: Session) -> dict[str, Any] | None:
    """The right answers of both to the validation images; None where there are none."""
    val = job.parts.val
    if val is None:
        return None
    right = dict[str, int]()
    for name, model in (("student", student), ("finish", finish)):
        logits_BK, ids_B = _logits(model.classifier, val, job, session, "validating")
        right[name] = int((logits_BK.argmax(dim=1) == val.labels.single()[ids_B]).sum())
    return {**right, "n": len(val)}


def _delivers(validation: Mapping[str, Any] | None, student: Path) -> tuple[bool, list[str]]:
    """Whether the finish is the result, with the note to print. The test images must not choose: they would flatter it."""
    if validation is None:
        return True, [
            f"no validation images show whether the finish is better than {student}, so it is delivered as asked; "
            f"--set data.val_frac=0.1 holds some out to decide"
        ]
    if validation["finish"] >= validation["student"]:
        return True, []
    return False, [
        f"the finish is right on {validation['finish']:,} of {validation['n']:,} validation images and the student on "
        f"{validation['student']:,}, so {student} is delivered"
    ]


def _path(job: NoisyJob, teacher: _Teacher) -> Path:
    """Where a teacher lies: a run of this folder, or the model that was given."""
    return Path(teacher.name) if teacher.name == job.teacher else job.folder / teacher.name


def _answers(scores: Scores, ids_B: Tensor) -> Answers:
    match = Match(tuple((k,) for k in range(scores.logits_BK.shape[1])))
    return judge(scores.logits_BK, scores.targets, match).chosen(torch.isin(scores.ids, ids_B))


# --- pseudo-labels ------------------------------------------------------------------------------------------------------


def _known_images(job: NoisyJob, console: Console) -> list[dict[str, Any]]:
    """The unlabelled images that show a labelled, validation or test image, as stored; an error where all of them do."""
    images = job.unlabelled.images
    shared = shared_pictures(images, job.parts.used(), console=console)
    if len(shared) == len(images):
        raise UsageError(
            f"all {len(images):,} unlabelled images are copies of labelled, validation or test images, so there is nothing "
            f"to label",
            hint="Name others with --unlabelled.",
        )
    return [{"number": i, "image": str(images.keys[i]), "shows": part} for i, part in shared.items()]


def _without_known(job: NoisyJob, console: Console) -> tuple[Dataset, Dataset | None, dict[str, str]]:
    """The unlabelled images that show none of the others; which do, is found once and stored."""
    images, truth, path = job.unlabelled.images, job.unlabelled.truth, job.folder / LEFT_OUT
    if not path.is_file():
        fsio.write_json(path, _known_images(job, console))
    shared = _read_left_out(path, images)
    if shared:
        by_part = {part: sum(found == part for found in shared.values()) for part in dict.fromkeys(shared.values())}
        counts = ", ".join(f"{count:,} of the {part} part" for part, count in by_part.items())
        console.say(f"left out of the unlabelled images, as copies of others: {counts}")
    kept = torch.tensor([i for i in range(len(images)) if i not in shared], dtype=torch.int64)
    left_out = {images.keys[i]: part for i, part in shared.items()}
    return images.subset(kept), None if truth is None else truth.subset(kept), left_out


def _read_left_out(path: Path, images: Dataset) -> dict[int, str]:
    """The numbers of the images that were left out, with the part that each shows an image of."""
    try:
        rows = [(int(row["number"]), str(row["image"]), str(row["shows"])) for row in reading.load_json(path)]
        if any(images.keys[i] != name for i, name, _ in rows):
            raise ValueError("it names other images")
    except (LookupError, TypeError, ValueError) as error:
        raise FileProblem(
            f"{path} is damaged: {error}", hint="Remove it: the images are then compared again."
        ) from None
    return {i: part for i, _, part in rows}


def _labels_path(job: NoisyJob, generation: int) -> Path:
    return job.folder / f"pseudo_labels-{generation}.npz"


def _pseudo_labels(
    job: NoisyJob, generation: int, teacher: _Teacher, images: Dataset, session: Session
) -> tuple[PseudoLabels, int]:
    """The teacher's probabilities, stored before they are used; and how many images could not be read."""
    path, classes = _labels_path(job, generation), job.parts.train.classes
    if path.is_file():
        labels = read_pseudo_labels(path)
        if labels.teacher != teacher.weights or labels.classes != classes:
            raise FileProblem(
                f"{path} was made by another teacher", hint="Remove it: the images are then labelled again."
            )
    else:
        logits_NK, ids_N = _logits(teacher.classifier, images, job, session, f"labelling for generation {generation}")
        p_NK = (logits_NK.double() / teacher.classifier.bundle.temperature).softmax(dim=1).float()
        names = tuple(str(images.keys[i]) for i in ids_N.tolist())
        labels = write_pseudo_labels(path, PseudoLabels(names, classes, p_NK, teacher.weights))
    return labels, len(images) - len(labels.names)


def _logits(
    classifier: Classifier, dataset: Dataset, job: NoisyJob, session: Session, label: str
) -> tuple[Tensor, Tensor]:
    """Logits in the order of the data's classes, and the numbers of the images; by a model in eval mode, without noise."""
    options, bad = InferenceOptions(workers=job.base.data.workers), BadImages(job.base.data.max_bad)
    with inference_progress(session.console, label, len(dataset), options) as advance:
        logits_BM, _, ids_B = predict_logits(
            classifier.model, dataset, classifier.preprocess, options, session.world, bad, advance=advance
        )
    order = [classifier.labels.index(name) for name in job.parts.train.classes]
    return logits_BM[:, order], ids_B


def _rows_of(labels: PseudoLabels, images: Dataset) -> Tensor:
    """int64: which image each row of the pseudo-labels is of. Both are in one order; unreadable images have no row."""
    rows, at = list[int](), 0
    for name in labels.names:
        while at < len(images) and str(images.keys[at]) != name:
            at += 1
        rows.append(at)
        at += 1
    if at > len(images):
        raise FileProblem(
            "the pseudo-labels are of other images", hint="Remove the pseudo_labels files of this folder."
        )
    return torch.tensor(rows, dtype=torch.int64)


def _not_chosen(job: NoisyJob, learnt: Dataset) -> Dataset | None:
    """Images of the data itself that the student does not see, for its `split.csv`."""
    if job.foreign or job.parts.unlabelled is None:
        return job.parts.unlabelled
    seen = set(learnt.keys)
    rest = job.parts.unlabelled
    return rest.subset(torch.tensor([i for i, key in enumerate(rest.keys) if key not in seen], dtype=torch.int64))


def _accuracy(labels: PseudoLabels, chosen: Selection, truth: Dataset | None, rows_N: Tensor) -> dict[str, Any] | None:
    """How often pseudo-labels are right, where the source has labels: for this report, and nothing else reads them."""
    if truth is None:
        return None
    right_N = labels.answer_N == truth.labels.single()[rows_N]
    different = chosen.rows.unique()
    return {
        "all": float(right_N.double().mean()),
        "kept": float(right_N[different].double().mean()),
        "of": "the labels of the unlabelled source, which serve this number alone",
    }
