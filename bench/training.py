"""Training from encoded images to updated weights: images per second, waiting for data and memory, beside the peers.

`vitlab train` as users call it, a bare loop of timm's loader, model and optimiser, and the Trainer of transformers: the same
images, architecture, batch, optimiser, precision and number of workers. Each is a process of its own that trains without end.
All are started and warmed up; then they take turns, the others stopped (SIGSTOP), so that a busy moment hits everybody. The
median over the rounds counts. Run by `make bench` in the peers' environment; `--write FILE` records the table.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import vitlab

DATA = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[2] / "shared" / "data"))
PEERS = Path(__file__).with_name("training_peers.py")
OURS, OURS_LOADING = "vitlab", "vitlab, no cache"
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)  # torchvision's defaults
LR, WEIGHT_DECAY, CLIP = 1e-3, 0.05, 1.0  # of no matter for speed; all use them
GRAPHS = "reduce-overhead"  # torch.compile's mode with CUDA graphs, which vitlab takes on a GPU
LONGEST_NAP_S = 10.0  # vitlab takes workers that show no sign of life for 20 s as hanging
PATIENCE_S = 400.0  # until everybody is warm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    title: str
    source: str  # as `vitlab train` takes it, below the data folder or a name
    archive: str  # the training images, below the data folder
    num_classes: int
    model: str
    side: int
    batch: int
    workers: int
    precision: str = "bf16"
    shift: int = 0  # pixels of frame to move within; 0 for a random resized crop
    compiled: bool = False
    every: int = 1  # steps in a record of the peers
    warm: int = 2  # steps that do not count: memory is allocated, the workers are at work
    contenders: Sequence[str] = (OURS, "timm", "transformers")


PETS = "oxford_pets/pets_trainval.npz"
ON_CPU = Job(
    title="Pets, 224 px",
    source=str(DATA / PETS),
    archive=PETS,
    num_classes=37,
    model="ViT-Ti/16",
    side=224,
    batch=32,
    workers=1,  # vitlab's own choice on a CPU
)
ON_GPU = Job(
    title="CIFAR-10, 32 px",
    source="cifar10",
    archive="cifar10/cifar10_train.npz",
    num_classes=10,
    model="ViT-w256d9m1024h4/4",
    side=32,
    batch=512,
    workers=8,  # vitlab's own choice beside a GPU
    shift=4,
    compiled=True,
    every=10,
    warm=20,  # compiled, and the graphs recorded
    contenders=(OURS, OURS_LOADING, "timm", "transformers"),
)
JOBS = {
    "cpu": [ON_CPU, dataclasses.replace(ON_CPU, precision="fp32")],
    "cuda": [
        ON_GPU,
        dataclasses.replace(
            ON_GPU,
            title="CIFAR-10, 224 px",
            model="ViT-S/16",
            side=224,
            batch=256,
            shift=0,
            every=5,
        ),
    ],
}


class Contender:
    """A process that trains, with its workers in one group, and the log that it writes."""

    def __init__(self, name: str, job: Job, device: str, folder: Path) -> None:
        self.name, self.job, self.folder = name, job, folder
        folder.mkdir()
        self.printed = folder / "said.txt"
        ours = name in (OURS, OURS_LOADING)
        self.log = folder / "run" / "metrics.jsonl" if ours else folder / "metrics.jsonl"
        command = (_our_command if ours else _peer_command)(name, job, device, folder, self.log)
        environment = {**os.environ, "VITLAB_DATA": str(DATA)}
        with self.printed.open("w") as printed:
            self.process = subprocess.Popen(
                command, stdout=printed, stderr=printed, start_new_session=True, env=environment
            )
        self.started, self.asleep_since, self.start_s = time.monotonic(), 0.0, 0.0
        self.turns: list[list[dict[str, Any]]] = []
        self.cpu_ms: list[float] = []  # per image, of each turn

    def count(self) -> int:
        found = self.log.read_bytes().count(b"\n") if self.log.exists() else 0
        if found and not self.start_s:
            self.start_s = time.monotonic() - self.started
        return found

    def failed(self) -> str:
        """Why it ended by itself; nothing while it runs."""
        if self.process.poll() is None:
            return ""
        return (
            " ".join(self.printed.read_text(errors="replace").split()[-40:]) or f"exit code {self.process.returncode}"
        )

    def sleep(self) -> None:
        self._signal(signal.SIGSTOP)
        self.asleep_since = time.monotonic()

    def wake(self) -> None:
        self._signal(signal.SIGCONT)
        self.asleep_since = 0.0

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def take_turn(self, steps: int, seconds: float) -> None:
        """Runs alone for at least so long. The first record is left out: it began before the sleep."""
        before, began, cpu = self.count(), time.monotonic(), _cpu_s(self.process.pid)
        self.wake()
        while not self.failed() and (
            self.count() <= before + self.records_of(steps) or time.monotonic() - began < seconds
        ):
            time.sleep(0.02)  # short beside a record
        self.sleep()
        records = [json.loads(line) for line in self.log.read_text().splitlines()[before:]]
        self.turns.append(records[1:])
        images = self.job.batch * sum(record.get("steps", 1) for record in records)
        self.cpu_ms.append(1000 * (_cpu_s(self.process.pid) - cpu) / max(1, images))

    def is_warm(self) -> bool:
        return self.count() >= self.records_of(self.job.warm)

    def records_of(self, steps: int) -> int:
        """How many records so many steps make, at least."""
        return steps if self.name in (OURS, OURS_LOADING) else -(-steps // self.job.every)

    def seconds_of(self, record: dict[str, Any]) -> float:
        return self.job.batch * record.get("steps", 1) / record["images_per_second"]

    def rates(self) -> list[float]:
        """Images per second in each turn."""
        steps = [sum(record.get("steps", 1) for record in records) for records in self.turns]
        seconds = [sum(map(self.seconds_of, records)) for records in self.turns]
        return [self.job.batch * n / time_ for n, time_ in zip(steps, seconds, strict=True)]

    def data_wait_frac(self) -> float:
        """Of all turns together: one step in many may wait for all of them."""
        waited = sum(self.seconds_of(record) * record["data_wait_frac"] for record in self.records())
        return waited / sum(map(self.seconds_of, self.records()))

    def records(self) -> list[dict[str, Any]]:
        return [record for records in self.turns for record in records]


def _our_command(name: str, job: Job, device: str, folder: Path, log: Path) -> list[str]:
    # On a GPU, the set lies there, as in the recipes cifar10-plain-vit and finetune-cifar10.
    cached = device == "cuda" and name == OURS
    crop = f'how = "torchvision"\narea = {list(AREA)}\naspect = {list(ASPECT)}'
    recipe = f"""
title = "speed"
[data]
image_size = [{job.side}, {job.side}]
test_frac = 0.0
workers = {job.workers}
cache = "{"device" if cached else "none"}"
[data.crop]
{'how = "whole"' if job.shift else crop}
[data.augment]
shift_px = {job.shift}
[model]
name = "{job.model}"
gelu = "exact"
[train]
steps = 1_000_000
batch_size = {job.batch}
precision = "{job.precision}"
compiled = {str(job.compiled).lower()}
[optim]
lr = {LR}
weight_decay = {WEIGHT_DECAY}
max_grad_norm = {CLIP}
[schedule]
decay = "constant"
"""
    (folder / "recipe.toml").write_text(recipe)
    words = ["train", job.source, "--recipe", str(folder / "recipe.toml"), "--out", str(log.parent), "--device", device]
    return [sys.executable, "-m", "vitlab", *words]


def _peer_command(name: str, job: Job, device: str, folder: Path, log: Path) -> list[str]:
    spec = vitlab.model_info(job.model).spec
    shape = {name: getattr(spec, name) for name in ("width", "depth", "heads", "mlp_dim")}
    job_json = {
        **dataclasses.asdict(job),
        "archive": str(DATA / job.archive),
        "shape": {**shape, "patch": int(job.model.partition("/")[2])},
        "device": device,
        **{"area": AREA, "aspect": ASPECT, "mean": [0.5] * 3, "std": [0.5] * 3},
        **{"lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": CLIP},
    }
    (folder / "job.json").write_text(json.dumps(job_json))
    return [sys.executable, str(PEERS), name, str(folder / "job.json"), str(log)]


def _cpu_s(group: int) -> float:
    """What the processes of a group have had of the cores; a busy machine changes it less than it does the clock."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()  # the state comes first, then parent and group
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])  # in the program and in the kernel
    return ticks / os.sysconf("SC_CLK_TCK")


def present(name: str) -> bool:
    """Whether what a contender needs is installed."""
    needs = {"timm": ("timm", "torchvision"), "transformers": ("transformers", "accelerate", "torchvision")}
    missing = [module for module in needs.get(name, ()) if importlib.util.find_spec(module) is None]
    if missing:
        print(f"{name} is left out: {', '.join(missing)} is not installed", file=sys.stderr)
    return not missing


def warm_up(contenders: Sequence[Contender]) -> None:
    """Until each has made a few steps; who has sleeps, and wakes for a moment now and then."""
    deadline = time.monotonic() + PATIENCE_S
    while waiting := [one for one in contenders if not one.is_warm() and not one.failed()]:
        for one in contenders:
            if one.is_warm() and not one.asleep_since:
                one.sleep()
            elif one.asleep_since and time.monotonic() - one.asleep_since > LONGEST_NAP_S:
                one.wake()
                time.sleep(0.1)  # enough for a sign of life
                one.sleep()
        if time.monotonic() > deadline:
            raise SystemExit(f"{', '.join(one.name for one in waiting)} made no step in {PATIENCE_S:.0f} s")
        time.sleep(0.05)
    for one in contenders:
        one.sleep()


def rows_of(job: Job, device: str, contenders: Sequence[Contender]) -> Iterable[dict[str, Any]]:
    ours = vitlab.create_model(job.model, image_size=job.side, num_classes=job.num_classes)
    parameters = sum(p.numel() for p in ours.parameters())
    ready = [one for one in contenders if one.job is job and not one.failed()]
    peers = [one.rates() for one in ready if one.name not in (OURS, OURS_LOADING)]
    for one in ready:
        rates, records = one.rates(), one.records()
        if records[0].get("parameters", parameters) != parameters:
            raise SystemExit(
                f"{one.name} trains another model: {records[0]['parameters']:,} parameters, not {parameters:,}"
            )
        best = [max(turn) for turn in zip(*peers, strict=True)]
        ratio = round(statistics.median(a / b for a, b in zip(rates, best, strict=True)), 3) if best else None
        yield {
            "peer": one.name,
            "job": job.title,
            "model": job.model,
            "batch": job.batch,
            "precision": job.precision,
            "device": device,
            "images_per_second": round(statistics.median(rates), 1),
            "ratio_to_best_peer": ratio,
            "slowest_and_fastest_turn": [round(min(rates), 1), round(max(rates), 1)],
            "cpu_ms_per_image": round(statistics.median(one.cpu_ms), 2),
            "data_wait_frac": round(one.data_wait_frac(), 4),
            "memory_gb": round(max(record["memory_gb"] for record in records), 2),
            "steps": sum(record.get("steps", 1) for record in records),
            "last_loss": round(records[-1]["loss"], 3),
            "last_step": records[-1]["step"],
            "start_s": round(one.start_s, 1),
            "compiled": records[-1].get("compiled", GRAPHS if job.compiled else None),
        }


def measure(jobs: Sequence[Job], device: str, rounds: int, steps: int, seconds: float) -> list[dict[str, Any]]:
    """All contenders of `jobs` at once: on a machine of many cores they compile beside each other."""
    with tempfile.TemporaryDirectory() as place:
        asked = [(job, name) for job in jobs for name in job.contenders if present(name)]
        contenders = [Contender(name, job, device, Path(place) / str(i)) for i, (job, name) in enumerate(asked)]
        try:
            warm_up(contenders)
            print(f"warm: {', '.join(f'{one.name} {one.start_s:.0f} s' for one in contenders)}", file=sys.stderr)
            for _ in range(rounds):
                for one in contenders:
                    if not one.failed():
                        one.take_turn(steps, seconds)
            for one in contenders:
                if why := one.failed():
                    print(f"{one.name} failed at {one.job.title}: {why}", file=sys.stderr)
            return [row for job in jobs for row in rows_of(job, device, contenders)]
        finally:
            for one in contenders:
                one.end()


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        low, high = row["slowest_and_fastest_turn"]
        cells = {
            "job": f"{row['job']}, {row['precision']}",
            "model": row["model"],
            "batch": row["batch"],
            "who": row["peer"] + (f" ({row['compiled']})" if row["compiled"] else ""),
            "images/s": f"{row['images_per_second']:.1f}",
            "slowest to fastest turn": f"{low:.1f} to {high:.1f}",
            "/ best peer": "" if row["ratio_to_best_peer"] is None else f"{row['ratio_to_best_peer']:.2f}",
            "CPU ms/image": f"{row['cpu_ms_per_image']:.1f}",
            "data wait": f"{row['data_wait_frac']:.1%}",
            "memory": f"{row['memory_gb']:.2f} GB",
            "start": f"{row['start_s']:.0f} s",
            "loss": f"{row['last_loss']:.2f} at step {row['last_step']}",
        }
        lines = lines or [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]
        lines.append(f"| {' | '.join(map(str, cells.values()))} |")
    return lines


def page(rows: Sequence[dict[str, Any]], device: str, words: str, rounds: int) -> str:
    machine = f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    memory = "the largest resident size of the training process, without its workers"
    if device == "cuda":
        machine, memory = (
            f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores",
            "torch's largest allocation on the GPU",
        )
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("torch", "timm", "transformers") if present(name)
    )
    title = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    workers = JOBS[device][0].workers
    return (
        f"# Training beside the peers, from images to updated weights ({title})\n\n"
        f"{date.today()} · `python bench/training.py {words}` · median of {rounds} interleaved turns · {machine}, "
        f"{torch.get_num_threads()} thread(s) · {versions}.\n"
        "vitlab is `vitlab train` with a recipe; timm is a bare loop of its `create_loader`, model and `create_optimizer_v2`; "
        "transformers is its `Trainer` with torchvision's transforms, as its guide has it. The same files, parameters, batch, "
        f"AdamW, clipping, autocast and {workers} worker(s) for all; on a GPU all are compiled for CUDA graphs, pin memory and "
        "use AdamW's fused kernel. Nobody saves or evaluates meanwhile. "
        "All have the exact GELU, as timm and transformers do; vitlab's default is the tanh form of the paper's authors.\n"
        "The ratio is the median of the turns' own ratios to the faster peer of that round. "
        "CPU time is that of all its processes, and depends less on what else the machine had to do. "
        f"Memory is {memory}. The start is the time to the first record, with all contenders starting at once.\n\n"
        + "\n".join(table(rows))
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=list(JOBS), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="the fewest steps of a turn")
    parser.add_argument("--seconds", type=float, default=2.0, help="the shortest turn")
    parser.add_argument("--write", type=Path, help="record the table in this file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nobody is left asleep
    device, rounds = arguments.device, arguments.rounds
    # A GPU's machine has cores for all to start at once; on a CPU, few is better.
    together = [JOBS[device]] if device == "cuda" else [[job] for job in JOBS[device]]
    rows: list[dict[str, Any]] = []
    for jobs in together:
        for row in measure(jobs, device, rounds, arguments.steps, arguments.seconds):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.write:
        words = f"--device {device} --rounds {rounds} --steps {arguments.steps} --seconds {arguments.seconds:g}"
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(page(rows, device, words, rounds))


if __name__ == "__main__":
    main()
