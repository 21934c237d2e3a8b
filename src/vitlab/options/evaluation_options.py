"""The options of `evaluate`, `compare`, `predict` and `embed`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from vitlab.models.spec import TokenKind
from vitlab.options.option import (
    Columns,
    DryRun,
    Force,
    Inference,
    Opt,
    Overrides,
    Part,
    StrPath,
    TrustPickle,
    numbers,
    opt,
)

_HEAD, _FEATURES, _VTAB = "The head's answers", "Features of the model", "VTAB-1k"

Model = Annotated[StrPath, Opt("A bundle, a run, a file of weights, or a published name.", "MODEL")]
Preprocessing = Annotated[
    str | None, Opt("minus-one-to-one, imagenet, or a preprocess.json, in place of its own.", "WHAT")
]
Layers = Annotated[
    Sequence[int] | None,
    Opt("Features of these layers, concatenated; -1 is the last.", "I,J", parse=numbers, panel=_FEATURES),
]
Tokens = Annotated[TokenKind | None, Opt("cls, mean or patches; default: what the head sees.", "KIND", panel=_FEATURES)]
Resamples = Annotated[int, Opt("Draws behind each bootstrap interval.", "N")]


@dataclass(frozen=True)
class EvaluateOptions(Inference):
    model: StrPath | None = opt(None, "A bundle, a run, a weights file or a published name.", "MODEL")
    data: StrPath | None = opt(None, "As for `train`; default: the data of the run.", "DATA")
    _: KW_ONLY
    columns: Columns = None
    part: Part = None
    out: StrPath | None = opt(
        None, "A new folder for numbers, records, tables and report.html.", "DIR", changes_result=False
    )
    label_map: StrPath | None = opt(
        None, "JSON: which of the model's labels are right for a class of the data.", "FILE", panel=_HEAD
    )
    restrict: bool = opt(False, "Answers among the data's classes only, as if it knew no others.", panel=_HEAD)
    real: StrPath | None = opt(None, "ImageNet-ReaL's real.json: also count by its labels.", "FILE", panel=_HEAD)
    fit_on: str | None = opt(
        None, "Where temperature and thresholds are fitted; default val, if not measured.", "PART", panel=_HEAD
    )
    save_temperature: StrPath | None = opt(
        None,
        "A new folder: the bundle with the fitted temperature, and thresholds.",
        "DIR",
        panel=_HEAD,
        changes_result=False,
    )
    few_shot: Sequence[int] | None = opt(
        None, "Linear classifiers from so many images of each class.", "1,5,10,25", parse=numbers, panel=_FEATURES
    )
    knn: bool = opt(False, "Vote of the 20 nearest training images.", panel=_FEATURES)
    probe: bool = opt(False, "A linear head on frozen features.", panel=_FEATURES)
    layers: Layers = None
    tokens: Tokens = None
    vtab: bool = opt(False, "Fine-tune on the tasks of VTAB-1k that are here.", panel=_VTAB)
    tasks: Sequence[str] = opt((), "Only this task; repeatable.", "NAME", flag="task", panel=_VTAB)
    sweep: Sequence[str] = opt((), "Choose on its validation images; repeatable.", "KEY=A,B", panel=_VTAB)
    overrides: Overrides = ()
    seeds: int = opt(1, "Fine-tune to each task N times.", "N", panel=_VTAB)
    download: bool = opt(False, "Fetch what has an address.", panel=_VTAB)
    as_published: str | None = opt(
        None, "Settings and accuracy of this checkpoint: ViT-B/16@augreg-i21k-i1k-224.", "NAME"
    )
    preprocess: Preprocessing = None
    force: Force = False
    resamples: Resamples = 1000
    trust_pickle: TrustPickle = False
    dry_run: DryRun = False


@dataclass(frozen=True)
class CompareOptions(Inference):
    a: Annotated[StrPath, Opt("A bundle, a run, a weights file or a published name.", "A")]
    b: Annotated[StrPath, Opt("The other one.", "B")]
    data: StrPath | None = opt(None, "As for `train`; default: the data of the run A.", "DATA")
    _: KW_ONLY
    columns: Columns = None
    part: Part = None
    out: StrPath | None = opt(
        None, "A new folder for numbers, records, answers and report.html.", "DIR", changes_result=False
    )
    label_map: StrPath | None = opt(
        None, "JSON: which of the models' labels are right for a class of the data.", "FILE"
    )
    force: Force = False
    resamples: Resamples = 1000
    trust_pickle: TrustPickle = False
    dry_run: DryRun = False


@dataclass(frozen=True)
class PredictOptions(Inference):
    model: Model
    images: Annotated[
        StrPath | Sequence[StrPath],
        Opt("Files, folders, patterns such as 'photos/*.jpg', shards, data sets, addresses.", "IMAGES"),
    ]
    _: KW_ONLY
    top: int = opt(5, "How many labels for each image.", "K")
    out: StrPath | None = opt(None, "Store the answers in a new .json, .csv or .parquet.", "FILE")
    columns: Columns = None
    part: str | None = opt(None, "Of a data set, only train, val or test.", "NAME")
    cache: StrPath | None = opt(
        None, "Where answers for --out are kept on the way; default: vitlab's cache folder.", "DIR"
    )
    trust_pickle: TrustPickle = False
    dry_run: DryRun = False


@dataclass(frozen=True)
class EmbedOptions(Inference):
    model: Model
    data: Annotated[
        StrPath | Sequence[StrPath],
        Opt("A data set as for train, a folder of images, files, patterns or addresses.", "DATA"),
    ]
    out: StrPath | None = opt(None, "A new .parquet, .npz, .csv or .json; --json alone prints it.", "FILE", named=True)
    _: KW_ONLY
    columns: Columns = None
    part: str | None = opt(None, "Only train, val or test.", "NAME")
    layers: Layers = None
    tokens: Tokens = None
    cache: StrPath | None = opt(None, "Where vectors are kept; default: vitlab's cache folder.", "DIR")
    trust_pickle: TrustPickle = False
    dry_run: DryRun = False
