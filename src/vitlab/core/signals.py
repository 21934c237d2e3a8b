"""Defer Ctrl-C and SIGTERM until the step is saved; a second one exits immediately."""

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal as an exception, so that unfinished files are removed on the way out."""

    def __init__(self, number: int, advice: str = "") -> None:
        super().__init__(number)
        self.exit_code = 128 + number
        self.reason = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
        self.advice = advice


class StopRequest:
    """The number of the signal that came, 0 while none has."""

    number = 0


@contextlib.contextmanager
def defer_signals() -> Generator[StopRequest]:
    """Note the first signal in `StopRequest.number`, to be polled between steps."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread listen
        yield request
        return
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _SIGNALS}

    def note(number: int, _: FrameType | None) -> None:
        request.number = number
        for known, handler in before.items():
            signal.signal(known, handler)

    for number in _SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
