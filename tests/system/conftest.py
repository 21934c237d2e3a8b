"""The demo, whole or with small models, and two short ones under different hash seeds, for the tests of what they leave."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest


@dataclasses.dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str
    folder: Path  # where the demo ran; its own folder is `folder / "demo"`


@dataclasses.dataclass
class Running:
    process: subprocess.Popen[str]
    folder: Path

    def wait(self) -> Finished:
        out, err = self.process.communicate(timeout=1800)
        return Finished(self.process.returncode, out, err, self.folder)


SOAK = os.environ.get("VITLAB_SOAK") == "1"
FRACTALS = "pretrain.data.source=fractals:categories=4,instances=40,image_size=16"
BODIES = [f"{part}.model.name=ViT-w32d2m64h2/2" for part in ("pretrain", "transfer")]
SMALL = ["pretrain.data.source=fractals:categories=8,instances=50,image_size=16", *BODIES]
SMALL = [word for key in (*SMALL, "pretrain.train.steps=200", "transfer.train.epochs=4") for word in ("--set", key)]
SHORT = [
    FRACTALS,
    *BODIES,
    "pretrain.train.steps=6",
    "transfer.train.steps=18",
]  # before it is asked whether they learn
SHORT = [word for key in SHORT for word in ("--set", key)]


def _start(folder: Path, hash_seed: str, *more: str) -> Running:
    command = [
        str(Path(sys.executable).with_name("vitlab")),
        "demo",
        "--json",
        "--threads",
        "1",
        "--out",
        "demo",
        *more,
    ]
    # Another hash seed shuffles sets and dictionaries of names, which must not reach the numbers.
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    return Running(process, folder)


@contextlib.contextmanager
def _finished(*running: Running) -> Generator[list[Finished]]:
    try:
        yield [demo.wait() for demo in running]
    finally:
        for demo in running:
            demo.process.kill()
            demo.process.communicate()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Generator[Finished]:
    """The demo with small models that learn in seconds, or with VITLAB_SOAK=1 as the README promises it."""
    with _finished(_start(tmp_path_factory.mktemp("demo"), "1", *([] if SOAK else SMALL))) as (demo,):
        yield demo


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Generator[list[Finished]]:
    """Two demos whose bits must be equal: of a few steps, or with VITLAB_SOAK=1 the whole one and one more like it."""
    if SOAK:
        with _finished(_start(tmp_path_factory.mktemp("demo"), "2")) as (second,):
            yield [request.getfixturevalue("finished"), second]
    else:
        with _finished(*(_start(tmp_path_factory.mktemp("demo"), seed, *SHORT) for seed in ("1", "2"))) as both:
            yield both


@pytest.fixture(scope="session")
def short(pair: list[Finished]) -> Finished:
    """A demo that learns next to nothing, for the tests of what it says and leaves; with VITLAB_SOAK=1 the whole one."""
    return pair[0]


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command that must succeed, and returns what it said."""

    def call(
        command: list[str | Path], *, cwd: Path, env: dict[str, str] | None = None, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    return call
