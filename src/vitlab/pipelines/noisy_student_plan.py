"""Resolve a call of `vitlab noisy-student`: labelled, unlabelled and test images, and the recipe of every generation.

Reads, and writes nothing but caches. A resumed one has decided it all before, and reads it from its folder.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.core import config, fsio, reading
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.runtime import require_threads
from vitlab.data.auditing.preflight import scan_used
from vitlab.data.dataset import Dataset, Opened, train_part
from vitlab.data.part_names import test_part
from vitlab.data.parts import Parts, arrange, keep_labels
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.unlabelled import Unlabelled, open_unlabelled, without_labels
from vitlab.engines.classifier import Classifier, load
from vitlab.models.names import format_name
from vitlab.options.option import command_of
from vitlab.options.training_options import NoisyStudentOptions, noisy_student_forms
from vitlab.runs.training import run_folder
from vitlab.runs.training.resolve import as_data_gone, columns_of, count_images, describe_counts, resolve
from vitlab.training.call import IN_PYTHON, TrainCall, name_of
from vitlab.training.draft import as_usage_error, split_settings
from vitlab.training.recipe import (
    DataConfig,
    Recipe,
    for_other_data,
    read_recipe,
    recipe_from_dict,
    recipe_to_dict,
    recipe_to_toml,
    with_changes,
)
from vitlab.training.recipe_book import written_length
from vitlab.training.rules import NoisyStudentRule
from vitlab.training.student import Student, finish_recipe, require_labels, student_recipe

STATE, RECIPE = run_folder.NOISY_STUDENT, "recipe.toml"
FORMAT = 2  # of the folder
FINISH = "finish"
# What a resumed call has to know of the one that began; all else is in the recipe.
_STORED = ("data", "unlabelled", "teacher", "student_overrides", "seed")

Copies = Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class NoisyCall(NoisyStudentOptions):
    """A call of `vitlab noisy-student`, checked as far as the call alone can tell."""

    def __post_init__(self) -> None:
        require_threads(self.threads)
        given = [name for name in ("recipe", "init", "model", "teacher", "out") if getattr(self, name) is not None]
        given += ["unlabelled"] if isinstance(self.unlabelled, str | Path) else []
        words = [f"--{name}" for name in given] + (["--seed"] if self.seed else [])
        words += [str(self.data)] if isinstance(self.data, str | Path) else []
        if self.resume is not None and words:
            raise UsageError(f"--resume continues with what the run was started with; leave {', '.join(words)} out")
        if self.teacher is not None and self.model is not None:
            raise UsageError("a teacher that is given has its model; leave --model out, or name a --student")

    @property
    def changes(self) -> tuple[str, ...]:
        return (*noisy_student_forms(self), *config.override_texts(self.overrides))

    @property
    def student_changes(self) -> tuple[str, ...]:
        return config.override_texts(self.student_overrides)

    def train_call(self, data: Any, folder: Path) -> TrainCall:
        """The call that trains the teacher."""
        changes = self.changes
        if self.recipe is None and "train.method" not in config.overridden(changes):
            changes = ("train.method=steps", *changes)  # a linear probe learns under no noise
        return TrainCall(
            data,
            recipe=self.recipe,
            init=self.init,
            model=self.model,
            overrides=changes,
            out=folder,
            seed=self.seed,
            device=self.device,
            threads=self.threads,
            dry_run=self.dry_run,
        )

    def command(self, folder: Path | None, data: str | None) -> str:
        """The call as it can be pasted; without a folder, one that takes the next free name."""
        others = {"overrides": config.override_texts(self.overrides), "student_overrides": self.student_changes}
        return command_of("noisy-student", self, data=data, out=folder, unlabelled=name_of(self.unlabelled), **others)


class Divided(NamedTuple):
    """The data before the recipe is known: parts with the images that keep their labels, and the rest of `train`."""

    opened: Opened
    rest: Dataset | None
    copies: Copies  # in the data as it was opened


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisyJob:
    """Everything decided: what each run learns from, its recipe, its folder."""

    base: Recipe  # of the teacher, where it is trained
    parts: Parts  # labelled images to train on, for validation, to test on
    unlabelled: Unlabelled
    foreign: bool  # whether the unlabelled images are from another source than the labelled ones
    folder: Path
    command: str
    repeat: str  # the command without its folder
    students: tuple[Student, ...]
    finish: Recipe | None
    teacher: str | None = None  # the model that was given
    classifier: Classifier | None = None  # the same, loaded
    recipe_name: str = ""
    reason: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    copies: Mapping[str, Copies] = dataclasses.field(default_factory=dict[str, Copies])
    call: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])  # what a resumed one has to know
    resume: bool = False

    @property
    def rule(self) -> NoisyStudentRule:
        assert self.base.noisy_student is not None
        return self.base.noisy_student

    @property
    def counts(self) -> dict[str, int]:
        """Classes, and the labelled images of each part."""
        return count_images(self.parts, labelled=True)

    @property
    def fingerprints(self) -> dict[str, str]:
        found = {name: part.fingerprint() for name, part in self.parts.used().items()}
        return {**found, "unlabelled": self.unlabelled.images.fingerprint()}

    def describe(self) -> dict[str, str | list[str] | None]:
        """For --dry-run."""
        rule, images = self.rule, len(self.unlabelled.images)
        targets = f"{rule.targets} labels at a confidence of {rule.threshold:g} or more"
        models = [f"{format_name(one.recipe.model)}, {written_length(one.recipe)}" for one in self.students]
        trained = f"{format_name(self.base.model)}, {written_length(self.base)}, trained first"
        size = None if self.finish is None else self.finish.data.image_size
        return {
            "out": str(self.folder),
            "images": describe_counts(self.counts),
            "unlabelled": f"{images:,} images of {self.unlabelled.images.name}; {targets}",
            "teacher": trained if self.teacher is None else self.teacher,
            "students": models,
            "finish": None if size is None else f"at {size[0]}x{size[1]} pixels",
            "chosen": self.reason,
            "notes": [*self.notes, *(note for one in self.students for note in one.notes)] or None,
            "warnings": [*self.warnings, *(text for one in self.students for text in one.warnings)] or None,
        }

    def config(self) -> dict[str, Any]:
        """Every recipe with all its keys, for --print-config."""
        runs = {} if self.teacher is not None else {"generation-0": self.base}
        runs |= {f"generation-{number}": one.recipe for number, one in enumerate(self.students, start=1)}
        runs |= {} if self.finish is None else {FINISH: self.finish}
        return {name: recipe_to_dict(recipe) for name, recipe in runs.items()}


def resolve_noisy(call: NoisyCall, world: World, console: Console) -> NoisyJob:
    """Open the data, settle the recipes and check what can be wrong."""
    if call.resume is not None:
        return _resolve_resume(call, Path(call.resume), world, console)
    return _resolve_new(call, world, console)


# --- a new one ----------------------------------------------------------------------------------------------------------


def _resolve_new(call: NoisyCall, world: World, console: Console) -> NoisyJob:
    folder = _free_folder(call)
    train_call = call.train_call(call.data, folder)
    source, table = train_call.source, {} if call.recipe is None else read_recipe(call.recipe)
    assert source is not None
    table = with_changes({"data": {}, "train": {}, **table}, call.changes)
    require_labels(table)
    rule = config.from_dict(NoisyStudentRule, table.get("noisy_student") or {}, "noisy_student.")
    if call.unlabelled is None and not (rule.labelled or rule.labelled_per_class):
        raise UsageError(
            "there are no unlabelled images",
            hint="Name some with --unlabelled, or keep --labelled N labels of DATA and take its other images.",
        )
    with as_usage_error(Path(source).exists()):
        given = source if train_call.in_python is None else train_call.in_python
        opened = open_data(given, columns=columns_of(train_call), console=console)
    divided = _divide(_with_copies(opened, console), split_settings(source, table["data"]), rule)
    unlabelled = _open_unlabelled(call.unlabelled, divided, console)
    classifier = _load_teacher(call.teacher, divided.opened.classes, world, console)
    job = resolve(call.train_call(divided.opened, folder), world, console)
    if job.parts.train.classes != divided.opened.classes:
        raise UsageError(
            "data.min_images drops classes of the labelled images", hint="Keep more labels, or ask for fewer."
        )
    title = Path(source).name if job.recipe.title.startswith(IN_PYTHON) else job.recipe.title
    data = dataclasses.replace(job.recipe.data, source=source)
    base = dataclasses.replace(job.recipe, title=title, data=data, noisy_student=rule)
    parts = dataclasses.replace(job.parts, unlabelled=divided.rest)
    teacher = None if call.teacher is None else str(call.teacher)
    stored = {"data": source, "unlabelled": name_of(call.unlabelled), "seed": call.seed, "teacher": teacher}
    return _with_students(
        call,
        NoisyJob(
            base=base,
            parts=parts,
            unlabelled=unlabelled,
            foreign=call.unlabelled is not None,
            folder=folder,
            command=call.command(folder, source),
            repeat=call.command(None, source),
            students=(),
            finish=None,
            teacher=teacher,
            classifier=classifier,
            recipe_name=job.recipe_name,
            reason=job.reason,
            notes=job.notes,
            warnings=job.warnings,
            copies={"data": divided.copies, "labelled": job.parts.copies},
            call={**stored, "student_overrides": list(call.student_changes)},
        ),
    )


def _free_folder(call: NoisyCall) -> Path:
    folder = run_folder.next_free("noisy-student") if call.out is None else Path(call.out)
    for source in (call.data, call.unlabelled):
        is_folder = isinstance(source, str | Path) and Path(source).is_dir()
        if is_folder and folder.resolve().is_relative_to(Path(source).resolve()):
            raise UsageError(f"the runs would go to {folder}, inside {source}", hint="Give --out a folder elsewhere.")
    return fsio.require_free(folder)


def _with_copies(opened: Opened, console: Console) -> Opened:
    """Where test images will be held out, copies of a picture must stay on one side."""
    if test_part(opened.parts) is not None:
        return opened
    scanned = scan_used(opened, list(opened.parts.values()), console)
    return opened if scanned is None else dataclasses.replace(opened, copies=scanned.copies(train_part(opened.parts)))


def _divide(opened: Opened, split: DataConfig, rule: NoisyStudentRule) -> Divided:
    """Test images first, for they are never learnt; then the labelled ones among those to train on."""
    with as_usage_error(True):
        parts = arrange(opened, split)
    if parts.train.labels.multi:
        raise UsageError("images with several labels each cannot be learnt from pseudo-labels of one class each")
    labelled, rest = parts.train, None
    if rule.labelled or rule.labelled_per_class:
        labelled, rest = keep_labels(
            parts.train, split.split_seed, count=rule.labelled, per_class=rule.labelled_per_class
        )
    named = {"train": labelled, "val": parts.val, "test": parts.test}
    used = {name: part for name, part in named.items() if part is not None}
    return Divided(dataclasses.replace(opened, parts=used, notes=parts.notes, copies=()), rest, opened.copies)


def _open_unlabelled(source: Any, divided: Divided, console: Console) -> Unlabelled:
    if source is None:
        assert divided.rest is not None
        return Unlabelled(without_labels(divided.rest, divided.opened.classes), divided.rest)
    with as_usage_error(not isinstance(source, str | Path) or Path(source).exists()):
        return open_unlabelled(source, divided.opened.classes, console)


def _load_teacher(
    teacher: str | Path | None, classes: tuple[str, ...], world: World, console: Console
) -> Classifier | None:
    if teacher is None:
        return None
    with as_usage_error("@" not in str(teacher)):
        classifier = load(teacher, device=str(world.device), quiet=console.quiet)
    if set(classifier.labels) != set(classes) or len(classifier.labels) != len(classes) or classifier.bundle.thresholds:
        raise UsageError(
            f"the teacher {teacher} knows other classes than the data: {len(classifier.labels):,}, not these "
            f"{len(classes):,}",
            hint="Train it on the same classes, or leave --teacher out.",
        )
    return classifier


def _with_students(call: NoisyCall, job: NoisyJob) -> NoisyJob:
    """The job with the recipe of every generation and of the finish."""
    rule, changes = job.rule, tuple(job.call["student_overrides"])
    if call.resume is not None:
        changes = (*changes, *call.student_changes)
    spec = job.base.model if job.classifier is None else job.classifier.model.spec
    students: list[Student] = []
    for generation in range(1, rule.generations + 1):
        students.append(student_recipe(job.base, spec, rule, generation, changes))
        spec = students[-1].recipe.model
    last, labelled = students[-1].recipe, len(job.parts.train)
    finish = finish_recipe(last, _finish_start(job), rule, labelled) if rule.finish else None
    return dataclasses.replace(job, students=tuple(students), finish=finish)


def _finish_start(job: NoisyJob) -> str:
    """The run of the last student; of a finish that exists, as it was named then: the folder may have moved since."""
    finish = job.folder / FINISH
    if (finish / run_folder.CONFIG).is_file():
        return str(run_folder.read_config(finish)["init"])
    return str(job.folder / f"generation-{job.rule.generations}")


# --- one that is resumed ------------------------------------------------------------------------------------------------


def new_state(job: NoisyJob) -> dict[str, Any]:
    """What the folder knows before anything is trained."""
    return {
        "format": FORMAT,
        "command": job.command,
        "repeat": job.repeat,
        "cwd": str(Path.cwd()),
        "call": dict(job.call),
        "recipe": job.recipe_name,
        "reason": job.reason,
        "counts": describe_counts(job.counts),  # for the page: a resumed call counts again
        "notes": list(job.notes),
        "warnings": list(job.warnings),
        "own_warnings": list(job.warnings),  # those of the runs join the others
        "copies": {name: [list(keys) for keys in groups] for name, groups in job.copies.items()},
        "data": job.fingerprints,
        "sha256": hashlib.sha256(recipe_to_toml(job.base).encode()).hexdigest(),
        "generations": [],
        "finished": False,
    }


def read_state(folder: Path) -> dict[str, Any]:
    """`noisy_student.json`; an error where it is not one that this vitlab can resume from."""
    if not folder.exists():
        raise UsageError(f"{folder} does not exist, so there is nothing to resume")
    path = folder / STATE
    if not path.is_file():
        raise UsageError(f"{folder} is not a folder of `vitlab noisy-student`: it has no {STATE}")
    state = reading.load_json(path)
    if not isinstance(state, dict) or type(state.get("format")) is not int:
        raise FileProblem(f"{path} is damaged: it does not say its format", hint="Start anew.")
    if state["format"] != FORMAT:
        raise FileProblem(f"{path} has format {state['format']}; this version reads {FORMAT}", hint="Start anew.")
    lacking = {"command", "repeat", "call", "copies", "data", "sha256", "generations"} - state.keys()
    if lacking or not set(_STORED) <= set(state["call"]):
        raise FileProblem(f"{path} is damaged: it lacks {', '.join(sorted(lacking)) or 'a part of the call'}")
    return state


def _resolve_resume(call: NoisyCall, folder: Path, world: World, console: Console) -> NoisyJob:
    state = read_state(folder)
    text = reading.read_text(folder / RECIPE) if (folder / RECIPE).is_file() else ""
    if hashlib.sha256(text.encode()).hexdigest() != state["sha256"]:
        raise UsageError(f"{folder / RECIPE} was changed after the runs started", hint="Put it back as it was.")
    first_call = state["call"]
    table = for_other_data(config.parse_toml(text, str(folder / RECIPE)))
    table = with_changes(table, call.changes)
    rule = config.from_dict(NoisyStudentRule, table["noisy_student"], "noisy_student.")
    data = _reopened("data", first_call["data"], call.data)
    unlabelled = (
        None if first_call["unlabelled"] is None else _reopened("unlabelled", first_call["unlabelled"], call.unlabelled)
    )
    with as_data_gone(folder, str(state.get("cwd", ""))):
        opened = open_data(data, columns=table["data"].get("columns"), console=console)
    opened = dataclasses.replace(opened, copies=state["copies"]["data"])
    divided = _divide(opened, split_settings(first_call["data"], table["data"]), rule)
    base = recipe_from_dict(table, len(divided.opened.classes))
    parts = arrange(dataclasses.replace(divided.opened, copies=state["copies"]["labelled"]), base.data)
    with as_data_gone(folder, str(state.get("cwd", ""))):
        opened_unlabelled = _open_unlabelled(unlabelled, divided, console)
        classifier = _load_teacher(first_call["teacher"], divided.opened.classes, world, console)
    job = NoisyJob(
        base=base,
        parts=dataclasses.replace(parts, unlabelled=divided.rest),
        unlabelled=opened_unlabelled,
        foreign=unlabelled is not None,
        folder=folder,
        command=state["command"],
        repeat=state["repeat"],
        students=(),
        finish=None,
        teacher=first_call["teacher"],
        classifier=classifier,
        recipe_name=state.get("recipe", ""),
        reason=state.get("reason", ""),
        notes=tuple(state.get("notes", ())),
        warnings=tuple(state.get("own_warnings", ())),
        copies=state["copies"],
        call=first_call,
        resume=True,
    )
    if other := sorted(name for name, mark in job.fingerprints.items() if state["data"].get(name) != mark):
        raise UsageError(
            f"the {' and '.join(other)} images changed since {folder} started",
            hint="Put them back, or start anew.",
        )
    return _with_students(call, job)


def _reopened(what: str, named: str, given: Any) -> Any:
    """The data that the first call had: by its name, or given again where it had none."""
    if not named.startswith(IN_PYTHON):
        return named
    if given is None:
        raise UsageError(f"the {what} images were given in Python, so give them again")
    return given
