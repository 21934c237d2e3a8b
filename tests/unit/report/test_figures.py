"""Figures are well-formed, self-contained and the same bytes every time."""

import io
import subprocess
import sys
import warnings
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.report import figures

HOSTILE = ["<script>alert(1)</script>", "a & b", '"quoted"', "it's", "line\nbreak", "C:\\path", "100 %", "{x}", "]]>"]


def confusion(classes: list[str]) -> bytes:
    return figures.confusion(torch.eye(len(classes)).long() * 3, classes)


def texts(svg: bytes) -> str:
    """All text of the drawing, after it was parsed as XML."""
    return " ".join(
        "".join(node.itertext()) for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("text")
    )


def test_curves_and_confusion_are_well_formed_svg() -> None:
    curves = figures.curves([1, 2, 3], [2.0, 1.0, 0.5], [0.1, 0.2, 0.1])
    assert "training loss" in texts(curves)
    assert "answer" in texts(confusion(["cat", "dog"]))
    for svg in (curves, confusion(["cat", "dog"])):
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"


def test_svg_loads_nothing_and_runs_nothing() -> None:
    root = ElementTree.fromstring(confusion(HOSTILE))
    for node in root.iter():
        assert not node.tag.endswith(("script", "foreignObject"))
        for name, value in node.attrib.items():
            if name.endswith("href"):
                assert value.startswith(("#", "data:"))
            assert not name.lower().startswith("on")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_class_names_stay_text(name: str) -> None:
    drawn = texts(confusion([name, "plain"]))
    assert all(part in drawn for part in name.split("\n"))


@pytest.mark.parametrize("name", ["$x$", r"$\frac$", "cost $5 or $6", "$$"])
def test_class_names_with_dollar_signs_stay_text(name: str) -> None:
    assert name in texts(confusion([name, "plain"]))


@pytest.mark.parametrize("name", ["中文", "ไทย"])
def test_class_names_in_other_scripts_are_drawn_without_a_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert name in texts(confusion([name, "plain"]))


def test_same_data_gives_the_same_bytes_in_another_process() -> None:
    code = (
        "import sys, torch; from vitlab.report import figures\n"
        "out = figures.curves([1, 2], [2.0, 1.0], [0.1, 0.2]) + figures.confusion(torch.eye(2).long(), ['a', 'b'])\n"
        "sys.stdout.buffer.write(out)"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    here = figures.curves([1, 2], [2.0, 1.0], [0.1, 0.2]) + figures.confusion(torch.eye(2).long(), ["a", "b"])
    assert there == here
    assert figures.confusion(torch.eye(2).long(), ["a", "c"]) not in here


def test_shortest_run_and_perfect_scores_are_drawn() -> None:
    assert figures.curves([1], [0.0], [0.0]).startswith(b"<?xml")
    assert b"svg" in confusion(["only"])


def test_confusion_shows_every_count() -> None:
    drawn = texts(figures.confusion(torch.tensor([[41, 1], [0, 57]]), ["a", "b"])).split()
    assert {"41", "57", "1"} <= set(drawn)


def test_png_is_lossless() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(figures.png(picture)))), np.asarray(picture))
