"""`vitlab demo`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import Debug, Device, DryRun, Json, PrintConfig, Quiet, Seed, Set, Threads, print_json


def run(
    out: Annotated[Path | None, typer.Option(help="A new folder; default runs/demo, or the next free name.")] = None,
    overrides: Set = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Leave the pre-training out, to compare.")
    ] = False,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = None,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The whole story in two minutes: pre-train, transfer, test, explain, report; on real digits, with no download."""
    from vitlab.runs import digits_demo

    given = overrides or []
    if print_config:
        typer.echo(digits_demo.demo_config(given, seed), nl=False)
        return
    if dry_run:
        plan = digits_demo.plan_demo(out, overrides=given, from_scratch=from_scratch, device=device, seed=seed)
        print_json(plan) if as_json else [typer.echo(f"{name:<10} {text}") for name, text in plan.items()]
        return
    result = digits_demo.demo(
        out, overrides=given, from_scratch=from_scratch, device=device, seed=seed, threads=threads, quiet=quiet
    )
    if as_json:
        print_json(dataclasses.asdict(result))
    elif quiet:
        typer.echo(f"test top-1 {result.test['top1']:.4f}  {result.report}")
