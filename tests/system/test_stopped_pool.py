import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "stopped_pool.py"


@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX")
@pytest.mark.parametrize(("task", "after_s"), [("large", 0.1), ("large", 0.4), ("long", 0.4)])
def test_signal_to_the_whole_group_ends_a_program_with_workers(task: str, after_s: float) -> None:
    """As `timeout`, Ctrl-C and schedulers send it.

    Workers killed in the middle of a message would leave the parent waiting, and those that nobody stops would keep it waiting.
    """
    process = subprocess.Popen([sys.executable, str(PROGRAM), task], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(10) == 3
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
