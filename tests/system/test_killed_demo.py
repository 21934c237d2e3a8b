"""SIGKILL in the middle of a demo: what stands under its final name is whole, and the next demo works.

Four kill points by default; with VITLAB_SOAK=1 every disk operation of the demo and a hundred random moments.
"""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from forked_work import in_child
from killed_demo import main

from vitlab.core import fsio
from vitlab.engines.classifier import load

SOAK = os.environ.get("VITLAB_SOAK") == "1"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def killed(place: Path) -> dict[str, Any]:
    how_many, random_kills = (0, 100) if SOAK else (4, 0)
    return in_child(lambda: main(place, how_many, random_kills), place)


def test_every_child_but_the_first_died_at_its_operation(killed: dict[str, Any]) -> None:
    assert killed["whole"] == 0
    assert killed["total"] >= 50
    assert len(killed["ends"]) >= 4
    assert set(killed["ends"].values()) <= {-9, 0}
    assert {end for name, end in killed["ends"].items() if name.startswith("at-")} == {-9}


def test_what_has_its_final_name_is_whole(place: Path, killed: dict[str, Any]) -> None:
    assert killed
    seen = 0
    for path in place.rglob("*"):
        if any(part.startswith(".") and part.endswith(".tmp") for part in path.relative_to(place).parts):
            continue  # a killed writer's unfinished work, under a name that nothing reads
        if path.name in ("bundle", "plots") or path.parent.name == "checkpoints":
            assert fsio.verify_folder(path)
            seen += path.name == "bundle" and bool(load(path, device="cpu").labels)
        elif path.suffix == ".json" and path.parent.parent.name != "checkpoints":  # those are read above
            json.loads(path.read_text())
        elif path.suffix == ".toml":
            tomllib.loads(path.read_text())
        elif path.name == "report.html":
            assert path.read_text().endswith("</html>")
        elif path.name == "metrics.jsonl":
            assert [json.loads(line)["step"] for line in path.read_text().splitlines()] in ([], [1], [1, 2])
    assert seen >= 4, "the whole demo has three bundles, and some killed one got as far"


def test_unfinished_run_is_refused_in_plain_words(place: Path, killed: dict[str, Any]) -> None:
    first = place / min(killed["ends"], key=lambda name: int(name.split("-")[1]) if name.startswith("at-") else 10**9)
    with pytest.raises(Exception, match=r"does not exist|has no manifest\.json"):
        load(first)
