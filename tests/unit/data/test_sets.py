"""The two built-in sets: printed letters, drawn from (seed, index) alone, and scikit-learn's real digits."""

import sys

import numpy as np
import pytest
import torch
from sklearn import datasets

from vitlab.core.errors import MissingExtra
from vitlab.data.digits import load_digits
from vitlab.data.letters import draw_letters


def test_letter_is_a_pure_function_of_seed_and_index() -> None:
    long, short = draw_letters(40, (8, 8), seed=1), draw_letters(30, (8, 8), seed=1)
    assert torch.equal(long.images[:30], short.images)
    assert long.ids[:30] == short.ids
    assert not torch.equal(draw_letters(30, (8, 8), seed=2).images, short.images)


def test_letters_are_26_classes_in_turn() -> None:
    letters = draw_letters(53, (6, 9), seed=0)
    assert letters.classes == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert letters.labels.tolist() == [*range(26), *range(26), 0]
    assert letters.images.shape == (53, 1, 6, 9)
    assert letters.images.dtype == torch.uint8
    assert len(set(letters.ids)) == 53


def test_letters_are_bright_on_black_and_no_two_alike() -> None:
    letters = draw_letters(104, (16, 16), seed=0)
    assert len({image.numpy().tobytes() for image in letters.images}) == 104
    ink = letters.images.float().mean(dim=(1, 2, 3)) / 255
    assert 0.02 < float(ink.min()) < float(ink.max()) < 0.6
    assert int(letters.images.amax(dim=(1, 2, 3)).min()) > 128


def test_letters_can_be_told_apart() -> None:
    images = draw_letters(26 * 12, (8, 8), seed=0).images.float().reshape(12, 26, 64)
    means = images[:8].mean(dim=0)
    answers = torch.cdist(images[8:].reshape(-1, 64), means).argmin(dim=1).reshape(4, 26)
    assert float((answers == torch.arange(26)).float().mean()) > 0.3, "even the nearest mean is far above chance"


def test_digits_are_scikit_learns_on_the_full_scale() -> None:
    ours, theirs = load_digits(), datasets.load_digits()
    assert ours.images.shape == (1797, 1, 8, 8)
    assert np.array_equal(ours.labels.numpy(), theirs.target)
    assert np.array_equal(ours.images[:, 0].numpy(), np.round(theirs.images * 255 / 16).astype(np.uint8))
    assert int(ours.images.max()) == 255
    assert ours.classes == tuple("0123456789")


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # Python's own way to make an import fail
    with pytest.raises(MissingExtra, match=r"pip install 'vitlab\[demo\]'"):
        load_digits()
