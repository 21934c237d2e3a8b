"""The first signal is a request that the work may finish; the second, and any after it, is as before."""

import os
import signal
import threading
from collections.abc import Generator
from types import FrameType

import pytest

from vitlab.core.signals import Stopped, defer_signals


@pytest.fixture
def heard() -> Generator[list[int]]:
    """Handlers that note what reaches them, in the place of Python's own."""
    numbers: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        numbers.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_noted_and_the_second_is_not_held_back(heard: list[int], number: int) -> None:
    with defer_signals() as request:
        assert request.number == 0
        os.kill(os.getpid(), number)
        assert (request.number, heard) == (number, [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGINT)
    assert heard == [signal.SIGTERM, signal.SIGINT]


def test_handlers_are_put_back_after_an_error_too(heard: list[int]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), defer_signals():
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert heard == []


def test_another_thread_may_ask_but_hears_nothing() -> None:
    found: list[int] = []

    def work() -> None:
        with defer_signals() as request:
            found.append(request.number)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0]


def test_stop_has_exit_status_and_reason() -> None:
    assert (Stopped(signal.SIGINT).exit_code, Stopped(signal.SIGINT).reason) == (130, "")
    stopped = Stopped(signal.SIGTERM, "Go on.")
    assert (stopped.exit_code, stopped.reason, stopped.advice) == (143, " by SIGTERM", "Go on.")
    assert not isinstance(stopped, Exception), "code that swallows errors must not swallow this"
