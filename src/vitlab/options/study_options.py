"""The options of `study show`, `study run` and `study report`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from vitlab.options.option import DryRun, Opt, Quiet, StrPath, Threads

_MACHINE = "Machine"


@dataclass(frozen=True)
class StudyShowOptions:
    name: Annotated[str, Opt("A study of `vitlab study list`, or a TOML file.", metavar="NAME")]
    _: KW_ONLY
    scale: Annotated[str | None, Opt("laptop, gpu or paper; default: all.", metavar="SCALE")] = None


@dataclass(frozen=True)
class StudyRunOptions:
    name: Annotated[
        str | Sequence[str], Opt("A study of `vitlab study list`, several, or a TOML file.", metavar="NAME")
    ]
    _: KW_ONLY
    scale: Annotated[str, Opt("laptop, gpu or paper.", metavar="SCALE")] = "laptop"
    out: Annotated[
        StrPath, Opt("Runs, records and reports; shared by all studies and workers.", metavar="DIR", named=True)
    ] = "runs/studies"
    seeds: Annotated[int | None, Opt("The first N seeds of the study alone.", metavar="N")] = None
    device: Annotated[
        str, Opt("cpu, cuda, cuda:1, mps, or auto for every GPU there is.", metavar="NAME", panel=_MACHINE)
    ] = "auto"
    workers: Annotated[
        int | None,
        Opt("Runs at once on each device; default: 4 on a GPU, else one for each core.", metavar="N", panel=_MACHINE),
    ] = None
    threads: Threads = None
    quiet: Quiet = False
    dry_run: DryRun = False


@dataclass(frozen=True)
class StudyReportOptions:
    name: Annotated[
        str, Opt("A study or a published table of `vitlab study list`, or claims for all of them.", metavar="NAME")
    ]
    _: KW_ONLY
    scale: Annotated[str | None, Opt("laptop, gpu or paper; default: the largest with records.", metavar="SCALE")] = (
        None
    )
    records: Annotated[
        StrPath | None,
        Opt(
            "The folder of the records; default runs/studies for a study, docs/results/records for a table.",
            metavar="DIR",
        ),
    ] = None
    out: Annotated[StrPath | None, Opt("A new .md or .html file to write it to.", metavar="FILE")] = None
    gpu_tflops: Annotated[
        float | None, Opt("Sustained TFLOP/s of a GPU to count training days of a table with.", metavar="X")
    ] = None
