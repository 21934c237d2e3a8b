"""The server beside bare inference and beside other servers, and under overload and faults.

    python bench/serving.py --write docs/results/serving-cpu.md

Run in an environment that also has litserve and fastapi. First part: the same model, images, threads and connections for
`vitlab serve`, LitServe, a plain FastAPI handler, and the model alone in a loop; the load generator shares their cores. They
take turns, the others stopped (SIGSTOP), so that a busy moment hits everybody; the median over the rounds counts. Second part:
the trials of tests/system/serving_trials.py in full, with a model of fixed cost, where times do not depend on the cores.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

import vitlab
from vitlab.core.environment import processor_name
from vitlab.data.decode import read
from vitlab.data.preprocess import normalise
from vitlab.engines.inference import infer_pixels

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "system"))
import serving_trials as trials  # noqa: E402
from open_loop import Shot, even, fire, form, post  # noqa: E402

DATA = Path(os.environ.get("VITLAB_DATA", ROOT.parent / "shared" / "data"))
PHOTOS = "imagenet_samples/imagenet_850.npz"
START_S = 300.0
BARE, SPLIT, DECODED = "model alone", "model alone, images split over threads", "decoding and model in a loop"
OURS = "vitlab serve"
ADDRESSES = {OURS: "/v1/predict?top=1", "LitServe": "/predict", "FastAPI": "/predict"}
Rows = list[tuple[str, str, str]]  # what, wanted, measured
OFFERED = 3  # times what the model alone does: more than any of them can do, also one that computes images side by side
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--images", type=int, default=64, help="requests in a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload")
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--mixed", type=int, default=20_000, help="requests while processes are killed")
    parser.add_argument("--cores", type=int, help="everything runs on these many, the generator too; default all")
    parser.add_argument("--only", nargs="+", choices=["speed", *TRIALS], default=["speed", *TRIALS])
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    if given.cores:
        os.sched_setaffinity(0, range(given.cores))  # before torch makes its threads
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    lines = [
        "# The server: speed, overload and faults",
        "",
        f"{date.today()} · `{_command(parser, given)}` · {os.cpu_count()} cores of an {processor_name()}, load"
        f" {os.getloadavg()[0]:.0f} at the start · Python {platform.python_version()}, "
        + ", ".join(
            f"{name} {metadata.version(name)}" for name in ("torch", "uvicorn", "starlette", "litserve", "fastapi")
        ),
        "",
    ]
    for make in [speed] * ("speed" in given.only) + [faults] * any(name in given.only for name in TRIALS):
        found = make(given)
        lines += found
        print("\n".join(found), flush=True)
    if given.write:
        given.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _command(parser: argparse.ArgumentParser, given: argparse.Namespace) -> str:
    changed = {
        name: value for name, value in vars(given).items() if value != parser.get_default(name) and name != "write"
    }
    return "python bench/serving.py" + "".join(
        f" --{name} {' '.join(value) if isinstance(value, list) else value}" for name, value in changed.items()
    )


# --- speed ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Turns:
    """What a contender did, turn by turn."""

    rates: list[float] = dataclasses.field(default_factory=list)  # images per second
    cpu_ms: list[float] = dataclasses.field(default_factory=list)  # per image, of all its processes
    answered: int = 0


class Contender:
    """A server in a process group of its own, asleep unless it is its turn."""

    def __init__(self, name: str, bundle: Path, given: argparse.Namespace, folder: Path) -> None:
        self.name, self.address = name, ("127.0.0.1", trials.free_port())
        port = str(self.address[1])
        if name == OURS:
            # As patient as the others, which know no limits: on a slow machine the usual ones would turn requests away.
            patient = ["--queue-seconds", "300", "--deadline", "300", "--model-seconds", "300"]
            command = [sys.executable, "-m", "vitlab", "serve", bundle, "--port", port, "--device", "cpu", *patient]
            command += ["--max-batch", str(given.batch)]
        else:
            peers = Path(__file__).with_name("serving_peers.py")
            command = [sys.executable, peers, name.lower(), bundle, port, "--batch", str(given.batch)]
        self.printed = folder / f"{name}.txt"
        with self.printed.open("w") as printed:
            self.process = subprocess.Popen(
                [*command, "--threads", str(given.threads)],
                stdout=printed,
                stderr=printed,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": str(given.threads)},
            )

    def wait(self, shot: Shot) -> None:
        """Until it answers an image."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if fire(self.address, [shot], [0.0], lambda _, body: bool(body))[0].status == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} does not answer: {self.printed.read_text()[-2000:]}")

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def cpu_s(self) -> float:
        served = trials.Served(self.process, self.address, self.printed.parent)
        return sum(map(_cpu_s, served.pids()))


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
    return 0.0


def speed(given: argparse.Namespace) -> list[str]:
    torch.set_num_threads(given.threads)
    photos = _photos(given.images)
    turns = {name: Turns() for name in (BARE, SPLIT, DECODED, *ADDRESSES)}
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        _save_model(given.model, bundle)
        clf = vitlab.load(bundle, device="cpu")
        truth = [clf.labels[index] for index in _loop(clf, _decoded(clf, photos), given.batch)]
        with _contenders(bundle, given, Path(folder), photos) as contenders:
            for _ in range(given.rounds):
                _alone(turns, clf, photos, given.batch)
                offered = OFFERED * turns[BARE].rates[-1]
                for contender in contenders:
                    _turn(contender, photos, truth, offered, turns[contender.name], 3 * given.batch)
    bare = statistics.median(turns[BARE].rates)
    lines = [
        "## Beside the model alone, and beside other servers",
        "",
        f"{given.model} at 224 pixels in float32, batches of at most {given.batch}, {given.threads} thread(s)."
        f" {given.images} photos in each of {given.rounds} turns, sent at {OFFERED} times what the model alone does, over at"
        f" most {3 * given.batch} connections. LitServe waits 10 ms for a batch to fill; FastAPI takes one image at a time in"
        " its pool of threads. All decode and prepare images with the same functions. Median, and range, over the turns. The"
        " processor's time is that of all processes of a server, and changes less with what else the machine does.",
        "",
        "| | images/s | of the model alone | of vitlab serve | processor ms per image |",
        "|---|---|---|---|---|",
    ]
    ours = statistics.median(turns[OURS].rates)
    for name, turn in turns.items():
        rate = statistics.median(turn.rates)
        spread = f"{rate:.2f} ({min(turn.rates):.2f} to {max(turn.rates):.2f})"
        lines.append(
            f"| {name} | {spread} | {rate / bare:.2f} | {rate / ours:.2f} | {statistics.median(turn.cpu_ms):.0f} |"
        )
    right = {name: f"{turns[name].answered}/{given.images * given.rounds}" for name in ADDRESSES}
    wanted = [("the model alone", BARE, 0.85), ("LitServe", "LitServe", 1.0), ("FastAPI", "FastAPI", 1.15)]
    pairs = {
        name: statistics.median(a / b for a, b in zip(turns[OURS].rates, turns[name].rates, strict=True))
        for _, name, _ in wanted
    }
    return [
        *lines,
        "",
        "Answered with the label that the model alone gives: " + ", ".join(f"{k} {v}" for k, v in right.items()) + ".",
        "",
        "| vitlab serve, in images/s | wanted | measured, ratio of medians | median of the ratios within a round |",
        "|---|---|---|---|",
        *(
            f"| beside {shown} | at least {least:.2f} | {ours / statistics.median(turns[name].rates):.2f} | {pairs[name]:.2f} |"
            for shown, name, least in wanted
        ),
        "",
    ]


def _save_model(name: str, bundle: Path) -> None:
    model = vitlab.create_model(name, num_classes=1000, image_size=224, seed=0)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.weight, std=0.05)  # new heads are zero, and would call everything the same
    vitlab.save(model, bundle, labels=[f"class {index}" for index in range(1000)])


def _photos(count: int) -> list[bytes]:
    stored = np.load(DATA / PHOTOS)
    data, offsets = stored["data"], stored["offsets"]
    return [data[offsets[i] : offsets[i + 1]].tobytes() for i in range(count)]


def _decoded(clf: "vitlab.engines.classifier.Classifier", photos: Sequence[bytes]) -> torch.Tensor:
    return torch.stack([read(photo, clf.preprocess) for photo in photos])


@torch.inference_mode()
def _loop(clf: "vitlab.engines.classifier.Classifier", images_BCYX: torch.Tensor, batch: int) -> list[int]:
    parts = [clf.model(normalise(clf.preprocess, part)).argmax(dim=1) for part in images_BCYX.split(batch)]
    return torch.cat(parts).tolist()


def _alone(
    turns: dict[str, Turns], clf: "vitlab.engines.classifier.Classifier", photos: list[bytes], batch: int
) -> None:
    ready = _decoded(clf, photos)
    jobs: dict[str, Callable[[], object]] = {
        BARE: lambda: _loop(clf, ready, batch),
        SPLIT: lambda: infer_pixels(clf.model, ready, clf.preprocess, clf.device, batch),
        DECODED: lambda: [
            _loop(clf, _decoded(clf, photos[i : i + batch]), batch) for i in range(0, len(photos), batch)
        ],
    }
    for name, job in jobs.items():
        began, cpu = time.perf_counter(), time.process_time()
        job()
        turns[name].rates.append(len(photos) / (time.perf_counter() - began))
        turns[name].cpu_ms.append((time.process_time() - cpu) / len(photos) * 1e3)


@contextlib.contextmanager
def _contenders(
    bundle: Path, given: argparse.Namespace, folder: Path, photos: list[bytes]
) -> Generator[list[Contender]]:
    started: list[Contender] = []
    try:
        for name in ADDRESSES:  # one after the other, so that none is slow to start because of the rest
            contender = Contender(name, bundle, given, folder)
            started.append(contender)
            contender.wait(_shot(name, photos[0], 0))
            fire(
                contender.address,
                [_shot(name, photo, 0) for photo in photos[:8]],
                even(8, 1.0),
                lambda _, body: bool(body),
            )
            contender.signal(signal.SIGSTOP)
        yield started
    finally:
        for contender in started:
            contender.signal(signal.SIGKILL)
            contender.process.wait()


def _shot(name: str, photo: bytes, number: int) -> Shot:
    body, kind = form(photo)
    return Shot(post(ADDRESSES[name], body, kind), number)


def _turn(
    contender: Contender, photos: list[bytes], truth: list[str], offered: float, turns: Turns, connections: int
) -> None:
    def judge(number: int, body: bytes) -> bool:
        found = json.loads(body)
        return (found["results"][0]["top"][0] if contender.name == OURS else found)["label"] == truth[number]

    shots = [_shot(contender.name, photo, number) for number, photo in enumerate(photos)]
    contender.signal(signal.SIGCONT)
    fire(contender.address, shots[:2], [0.0, 0.0], judge)  # awake
    cpu = contender.cpu_s()
    outcomes = fire(
        contender.address, shots, even(offered, 2 * len(photos) / offered)[: len(photos)], judge, connections
    )
    turns.cpu_ms.append((contender.cpu_s() - cpu) / len(photos) * 1e3)
    contender.signal(signal.SIGSTOP)
    answered = [o for o in outcomes if o.status == 200]
    turns.answered += sum(o.right for o in answered)
    turns.rates.append(len(answered) / (max(o.done for o in outcomes) - outcomes[0].due))


# --- overload and faults ----------------------------------------------------------------------------------------------


def faults(given: argparse.Namespace) -> list[str]:
    cost = 0.2
    capacity = trials.BATCH / cost
    lines = [
        "## Overload and faults",
        "",
        f"A model that takes {cost * 1e3:.0f} ms for a batch of at most {trials.BATCH}, so {capacity:.0f} images/s (stops:"
        " half, mixed: a tenth of it); limits as `vitlab serve` has them; the load generator shares the cores. Latency counts"
        " from when a request was due.",
        "",
        "| trial | wanted | measured |",
        "|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in TRIALS if name in given.only]:
            rows = TRIALS[name](Path(folder) / name, given, cost)
            lines += [f"| {what} | {wanted} | {found} |" for what, wanted, found in rows]
    return [*lines, ""]


def _overload(folder: Path, given: argparse.Namespace, cost: float) -> Rows:
    capacity = trials.BATCH / cost
    with trials.serving(folder, cost) as served:
        found = trials.overload(served, capacity, given.seconds)
    under, steady, after = found.under, found.steady, found.after
    return [
        (f"10x load, {given.seconds:.0f} s, {under.sent:,} requests: statuses", "200 and 503", _counts(under.statuses)),
        ("p99 of admitted, beside that at 80 % load", "at most 2", _ratio(under.p99, steady.p99)),
        ("p99 of refusals", "at most 50 ms", f"{under.refused_p99 * 1e3:.0f} ms"),
        (
            "503 without Retry-After; wrong; admitted and lost",
            "0",
            f"{under.without_retry_after}; {under.wrong}; {under.lost}",
        ),
        ("right answers/s, beside the peak", "at least 0.95", f"{under.goodput / found.peak:.3f} ({found.peak:.1f}/s)"),
        ("memory of all its processes", "at most +50 MB", f"{found.grown_mb:+.1f} MB"),
        ("p99 at 80 % load, from 2 s after the overload on", "as before", _ratio(after.p99, steady.p99)),
        ("statuses then, and before it", "", f"{_counts(after.statuses)}; {_counts(steady.statuses)}"),
    ]


def _slow_clients(folder: Path, given: argparse.Namespace, cost: float) -> Rows:
    capacity = trials.BATCH / cost
    with trials.serving(folder, cost) as served:
        found = trials.slow_clients(served, capacity / 2, 500, min(given.seconds, 40.0))
    return [
        (
            "500 slow clients: p99 of others, beside that without them",
            "at most 1.2",
            _ratio(found.beside.p99, found.alone.p99),
        ),
        ("statuses of the others", "200", _counts(found.beside.statuses)),
        (f"longest life of a slow connection, of {found.closed:,} closed", "about 10 s", f"{found.longest_s:.1f} s"),
    ]


def _stops(folder: Path, given: argparse.Namespace, cost: float) -> Rows:
    stops = list[trials.Stop]()
    for number in range(given.stops):
        with trials.serving(folder / str(number), cost / 2) as served:
            stops.append(trials.stop_under_load(served, rate=(30, 60, 300)[number % 3]))
    flying, lost = sum(stop.in_flight for stop in stops), sum(len(stop.lost) for stop in stops)
    return [
        (f"{given.stops} stops under load: lost, of {flying:,} requests in flight", "0", str(lost)),
        (
            "exit statuses; wrong answers",
            "0; 0",
            f"{sorted({stop.code for stop in stops})}; {sum(s.wrong for s in stops)}",
        ),
        ("longest stop", "at most 30 s", f"{max(stop.seconds for stop in stops):.1f} s"),
    ]


def _mixed(folder: Path, given: argparse.Namespace, cost: float) -> Rows:
    with trials.serving(folder, cost / 10) as served:
        found = trials.mixed_requests(served, given.mixed, rate=75, kill_every_s=10.0)
    return [
        (
            f"{given.mixed:,} mixed requests, clients going away, {found.kills} kills: wrong or swapped",
            "0",
            str(len(found.wrong)),
        ),
        (
            "lost; good images refused; statuses (-1: client went away)",
            "0; 0",
            f"{len(found.lost)}; {found.refused_images}; {_counts(found.statuses)}",
        ),
    ]


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f} ({one * 1e3:.0f} and {other * 1e3:.0f} ms)"


def _counts(statuses: dict[int, int]) -> str:
    return ", ".join(f"{count:,} of {status}" for status, count in sorted(statuses.items()))


TRIALS = {"overload": _overload, "slow": _slow_clients, "stops": _stops, "mixed": _mixed}

if __name__ == "__main__":
    main()
