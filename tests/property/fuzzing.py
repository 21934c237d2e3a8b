"""What the fuzz tests of all readers share: odd values, damage that knows JSON and bytes, and the rule that every reader keeps.

An input is made from the reader's name, a seed and a number, and can be made again from these: `python -m pytest ... -k NAME`
names them in its failure. A sample of fixed seed runs on every call, and with VITLAB_SOAK=1 a hundred thousand new ones.
VITLAB_SOAK_SEED and VITLAB_SOAK_RANGE=FIRST:END share these out among processes, or make one of them again.
"""

import json
import mmap
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from vitlab.core.errors import VitlabError

SOAK = os.environ.get("VITLAB_SOAK") == "1"
SEED = int(os.environ.get("VITLAB_SOAK_SEED") or time.time_ns()) if SOAK else 0
ENOUGH = 100  # inputs, to say that too many or too few of them were read
SLOWEST = 5  # seconds of CPU for one input
BLOCKED = 300  # seconds on the clock, far beyond any load of the machine: what waits for ever uses no CPU
MEMORY = 256 * 2**20  # bytes beyond twice the size of the files

Files = dict[str, bytes]
Mutation = Callable[[random.Random], Files]


class Reader(NamedTuple):
    """`make` draws the files of one input, and `read` reads what lies in the folder as a user would."""

    name: str
    make: Mutation
    read: Callable[[Path], object]


# --- odd values and damage --------------------------------------------------------------------------------------------

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 255, 48_000, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 2**64),
    *(10**30, 10**400, -(10**400), 0.0, -0.0, 0.5, 1e-9, 1e-320, 1e308, -1e308, float("nan"), float("inf")),
    *("", " ", "x", "0", "-1", "1e999", "none", "\x00", "\x1b[31mred", "\ud800", "é", "../up", "/etc/passwd"),
    *("a" * 5000, "~", ".", "..", "con\nfig", "\u202e", [], {}, [[]], [None], [1, 2, 3], ["a"], [[1], 2]),
    *({"a": 1}, {"": None}, [0] * 300, {"type": "x"}, [1e400], "9" * 5000),
]
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**64 - 1,
]


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def json_places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON document, the document itself included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in json_places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    return value if not path else value_at(value[path[0]], path[1:])


def odd_json(document: Any, draw: random.Random) -> bytes:
    """The document with one to three odd places, or its text damaged."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = json_places(document)
        path = draw.choice(places)
        old = value_at(document, path)
        match draw.randrange(8):
            case 0 if path:  # gone
                around = value_at(document, path[:-1])
                kept = (
                    {key: item for key, item in around.items() if key != path[-1]}
                    if isinstance(around, dict)
                    else [item for i, item in enumerate(around) if i != path[-1]]
                )
                document = replaced(document, path[:-1], kept)
            case 1:  # one more
                new = {**old, str(draw.choice(ODD)): draw.choice(ODD)} if isinstance(old, dict) else [old, old]
                document = replaced(document, path, new)
            case 2:  # what stands elsewhere
                document = replaced(document, path, value_at(document, draw.choice(places)))
            case 3 if isinstance(old, int | float) and not isinstance(old, bool):
                factor = draw.choice((-1, 0.5, 2, 3, 1000, 10**9))
                document = replaced(document, path, old * factor if abs(old) < 1e200 else 0)
            case _:
                document = replaced(document, path, draw.choice(ODD))
    text = json.dumps(document)
    if draw.random() < 0.1:  # a key twice, nesting beyond any parser, a cut, a flipped bit
        match draw.randrange(3):
            case 0:
                text = text.replace("{", '{"format_version": 1, ' if draw.random() < 0.5 else '{"": 0, "": 0, ', 1)
            case 1:
                text = text.replace(draw.choice(("null", "1", "0", '""')), nested(draw.choice((10, 900, 100_000))), 1)
            case _:
                return damaged(text.encode(), draw)
    return text.encode()


def damaged(data: bytes, draw: random.Random, words: list[bytes] | None = None) -> bytes:
    """One to four small changes, of bits, bytes, lengths and `words` of the format."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(out) + 1)
        match draw.randrange(8):
            case 0 | 1 if at < len(out):
                out[at] ^= 1 << draw.randrange(8)
            case 2 if at < len(out):
                out[at] = draw.randrange(256)
            case 3:
                width = draw.choice((1, 2, 4, 8))
                number = draw.choice(NUMBERS) % 256**width
                out[at : at + width] = number.to_bytes(width, draw.choice(("little", "big")))
            case 4:
                word = draw.choice(words or [b"\x00", b"\xff", b"\x1b[31m", b"\n", b'"', b"\r", b"\xed\xa0\x80"])
                out[at : at + draw.choice((0, len(word)))] = word
            case 5:
                del out[at : at + draw.choice((1, 2, 8, 100))]
            case 6:
                other = draw.randrange(len(out) + 1)
                out[at:at] = out[other : other + draw.choice((1, 4, 20, 200))]
            case _ if draw.random() < 0.2:
                del out[at:]
    return bytes(out)


# --- the rule ---------------------------------------------------------------------------------------------------------


def draws(count: int, soaked: int) -> range:
    """The numbers of the inputs that this process draws."""
    first, end = map(int, os.environ.get("VITLAB_SOAK_RANGE", f"0:{soaked}").split(":"))
    return range(first, end) if SOAK else range(count)


def assert_some(read: int, count: int, least: float = 0.01) -> None:
    assert count < ENOUGH or least <= read / count < 0.9, (
        f"{read} of {count} read: the damage is too much or too little"
    )


def hold(reader: Reader, count: int, *, least_read: float = 0.01) -> None:
    """Every input is read, or refused by an error of ours, within the time and the memory; some are read.

    In a process of its own, because a limit on memory cannot be taken back, and so that a crash or a hang has a number.
    """
    numbers = draws(count, 100_000)
    number = mmap.mmap(-1, 16)  # shared with the child: where it is, how many were read
    receive, send = os.pipe()
    sys.stdout.flush()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child has none of the parent's threads, and would wait for them
    child = os.fork()
    if not child:
        os.close(receive)
        outcome = ""
        try:
            outcome = _hold(reader, numbers, number)
        except BaseException:
            outcome = traceback.format_exc()
        finally:
            os.write(send, outcome.encode("utf-8", "backslashreplace")[-4000:])
            os._exit(0)
    torch.set_num_threads(threads)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        outcome = pipe.read().decode()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    at, read = (int.from_bytes(number[i : i + 8], "little") for i in (0, 8))
    where = f"{reader.name}, seed {SEED}, number {at}"
    assert ended == 0, (
        f"{where}: killed by {signal.Signals(-ended).name} (ALRM: it waits; PROF: over {SLOWEST} s of CPU)"
    )
    assert not outcome, f"{where}: {outcome}"
    assert_some(read, len(numbers), least_read)


def _hold(reader: Reader, numbers: range, number: mmap.mmap) -> str:
    read = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        signal.setitimer(signal.ITIMER_REAL, BLOCKED)
        _attempt(reader, 0, Path(place))  # what a first call keeps for later ones is no input's fault
        limit = _data_bytes() + MEMORY
        for i in numbers:
            number[:8] = i.to_bytes(8, "little")
            files = reader.make(random.Random(f"{reader.name} {SEED} {i}"))
            allowed = limit + 2 * sum(map(len, files.values()))
            resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.RLIM_INFINITY))
            signal.setitimer(signal.ITIMER_PROF, SLOWEST)  # nobody handles these signals: they end the process
            signal.setitimer(signal.ITIMER_REAL, BLOCKED)
            error = _attempt(reader, i, Path(place), files)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            if error is not None and (what := _broken(error)):
                shown = {name: data[:300] for name, data in files.items()}
                return f"{what}\n{''.join(traceback.format_exception(error))[-2500:]}\n{shown!r:.800}"
            read += error is None
            number[8:] = read.to_bytes(8, "little")
    return ""


def _attempt(reader: Reader, i: int, place: Path, files: Files | None = None) -> BaseException | None:
    folder = place / f"input-{i}"  # a name of its own: readers may keep what they have read
    folder.mkdir()
    try:
        for name, data in (files or reader.make(random.Random(i))).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        reader.read(folder)
    except BaseException as error:
        return error
    finally:
        _remove(folder)
    return None


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            _remove(path)
        else:
            path.unlink()
    folder.rmdir()


def _broken(error: BaseException) -> str:
    """What is wrong with this error: not of our family, or the answer to memory that could not be had."""
    if not isinstance(error, VitlabError):
        return f"{type(error).__name__} is no error of ours"
    if not str(error) or re.search(r"\b0x[0-9a-f]{6}", str(error)):
        return "the error says nothing, or where something lies in memory"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
            return "it asks for more memory than twice the file and 256 MB"
        cause = cause.__cause__ or cause.__context__
    return ""


def _data_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


limits_only = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and time as Linux has them")
