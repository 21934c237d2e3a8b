"""The options of `evaluate`, `compare`, `predict` and `embed`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from vitlab.models.spec import TokenKind
from vitlab.options.option import Columns, DryRun, Force, Inference, Opt, Overrides, Part, StrPath, TrustPickle, numbers

_HEAD, _FEATURES, _VTAB = "The head's answers", "Features of the model", "VTAB-1k"

Model = Annotated[StrPath, Opt("A bundle, a run, a file of weights, or a published name.", metavar="MODEL")]
Preprocessing = Annotated[
    str | None, Opt("minus-one-to-one, imagenet, or a preprocess.json, in place of its own.", metavar="WHAT")
]
Layers = Annotated[
    Sequence[int] | None,
    Opt("Features of these layers, concatenated; -1 is the last.", metavar="I,J", parse=numbers, panel=_FEATURES),
]
Tokens = Annotated[
    TokenKind | None, Opt("cls, mean or patches; default: what the head sees.", metavar="KIND", panel=_FEATURES)
]
Resamples = Annotated[int, Opt("Draws behind each bootstrap interval.", metavar="N")]


@dataclass(frozen=True)
class EvaluateOptions(Inference):
    model: Annotated[StrPath | None, Opt("A bundle, a run, a weights file or a published name.", metavar="MODEL")] = (
        None
    )
    data: Annotated[StrPath | None, Opt("As for `train`; default: the data of the run.", metavar="DATA")] = None
    _: KW_ONLY
    columns: Columns = None
    part: Part = None
    out: Annotated[
        StrPath | None,
        Opt("A new folder for numbers, records, tables and report.html.", metavar="DIR", changes_result=False),
    ] = None
    label_map: Annotated[
        StrPath | None,
        Opt("JSON: which of the model's labels are right for a class of the data.", metavar="FILE", panel=_HEAD),
    ] = None
    restrict: Annotated[bool, Opt("Answers among the data's classes only, as if it knew no others.", panel=_HEAD)] = (
        False
    )
    real: Annotated[
        StrPath | None, Opt("ImageNet-ReaL's real.json: also count by its labels.", metavar="FILE", panel=_HEAD)
    ] = None
    fit_on: Annotated[
        str | None,
        Opt("Where temperature and thresholds are fitted; default val, if not measured.", metavar="PART", panel=_HEAD),
    ] = None
    save_temperature: Annotated[
        StrPath | None,
        Opt(
            "A new folder: the bundle with the fitted temperature, and thresholds.",
            metavar="DIR",
            panel=_HEAD,
            changes_result=False,
        ),
    ] = None
    few_shot: Annotated[
        Sequence[int] | None,
        Opt(
            "Linear classifiers from so many images of each class.",
            metavar="1,5,10,25",
            parse=numbers,
            panel=_FEATURES,
        ),
    ] = None
    knn: Annotated[bool, Opt("Vote of the 20 nearest training images.", panel=_FEATURES)] = False
    probe: Annotated[bool, Opt("A linear head on frozen features.", panel=_FEATURES)] = False
    layers: Layers = None
    tokens: Tokens = None
    vtab: Annotated[bool, Opt("Fine-tune on the tasks of VTAB-1k that are here.", panel=_VTAB)] = False
    tasks: Annotated[Sequence[str], Opt("Only this task; repeatable.", metavar="NAME", flag="task", panel=_VTAB)] = ()
    sweep: Annotated[
        Sequence[str], Opt("Choose on its validation images; repeatable.", metavar="KEY=A,B", panel=_VTAB)
    ] = ()
    overrides: Overrides = ()
    seeds: Annotated[int, Opt("Fine-tune to each task N times.", metavar="N", panel=_VTAB)] = 1
    download: Annotated[bool, Opt("Fetch what has an address.", panel=_VTAB)] = False
    as_published: Annotated[
        str | None, Opt("Settings and accuracy of this checkpoint: ViT-B/16@augreg-i21k-i1k-224.", metavar="NAME")
    ] = None
    preprocess: Preprocessing = None
    force: Force = False
    resamples: Resamples = 1000
    trust_pickle: TrustPickle = False
    dry_run: DryRun = False


@dataclass(frozen=True)
class CompareOptions(Inference):
    a: Annotated[StrPath, Opt("A bundle, a run, a weights file or a published name.", metavar="A")]
    b: Annotated[StrPath, Opt("The other one.", metavar="B")]
    data: Annotated[StrPath | None, Opt("As for `train`; default: the data of the run A.", metavar="DATA")] = None
    _: KW_ONLY
    columns: Columns = None
    part: Part = None
    out: Annotated[
        StrPath | None,
        Opt("A new folder for numbers, records, answers and report.html.", metavar="DIR", changes_result=False),
    ] = None
    label_map: Annotated[
        StrPath | None, Opt("JSON: which of the models' labels are right for a class of the data.", metavar="FILE")
    ] = None
    force: Force = False
    resamples: Resamples = 1000
    trust_pickle: TrustPickle = False
    dry_run: DryRun = False


@dataclass(frozen=True)
class PredictOptions(Inference):
    model: Model
    images: Annotated[
        StrPath | Sequence[StrPath],
        Opt("Files, folders, patterns such as 'photos/*.jpg', shards, data sets, addresses.", metavar="IMAGES"),
    ]
    _: KW_ONLY
    top: Annotated[int, Opt("How many labels for each image.", metavar="K")] = 5
    out: Annotated[StrPath | None, Opt("Store the answers in a new .json, .csv or .parquet.", metavar="FILE")] = None
    columns: Columns = None
    part: Annotated[str | None, Opt("Of a data set, only train, val or test.", metavar="NAME")] = None
    cache: Annotated[
        StrPath | None,
        Opt("Where answers for --out are kept on the way; default: vitlab's cache folder.", metavar="DIR"),
    ] = None
    trust_pickle: TrustPickle = False
    dry_run: DryRun = False


@dataclass(frozen=True)
class EmbedOptions(Inference):
    model: Model
    data: Annotated[
        StrPath | Sequence[StrPath],
        Opt("A data set as for train, a folder of images, files, patterns or addresses.", metavar="DATA"),
    ]
    out: Annotated[
        StrPath | None, Opt("A new .parquet, .npz, .csv or .json; --json alone prints it.", metavar="FILE", named=True)
    ] = None
    _: KW_ONLY
    columns: Columns = None
    part: Annotated[str | None, Opt("Only train, val or test.", metavar="NAME")] = None
    layers: Layers = None
    tokens: Tokens = None
    cache: Annotated[StrPath | None, Opt("Where vectors are kept; default: vitlab's cache folder.", metavar="DIR")] = (
        None
    )
    trust_pickle: TrustPickle = False
    dry_run: DryRun = False
