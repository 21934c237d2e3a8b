"""Few-shot linear: the published numbers, both closed forms, and what cannot be measured."""

from typing import Any

import numpy as np
import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.evaluation.few_shot import L2, draw_shots, fit_ridge
from vitlab.evaluation.linear_probe import judge

Array = np.ndarray[Any, Any]
NAMES = ("a", "b", "c", "d")


def clouds(per_class: int, width: int, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Overlapping Gaussian clouds, float32, with features of very different scale and one that never changes."""
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(classes, width))
    labels = np.repeat(np.arange(classes), per_class)
    x = (centres[labels] + 2.0 * draw.normal(size=(len(labels), width))) * np.logspace(-2, 2, width)
    x[:, 0] = 3.0
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(labels)


def published(x: Array, y: Array, x_test: Array, classes: int, l2: float) -> Array:
    """Scores by the method as published, the long way: eigenvalues of the covariance, then every λ from them. Float64."""
    x, x_test = x.astype(np.float64), x_test.astype(np.float64)
    mean, std = x.mean(0), x.std(0) + 1e-5
    wide = np.concatenate([(x - mean) / std, np.full((len(x), 1), 100.0)], axis=1)
    wide_test = np.concatenate([(x_test - mean) / std, np.full((len(x_test), 1), 100.0)], axis=1)
    signs = np.where(np.arange(classes) == y[:, None], 1.0, -1.0)
    values, vectors = np.linalg.eigh(wide.T @ wide)
    weight = vectors @ ((vectors.T @ (wide.T @ signs)) / (values + l2)[:, None])
    return wide_test @ weight


@pytest.mark.parametrize(("per_class", "width"), [(3, 40), (25, 12)], ids=["fewer images", "fewer features"])
def test_primal_equals_dual(per_class: int, width: int) -> None:
    x, y = clouds(per_class, width)
    primal, dual = (fit_ridge(x, y, 4, form=form) for form in ("primal", "dual"))
    torch.testing.assert_close(primal.weight_EK, dual.weight_EK, rtol=0, atol=1e-9)
    assert primal.weight_EK.dtype == torch.float64
    assert primal.weight_EK.abs().max() > 1e-3


@pytest.mark.parametrize(("per_class", "width"), [(1, 30), (5, 12), (40, 30)])
@pytest.mark.parametrize("l2", [1.0, L2])
def test_scores_equal_a_numpy_reference_of_the_published_method(per_class: int, width: int, l2: float) -> None:
    x, y = clouds(per_class, width)
    x_test, y_test = clouds(50, width, seed=1)
    fitted = fit_ridge(x, y, 4, l2=l2)
    wanted = published(x.numpy(), y.numpy(), x_test.numpy(), 4, l2)
    # 1e-7 of the scores: forming XᵀX with a constant of 100 costs the reference some digits.
    np.testing.assert_allclose(fitted.scores(x_test).numpy(), wanted, rtol=0, atol=1e-7 * np.abs(wanted).max())
    assert judge(fitted.scores, x_test.split(7), y_test)[0] == int((wanted.argmax(1) == y_test.numpy()).sum())


def test_constants_are_the_published_ones() -> None:
    assert L2 == 1024.0
    x, y = clouds(5, 12)
    fitted = fit_ridge(x, y, 4)
    assert torch.equal(fitted.std_D, x.double().std(0, correction=0) + 1e-5)


def test_form_is_chosen_by_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = torch.linalg.cholesky

    def noting(matrix: torch.Tensor) -> torch.Tensor:
        sizes.append(len(matrix))
        return plain(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky", noting)
    fit_ridge(*clouds(3, 40), 4)
    fit_ridge(*clouds(30, 12), 4)
    assert sizes == [12, 13]  # images; features and the constant


def test_draw_takes_as_many_of_every_class_and_more_shots_contain_fewer() -> None:
    labels = torch.arange(200) % 4
    five, one = (draw_shots(labels, shots, 7, NAMES) for shots in (5, 1))
    assert labels[five].bincount().tolist() == [5, 5, 5, 5]
    assert len(five.unique()) == 20
    assert one.tolist() == five[::5].tolist()
    assert draw_shots(labels, 5, 8, NAMES).tolist() != five.tolist()


def test_draw_is_the_published_one() -> None:
    """A shuffle per class, in the order of the classes, from one NumPy generator."""
    labels = torch.tensor([2, 0, 1, 1, 0, 2, 2, 0, 1, 0])
    draw = np.random.default_rng(3)
    wanted = [draw.permutation(np.where(labels.numpy() == c)[0])[:2] for c in range(3)]
    assert draw_shots(labels, 2, 3, NAMES[:3]).tolist() == np.concatenate(wanted).tolist()


@pytest.mark.parametrize("shots", [0, -1])
def test_no_shots_are_refused(shots: int) -> None:
    with pytest.raises(UsageError, match="at least 1 image per class"):
        draw_shots(torch.arange(4), shots, 0, NAMES)


def test_more_shots_than_images_name_the_class() -> None:
    with pytest.raises(UsageError, match=r"5 shots need 5 training images .* c has 4"):
        draw_shots(torch.tensor([0] * 9 + [1] * 9 + [2] * 4 + [3] * 9), 5, 0, NAMES)


def test_one_image_per_class_is_enough_for_one_shot() -> None:
    x, y = clouds(1, 8)
    fitted = fit_ridge(x, y, 4)
    assert fitted.scores(x).isfinite().all()
    assert judge(fitted.scores, [x], y)[0] == 4


def test_one_class_is_refused() -> None:
    with pytest.raises(UsageError, match="one class"):
        fit_ridge(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), 1)
