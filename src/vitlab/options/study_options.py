"""The options of `study show`, `study run` and `study report`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from vitlab.options.option import DryRun, Opt, Quiet, StrPath, Threads, opt

_MACHINE = "Machine"


@dataclass(frozen=True)
class StudyShowOptions:
    name: Annotated[str, Opt("A study of `vitlab study list`, or a TOML file.", "NAME")]
    _: KW_ONLY
    scale: str | None = opt(None, "laptop, gpu or paper; default: all.", "SCALE")


@dataclass(frozen=True)
class StudyRunOptions:
    name: Annotated[str | Sequence[str], Opt("A study of `vitlab study list`, several, or a TOML file.", "NAME")]
    _: KW_ONLY
    scale: str = opt("laptop", "laptop, gpu or paper.", "SCALE")
    out: StrPath = opt(
        "runs/studies", "Runs, records and reports; shared by all studies and workers.", "DIR", named=True
    )
    seeds: int | None = opt(None, "The first N seeds of the study alone.", "N")
    device: str = opt("auto", "cpu, cuda, cuda:1, mps, or auto for every GPU there is.", "NAME", panel=_MACHINE)
    workers: int | None = opt(
        None, "Runs at once on each device; default: 4 on a GPU, else one for each core.", "N", panel=_MACHINE
    )
    threads: Threads = None
    quiet: Quiet = False
    dry_run: DryRun = False


@dataclass(frozen=True)
class StudyReportOptions:
    name: Annotated[str, Opt("A study or a published table of `vitlab study list`, or claims for all of them.", "NAME")]
    _: KW_ONLY
    scale: str | None = opt(None, "laptop, gpu or paper; default: the largest that is complete.", "SCALE")
    records: StrPath | None = opt(
        None, "The folder of the records; default runs/studies for a study, docs/results/records for a table.", "DIR"
    )
    out: StrPath | None = opt(None, "A new .md or .html file to write it to.", "FILE")
    gpu_tflops: float | None = opt(None, "Sustained TFLOP/s of a GPU to count training days of a table with.", "X")
