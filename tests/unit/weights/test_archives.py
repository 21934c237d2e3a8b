"""Checkpoints of training programs: what stands beside the weights is passed by, and none of it is ever made or run."""

import argparse
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vitlab.core.errors import FileProblem
from vitlab.weights.archives import _Inert
from vitlab.weights.containers import parse_arrays

WEIGHTS = {"a": torch.arange(3.0)}


def saved(value: Any, *, as_zip: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=as_zip)
    return buffer.getvalue()


@pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "legacy"])
def test_settings_and_numbers_beside_the_weights_are_passed_by(as_zip: bool) -> None:
    """The form of MAE, DINO and timm: arguments of the program, paths among them, and numpy's idea of a float."""
    settings = argparse.Namespace(lr=1e-3, output_dir=Path("/tmp/x"), inner=argparse.Namespace(betas=(0.9, 0.95)))
    numbers = [kind(1) for kind in (np.float64, np.float32, np.int64, np.bool_, np.longdouble, np.complex128)]
    found = parse_arrays(saved({"model": WEIGHTS, "args": settings, "best": numbers, "epoch": 3}, as_zip=as_zip), "x")
    assert found.arrays.keys() == {"a"} and torch.equal(found.arrays["a"], WEIGHTS["a"])
    assert found.ignored == ("args", "best", "epoch")


def test_the_stand_in_keeps_nothing() -> None:
    inert = _Inert(1, 2)
    inert.__setstate__({"run": print})
    assert not hasattr(inert, "__dict__") and not hasattr(inert, "run")
    with pytest.raises(AttributeError):
        inert.run = print  # pyright: ignore[reportAttributeAccessIssue]


def crafted(code: bytes) -> bytes:
    """A torch archive whose pickle is `code`."""
    buffer = io.BytesIO(saved(WEIGHTS))
    out = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, code if info.filename.endswith("data.pkl") else old.read(info))
    return out.getvalue()


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


ENCODE = b"c_codecs\nencode\n"
HOSTILE = {
    "another encoding": ENCODE + text("a") + text("unicode_escape") + b"\x86R",
    "a long text": ENCODE + text("a" * 1000) + text("latin1") + b"\x86R",
    "no text": ENCODE + b"]" + text("latin1") + b"\x86R",
    "arguments from a list": ENCODE + b"](" + text("a") + text("idna") + b"eR",
    "arguments behind a mark": ENCODE + b"(" + text("a") + text("idna") + b"tR",
    "an encoding of an encoding": ENCODE + ENCODE + text("a") + text("latin1") + b"\x86R" + text("hex") + b"\x86R",
    "an array": pickle.dumps(np.zeros(1000), protocol=2)[2:-1],
    "a method of an allowed class": b"cargparse\nNamespace._get_kwargs\n)R",
    "a class beside an allowed one": b"cargparse\nFileType\n" + text("w") + b"\x85R",
}


@pytest.mark.parametrize("code", HOSTILE.values(), ids=list(HOSTILE))
def test_nothing_more_than_that_is_allowed(code: bytes) -> None:
    with pytest.raises(FileProblem):
        parse_arrays(crafted(b"\x80\x02}" + text("x") + code + b"s."), "x")
    inert = b"cargparse\nNamespace\n)\x81}b"
    with pytest.raises(FileProblem, match="holds no weights"):  # the frame itself is sound
        parse_arrays(crafted(b"\x80\x02}" + text("x") + inert + b"s."), "x")
