"""Tiny training runs in forked children, stopped in every way, alone and several processes together.

Each child trains the same small model on noise, in a folder of its own. `do_work` returns how every child ended and what it
left, so that the tests only compare. Forking from one parent saves importing torch for each of them.
"""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # it and the next are here, so that those who are forked need not wait for them
import torch.distributed.fsdp
from run_jobs import run_recipe

from vitlab.core import dist, fsio
from vitlab.core.console import Console
from vitlab.core.errors import UsageError, VitlabError
from vitlab.core.runtime import generator, prepare
from vitlab.core.signals import Stopped
from vitlab.data.dataset import Dataset, from_arrays
from vitlab.data.parts import Parts
from vitlab.training import checkpoint
from vitlab.training.recipe import recipe_from_dict, with_changes

CLASSES = ("a", "b", "c", "d")
TABLE: dict[str, Any] = {
    "title": "Noise",
    "data": {"source": "noise", "image_size": [8, 8], "mode": "L"},
    "model": {"name": "ViT-w16d2m32h2/4"},
    "train": {"steps": 6, "batch_size": 8, "save_every": "34%", "ema": 0.9},
    "optim": {"lr": 1e-2},
}
TIMES = {"images_per_second", "data_wait_frac", "memory_gb", "seconds_left"}
REFUSED, FAILED = 2, 1

# What keeps a state and what draws at random, in several mixtures.
RANDOM = ("model.dropout=0.2", "data.augment.erase=0.5", "data.mix.mixup=0.4", "data.mix.cutmix=1.0", "data.repeats=2")
MASKED = ("objective.kind=masked-patches",)
MAE = ("objective.kind=mae", *(f"objective.mae.decoder_{name}" for name in ("width=16", "depth=1", "heads=2")))
VARIANTS: dict[str, tuple[str, ...]] = {
    "adamw, all that is random": RANDOM,
    "adam-paper, narrow momentum": ("optim.name=adam-paper", "optim.momentum_dtype=bfloat16", "optim.weight_decay=0.1"),
    "sgd-paper, two workers": (*RANDOM, "optim.name=sgd-paper", "data.workers=2", "data.cache=file"),
    "sgd, balanced classes": (*RANDOM, "optim.name=sgd", "data.balanced=true", "train.ema=0"),
    "half precision": (*RANDOM, "train.precision=fp16", "train.micro_batch=4"),
    "adapters, recomputed": (*RANDOM, "optim.train=lora", "train.recompute=true"),
    "masked patches": (*MASKED, "model.dropout=0.2", "train.micro_batch=4"),
    "masked autoencoder, recomputed": (*MAE, "model.dropout=0.2", "train.recompute=true"),
}


def noise(name: str, count: int, seed: int) -> Dataset:
    images = torch.randint(0, 256, (count, 1, 16, 16), dtype=torch.uint8, generator=generator(seed))
    return from_arrays(images, torch.arange(count) % len(CLASSES), CLASSES, name)


def train(folder: Path, *overrides: str, resume: bool = False, tuned: bool = False) -> int:
    """One run in this process, alone or as the environment says; returns an exit code."""
    recipe = recipe_from_dict(with_changes(TABLE, overrides), len(CLASSES))
    parts = Parts(noise("train", 24, 0), noise("val", 10, 2) if tuned else None, noise("test", 10, 1), ())
    runtime = prepare("cpu", seed=0, threads=1)
    try:
        with dist.join(runtime.device) as world:
            run_recipe(
                recipe,
                parts,
                folder,
                runtime=runtime,
                world=world,
                console=Console(quiet=True),
                command="a test",
                resume=resume,
            )
    except Stopped as stopped:
        return stopped.exit_code
    except UsageError:
        return REFUSED
    except VitlabError:
        return FAILED
    return 0


def forked(task: Callable[[], int]) -> int:
    """The id of a child that does `task` and exits with its code; any surprise is shown and is code 99."""
    child = os.fork()
    if child:
        return child
    try:
        code = task()
    except BaseException:
        traceback.print_exc()
        code = 99
    os._exit(code)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def left(folder: Path) -> dict[str, Any]:
    """What two runs that should be equal must have in common, as hashes; and what must not be there."""
    paths = checkpoint.list_checkpoints(folder / "checkpoints")
    if not paths or not (folder / "bundle").exists():
        return {"files": sorted(path.name for path in folder.iterdir()) if folder.exists() else None}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name not in TIMES} for row in rows]
    fsio.verify_folder(paths[-1])
    fsio.verify_folder(folder / "bundle")
    return {
        "rows": hashlib.sha256(json.dumps(kept).encode()).hexdigest(),
        "checkpoints": [path.name for path in paths],
        "state": fsio.hash_file(paths[-1] / fsio.MANIFEST),
        "bundle": fsio.hash_file(folder / "bundle" / fsio.MANIFEST),
        "temporary": [str(path) for path in folder.rglob("*.tmp")],
    }


# --- signals in the midst of the steps --------------------------------------------------------------------------------


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_steps(folder: Path, steps: int) -> None:
    until = time.monotonic() + 300
    while steps_done(folder) < steps:
        if time.monotonic() > until:
            raise TimeoutError(f"{folder} has done {steps_done(folder)} steps only")
        time.sleep(0.005)


def signals(root: Path, _: int) -> dict[str, Any]:
    """SIGTERM to the process alone, as a scheduler sends it; SIGINT to its loading workers too, as Ctrl-C does."""
    long = ("train.steps=60", "train.save_every=100%", "data.workers=2", *RANDOM)
    whole = forked(lambda: train(root / "whole", *long))
    found: dict[str, Any] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        folder = root / number.name

        def task(folder: Path = folder) -> int:
            os.setpgid(0, 0)
            return train(folder, *long)

        child = forked(task)
        wait_for_steps(folder, 3)
        (os.killpg if number == signal.SIGINT else os.kill)(child, number)
        code = ended(child)
        saved = [path.name for path in checkpoint.list_checkpoints(folder / "checkpoints")]
        resumed = ended(forked(lambda folder=folder: train(folder, *long, resume=True)))
        found[number.name] = {"code": code, "saved": saved, "resumed": resumed, "left": left(folder)}
    return {"whole": ended(whole), "left": left(root / "whole"), "signals": found}


# --- what a state consists of -----------------------------------------------------------------------------------------


class Crash(BaseException):
    pass


def crashed(folder: Path, overrides: tuple[str, ...], after: int) -> int:
    seen = 0

    def listener(_operation: fsio.Operation, path: Path) -> None:
        nonlocal seen
        seen += path.name == "metrics.jsonl"
        if path.name == "metrics.jsonl" and seen == after + 1:
            raise Crash

    try:
        with fsio.intercept(listener):
            train(folder, *overrides)
    except Crash:
        return train(folder, *overrides, resume=True)
    return FAILED


def variants(root: Path, how_many: int) -> dict[str, Any]:
    """Stopped after so many different steps, of which one has a checkpoint before it in any case."""
    found: dict[str, Any] = {}
    for number, (name, overrides) in enumerate(VARIANTS.items()):
        train(root / f"{number}-whole", *overrides)
        rows: dict[str, Any] = {"whole": left(root / f"{number}-whole")}
        for after in (5, 3, 1)[:how_many]:
            folder = root / f"{number}-{after}"
            rows[str(after)] = {"code": crashed(folder, overrides, after), "left": left(folder)}
        found[name] = rows
    return found


# --- several processes ------------------------------------------------------------------------------------------------


def world_of(size: int, task: Callable[[int], int]) -> list[int]:
    """The ids of `size` children that find each other as those of torchrun do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def member(rank: int) -> int:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
        )
        return task(rank)

    return [forked(lambda rank=rank: member(rank)) for rank in range(size)]


@dataclasses.dataclass(frozen=True)
class Outcome:
    codes: list[int]
    losses: list[float]
    files: list[str]
    weights: str


def together(folder: Path, size: int, *overrides: str, resume: bool = False, tuned: bool = False) -> Outcome:
    children = world_of(size, lambda _: train(folder, *overrides, resume=resume, tuned=tuned))
    return outcome(folder, [ended(child) for child in children])


def outcome(folder: Path, codes: list[int]) -> Outcome:
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    files = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    return Outcome(codes, [row["loss"] for row in rows], files, str(folder / "bundle" / "model.safetensors"))


# Not Adam: the bias of the keys has no gradient but rounding noise, which Adam would scale up to whole steps.
PLAIN = ("train.steps=6", "data.mix.mixup=0.4", "data.augment.erase=0.5", "optim.name=sgd", "optim.lr=0.1")


def worlds(root: Path, _: int) -> dict[str, Any]:
    """What every rule of several processes needs once."""
    found = {str(size): together(root / str(size), size, *PLAIN) for size in (1, 2)}
    found["sharded"] = together(root / "sharded", 4, *PLAIN, "train.sharded=true")
    found["uneven"] = together(root / "uneven", 3, *PLAIN)
    found["nan"] = together(root / "nan", 2, *PLAIN, "optim.lr=1e30", "train.save_every=100%")
    return {
        **{name: dataclasses.asdict(value) for name, value in found.items()},
        "signal, false": stopped_together(root / "signal, false", "false"),
    }


def stopped_together(folder: Path, sharded: str) -> dict[str, Any]:
    long = ("train.steps=200", "train.save_every=100%", f"train.sharded={sharded}")
    children = world_of(2, lambda _: train(folder, *long))
    wait_for_steps(folder, 3)
    os.kill(children[1], signal.SIGTERM)  # not the one that leads
    codes = [ended(child) for child in children]
    saved = [path.name for path in checkpoint.list_checkpoints(folder / "checkpoints")]
    return {"codes": codes, "saved": saved, "steps": steps_done(folder)}


def more_worlds(root: Path, _: int) -> dict[str, Any]:
    """The variations of them."""
    plain = PLAIN
    found = {str(size): together(root / str(size), size, *plain) for size in (1, 4)}
    found["pieces"] = together(root / "pieces", 2, *plain, "train.micro_batch=2", "data.cache=file")

    def begin(_: int) -> int:
        seen = 0

        def listener(_operation: fsio.Operation, path: Path) -> None:
            nonlocal seen
            seen += path.name == "metrics.jsonl"
            if path.name == "metrics.jsonl" and seen == 5:
                raise Crash

        try:
            with fsio.intercept(listener):
                return train(root / "grown", *plain)
        except Crash:
            return 0

    ended(forked(lambda: begin(0)))
    shutil.copytree(root / "grown", root / "grown, sharded")
    found["grown"] = together(root / "grown", 2, *plain, resume=True)
    found["grown, sharded"] = together(root / "grown, sharded", 2, *plain, "train.sharded=true", resume=True)
    recomputed = ("train.sharded=true", "train.recompute=true", "train.micro_batch=2")
    found["sharded pieces"] = together(root / "sharded pieces", 2, *plain, *recomputed)
    taught = (
        "objective.kind=feature-distillation",
        f"teacher={root / '1'}",
        "train.steps=6",
        "optim.name=sgd",
        "optim.lr=0.1",
    )
    found |= {f"taught {size}": together(root / f"taught {size}", size, *taught) for size in (1, 2)}
    found["taught, sharded"] = together(root / "taught, sharded", 2, *taught, "train.sharded=true")
    return {
        **{name: dataclasses.asdict(value) for name, value in found.items()},
        "signal, true": stopped_together(root / "signal, true", "true"),
        "signal, slow disk": stopped_on_a_slow_disk(root / "signal, slow disk"),
    }


def stopped_on_a_slow_disk(folder: Path) -> dict[str, Any]:
    """The first process saves for long; the other, which has nothing to save, must not leave meanwhile."""

    def work(rank: int) -> int:
        def slow(operation: fsio.Operation, path: Path) -> None:
            if (operation, rank, path.name) == ("write", 0, checkpoint.OPTIMIZER):
                time.sleep(3)

        with fsio.intercept(slow):
            return train(folder, "train.steps=200", "train.save_every=100%")

    children = world_of(2, work)
    wait_for_steps(folder, 3)
    os.kill(children[0], signal.SIGTERM)
    codes = [ended(child) for child in children]
    saved = [path.name for path in checkpoint.list_checkpoints(folder / "checkpoints")]
    return {"codes": codes, "saved": saved, "steps": steps_done(folder)}


SPREAD: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "adam-paper, narrow momentum": ("optim.name=adam-paper", "optim.momentum_dtype=bfloat16", "optim.weight_decay=0.1"),
    "sgd-paper, adapters": ("optim.name=sgd-paper", "optim.train=lora"),
    "the last block": ("optim.train=last:1", "train.recompute=true"),
    "bfloat16": ("train.precision=bf16",),
    "float16": ("train.precision=fp16", "train.micro_batch=2"),
    "masked patches": MASKED,
    "masked autoencoder": MAE,
}


def some_of_spread() -> dict[str, tuple[str, ...]]:
    """All with VITLAB_SOAK=1; otherwise one for each way that a state is kept and a step is taken."""
    some = ("adamw", "adam-paper, narrow momentum", "the last block", "float16", "masked autoencoder")
    return SPREAD if os.environ.get("VITLAB_SOAK") == "1" else {name: SPREAD[name] for name in some}


def spread(root: Path, _: int) -> dict[str, Any]:
    """Two processes that have all weights each, and two that have half of them each; with evaluations, the best kept."""
    found: dict[str, Any] = {}
    for number, (name, overrides) in enumerate(some_of_spread().items()):
        few = ("train.steps=4", "train.eval_every=50%", "optim.lr=1e-3", *overrides)
        for kind, shard in (("whole", "false"), ("spread", "true")):
            folder = root / f"{number}-{kind}"
            run = dataclasses.asdict(together(folder, 2, *few, f"train.sharded={shard}", tuned=True))
            last = checkpoint.restore(folder / "checkpoints" / "step-000000004")
            found.setdefault(name, {})[kind] = {**run, "tuned": last.progress["evaluations"]}

    def no_room(rank: int) -> int:
        """The second process finds the disk full at its part of the second checkpoint."""

        def listener(operation: fsio.Operation, path: Path) -> None:
            if (operation, rank) == ("write", 1) and path.parent.name.startswith(".step-000000004"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with fsio.intercept(listener):
            return train(root / "full", "train.sharded=true")

    codes = [ended(child) for child in world_of(2, no_room)]
    saved = sorted(path.name for path in (root / "full" / "checkpoints").iterdir())
    found["full"] = {
        "codes": codes,
        "saved": saved,
        "whole": fsio.verify_folder(root / "full" / "checkpoints" / saved[0]),
    }
    return found


WORK = {"signals": signals, "variants": variants, "worlds": worlds, "more-worlds": more_worlds, "spread": spread}


def do_work(kind: str, place: Path, how_many: int = 0) -> dict[str, Any]:
    place.mkdir(parents=True, exist_ok=True)
    train(place / "first")  # what torch prepares at its first use, the children inherit
    return WORK[kind](place, how_many)
