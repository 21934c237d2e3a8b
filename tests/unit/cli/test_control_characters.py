"""Text of other people's files never steers the terminal: control characters arrive as escapes, wherever they are printed."""

import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

Call = Callable[..., Any]

# Sets the title of a window; turns the direction of what follows; the C1 form of `ESC [`.
HOSTILE = "a\x1b]0;owned\x07\u202e\x9b31m"
ESCAPED = r"a\x1b]0;owned\x07\u202e\x9b31m"


def controls(text: str) -> list[str]:
    return [sign for sign in text if not sign.isprintable() and sign != "\n"]


def recipe(folder: Path) -> Path:
    path = folder / "odd.toml"
    path.write_text('[data]\nimage_size = 8\n"a\\u001b]0;owned\\u0007\\u202E\\u009B31m" = 1')
    return path


def photos(folder: Path) -> Path:
    for name in ("a\u202e", "b"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (24, 24), (number * 30, 0, 99)).save(folder / "photos" / name / f"{number}.png")
    (folder / "photos" / "b" / "x\u2066.png").write_bytes(b"no image")
    return folder / "photos"


def test_error_that_quotes_a_file_reaches_a_terminal_escaped(vitlab: str, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    command = [vitlab, "recipes", "show", str(recipe(tmp_path))]
    done = subprocess.run(command, stdout=follower, stderr=follower, check=False)
    os.close(follower)
    shown = os.read(leader, 100_000).decode().replace("\r\n", "\n")
    os.close(leader)
    assert done.returncode == 2
    assert ESCAPED in shown
    assert controls(shown.replace("\033[1;31mvitlab:\033[0m", "vitlab:")) == []  # the colour is ours


@pytest.mark.parametrize("more", [[], ["--debug"]])
def test_error_of_any_kind_is_printed_escaped(call: Call, tmp_path: Path, more: list[str]) -> None:
    code, out, err = call("recipes", "show", str(recipe(tmp_path)), *more)
    assert (code, out, controls(err)) == (2, "", [])
    assert ESCAPED in err
    assert ("Traceback" in err) == bool(more)


def test_names_of_images_are_printed_escaped(call: Call, tmp_path: Path) -> None:
    code, out, err = call("data", "check", str(photos(tmp_path)), "--workers", "1")
    assert (code, controls(out), controls(err)) == (1, [], [])
    assert r"b/x\u2066.png" in out


def test_result_that_names_a_file_is_printed_escaped(call: Call, tmp_path: Path) -> None:
    code, out, err = call("train", str(photos(tmp_path)), "--out", HOSTILE, "--dry-run", "--model", "ViT-w8d1m8h2/8")
    assert (code, controls(out), controls(err)) == (0, [], [])
    assert ESCAPED in out


def test_json_has_every_name_in_ascii(call: Call, tmp_path: Path) -> None:
    out = call("data", "check", str(photos(tmp_path)), "--workers", "1", "--json").out
    assert out.isascii()
    assert controls(out) == []
    assert r"b/x\u2066.png" in out
