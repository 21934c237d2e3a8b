"""The colours of series: seen on paper and on dark, and told apart by readers who are colour-blind, too."""

import re
from importlib import resources

import numpy as np
import pytest

from vitlab.report import svg

STYLE = (resources.files("vitlab.report") / "style.css").read_text(encoding="utf-8")
LIGHT, DARK = ([pair[k] for pair in re.findall(r"--c\d: light-dark\((#\w{6}), (#\w{6})\)", STYLE)] for k in range(2))
# What is left of linear sRGB without red, green or blue cones: Machado, Oliveira and Fernandes 2009, severity 1.
SEEN = {
    "all": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
# Oklab, of linear sRGB: distances in it are about as large as they look.
CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
LAB = [
    [0.2104542553, 0.793617785, -0.0040720468],
    [1.9779984951, -2.428592205, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.808675766],
]


def linear(colours: list[str]) -> np.ndarray:
    rgb = np.array([list(bytes.fromhex(colour[1:])) for colour in colours]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def luminance(colours: list[str]) -> np.ndarray:
    return linear(colours) @ [0.2126, 0.7152, 0.0722] + 0.05


@pytest.mark.parametrize("eyes", SEEN)
@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_no_two_colours_are_alike(colours: list[str], eyes: str) -> None:
    seen = np.clip(linear(colours) @ np.array(SEEN[eyes]).T, 0, 1)
    lab = np.cbrt(seen @ np.array(CONES).T) @ np.array(LAB).T
    apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1)
    # Blue and violet of other palettes are 0.004 apart; a tenth of the way from black to white is seen at once.
    assert apart[np.triu_indices(len(colours), 1)].min() > (0.08 if eyes == "tritanopia" else 0.1)


@pytest.mark.parametrize(("colours", "paper"), [(LIGHT, "#ffffff"), (DARK, "#171d26")])
def test_colours_are_seen_on_the_page(colours: list[str], paper: str) -> None:
    both = luminance(colours), luminance([paper])
    assert (np.maximum(*both) / np.minimum(*both)).min() >= 3, "as WCAG asks of graphics"


@pytest.mark.parametrize(("palette", "which"), [(svg.LIGHT, 0), (svg.DARK, 1)], ids=["light", "dark"])
def test_files_have_the_colours_of_the_page(palette: dict[str, str], which: int) -> None:
    page = dict(re.findall(r"--(\w+): (light-dark\(.*?\))", STYLE))
    assert palette == {name: re.findall(r"#\w+", page[name])[which] for name in palette}
    assert len(set(palette.values())) == len(palette)
    assert sum(re.fullmatch(r"c\d", name) is not None for name in palette) == svg.COLOURS


def test_a_file_is_dark_where_its_reader_is() -> None:
    light, dark = svg.as_file('<svg width="1" height="1"/>').decode().split("@media(prefers-color-scheme:dark)")
    for rules, palette, other in ((light, svg.LIGHT, svg.DARK), (dark, svg.DARK, svg.LIGHT)):
        assert all(palette[name] in rules for name in ("ink", "paper", "line", *(f"c{k}" for k in range(svg.COLOURS))))
        assert not set(re.findall(r"#\w+", rules)) & set(other.values())
