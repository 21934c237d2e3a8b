"""The queue before the model: what goes together, what is dropped, and that no answer is ever swapped."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from vitlab.serving.batching import Batcher
from vitlab.serving.errors import Refusal
from vitlab.serving.metrics import Metrics
from vitlab.serving.model_process import Answer, Kind

PREDICT: tuple[int, Kind] = (0, "predict")
FAR = 1e9


class Echo:
    """Answers each image with itself, when the test lets it."""

    def __init__(self) -> None:
        self.ready = True
        self.batches: list[list[bytes]] = []
        self.go = asyncio.Semaphore(0)
        self.fails = False

    async def run(self, model: int, kind: Kind, images: Sequence[bytes], _wanted: Sequence[Any]) -> list[Answer]:
        self.batches.append(list(images))
        await self.go.acquire()
        if self.fails:
            raise Refusal("model_lost")
        return [("ok", (model, kind, image)) for image in images]


def made(max_batch: int = 4, max_wait: float = 0.0) -> tuple[Echo, Batcher]:
    model = Echo()
    batcher = Batcher(model, max_wait, Metrics())
    batcher.max_batch = max_batch
    return model, batcher


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def submit(batcher: Batcher, number: int, deadline: float = FAR, key: Any = PREDICT) -> "asyncio.Task[Any]":
    return asyncio.ensure_future(batcher.submit(key, b"%d" % number, {}, deadline))


def test_idle_model_starts_at_once_and_a_busy_one_lets_the_next_batch_fill() -> None:
    async def trial() -> None:
        model, batcher = made()
        tasks = [submit(batcher, 0)]
        await settle()
        tasks += [submit(batcher, number) for number in (1, 2, 3)]
        await settle()
        assert model.batches == [[b"0"]], "three are no full batch, so they wait for more"
        tasks += [submit(batcher, 4), submit(batcher, 5)]
        await settle()
        assert model.batches[1:] == [[b"1", b"2", b"3", b"4"]], "a full one is sent ahead"
        assert batcher.waiting == 1
        model.go.release()
        model.go.release()
        await settle()
        assert model.batches[2:] == [[b"5"]]
        model.go.release()
        assert [found[2] for found in await asyncio.gather(*tasks)] == [b"%d" % number for number in range(6)]

    asyncio.run(trial())


def test_cancelled_and_late_work_is_not_computed() -> None:
    async def trial() -> None:
        model, batcher = made()
        first = submit(batcher, 0)
        await settle()
        now = asyncio.get_running_loop().time()
        gone, late, good = submit(batcher, 1), submit(batcher, 2, now + 0.01), submit(batcher, 3)
        await settle()
        gone.cancel()
        await asyncio.sleep(0.05)
        model.go.release()
        await settle()
        model.go.release()
        assert (await first)[2] == b"0" and (await good)[2] == b"3"
        with pytest.raises(Refusal, match="deadline"):
            await late
        assert model.batches == [[b"0"], [b"3"]]
        assert batcher._metrics.cancelled.values == {"": 1}

    asyncio.run(trial())


def test_waits_for_company_only_where_asked_to() -> None:
    async def trial() -> None:
        model, batcher = made(max_wait=0.05)
        model.go = asyncio.Semaphore(9)
        tasks = [submit(batcher, 0)]
        await settle()
        assert model.batches == []
        tasks.append(submit(batcher, 1))
        await asyncio.gather(*tasks)
        assert model.batches == [[b"0", b"1"]]

    asyncio.run(trial())


def test_lost_model_refuses_what_it_had_and_keeps_what_waited() -> None:
    async def trial() -> None:
        model, batcher = made(max_batch=1)
        tasks = [submit(batcher, number) for number in range(4)]
        await settle()
        model.ready, model.fails = False, True
        model.go.release()
        model.go.release()
        await settle()
        assert batcher.waiting == 2
        model.ready, model.fails, model.go = True, False, asyncio.Semaphore(9)
        batcher.pump()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(each, Refusal) for each in found] == [True, True, False, False]

    asyncio.run(trial())


def test_models_and_kinds_are_not_mixed_and_the_longest_waiting_comes_first() -> None:
    async def trial() -> None:
        model, batcher = made(max_batch=8)
        keys: list[tuple[int, Kind]] = [(0, "predict"), (1, "predict"), (0, "embed"), (0, "explain"), (0, "explain")]
        tasks = [submit(batcher, number, key=keys[number % 5]) for number in range(10)]
        await settle()
        for _ in range(12):
            model.go.release()
            await settle()
        found = await asyncio.gather(*tasks)
        assert [each[:2] for each in found] == [keys[number % 5] for number in range(10)]
        assert model.batches[0] == [b"0"] and model.batches[1] == [b"1", b"6"]

    asyncio.run(trial())


def test_thousands_with_random_cancels_each_get_their_own_answer() -> None:
    async def trial() -> None:
        model, batcher = made(max_batch=8)
        model.go = asyncio.Semaphore(10**6)
        draw = random.Random(0)
        tasks = list[asyncio.Task[Any]]()
        for number in range(3000):
            tasks.append(submit(batcher, number))
            if draw.random() < 0.2:
                draw.choice(tasks[-20:]).cancel()
            if draw.random() < 0.3:
                await asyncio.sleep(0)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        answered = [(number, each) for number, each in enumerate(found) if not isinstance(each, BaseException)]
        assert len(answered) > 2000
        assert all(each[2] == b"%d" % number for number, each in answered)

    asyncio.run(trial())
