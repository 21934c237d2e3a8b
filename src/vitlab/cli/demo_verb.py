"""`vitlab demo`."""

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import (
    Debug,
    Device,
    DryRun,
    Json,
    PrintConfig,
    Quiet,
    Seed,
    Set,
    Threads,
    echo,
    print_json,
    show,
)
from vitlab.core import config


def run(
    out: Annotated[Path | None, typer.Option(help="A new folder; default runs/demo, or the next free name.")] = None,
    overrides: Set = None,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = 1,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The whole story in minutes: pre-train on fractals, transfer to real digits, test, explain, report; no download."""
    from vitlab.runs import digits_demo

    given = overrides or []
    if print_config:
        table = digits_demo.demo_config(given, seed)
        print_json(table) if as_json else echo(config.dump_toml(table), end="")
        return
    if dry_run:
        plan = digits_demo.plan_demo(out, overrides=given, device=device, seed=seed, threads=threads)
        show(plan, [f"{name:<10} {text}" for name, text in plan.items()], as_json=as_json)
        return
    result = digits_demo.demo(out, overrides=given, device=device, seed=seed, threads=threads, quiet=quiet)
    show(result, result.sentences(), as_json=as_json)
