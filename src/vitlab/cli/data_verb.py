"""`vitlab data list | check | split | shard`."""

import dataclasses
import fnmatch
from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import Debug, Device, Json, Quiet, Seed, echo, print_json, show
from vitlab.core.errors import UnknownName, VitlabError

app = typer.Typer(name="data", help="Sets of images: list, check, split and shard them.", no_args_is_help=True)

_SHOWN = 5  # findings of a kind; --out and --json have all

Data = Annotated[str, typer.Argument(metavar="DATA", help="A folder of class folders, a table, shards, or a name.")]


@app.command("list")
def show_list(
    pattern: Annotated[str, typer.Argument(help="A shell pattern, such as 'cifar*'.")] = "*",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The sets that have a name: which are here, which can be fetched or generated, and where to put the others."""
    from vitlab.data.sources.named import list_data

    rows = [row for row in list_data() if fnmatch.fnmatchcase(row.name, pattern.casefold())]
    if not rows:
        raise UnknownName("data set", pattern, [row.name for row in list_data()])
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
        return
    echo(f"{'name':<22}{'classes':>8}  {'images':<40}{'state':<10}where")
    for row in rows:
        parts = ", ".join(f"{part} {count:,}" for part, count in row.parts.items()) or "-"
        echo(f"{row.name:<22}{row.classes:>8,}  {parts:<40}{row.state:<10}{row.where}")
        if row.state == "by hand":
            echo(f"{'':<22}{'':>8}  put there: {', '.join(row.files) or row.where}")


@app.command("check")
def check(
    data: Data,
    against: Annotated[
        str | None, typer.Option(metavar="DATA", help="Other data whose test images must not be among these.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Also compare labels with the nearest pictures' by this model.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder for audit.html, with pictures, and audit.json.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default one per core, eight at most.")] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Decode every image; find what is broken, odd, there twice, or in two parts. Exits with status 1 if it is serious."""
    from vitlab.data.auditing.audit import SERIOUS, TITLES
    from vitlab.runs.data_tools import audit_json, check_data

    audit = check_data(data, against=against, model=model, out=out, workers=workers, device=device, quiet=quiet)
    if as_json:
        print_json(audit_json(audit))
    else:
        for part, counts in audit.parts.items():
            present = sum(count > 0 for count in counts.values())
            echo(f"{part:<8} {audit.sizes[part]:,} images of {present:,} classes")
        formats = ", ".join(f"{name} {count:,}" for name, count in audit.formats.items())
        echo(f"{'files':<8} {formats}; {audit.megabytes:,.1f} MB; median shorter side {audit.median_side} pixels")
        for note in audit.notes:
            echo(f"{'note':<8} {note}")
        for kind, count in audit.counts.items():
            echo(f"\n{'!!' if kind in SERIOUS else '--'}  {TITLES[kind]}: {count:,}")
            for finding in [finding for finding in audit.findings if finding.kind == kind][:_SHOWN]:
                names = ", ".join(item.key for item in finding.items[:_SHOWN])
                echo(f"      {names}{': ' if names else ''}{finding.text}")
            if count > _SHOWN:
                echo(f"      and {count - _SHOWN:,} more; --out DIR or --json gives all")
        if not audit.findings:
            echo("\nnothing to report")
        if out is not None:
            echo(f"\npage: {out / 'audit.html'}")
    if audit.serious:
        number = sum(finding.serious for finding in audit.findings)
        raise VitlabError(f"{number:,} serious finding(s) in {data}", hint="They are marked !! above.")


@app.command("split")
def split(
    data: Data,
    out: Annotated[Path, typer.Option(metavar="FILE.csv", help="The table to write; it names the images.")],
    train: Annotated[float, typer.Option(help="Share of every class.")] = 0.8,
    val: Annotated[float, typer.Option(help="Share of every class; 0 for no such part.")] = 0.1,
    test: Annotated[float, typer.Option(help="Share of every class; 0 for no such part.")] = 0.1,
    seed: Seed = 0,
    group_by: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Keep together what has this in its name in common: 'patient\\d+'."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Stratified split as a table: groups and copies of a picture stay together. The same data and seed give the same one."""
    from vitlab.runs.data_tools import split_data

    shares = {name: share for name, share in (("train", train), ("val", val), ("test", test)) if share != 0}
    done = split_data(data, out, parts=shares, seed=seed, group_by=group_by, quiet=quiet)
    lines = [
        f"{part:<8} {done.sizes[part]:,} images of {len(counts):,} classes" for part, counts in done.counts.items()
    ]
    if done.groups is not None:
        lines.append(f"{'groups':<8} {done.groups:,}, none of them in two parts")
    if done.copies:
        apart = f"{done.copies_apart:,} of them" if done.copies_apart else "none of them"
        lines.append(f"{'copies':<8} pictures more than once: {done.copies:,}, {apart} in two parts")
    show(done, [*lines, f"{'table':<8} {done.out}"], as_json=as_json)


@app.command("shard")
def shard(
    data: Data,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder for the shards.")],
    per_shard: Annotated[int, typer.Option(help="Images in a shard; it is held in memory while it is written.")] = 1000,
    workers: Annotated[int | None, typer.Option(help="Processes; default one per core, eight at most.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the data as WebDataset tars with an index and checksums. The same call again resumes where this one stopped."""
    from vitlab.runs.data_tools import shard_data

    done = shard_data(data, out, per_shard=per_shard, workers=workers, quiet=quiet)
    rows = {"images": f"{done.images:,}", "shards": f"{done.shards:,}, {done.megabytes:,.1f} MB", "folder": done.out}
    show(done, [f"{name:<8} {text}" for name, text in rows.items()], as_json=as_json)
