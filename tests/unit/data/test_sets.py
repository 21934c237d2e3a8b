"""The built-in set: scikit-learn's real digits."""

import sys

import numpy as np
import pytest
from sklearn import datasets

from vitlab.core.errors import MissingExtra
from vitlab.data.sources import digits
from vitlab.data.sources.digits import load_digits


@pytest.mark.parametrize("file", [digits._FILE, "moved"], ids=["read", "imported"])
def test_digits_are_scikit_learns_on_the_full_scale(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "_FILE", file)
    ours, theirs = load_digits(), datasets.load_digits()
    images = np.stack([np.asarray(ours.read(i)) for i in range(len(ours))])
    assert images.shape == (1797, 8, 8, 1)
    assert np.array_equal(ours.labels.single().numpy(), theirs.target)
    assert np.array_equal(images[..., 0], np.round(theirs.images * 255 / 16).astype(np.uint8))
    assert int(images.max()) == 255
    assert ours.classes == tuple("0123456789")
    assert len(set(ours.keys)) == 1797


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # Python's own way to make an import fail
    with pytest.raises(MissingExtra, match=r"pip install 'vitlab\[demo\]'"):
        load_digits()
