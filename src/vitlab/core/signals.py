"""Ctrl-C and SIGTERM as a wish, for work that can be saved: finish the step, save, then leave. A second one leaves at once."""

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any

_WISHES = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal, as an exception, so that whatever is being written is cleared away on the way out."""

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
    """While this lasts, the first signal is noted and the work goes on; the work asks `wish.number` where it can stop."""
    wish = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread listen
        yield wish
        return
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _WISHES}

    def note(number: int, _: FrameType | None) -> None:
        wish.number = number
        for known, handler in before.items():
            signal.signal(known, handler)

    for number in _WISHES:
        signal.signal(number, note)
    try:
        yield wish
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
