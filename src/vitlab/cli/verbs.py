"""The verbs that call one public function and print its result: a table, and how a row becomes a command.

Owns the names, sentences and examples of `--help`. What a verb does stands where its `function` says, and what it can be
given in its options class. A function is imported when its verb runs, so that `vitlab --help` never waits for torch.

A result has `sentences()` for people, and `printed()` where a shell should show others; for `--json` a `to_json()` where its
fields are not all of it. It may have an `exit_code`. A dry run gives a `Planned`, which has the same methods.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import typer

from vitlab.cli.options import PrintConfig, Verb, echo, print_json, show, verb
from vitlab.core import config
from vitlab.core.errors import UsageError
from vitlab.options.data_options import ShardOptions, SplitOptions
from vitlab.options.evaluation_options import CompareOptions, EmbedOptions, EvaluateOptions, PredictOptions
from vitlab.options.exporting_options import ExportOptions
from vitlab.options.inspection_options import InspectOptions
from vitlab.options.serving_options import ServeOptions
from vitlab.options.study_options import StudyReportOptions, StudyRunOptions, StudyShowOptions
from vitlab.options.training_options import DemoOptions, NoisyStudentOptions, PlanOptions, TrainOptions
from vitlab.options.weights_options import ConvertOptions

START, JUDGE, DATA, WEIGHTS, ABOUT = "Start", "Judge", "Data", "Weights", "About"  # panels of `vitlab --help`


class Row(NamedTuple):
    """One verb. `function` and `config`, which gives what `--print-config` prints, are `module:function` in vitlab."""

    name: str
    options: type
    function: str
    help: str
    example: str
    panel: str | None = None  # of `vitlab --help`; the verbs of a group need none
    config: str = ""
    check: Callable[[Mapping[str, Any], bool], None] | None = None  # of options and --json, before anything is imported


def _require_output(given: Mapping[str, Any], as_json: bool) -> None:
    if given["out"] is None and not as_json and not given["dry_run"]:
        raise UsageError("nowhere to put the vectors", hint="Give --out vectors.parquet, or --json to print them.")


VERBS = (
    Row(
        "demo",
        DemoOptions,
        "pipelines.digits_demo:demo",
        "Pre-train on fractals, transfer to real digits, test, explain, report: a few minutes, no download.",
        example="demo",
        panel=START,
        config="pipelines.digits_demo:demo_config",
    ),
    Row(
        "train",
        TrainOptions,
        "runs.training.training_run:train",
        "Train a classifier on your images: audit, split, train, test, explain, report.",
        example="train photos --epochs 10",
        panel=START,
        config="runs.training.training_run:resolved_config",
    ),
    Row(
        "noisy-student",
        NoisyStudentOptions,
        "pipelines.noisy_student_run:noisy_student",
        "Learn from unlabelled images: a teacher labels them, and a noisy student learns from both.",
        example="noisy-student photos --unlabelled more-photos",
        panel=START,
        config="pipelines.noisy_student_run:noisy_student_config",
    ),
    Row(
        "predict",
        PredictOptions,
        "runs.evaluation.prediction:predict",
        "Label images. Files that cannot be read are reported and skipped.",
        example="predict runs/train-1 new/*.jpg",
        panel=START,
    ),
    Row(
        "evaluate",
        EvaluateOptions,
        "runs.evaluation.evaluation_run:evaluate",
        "Measure a model on labelled images: accuracy, classes, confusion, calibration, with intervals.",
        example="evaluate runs/train-1 --out runs/train-1-eval",
        panel=JUDGE,
    ),
    Row(
        "compare",
        CompareOptions,
        "runs.evaluation.comparison:compare",
        "Compare two models on the same images: the difference, its interval, and whether chance explains it.",
        example="compare runs/train-1 runs/train-2",
        panel=JUDGE,
    ),
    Row(
        "inspect",
        InspectOptions,
        "runs.inspection_run:inspect",
        "Look inside a model: attention, saliency maps with their checks, the paper's figures, and a viewer to hover over.",
        example="inspect runs/train-1 photos/*.jpg",
        panel=JUDGE,
    ),
    Row(
        "study show",
        StudyShowOptions,
        "studies.listing:show_study",
        "The question of a study, its claims, and its grid at each scale.",
        example="study show positions",
    ),
    Row(
        "study run",
        StudyRunOptions,
        "studies.study_run:run_study",
        "Run every cell that has no record yet, several at a time, and report what came out.",
        example="study run positions --scale laptop",
    ),
    Row(
        "study report",
        StudyReportOptions,
        "studies.reporting:report_study",
        "A study, a published table with our numbers beside it, or with `claims` what holds of all of them.",
        example="study report table2",
    ),
    Row(
        "data split",
        SplitOptions,
        "runs.data_tools:split_data",
        "Stratified split as a table: groups and copies of a picture stay together. The same data and seed give the same one.",
        example="data split photos --out split.csv",
    ),
    Row(
        "data shard",
        ShardOptions,
        "runs.data_tools:shard_data",
        "Write data as WebDataset tars with an index and checksums. The same call resumes where one was stopped.",
        example="data shard photos shards",
    ),
    Row(
        "embed",
        EmbedOptions,
        "runs.evaluation.embedding:embed",
        "Write one vector per image, with path and label, to a file. Resumes where it was stopped.",
        example="embed ViT-S/14@dinov2 photos --out vectors.parquet",
        panel=DATA,
        check=_require_output,
    ),
    Row(
        "serve",
        ServeOptions,
        "serving.serve_run:serve",
        "Answer over HTTP, with a page to try the model on, until Ctrl-C.",
        example="serve runs/train-1",
        panel=WEIGHTS,
    ),
    Row(
        "convert",
        ConvertOptions,
        "engines.conversion:convert",
        "Convert weights from one format to another, lossless, with an account of every array.",
        example="convert ViT-B_16.npz vit-b-16 --to timm",
        panel=WEIGHTS,
    ),
    Row(
        "export",
        ExportOptions,
        "exporting.export_run:export",
        "Write a model for other runtimes, with labels and preprocessing, once its answers are the same there.",
        example="export runs/train-1 model.onnx --preprocess-inside",
        panel=WEIGHTS,
    ),
    Row(
        "plan",
        PlanOptions,
        "runs.training.planning:plan",
        "Estimate a run before it starts: parameters, compute, memory, speed on this machine, hours, cost.",
        example="plan --recipe paper-vit-h14-jft --gpus 8",
        panel=ABOUT,
    ),
)


def add_verbs(app: typer.Typer, groups: Mapping[str, typer.Typer]) -> None:
    """Every row as a command of `app`; `study run` as `run` of the group `study`."""
    for row in VERBS:
        group, _, name = row.name.rpartition(" ")
        home, epilog = groups[group] if group else app, f"Example: [bold]vitlab {row.example}[/bold]"
        home.command(name, cls=Verb, help=row.help, rich_help_panel=row.panel, epilog=epilog)(command(row))


def command(row: Row) -> Callable[..., None]:
    """The function that typer calls with the options of a verb."""

    @verb(row.options, **({"print_config": PrintConfig} if row.config else {}))
    def run(*, as_json: bool, debug: bool, print_config: bool = False, **given: Any) -> None:
        if row.check is not None:
            row.check(given, as_json)
        if print_config:
            table = imported(row.config)(**given)
            print_json(table) if as_json else echo(config.dump_toml(table), end="")
            return
        result = imported(row.function)(**given)
        lines = result.printed() if hasattr(result, "printed") else result.sentences()
        show(result, lines, as_json=as_json)
        if code := getattr(result, "exit_code", 0):
            raise typer.Exit(code)

    return run


def imported(place: str) -> Callable[..., Any]:
    """The function at `module:function` in vitlab."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"vitlab.{module}"), name)
