"""One drawing in two forms: SVG and pixels show the same things at the same places, and the same bytes every time."""

import io
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from vitlab.inspection.canvas import Canvas, shortened, text_width, wrapped


def drawn() -> Canvas:
    canvas = Canvas(100, 60, margin=5)
    canvas.picture(Image.new("RGB", (2, 2), (250, 0, 0)), (10, 20, 30, 20), crisp=True)
    canvas.path([(50, 10), (90, 10)], colour="#0000ff", width=3)
    canvas.text((50, 50), "a & b <×> é", anchor="middle")
    canvas.text((95, 30), "up", anchor="middle", upwards=True)
    return canvas


def test_both_forms_have_the_size_of_the_page_and_its_margin() -> None:
    root = ElementTree.fromstring(drawn().svg())
    assert (root.get("width"), root.get("height"), root.get("viewBox")) == ("110", "70", "-5 -5 110 70")
    assert drawn().pixels(3).size == (330, 210)


def test_things_are_painted_at_their_places() -> None:
    pixels = np.asarray(drawn().pixels(2)).astype(int)
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[2 * 25, 2 * 15].tolist() == [250, 0, 0] and pixels[2 * 25 - 1, 2 * 15].tolist() == [255, 255, 255]
    assert pixels[2 * 45 - 1, 2 * 45 - 1].tolist() == [250, 0, 0]
    assert pixels[2 * 15, 2 * 75].tolist() == [0, 0, 255]
    dark_YX = pixels.max(axis=2) < 120
    rows, cols = np.nonzero(dark_YX[2 * 43 :])
    assert rows.max() < 2 * 20 and abs((cols.min() + cols.max()) / 4 - 55) < 2, "the text is in the middle"
    rows, cols = np.nonzero(dark_YX[: 2 * 43, 2 * 90 :])
    assert np.ptp(rows) > np.ptp(cols), "turned upwards"
    assert abs((rows.min() + rows.max()) / 4 - 35) < 2


def test_transparent_parts_of_a_picture_leave_what_is_below() -> None:
    canvas = Canvas(4, 4, margin=0)
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([0, 0, 0, 9, 8, 7])
    palette.putpixel((1, 1), 1)
    palette.info["transparency"] = 0
    canvas.picture(palette, (0, 0, 4, 4), crisp=True)
    pixels = np.asarray(canvas.pixels(1))
    assert pixels[0, 0].tolist() == [255, 255, 255] and pixels[3, 3].tolist() == [9, 8, 7]


def test_text_in_an_svg_stays_text() -> None:
    texts = [node.text for node in ElementTree.fromstring(drawn().svg()).iter() if node.tag.endswith("text")]
    assert texts == ["a & b <×> é", "up"]
    hostile = Canvas(10, 10)
    hostile.text((0, 0), "</text><script>\x00\x1b")
    assert [node.tag.split("}")[1] for node in ElementTree.fromstring(hostile.svg())] == ["style", "text"]


@pytest.mark.parametrize(("text", "same"), [("×–−é", "x--e"), ("ü 中", "u ?")])
def test_signs_that_the_font_lacks_are_spelled(text: str, same: str) -> None:
    first, second = Canvas(80, 20), Canvas(80, 20)
    first.text((0, 15), text)
    second.text((0, 15), same)
    assert np.array_equal(np.asarray(first.pixels()), np.asarray(second.pixels()))


def test_same_drawing_is_the_same_bytes() -> None:
    def png() -> bytes:
        buffer = io.BytesIO()
        drawn().pixels().save(buffer, "PNG")
        return buffer.getvalue()

    assert drawn().svg() == drawn().svg() and png() == png()


def test_lines_are_broken_and_shortened_by_their_width() -> None:
    text = "the quick brown fox jumps over the lazy dog"
    lines = wrapped(text, 80)
    assert " ".join(lines) == text and len(lines) > 2
    assert all(text_width(line) <= 80 for line in lines)
    assert shortened(text, 80).endswith("…") and text_width(shortened(text, 80)) <= 80
    assert shortened("short", 80) == "short"
