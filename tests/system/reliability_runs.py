"""Run as a program: what the tests of the fault catalogue need processes of their own for. Each prints JSON.

    python reliability_runs.py WORK PLACE [HOW_MANY]

Children are forked from here, so that torch is imported once.
"""

import datetime
import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked_runs import CLASSES, TABLE, ended, forked, left, noise, train, world_of
from kill_points import killed_at, named_operations, spread
from run_jobs import run_recipe
from torch import Tensor, nn

from vitlab.core import dist, fsio
from vitlab.core.console import Console
from vitlab.core.errors import VitlabError
from vitlab.core.runtime import generator, prepare
from vitlab.data.loader import Batch
from vitlab.data.parts import Parts
from vitlab.models.build import build
from vitlab.models.names import parse_name
from vitlab.models.spec import changed
from vitlab.training import assemble, checkpoint
from vitlab.training.checkpoint import Saver, Snapshot
from vitlab.training.loop import NonFinite, StepRule, TrainState, fit
from vitlab.training.optim import OptimRule, make_optimizer
from vitlab.training.recipe import recipe_from_dict, with_changes

SGD = ("optim.name=sgd", "optim.lr=0.1")  # Adam would scale the rounding noise of several processes up to whole steps


def run_outcome(folder: Path, *overrides: str, resume: bool = False) -> tuple[int, str]:
    """One run in this process: its exit code, and what was said last or went wrong."""
    recipe = recipe_from_dict(with_changes(TABLE, overrides), len(CLASSES))
    parts = Parts(noise("train", 24, 0), None, noise("test", 10, 1), ())
    runtime, console = prepare("cpu", seed=0, threads=1), Console(quiet=True)
    try:
        with dist.join(runtime.device) as world:
            given: dict[str, Any] = {"runtime": runtime, "world": world, "console": console, "command": "a test"}
            run_recipe(recipe, parts, folder, **given, resume=resume)
    except VitlabError as error:
        return error.exit_code, str(error)
    return 0, "\n".join(console.lines)


def noted(path: Path, work: Callable[[], tuple[int, str]]) -> int:
    code, text = work()
    path.write_text(text)
    return code


# --- T02: numbers that are none in one process only -------------------------------------------------------------------


def poison(root: Path, _: int) -> dict[str, Any]:
    """Two processes; in the second, the third step's loss is NaN, infinite, or finite with a gradient that is not."""

    def loss_of(kind: str, rank: int, step: int, losses_B: Tensor) -> Tensor:
        if rank == 0 or step != 2:
            return losses_B
        if kind == "gradient":
            return losses_B + (losses_B - losses_B.detach()).sqrt()  # 0 to the root: finite, but steep without end
        return losses_B * float(kind)

    def member(kind: str, rank: int) -> int:
        prepare("cpu", seed=0, threads=1)
        with dist.join(torch.device("cpu")) as world:
            spec = changed(parse_name("ViT-w16d2m32h2/4"), {"image_size": (8, 8), "in_channels": 1, "num_classes": 4})
            model = build(spec, seed=0)
            nn.init.normal_(model.head.weight, generator=generator(0))  # a head of zeros would send no gradient
            forward = nn.parallel.DistributedDataParallel(model)
            state = TrainState(model, forward, make_optimizer(model, OptimRule(lr=1e-2)))
            ids = torch.arange(4) + 4 * rank
            fields = (torch.ones(4, dtype=torch.bool), ids, torch.zeros_like(ids), torch.zeros_like(ids), ids)
            images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8, generator=generator(rank))
            batch = Batch(images, ids % 4, *fields)
            rule = StepRule(
                prepare=lambda part, _: (part.images.float() / 255, part.targets),
                losses=lambda _, logits_BK, targets: loss_of(
                    kind, rank, state.step, nn.functional.cross_entropy(logits_BK, targets, reduction="none")
                ),
                lr_at=lambda _: 1e-2,
                seed=0,
                max_grad_norm=math.inf,
            )
            before = ""
            try:
                for _record in fit(state, [batch] * 5, rule, world):
                    before = hash_of(model)
            except NonFinite as error:
                found = {"step": error.step, "ids": error.ids, "untouched": hash_of(model) == before, "weights": before}
                (root / f"{kind}-{rank}.json").write_text(json.dumps(found))
                return 1
        return 0

    found: dict[str, Any] = {}
    for kind in ("nan", "inf", "gradient"):
        codes = [ended(child) for child in world_of(2, lambda rank, kind=kind: member(kind, rank))]
        ranks = [json.loads((root / f"{kind}-{rank}.json").read_text()) for rank in range(2)]
        found[kind] = {"codes": codes, "ranks": ranks}
    return found


def hash_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


# --- T05: SIGKILL at every step ---------------------------------------------------------------------------------------


def steps(root: Path, how_many: int) -> dict[str, Any]:
    whole = ended(forked(lambda: train(root / "whole")))
    found: dict[str, Any] = {}
    for step in spread(list(range(1, 7)), how_many):
        folder = root / str(step)

        def task(folder: Path = folder, step: int = step) -> int:
            with killed_at(folder, f"append metrics.jsonl #{step}"):
                return train(folder)

        died = ended(forked(task))
        found[str(step)] = {
            "died": died,
            "resumed": ended(forked(lambda folder=folder: train(folder, resume=True))),
            "left": left(folder),
        }
    return {"whole": whole, "left": left(root / "whole"), "kills": found}


# --- T06: one process dies --------------------------------------------------------------------------------------------


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lost(root: Path, _: int) -> dict[str, Any]:
    """One of two dies in each phase of the work, all four pairs at once; the other ends with one sentence."""
    long = ("train.steps=40", "train.save_every=5%", "model.dropout=0.1")

    def deadly(phase: str) -> None:
        calls = 0

        def third(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                die()

        if phase == "forward":
            torch.nn.modules.module.register_module_forward_pre_hook(third)
        elif phase == "backward":
            backward = torch.Tensor.backward
            torch.Tensor.backward = lambda *given, **named: (third(), backward(*given, **named))[1]  # pyright: ignore
        else:
            dist.World.barrier = die  # pyright: ignore

    def member(phase: str, rank: int) -> int:
        folder, note = root / phase, root / f"{phase}-{rank}.txt"
        if phase == "save" and rank == 0:
            with killed_at(folder, "write checkpoints/step-000000002 (new)/model.safetensors #1"):
                return noted(note, lambda: run_outcome(folder, *long))
        if phase != "save" and rank == 1:
            deadly(phase)
        return noted(note, lambda: run_outcome(folder, *long))

    phases = ("forward", "backward", "save", "barrier")
    children = {phase: world_of(2, lambda rank, phase=phase: member(phase, rank)) for phase in phases}
    codes: dict[int, int] = {}
    moments: dict[int, float] = {}
    while len(codes) < 2 * len(phases):
        child, status = os.waitpid(-1, 0)
        codes[child], moments[child] = os.waitstatus_to_exitcode(status), time.monotonic()
    found: dict[str, Any] = {}
    for phase, (first, second) in children.items():
        text = (root / f"{phase}-{1 if phase == 'save' else 0}.txt").read_text()
        after = abs(moments[first] - moments[second])  # seconds from the death of the one to the end of the other
        found[phase] = {"codes": [codes[first], codes[second]], "seconds": after, "printed": text}
    folder = root / "backward"  # and it goes on, alone
    found["resumed"] = ended(forked(lambda: train(folder, *long, resume=True)))
    return found


# --- T07: one process hangs -------------------------------------------------------------------------------------------


def hung(root: Path, _: int) -> dict[str, Any]:
    """One of two falls asleep while it prepares its third batch; the other waits for it five seconds."""

    def member(rank: int) -> int:
        dist._TIMEOUT = datetime.timedelta(seconds=5)
        if rank == 1:
            calls, made = 0, assemble.normalise

            def asleep(*given: Any) -> Tensor:
                nonlocal calls
                calls += 1
                if calls == 3:
                    time.sleep(600)
                return made(*given)

            assemble.normalise = asleep
        return noted(root / f"{rank}.txt", lambda: run_outcome(root / "run", "train.steps=40"))

    started = time.monotonic()
    first, second = world_of(2, member)
    code = ended(first)
    os.kill(second, signal.SIGKILL)  # as a launcher does when one has failed
    return {
        "code": code,
        "died": ended(second),
        "seconds": time.monotonic() - started,
        "printed": (root / "0.txt").read_text(),
    }


# --- T08: no memory left ----------------------------------------------------------------------------------------------


def memory(root: Path, _: int) -> dict[str, Any]:
    """A batch that cannot be held, under a real limit on addresses, in a run that has a checkpoint already."""
    wide = (
        "train.steps=4",
        "train.save_every=25%",
        "train.batch_size=256",
        "data.image_size=[64,64]",
        "data.repeats=11",
    )

    def begin() -> int:
        with killed_at(root / "run", "append metrics.jsonl #3"):
            return train(root / "run", *wide)

    def limited(*more: str) -> int:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**26, resource.RLIM_INFINITY))
        return noted(root / "said.txt", lambda: run_outcome(root / "run", *wide, *more, resume=True))

    died = ended(forked(begin))
    before = {
        path.name: fsio.hash_file(path / fsio.MANIFEST)
        for path in checkpoint.list_checkpoints(root / "run" / "checkpoints")
    }
    failed = ended(forked(limited))
    printed = (root / "said.txt").read_text()
    after = {
        path.name: fsio.hash_file(path / fsio.MANIFEST)
        for path in checkpoint.list_checkpoints(root / "run" / "checkpoints")
    }
    smaller = ended(forked(lambda: limited("train.micro_batch=16")))
    return {"died": died, "failed": failed, "printed": printed, "kept": before == after, "smaller": smaller}


# --- C01, C02, C03: SIGKILL in a save ---------------------------------------------------------------------------------


def snapshot(step: int) -> Snapshot:
    draw = generator(step)
    return Snapshot(
        step=step,
        model={"w": torch.randn(30, 20, generator=draw), "b": torch.randn(20, generator=draw)},
        optimizer={"w/step": torch.tensor(float(step)), "w/exp_avg": torch.randn(30, 20, generator=draw)},
        ema={"w": torch.randn(30, 20, generator=draw)},
        progress={"best": None, "evaluations": [], "bad": {}, "scaler": {}},
    )


def is_whole(found: Snapshot) -> bool:
    """Whether it holds what the snapshot of its step held, to the bit."""
    made = snapshot(found.step)
    pairs = [(made.model, found.model), (made.optimizer, found.optimizer), (made.ema or {}, found.ema or {})]
    return all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours) for ours, theirs in pairs
    )


def saves(root: Path, _: int) -> list[dict[str, Any]]:
    """A third checkpoint and the removal of the first, killed before each disk operation."""

    def work(folder: Path, point: str | None) -> int:
        with killed_at(folder, point) as seen:
            checkpoint.store(folder, snapshot(3))
            checkpoint.prune(folder, keep=2, best=None)
        (root / "operations.json").write_text(json.dumps(seen))
        return 0

    def begun(name: str) -> Path:
        for step in (1, 2):
            checkpoint.store(root / name, snapshot(step))
        return root / name

    ended(forked(lambda: work(begun("whole"), None)))
    found: list[dict[str, Any]] = []
    for number, point in enumerate(json.loads((root / "operations.json").read_text())):
        folder = begun(str(number))
        died = ended(forked(lambda folder=folder, point=point: work(folder, point)))
        newest, printed = checkpoint.newest_valid(folder)
        whole = newest is not None and is_whole(newest)
        step = None if newest is None else newest.step
        with fsio.locked(folder):  # as the next run does it: leftovers go
            checkpoint.remove_after(folder, step or 0)
            if step == 2:
                checkpoint.store(folder, snapshot(3))
            checkpoint.prune(folder, keep=2, best=None)
        names = sorted(path.name for path in folder.iterdir() if path.name != fsio.LOCK)
        found.append({"point": point, "died": died, "step": step, "whole": whole, "printed": printed, "names": names})
    return found


def moments(root: Path, how_many: int) -> list[dict[str, Any]]:
    """A process that does nothing but save, beside its own work, killed at random times."""

    def work(folder: Path) -> int:
        saver = Saver(folder, keep=2)
        for step in range(1, 10**6):
            saver.submit(snapshot(step), None)
        return 0

    draw = random.Random(0)
    found: list[dict[str, Any]] = []
    for number in range(how_many):
        folder = root / str(number)
        checkpoint.store(folder, snapshot(0))
        child = forked(lambda folder=folder: work(folder))
        time.sleep(draw.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        died = ended(child)
        newest, _said = checkpoint.newest_valid(folder)
        newest_name = max(path.name for path in checkpoint.list_checkpoints(folder))
        found.append(
            {
                "died": died,
                "whole": newest is not None and is_whole(newest),
                "lost": 0 if newest is None else int(newest_name.removeprefix("step-")) - newest.step,
                "step": newest.step if newest else None,
            }
        )
        shutil.rmtree(folder)
    return found


# --- C04: a full disk -------------------------------------------------------------------------------------------------


def fill(place: Path) -> Path:
    """Takes all the room that is left on a small disk."""
    ballast = place / "ballast"
    with ballast.open("ab", buffering=0) as file:
        size = 2**16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return ballast


def full_disk_at_every_operation(place: Path, _: int) -> list[dict[str, Any]]:
    """PLACE is a small disk. It becomes full before each operation of a save in turn, and is given room again."""
    folder = place / "checkpoints"
    found: list[dict[str, Any]] = []
    number = 0
    while not found or found[-1]["reached"]:
        for step in (1, 2):
            checkpoint.store(folder, snapshot(step))
        count, reached, printed = 0, False, ""

        def listener(_operation: fsio.Operation, _path: Path, number: int = number) -> None:
            nonlocal count, reached
            if count == number:
                reached = True
                fill(place)
            count += 1

        try:
            with fsio.intercept(listener):
                checkpoint.store(folder, snapshot(3))
        except VitlabError as error:
            printed = str(error)
        newest, complaints = checkpoint.newest_valid(folder)
        row = {
            "reached": reached,
            "printed": printed,
            "complaints": complaints,
            "step": newest.step if newest else None,
        }
        row["whole"] = (
            newest is not None and is_whole(newest) and is_whole(checkpoint.restore(folder / "step-000000001"))
        )
        row["names"] = sorted(path.name for path in folder.iterdir())
        if reached:
            (place / "ballast").unlink()
        if row["step"] == 2:
            checkpoint.store(folder, snapshot(3))
        row["again"] = is_whole(checkpoint.restore(folder / "step-000000003"))
        found.append(row)
        shutil.rmtree(folder)
        number += 1
    return found


def full_disk_under_a_run(place: Path, how_many: int) -> dict[str, Any]:
    """A run whose disk is full from one operation on, for HOW_MANY of them (0: all); then room is made, and it goes on."""
    points = place.parent / f"{place.name}-points"  # what is reported must not need the small disk
    folder = place / "run"

    def task(point: str | None) -> int:
        def heard(name: str) -> None:
            seen.append(name)
            if name == point:
                fill(place)

        seen: list[str] = []
        with named_operations(folder, heard):
            code, text = run_outcome(folder)
        points.write_text(json.dumps([text, seen]))
        return code

    codes = [ended(forked(lambda: task(None)))]
    expected, (_, names) = left(folder), json.loads(points.read_text())
    shutil.rmtree(folder)
    needing = [name for name in names if name.startswith(("mkdir", "create", "write", "append"))]
    found: dict[str, Any] = {}
    for point in spread(needing, how_many):
        code = ended(forked(lambda point=point: task(point)))
        text, _ = json.loads(points.read_text())
        (place / "ballast").unlink()
        resume = folder.exists()
        again = ended(forked(lambda resume=resume: train(folder, resume=resume)))
        found[point] = {"code": code, "printed": text, "again": again, "same": left(folder) == expected}
        shutil.rmtree(folder)
    return {"whole": codes, "total": len(needing), "ends": found}


# --- C10: a run that goes on for long ---------------------------------------------------------------------------------


def long(root: Path, _: int) -> int:
    return train(root / "run", "train.steps=20000", "train.save_every=0.01%")


# --- C06: short writes and interrupted calls --------------------------------------------------------------------------


def store_one(root: Path, _: int) -> str:
    return str(checkpoint.store(root / "checkpoints", snapshot(5)))


WORK: dict[str, Callable[[Path, int], Any]] = {
    "poison": poison,
    "steps": steps,
    "lost": lost,
    "hung": hung,
    "memory": memory,
    "saves": saves,
    "moments": moments,
    "full-save": full_disk_at_every_operation,
    "full-run": full_disk_under_a_run,
    "store": store_one,
    "long": long,
}


def do_work(kind: str, place: Path, how_many: int = 0) -> Any:
    place.mkdir(parents=True, exist_ok=True)
    if kind in ("poison", "steps", "lost", "hung", "memory", "full-run"):
        train(place / "first")  # what torch prepares at its first use, the children inherit
        shutil.rmtree(place / "first")
    return WORK[kind](place, how_many)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    print(json.dumps(do_work(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))))
