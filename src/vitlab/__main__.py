"""The command `vitlab`, and `python -m vitlab`, which is the same."""

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    # Ctrl-C while the verbs and their libraries are imported: nothing has begun that could be reported or saved.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(128 + signal.SIGINT))
    from vitlab.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
