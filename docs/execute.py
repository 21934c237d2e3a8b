"""Runs the code in the documentation, so that no page can say what is not so.

    python docs/execute.py                  checks every page and README.md; pages can be named
    python docs/execute.py --write          writes the outputs and the pictures anew

The ```python blocks of a page run in order, in one namespace, in an empty folder. A ```text block right after one is what it
prints. In a ```console block, lines that start with `$ ` are commands and the others are what they answer. A line `...` stands
for any lines. A block marked otherwise, as ```python no-run, is left alone.
`picture(figure, "name")` makes docs/pictures/name.png. A page with `<!-- needs: FILE FILE -->` runs where these files are in
the folder that VITLAB_DATA names, and is left alone elsewhere.
"""

import argparse
import atexit
import contextlib
import difflib
import functools
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_MAX_PICTURE_BYTES = 60_000
_COLOURS = 160  # of a picture that would be too large with all of them
DATA = Path(os.environ.get("VITLAB_DATA") or ROOT.parent / "shared" / "data")
if DATA.is_dir():  # of pages, and of the commands on them
    os.environ["VITLAB_DATA"] = str(DATA)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for torch: on a busy machine, two are slower than one


class Block(NamedTuple):
    """A fenced block: what follows its backticks, and its lines as a slice of the page's."""

    kind: str
    start: int
    stop: int


def all_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def find_blocks(lines: Sequence[str]) -> list[Block]:
    blocks: list[Block] = []
    fence, kind, start = "", "", 0
    for number, line in enumerate(lines):
        if not fence and (match := re.fullmatch(r"(`{3,})(.*)", line)):
            fence, kind, start = match[1], match[2].strip(), number + 1
        elif fence and line.rstrip() == fence:
            blocks.append(Block(kind, start, number))
            fence = ""
    return [*blocks, Block(kind, start, len(lines))] if fence else blocks


def execute(page: Path, *, write: bool = False) -> list[str]:
    """Runs `page` and returns what is wrong with it, each with page and line; with `write`, mends the outputs instead."""
    lines = page.read_text(encoding="utf-8").splitlines()
    if missing(page):
        return []
    blocks = find_blocks(lines)
    namespace: dict[str, Any] = {"__name__": "__main__", "picture": functools.partial(_picture, write=write)}
    edits: list[tuple[int, int, list[str], str]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block, after in zip(blocks, [*blocks[1:], None], strict=False):
            place = f"{page.relative_to(ROOT) if page.is_relative_to(ROOT) else page}:{block.start}"
            start, stop, code = block.start, block.stop, lines[block.start : block.stop]
            if block.kind == "console":
                found = _run_console(code)
            elif block.kind == "python":
                try:
                    printed = _run_python(code, page, block.start, namespace)
                except Exception:
                    return [f"{place} fails\n{traceback.format_exc()}"]
                found = ["", "```text", *printed, "```"] if printed else []
                start = stop = block.stop + 1
                if after and after.kind == "text" and not "".join(lines[start : after.start - 1]).strip():
                    stop = after.stop + 1
            else:
                continue
            if not _matches(lines[start:stop], found):
                diff = difflib.unified_diff(lines[start:stop], found, "on the page", "in fact", lineterm="", n=1)
                edits.append((start, stop, found, f"{place} answers otherwise\n" + "\n".join(diff)))
    for start, stop, found, _ in reversed(edits if write else []):
        lines[start:stop] = found
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [] if write else [problem for *_, problem in edits]


def missing(page: Path) -> list[Path]:
    """Files that the page needs and that are not here."""
    needed = re.search(r"<!-- needs: (.+?) -->", page.read_text(encoding="utf-8"))
    files = [DATA / name for name in needed[1].split()] if needed else []
    return [path for path in files if not path.exists()]


def _run_python(code: Sequence[str], page: Path, start: int, namespace: dict[str, Any]) -> list[str]:
    """The printed lines. Empty lines in front of the code make a traceback's line numbers those of the page."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * start + "\n".join(code), str(page), "exec"), namespace)
    return _clean(printed.getvalue())


def _run_console(code: Sequence[str]) -> list[str]:
    """Each command with its answer; where the page's own fits, `...` included, that one. Always 80 columns, no colours."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    settings = os.environ | {"PATH": path, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    found: list[str] = []
    starts = [i for i, line in enumerate(code) if line.startswith("$ ")]
    for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
        answer, expected = _clean(_answer(code[start][2:], settings)), code[start + 1 : stop]
        found += [code[start], *(expected if _matches(expected, answer) else answer)]
    return found


def _answer(command: str, settings: dict[str, str]) -> str:
    """What a command prints. A plain `vitlab ...` is forked from a process that has torch, which takes seconds to import."""
    if not command.startswith("vitlab ") or set(command) & set("|&;<>$`*?~"):
        shell = f"({command}) 2>&1"
        return subprocess.run(shell, shell=True, env=settings, text=True, stdout=subprocess.PIPE, check=False).stdout
    server = _fork_server()
    assert server.stdin and server.stdout
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
        job = {"words": shlex.split(command), "folder": str(Path.cwd()), "settings": settings, "output": output.name}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        if not server.stdout.readline():
            raise RuntimeError("the process that commands are forked from has ended")
        return output.read()


# What most commands import is there before the fork, and a child ends without taking Python down: that takes most of its time.
_SERVER = """
import atexit, contextlib, io, json, os, sys, traceback
import torch._dynamo
import vitlab.pipelines.digits_demo, vitlab.runs.data_tools, vitlab.runs.evaluation.comparison, vitlab.runs.evaluation.embedding
from vitlab.cli.main import main

with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    sys.argv = ["vitlab", "train", "--help"]  # for what typer imports late
    main()
for line in sys.stdin:
    job = json.loads(line)
    if not (child := os.fork()):
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["settings"])
        for stream in (1, 2):
            os.dup2(os.open(job["output"], os.O_WRONLY | os.O_APPEND), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = job["words"]
        try:
            main()
        except SystemExit:
            pass  # no page shows the status of such a command
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(child, 0)
    print(flush=True)
"""


@functools.cache
def _fork_server() -> "subprocess.Popen[str]":
    """Ends with this process, also a killed one: its input is closed then."""
    server = subprocess.Popen([sys.executable, "-c", _SERVER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(_end, server)
    return server


def _end(server: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.communicate(timeout=5)  # closes its input
    server.kill()


def _clean(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _matches(expected: Sequence[str], found: Sequence[str]) -> bool:
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in expected)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in found)) is not None


def _picture(drawn: Any, name: str, *, write: bool) -> None:
    """A matplotlib Figure or a PIL image: always rendered, so that a broken one fails; stored only when writing."""
    png = io.BytesIO()
    if hasattr(drawn, "savefig"):
        drawn.savefig(png, dpi=100, metadata={"Software": None}, pil_kwargs={"optimize": True})
    else:
        drawn.save(png, "PNG", optimize=True)
    if len(png.getvalue()) > _MAX_PICTURE_BYTES:
        png = _with_fewer_colours(png)
    if len(png.getvalue()) > _MAX_PICTURE_BYTES:
        raise ValueError(f"picture {name} has {len(png.getvalue()):,} bytes, more than {_MAX_PICTURE_BYTES:,}")
    if write:
        (ROOT / "docs" / "pictures" / f"{name}.png").write_bytes(png.getvalue())


def _with_fewer_colours(png: io.BytesIO) -> io.BytesIO:
    """Photos have too many for a small PNG."""
    from PIL import Image

    smaller = io.BytesIO()
    Image.open(png).convert("RGB").quantize(_COLOURS).save(smaller, "PNG", optimize=True)
    return smaller


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the code in the documentation.")
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files; all of them by default.")
    parser.add_argument("--write", action="store_true", help="Write the outputs and the pictures anew.")
    given = parser.parse_args()
    pages = [page.resolve() for page in given.pages or all_pages()]
    for page in pages:
        if absent := missing(page):
            print(f"{page.name} was left alone, because {absent[0]} is not here")
    problems = [found for page in pages for found in execute(page, write=given.write)]
    print("\n\n".join(problems) or "every page does what it says")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
