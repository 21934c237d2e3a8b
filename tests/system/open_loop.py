"""An open-loop load generator for HTTP on this machine: requests leave at set times, whether or not earlier ones were answered.

    outcomes = fire(("127.0.0.1", 8000), [Shot(post("/v1/predict", image), 7)], even(50, 10.0), Judge)

Latency counts from the time at which a request was *due*, so that a slow server cannot hide its queue by holding back its
clients (coordinated omission). One process, standard library only, requests built beforehand: it has to share the server's
cores. It bounds itself in number and time, and refuses any address but loopback.
"""

import asyncio
import collections
import dataclasses
import ipaddress
import random
import time
from collections.abc import Callable, Sequence

MOST_REQUESTS = 200_000
MOST_SECONDS = 3700.0
LOST, CANCELLED = 0, -1  # beside HTTP's statuses: no answer came; the client went away on purpose

Address = tuple[str, int]
Judge = Callable[[int, bytes], bool]  # what was expected and the body of a 200 -> whether it is the right answer


@dataclasses.dataclass(frozen=True)
class Shot:
    request: bytes
    expected: int
    cancel_after_s: float | None = None  # the client closes its connection then


@dataclasses.dataclass(slots=True)
class Outcome:
    due: float  # all on time.perf_counter
    sent: float = 0.0
    done: float = 0.0
    status: int = LOST
    right: bool = True
    retry_after: bool = False
    why: str = ""  # of a request without an answer

    @property
    def latency(self) -> float:
        return self.done - self.due


def post(path: str, body: bytes, content_type: str = "image/png", headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{headers}\r\n".encode() + body


def form(*images: bytes, name: str = "image", boundary: str = "line-between-parts") -> tuple[bytes, str]:
    """The images as a multipart body, and its content type."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{i}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n".encode()
        + image
        + b"\r\n"
        for i, image in enumerate(images)
    ]
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def even(rate: float, seconds: float) -> list[float]:
    return [number / rate for number in range(int(rate * seconds))]


def poisson(rate: float, seconds: float, seed: int = 0) -> list[float]:
    random_ = random.Random(seed)
    dues, now = list[float](), random_.expovariate(rate)
    while now < seconds:
        dues.append(now)
        now += random_.expovariate(rate)
    return dues


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank; NaN for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else float("nan")


@dataclasses.dataclass(frozen=True)
class Summary:
    """What became of the requests of an interval. Seconds; admitted are those answered with 200."""

    sent: int
    statuses: dict[int, int]
    wrong: int
    lost: int
    goodput: float  # right answers per second
    p50: float
    p99: float
    refused_p99: float
    without_retry_after: int  # 503s that do not say when to come back


def summary(outcomes: Sequence[Outcome], seconds: float) -> Summary:
    good = [o.latency for o in outcomes if o.status == 200]
    refused = [o for o in outcomes if o.status == 503]
    return Summary(
        sent=len(outcomes),
        statuses=dict(collections.Counter(o.status for o in outcomes)),
        wrong=sum(not o.right for o in outcomes),
        lost=sum(o.status == LOST for o in outcomes),
        goodput=sum(o.right for o in outcomes if o.status == 200) / seconds,
        p50=percentile(good, 50),
        p99=percentile(good, 99),
        refused_p99=percentile([o.latency for o in refused], 99),
        without_retry_after=sum(not o.retry_after for o in refused),
    )


def require_loopback(address: Address) -> None:
    if not ipaddress.ip_address(address[0]).is_loopback:
        raise ValueError(f"load is only ever sent to this machine, not to {address[0]}")


def fire(
    address: Address, shots: Sequence[Shot], dues: Sequence[float], judge: Judge, connections: int = 512
) -> list[Outcome]:
    """Send `shots`, over and over, one at each of the times in `dues` (seconds from now); the outcomes in that order."""
    return asyncio.run(volley(address, shots, dues, judge, connections))


async def volley(
    address: Address, shots: Sequence[Shot], dues: Sequence[float], judge: Judge, connections: int = 512
) -> list[Outcome]:
    require_loopback(address)
    if len(dues) > MOST_REQUESTS or (dues and dues[-1] > MOST_SECONDS):
        raise ValueError(f"at most {MOST_REQUESTS:,} requests in {MOST_SECONDS:.0f} s")
    gun = _Gun(address, judge, connections)
    began = time.perf_counter()
    for number, due in enumerate(dues):
        wait = began + due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        elif number % 64 == 0:
            await asyncio.sleep(0)  # behind time: what has arrived meanwhile must be read all the same
        gun.shoot(shots[number % len(shots)], Outcome(began + due))
    await gun.empty()
    return gun.outcomes


class _Gun:
    """The connections, those of them that are idle, and the requests that wait for one."""

    PATIENCE_S = 120.0

    def __init__(self, address: Address, judge: Judge, connections: int) -> None:
        self.address, self.judge, self.most = address, judge, connections
        self.outcomes: list[Outcome] = []
        self.idle: list[_Connection] = []
        self.waiting: collections.deque[tuple[Shot, Outcome]] = collections.deque()
        self.open = self.pending = 0
        self.opening: set[asyncio.Task[None]] = set()
        self.done = asyncio.Event()

    def shoot(self, shot: Shot, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.pending += 1
        if self.idle:
            self.idle.pop().send(shot, outcome)
        else:
            self.waiting.append((shot, outcome))
            self.open_more()

    def open_more(self) -> None:
        if self.waiting and self.open < self.most:
            self.open += 1
            task = asyncio.ensure_future(self._connect())
            self.opening.add(task)
            task.add_done_callback(self.opening.discard)

    async def _connect(self) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: _Connection(self), *self.address)
        except OSError as problem:
            self.open -= 1
            if self.waiting:
                self.finish(self.waiting.popleft()[1], LOST, why=f"not connected: {type(problem).__name__}")

    def ready(self, connection: "_Connection") -> None:
        if self.waiting:
            connection.send(*self.waiting.popleft())
        else:
            self.idle.append(connection)

    def gone(self, connection: "_Connection") -> None:
        self.open -= 1
        if connection in self.idle:
            self.idle.remove(connection)
        self.open_more()

    def finish(self, outcome: Outcome, status: int, why: str = "") -> None:
        outcome.done, outcome.status, outcome.why = time.perf_counter(), status, why
        self.pending -= 1
        if not self.pending:
            self.done.set()

    async def empty(self) -> None:
        """Wait for the last answers, then close every connection."""
        try:
            while self.pending:
                self.done.clear()
                await asyncio.wait_for(self.done.wait(), self.PATIENCE_S)
        except TimeoutError:
            for outcome in self.outcomes:
                if not outcome.done:
                    self.finish(outcome, LOST, why=f"no answer for {self.PATIENCE_S:.0f} s")
        for connection in list(self.idle):
            connection.transport.close()
        await asyncio.sleep(0)


class _Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, gun: _Gun) -> None:
        self.gun = gun
        self.received = b""
        self.shot: Shot | None = None
        self.outcome: Outcome | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.gun.ready(self)

    def send(self, shot: Shot, outcome: Outcome) -> None:
        self.shot, self.outcome = shot, outcome
        outcome.sent = time.perf_counter()
        self.transport.write(shot.request)
        if shot.cancel_after_s is not None:
            self.timer = asyncio.get_running_loop().call_later(shot.cancel_after_s, self.cancel)

    def cancel(self) -> None:
        if self.outcome is not None:
            self.gun.finish(self.outcome, CANCELLED)
            self.outcome = None
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.outcome is None or self.shot is None:  # an answer to nobody
            self.transport.abort()
            return
        self.received += data
        head_end = self.received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        status, head = int(self.received[9:12]), self.received[:head_end].lower()
        at = head.find(b"content-length:")
        if at < 0:
            raise ValueError(f"an answer without a length: {head!r}")
        end = head_end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])
        if len(self.received) < end:
            return
        body, self.received = self.received[head_end + 4 : end], self.received[end:]
        outcome, self.outcome = self.outcome, None
        if self.timer:
            self.timer.cancel()
        outcome.retry_after = b"retry-after:" in head
        outcome.right = status != 200 or self.gun.judge(self.shot.expected, body)
        if not outcome.right:
            outcome.why = body[:200].decode(errors="replace")
        self.gun.finish(outcome, status, outcome.why)
        if b"connection: close" in head:
            self.transport.abort()
        else:
            self.gun.ready(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.outcome is not None:
            why = f"closed after {len(self.received)} bytes: {type(exc).__name__ if exc else 'end of stream'}"
            self.gun.finish(self.outcome, LOST, why)
            self.outcome = None
        if self.timer:
            self.timer.cancel()
        self.gun.gone(self)
