"""Trials of the server under load and faults: each sends its traffic and returns what it measured.

`test_server_load.py` runs them briefly and holds the counts (nothing lost, nothing wrong); `bench/serving.py` runs them in
full and records the times. They need Linux: memory and processes are read from /proc.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import fixed_cost
from open_loop import (
    LOST,
    Address,
    Outcome,
    Shot,
    Summary,
    even,
    fire,
    form,
    poisson,
    post,
    require_loopback,
    summary,
    volley,
)

HERE = Path(__file__).parent
START_S = 120.0
BATCH = 8
MB = 2**20


# --- a server ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Served:
    """A running server, as its operator and its clients see it."""

    process: subprocess.Popen[bytes]
    address: Address
    folder: Path  # stands for the model

    def request(self, method: str, path: str, body: bytes = b"", timeout: float = 30.0) -> tuple[int, bytes]:
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        answer = raw(self.address, f"{head}Content-Type: image/png\r\n\r\n".encode() + body, timeout)
        return int(answer[9:12] or 0), answer.partition(b"\r\n\r\n")[2]

    def ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.request("GET", "/readyz")[0] == 200
        return False

    def wait_until_ready(self, seconds: float = START_S) -> float:
        started = time.perf_counter()
        while not self.ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.printed()[-2000:]}")
            if time.perf_counter() - started > seconds:
                raise TimeoutError(f"not ready after {seconds:.0f} s: {self.printed()[-2000:]}")
            time.sleep(0.02)
        return time.perf_counter() - started

    def printed(self) -> str:
        return (self.folder / "said.txt").read_text(errors="replace")

    def metric(self, name: str) -> float:
        lines = self.request("GET", "/metrics")[1].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def model_pid(self) -> int:
        return int((self.folder / fixed_cost.PID).read_text())

    def pids(self) -> list[int]:
        """Of the server and all that it has started, itself first."""
        parents = dict[int, int]()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def memory(self) -> int:
        """Bytes of all its processes together; what they share counts once (PSS)."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        return total

    def files_and_threads(self) -> tuple[int, int]:
        files = threads = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
                threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
        return files, threads

    def stop(self, seconds: float = 60.0) -> tuple[int, float]:
        """SIGTERM; the exit status, and how long it took."""
        started = time.perf_counter()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds), time.perf_counter() - started
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait(), float("inf")


@contextlib.contextmanager
def serving(folder: Path, seconds: float, files: int | None = None, **limits: float) -> Generator[Served]:
    """A server with a model of fixed cost, `seconds` for a batch; `files` limits its open files, `limits` see `Limits`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / fixed_cost.COST).write_text(str(seconds))
    port = free_port()
    command = [
        sys.executable,
        HERE / "serve_fixed_cost.py",
        folder,
        str(port),
        json.dumps({"max_batch": BATCH, **limits}),
    ]
    if files is not None:
        command = ["prlimit", f"--nofile={files}:{files}", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    with (folder / "said.txt").open("wb") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=printed, start_new_session=True, env=environment)
    served = Served(process, ("127.0.0.1", port), folder)
    try:
        served.wait_until_ready()
        yield served
    finally:
        served.stop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def raw(address: Address, data: bytes, timeout: float = 30.0) -> bytes:
    """What comes back until the server closes the connection; bytes that it does not take any more are not its fault."""
    require_loopback(address)
    received = b""
    with socket.create_connection(address, timeout=timeout) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                received += piece
    return received


# --- traffic ----------------------------------------------------------------------------------------------------------


def pictures(count: int = 256) -> list[Shot]:
    """One image to a request, whose number must come back."""
    step = fixed_cost.NUMBERS // count
    return [
        Shot(post("/v1/predict?top=1", fixed_cost.picture(number)), number) for number in range(0, step * count, step)
    ]


def is_number(expected: int, body: bytes) -> bool:
    results = json.loads(body)["results"]
    return len(results) == 1 and results[0]["top"][0]["index"] == expected


def between(outcomes: Sequence[Outcome], start: float, end: float) -> list[Outcome]:
    """Those due in this interval, which counts from the first."""
    return [o for o in outcomes if start <= o.due - outcomes[0].due < end]


@contextlib.contextmanager
def watching(measure: Callable[[], float], every_s: float = 0.5) -> Iterator[list[float]]:
    """The values of `measure` meanwhile, in a thread."""
    values, over = [measure()], threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            values.append(measure())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield values
    finally:
        over.set()
        thread.join()


# --- trials -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Overload:
    steady: Summary  # at 80 % of what the model can do
    peak: float  # right answers per second at 1.25 times that
    under: Summary  # at the factor
    grown_mb: float  # memory, above what it was before
    after: Summary  # at 80 % again, from 2 s after the end of the overload on


def overload(served: Served, capacity: float, seconds: float, factor: float = 10.0) -> Overload:
    shots, calm = pictures(), max(3.0, min(20.0, seconds / 2))
    usual = poisson(0.8 * capacity, calm)
    fire(served.address, shots, even(capacity / 2, 2.0), is_number)  # connections, caches: as in a server that runs
    steady = summary(fire(served.address, shots, usual, is_number), calm)
    full = between(fire(served.address, shots, even(1.25 * capacity, calm + 1), is_number), 1.0, calm + 1)
    before = served.memory()
    with watching(served.memory) as memory:
        # In one go: requests that arrive right after the storm must find a server that is at ease within 2 s.
        storm = even(factor * capacity, seconds)
        dues = [*storm, *(seconds + due for due in poisson(0.8 * capacity, calm + 2, seed=1))]
        outcomes = fire(served.address, shots, dues, is_number, connections=1000)
    return Overload(
        steady=steady,
        peak=summary(full, calm).goodput,
        under=summary(outcomes[: len(storm)], seconds),
        grown_mb=(max(memory) - before) / MB,
        after=summary(between(outcomes, seconds + 2, seconds + calm + 2), calm),
    )


@dataclasses.dataclass(frozen=True)
class SlowClients:
    alone: Summary
    beside: Summary
    closed: int  # connections of slow clients that the server has closed
    longest_s: float  # that one of these lived


def slow_clients(served: Served, rate: float, count: int, seconds: float) -> SlowClients:
    """Normal traffic alone, then beside `count` clients of which half never end their header and half never their body.

    They come within the first 2 seconds, and whoever is thrown out comes back at once.
    """
    shots, dues = pictures(), poisson(rate, seconds)
    fire(served.address, shots, even(rate, 2.0), is_number)
    alone = fire(served.address, shots, dues, is_number)
    lives = list[float]()

    async def both() -> list[Outcome]:
        slow = [asyncio.ensure_future(_stay(served.address, 2.0 * n / count, n % 2 == 0, lives)) for n in range(count)]
        outcomes = await volley(served.address, shots, dues, is_number)
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return outcomes

    beside = asyncio.run(both())
    longest = max(lives, default=float("nan"))
    return SlowClients(summary(alone, seconds), summary(beside, seconds), len(lives), longest)


async def _stay(address: Address, wait: float, in_header: bool, lives: list[float]) -> None:
    await asyncio.sleep(wait)
    while True:
        lives.append(await _slow(address, in_header))


async def _slow(address: Address, in_header: bool) -> float:
    """A byte a second; how long the server bore with it."""
    require_loopback(address)
    reader, writer = await asyncio.open_connection(*address)
    started = time.perf_counter()
    head = b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n"
    writer.write(head + (b"X-Slow: " if in_header else b"Content-Length: 1000\r\n\r\n"))
    ended = asyncio.ensure_future(_end_of(reader))
    try:
        while not ended.done():
            await asyncio.wait([ended], timeout=1.0)
            with contextlib.suppress(ConnectionError):
                writer.write(b"a")
        return time.perf_counter() - started
    finally:
        ended.cancel()
        writer.transport.abort()


async def _end_of(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(4096):
            pass


@dataclasses.dataclass(frozen=True)
class Stop:
    code: int
    seconds: float
    in_flight: int  # requests that were sent before the signal, and answered after it or never
    lost: list[str]  # why, of those
    wrong: int
    statuses: dict[int, int]  # of those


def stop_under_load(served: Served, rate: float, seconds: float = 1.0) -> Stop:
    """SIGTERM in the middle of traffic. Every request that was sent before the signal must be answered."""
    signalled, ended = [0.0], [0, 0.0]

    def stop() -> None:
        time.sleep(seconds)
        signalled[0] = time.perf_counter()
        ended[:] = served.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    outcomes = fire(served.address, pictures(), even(rate, seconds + 0.5), is_number)
    thread.join()
    flying = [o for o in outcomes if 0 < o.sent < signalled[0] < o.done]
    return Stop(
        code=int(ended[0]),
        seconds=ended[1],
        in_flight=len(flying),
        lost=[o.why for o in flying if o.status == LOST],
        wrong=sum(not o.right for o in outcomes),
        statuses=summary(flying, seconds).statuses,
    )


@dataclasses.dataclass(frozen=True)
class Mixed:
    statuses: dict[int, int]
    wrong: list[str]
    lost: list[str]
    refused_images: int  # within answers to several, or with 422: nothing is wrong with any of them
    kills: int


def mixed_requests(served: Served, count: int, rate: float, kill_every_s: float, seed: int = 0) -> Mixed:
    """Predict and embed, one image and several, raw and as forms; some clients go away, and processes are killed meanwhile.

    Every answer is compared with what the same model says offline.
    """
    draw = random.Random(seed)
    asked: list[tuple[bool, list[int]]] = []
    shots: list[Shot] = []
    for number in range(min(count, 2000)):
        shown = [draw.randrange(fixed_cost.NUMBERS) for _ in range(draw.choice([1, 1, 1, 2, 3, 8]))]
        embeds = draw.random() < 0.3
        path = "/v1/embed" if embeds else f"/v1/predict?top={draw.choice([1, 3, 5])}"
        images = [fixed_cost.picture(each) for each in shown]
        body, kind = form(*images) if len(images) > 1 or draw.random() < 0.3 else (images[0], "image/png")
        cancel = draw.uniform(0.0, 0.3) if draw.random() < 0.15 else None
        asked.append((embeds, shown))
        shots.append(Shot(post(path, body, kind), number, cancel))
    offline, refused = _offline(), list[str]()

    def judge(number: int, body: bytes) -> bool:
        embeds, shown = asked[number]
        results = json.loads(body)["results"]
        refused.extend(result["error"]["code"] for result in results if "error" in result)
        return len(results) == len(shown) and all(
            "error" in result or _is_answer(result, offline[each], embeds)
            for result, each in zip(results, shown, strict=True)
        )

    with _killing(served, kill_every_s, draw) as kills:
        outcomes = fire(served.address, shots, poisson(rate, 2 * count / rate, seed)[:count], judge)
    statuses = summary(outcomes, 1.0).statuses
    return Mixed(
        statuses,
        [o.why for o in outcomes if not o.right],
        [o.why for o in outcomes if o.status == LOST],
        len(refused) + statuses.get(422, 0),
        kills[0],
    )


def _offline() -> list[tuple[int, float, list[float]]]:
    """For every number: the likeliest label, its probability, and the embedding."""
    model = fixed_cost.classifier()
    images = [fixed_cost.picture(number) for number in range(fixed_cost.NUMBERS)]
    tops, vectors = model(images, top=1), model.embed(images).tolist()
    return [(top[0].index, top[0].p, vector) for top, vector in zip(tops, vectors, strict=True)]


def _is_answer(result: dict[str, Any], truth: tuple[int, float, list[float]], embeds: bool) -> bool:
    index, p, vector = truth
    if embeds:
        return all(abs(one - other) < 1e-5 for one, other in zip(result["vector"], vector, strict=True))
    return result["top"][0]["index"] == index and abs(result["top"][0]["p"] - p) < 1e-5


@contextlib.contextmanager
def _killing(served: Served, every_s: float, draw: random.Random) -> Generator[list[int]]:
    """Now the process of the model, now one that decodes; the number of kills."""
    kills, over = [0], threading.Event()

    def kill() -> None:
        while not over.wait(every_s):
            model = served.model_pid()
            others = [pid for pid in served.pids()[1:] if pid != model and _is_worker(pid)]
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice([model, draw.choice(others or [model])]), signal.SIGKILL)
                kills[0] += 1

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join()


def _is_worker(pid: int) -> bool:
    """Not the process that the others are forked from, nor the one that tracks resources: these have no work of ours."""
    with contextlib.suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return b"forkserver" in Path(f"/proc/{parent}/cmdline").read_bytes()
    return False
