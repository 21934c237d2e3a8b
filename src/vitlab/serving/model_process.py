"""The model in a process of its own: what it does there, and how the front starts it, talks to it and replaces it.

A crash, a hang or an exhausted memory ends that process only. What it was working on is answered with 503, it is started
again, and nothing that an earlier process said can reach a later request: batches are numbered once for all of them.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import itertools
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.serving.decoding import unpack_photo, unpack_pixels
from vitlab.serving.errors import Refusal
from vitlab.serving.processes import process_context
from vitlab.serving.settings import Limits, ModelSettings, ServedModel

if TYPE_CHECKING:
    from torch import Tensor

    from vitlab.engines.classifier import Classifier

Kind = Literal["predict", "embed", "explain"]
Answer = tuple[str, Any]  # "ok" and what is asked for, or "refused" and a code
_AHEAD = 1  # batches that wait inside the model process
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds before a model that cannot be started is tried again


@dataclasses.dataclass(frozen=True)
class Batch:
    """Images for one model, as the decoders gave them, with what is wanted of each."""

    number: int
    model: int
    kind: Kind
    images: tuple[bytes, ...]  # uint8 [rows, columns, channels]; for `explain`, a packed photo
    wanted: tuple[dict[str, Any], ...]


# --- inside the process -----------------------------------------------------------------------------------------------


def load_model(path: str, device: str) -> "Classifier":
    """The usual factory."""
    from vitlab.engines.classifier import load

    return load(path, device=device)


def main(connection: Connection, settings: ModelSettings) -> None:
    """Load, say what was loaded, then answer batches until the front is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the front drains first, and then ends us
        signal.signal(number, signal.SIG_IGN)
    try:
        import torch

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        module, _, function = settings.factory.partition(":")
        make = getattr(importlib.import_module(module), function)
        models: list[Classifier] = [make(source.path, settings.device) for source in settings.sources]
        facts = [_facts(source.name, model) for source, model in zip(settings.sources, models, strict=True)]
        for model in models:
            _warm_up(model)
    except VitlabError as error:
        connection.send(("failed", error.what, error.hint, isinstance(error, UsageError)))
        return
    connection.send(("loaded", facts))
    _answer_all(connection, models)


def _answer_all(connection: Connection, models: "list[Classifier]") -> None:
    waiting: queue.Queue[Batch | None] = queue.Queue(_AHEAD)
    threading.Thread(target=_receive, args=(connection, waiting), daemon=True).start()
    while (batch := waiting.get()) is not None:
        try:
            answers = _answer(models[batch.model], batch)
        except Exception:  # too little memory, say; the next batch may be smaller
            Console().say(f"error: a batch of {len(batch.images)} failed\n{traceback.format_exc().rstrip()}")
            answers: list[Answer] = [("refused", "internal")] * len(batch.images)
        with contextlib.suppress(OSError):  # the front is gone
            connection.send((batch.number, answers))


def _receive(connection: Connection, waiting: "queue.Queue[Batch | None]") -> None:
    """In a thread, so that the next batch is here when the last is done."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            waiting.put(connection.recv())
    waiting.put(None)


def _answer(model: "Classifier", batch: Batch) -> list[Answer]:
    if batch.kind == "explain":
        return [_explain(model, image, wanted) for image, wanted in zip(batch.images, batch.wanted, strict=True)]
    pixels_BCYX = _pixels(model, batch.images)
    if batch.kind == "embed":
        vectors_BD = _outputs(model, model.model.represent, pixels_BCYX)
        return [_if_finite(row_D, row_D.tolist()) for row_D in vectors_BD]
    logits_BK = _outputs(model, model.model, pixels_BCYX)
    return [
        _if_finite(row_K, top) for row_K, top in zip(logits_BK, _ranked(model, logits_BK, batch.wanted), strict=True)
    ]


def _pixels(model: "Classifier", images: Sequence[bytes]) -> "Tensor":
    """[B, C, Y, X]"""
    import torch

    rule = model.preprocess
    return torch.stack([unpack_pixels(image, rule.image_size, rule.channels) for image in images])


def _outputs(model: "Classifier", function: "Callable[[Tensor], Tensor]", pixels_BCYX: "Tensor") -> "Tensor":
    from vitlab.engines.inference import infer_pixels

    return infer_pixels(function, pixels_BCYX, model.preprocess, model.device, len(pixels_BCYX))


def _ranked(model: "Classifier", logits_BK: "Tensor", wanted: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    from vitlab.engines.classifier import rank_labels

    most = max(each["top"] for each in wanted)
    return [
        [_to_json(answer) for rank, answer in enumerate(row) if rank < each["top"] or answer.has]
        for row, each in zip(rank_labels(model.bundle, logits_BK, most), wanted, strict=True)
    ]


def _to_json(answer: Any) -> dict[str, Any]:
    found = {"label": answer.label, "index": answer.index, "p": answer.p}
    return found if answer.has is None else found | {"has": answer.has}


def _if_finite(numbers: "Tensor", found: Any) -> Answer:
    return ("ok", found) if bool(numbers.isfinite().all()) else ("refused", "not_finite")


def _explain(model: "Classifier", image: bytes, wanted: dict[str, Any]) -> Answer:
    """As PNG, or as the numbers that the page draws."""
    from vitlab.serving.explaining import draw, explain

    photo = unpack_photo(image, model.preprocess)
    method, label = wanted["method"], wanted["label"]
    if wanted["png"]:
        return "ok", draw(model, photo, method, label)
    return "ok", explain(model, photo, method, label, wanted["detail"])


def _facts(name: str, model: "Classifier") -> ServedModel:
    from vitlab.inspection.saliency import methods_of
    from vitlab.models.names import format_name

    if model.preprocess.mode == "array":
        raise UsageError(f"{name} takes arrays of {model.preprocess.channels} channels, and no image files")
    spec, parameters = model.model.spec, sum(parameter.numel() for parameter in model.model.parameters())
    return ServedModel(
        name=name,
        architecture=format_name(spec),
        labels=tuple(model.labels),
        several_labels=bool(model.bundle.thresholds),
        dimensions=_outputs(model, model.model.represent, _black(model)).shape[1],
        parameters=parameters,
        preprocess=model.preprocess,
        methods=methods_of(spec) if parameters else (),  # an exported file has none that could be looked at
        card=model.bundle.card,
        device=str(model.device),
    )


def _black(model: "Classifier") -> "Tensor":
    import torch

    return torch.zeros(1, model.preprocess.channels, *model.preprocess.image_size, dtype=torch.uint8)


def _warm_up(model: "Classifier") -> None:
    """Before anybody waits: the first pass chooses kernels and allocates."""
    if model.labels:
        _outputs(model, model.model, _black(model))


# --- in the front -----------------------------------------------------------------------------------------------------


class ModelProcess:
    """Starts the process, sends batches, hands out answers, and starts another one when it dies or hangs."""

    def __init__(self, settings: ModelSettings, limits: Limits, changed: Callable[[], None]) -> None:
        self.settings, self.answer_seconds, self.load_seconds = settings, limits.model_seconds, limits.load_seconds
        self.models: tuple[ServedModel, ...] = ()
        self.ready = False
        self.failing = False  # the last try to start it again ended otherwise
        self.restarts = 0
        self._changed = changed  # called when it becomes ready
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[list[Answer]]] = {}
        self._process: Any = None
        self._connection: Connection | None = None
        self._sender = ThreadPoolExecutor(1, "send")
        self._watchdog: asyncio.TimerHandle | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Return when the models are loaded; raise what loading raised."""
        loop = asyncio.get_running_loop()
        context = process_context()
        here, there = context.Pipe()
        process: Any = context.Process(target=main, args=(there, self.settings), daemon=True, name="vitlab-model")
        try:
            async with asyncio.timeout(self.load_seconds):
                await loop.run_in_executor(None, process.start)
                there.close()
                self._process, self._connection = process, here
                reply = await loop.run_in_executor(self._sender, here.recv)
        except TimeoutError:
            self._kill()  # which also ends the wait for its pipe
            raise VitlabError(
                f"the models were not loaded within {self.load_seconds:g} s", hint="--load-seconds allows more."
            ) from None
        except (EOFError, OSError):
            raise VitlabError("the process of the model ended while it was loading") from None
        if reply[0] == "failed":
            raise (UsageError if reply[3] else FileProblem)(reply[1], hint=reply[2])
        self.models = tuple(reply[1])
        threading.Thread(target=self._listen, args=(here, loop), daemon=True).start()
        self.ready, self.failing = True, False
        self._changed()

    def _listen(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: no pipe of this kind can be awaited on every system."""
        with contextlib.suppress(EOFError, OSError, RuntimeError):  # the last where the loop is closed
            with contextlib.suppress(EOFError, OSError):
                while True:
                    number, answers = connection.recv()
                    loop.call_soon_threadsafe(self._answered, number, answers)
            loop.call_soon_threadsafe(self._lost, connection)

    async def run(
        self, model: int, kind: Kind, images: Sequence[bytes], wanted: Sequence[dict[str, Any]]
    ) -> list[Answer]:
        """The answers to one batch, in its order."""
        if self._connection is None or not self.ready:
            raise Refusal("not_ready")
        batch = Batch(next(self._numbers), model, kind, tuple(images), tuple(wanted))
        loop = asyncio.get_running_loop()
        answered = self._pending[batch.number] = loop.create_future()
        self._watch()
        loop.run_in_executor(self._sender, _send, self._connection, batch)
        return await answered

    def _answered(self, number: int, answers: list[Answer]) -> None:
        if (waiting := self._pending.pop(number, None)) is not None and not waiting.done():
            waiting.set_result(answers)
        self._watch(again=True)

    def _watch(self, *, again: bool = False) -> None:
        """Every answer buys the next one its time."""
        if self._watchdog is not None and (again or not self._pending):
            self._watchdog.cancel()
            self._watchdog = None
        if self._pending and self._watchdog is None:
            self._watchdog = asyncio.get_running_loop().call_later(self.answer_seconds, self._kill)

    def _kill(self) -> None:
        """The end of its pipe tells `_listen`, and so `_lost`."""
        if self._process is not None:
            self._process.kill()

    def _lost(self, connection: Connection) -> None:
        if connection is not self._connection or self._closed:
            return
        self.ready = False
        pending, self._pending = self._pending, {}
        for waiting in pending.values():
            if not waiting.done():
                waiting.set_exception(Refusal("model_lost"))
        self._watch()
        self._kill()
        connection.close()
        self._connection = None
        self.restarts += 1
        self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closed:
            try:
                await self.start()
                return
            except (VitlabError, OSError) as error:
                self.failing = True
                Console().say(f"error: the models cannot be loaded again: {error}")
                self._kill()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        self._closed, self.ready = True, False
        self._kill()
        if self._connection is not None:
            self._connection.close()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
        self._sender.shutdown(wait=False, cancel_futures=True)


def _send(connection: Connection, batch: Batch) -> None:
    with contextlib.suppress(OSError, ValueError):  # its process has died, which `_listen` sees too
        connection.send(batch)
