"""The wheel as a stranger gets it: built, installed into an empty environment, and run there."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheel")


@pytest.fixture(scope="module")
def wheel(place: Path, root: Path, run: Run) -> Path:
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", root, "-w", place / "wheels"], cwd=place)
    (built,) = (place / "wheels").iterdir()
    return built


@pytest.fixture(scope="module")
def venv(place: Path, root: Path, wheel: Path, run: Run) -> Path:
    """The programs of a new environment that holds the wheel with its demo extra, and nothing else of ours."""
    run([sys.executable, "-m", "venv", place / "venv"], cwd=place)
    programs = place / "venv" / "bin"
    env = {"PIP_CONSTRAINT": str(root / "constraints.txt"), "PYTHONPATH": ""}
    run([programs / "python", "-m", "pip", "install", "--quiet", "--no-compile", f"{wheel}[demo]"], cwd=place, env=env)
    return programs


def test_wheel_holds_the_package_its_data_and_its_licence(wheel: Path, root: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = root / "src"
    tracked = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    expected = {name for name in tracked if "__pycache__" not in name}
    assert {name for name in names if name.startswith("vitlab/")} == expected
    assert {"vitlab/py.typed", "vitlab/report/report.html.j2", "vitlab/training/recipes/demo-digits.toml"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("test" in name for name in names)


@pytest.mark.slow
def test_package_comes_from_the_new_environment(venv: Path, place: Path, run: Run) -> None:
    printed = run([venv / "python", "-c", "import vitlab; print(vitlab.__file__)"], cwd=place, env={"PYTHONPATH": ""})
    assert Path(printed.stdout.strip()).is_relative_to(venv.parent)


@pytest.mark.slow
def test_version_is_the_projects(venv: Path, place: Path, root: Path, run: Run) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert run([venv / "vitlab", "--version"], cwd=place).stdout == f"vitlab {version}\n"


@pytest.mark.slow
def test_model_facts_are_there(venv: Path, place: Path, run: Run) -> None:
    info = json.loads(run([venv / "vitlab", "models", "info", "ViT-B/16", "--json"], cwd=place).stdout)
    assert (info["name"], info["params"]) == ("ViT-B/16", 86_567_656)


@pytest.mark.slow
def test_demo_runs_and_prints_only_its_result(venv: Path, place: Path, run: Run) -> None:
    drawn = "pretrain.data.source=fractals:categories=4,instances=8,image_size=16"
    bodies = [f"{part}.model.name=ViT-w16d2m32h2/2" for part in ("pretrain", "transfer")]
    short = ["pretrain.train.steps=2", drawn, *bodies, "transfer.train.steps=2"]
    overrides = [part for override in short for part in ("--set", override)]
    done = run([venv / "vitlab", "demo", "--quiet", "--threads", "1", *overrides], cwd=place)
    assert re.match(r"Test accuracy \d+\.\d%: \d+ of 359 held-out digits right\.\n", done.stdout)
    assert "runs/demo/report.html" in done.stdout
    assert done.stderr == ""
    assert (place / "runs" / "demo" / "report.html").stat().st_size > 50_000


@pytest.mark.slow
def test_cpu_machine_gets_no_gpu_packages(venv: Path, place: Path, run: Run) -> None:
    listed: list[dict[str, Any]] = json.loads(run([venv / "pip", "list", "--format=json"], cwd=place).stdout)
    versions = {package["name"].lower(): package["version"] for package in listed}
    if not versions["torch"].endswith("+cpu"):
        pytest.skip("torch is not a CPU build here, so its GPU packages belong to it")
    assert [name for name in versions if name.startswith(("nvidia", "triton", "cuda"))] == []


@pytest.mark.slow
def test_only_declared_packages_are_needed(venv: Path, place: Path, run: Run) -> None:
    assert run([venv / "python", "-m", "pip", "check"], cwd=place).stdout == "No broken requirements found.\n"


@pytest.mark.slow
def test_without_the_extra_the_demo_says_what_to_install(venv: Path, place: Path, run: Run) -> None:
    run([venv / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "scikit-learn"], cwd=place)
    done = run([venv / "vitlab", "demo", "--out", "never"], cwd=place, code=1)
    assert done.stderr.splitlines() == [
        "vitlab: the handwritten digits needs the package 'scikit-learn', which is not installed",
        "Install it with:  pip install 'vitlab[demo]'",
    ]
    assert not (place / "never").exists()
