"""The formulas against independent references: SciPy, plain loops, torch's own operators."""

from typing import get_args

import numpy as np
import pytest
import scipy.ndimage
import torch
import torch.nn.functional as F

from vitlab.models import ops
from vitlab.models.spec import GridResize

GRIDS = [((14, 14), (24, 24)), ((7, 7), (12, 12)), ((16, 16), (37, 37)), ((24, 24), (14, 14)), ((14, 10), (9, 21))]


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_corner_bilinear_is_scipy_zoom(old: tuple[int, int], new: tuple[int, int]) -> None:
    """The authors' own code is `scipy.ndimage.zoom(order=1)`."""
    grid = np.random.default_rng(0).normal(size=(*old, 8))
    zoomed = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    ours = ops.resize_grid(torch.from_numpy(grid).reshape(1, -1, 8), old, new, "corner-bilinear")
    np.testing.assert_allclose(ours.reshape(*new, 8).numpy(), zoomed, rtol=0, atol=1e-6)
    single = ops.resize_grid(torch.from_numpy(grid).float().reshape(1, -1, 8), old, new, "corner-bilinear")
    np.testing.assert_allclose(single.reshape(*new, 8).numpy(), zoomed, rtol=0, atol=1e-5)


def bicubic_with_offset(new: int, old: int) -> np.ndarray:
    """[new, old]: torch's kernel (a = -0.75) at the centres of cells a tenth of one short, as DINOv2's code asks for them."""
    weights = np.zeros((new, old))
    for row in range(new):
        centre = (row + 0.5) * old / (new + 0.1) - 0.5
        for cell in range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3):
            t, a = abs(centre - cell), -0.75
            near, far = (a + 2) * t**3 - (a + 3) * t**2 + 1, a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
            weights[row, min(max(cell, 0), old - 1)] += near if t <= 1 else far
    return weights


@pytest.mark.parametrize(("old", "new"), [*GRIDS, ((37, 37), (16, 16)), ((37, 37), (37, 16))])
def test_bicubic_offset_is_the_rule_of_dinov2(old: tuple[int, int], new: tuple[int, int]) -> None:
    """Its `interpolate_pos_encoding` asks for a scale of (new + 0.1) / old, which moves every cell a little."""
    grid = np.random.default_rng(0).normal(size=(*old, 8))
    down, across = (bicubic_with_offset(*sides) for sides in zip(new, old, strict=True))
    ours = ops.resize_grid(torch.from_numpy(grid).reshape(1, -1, 8), old, new, "bicubic-offset")
    expected = np.einsum("ym,mnd,xn->yxd", down, grid, across)
    np.testing.assert_allclose(ours.reshape(*new, 8).numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", get_args(GridResize))
def test_resize_to_the_same_grid_changes_nothing(how: GridResize) -> None:
    pos = torch.randn(1, 12, 4)
    assert ops.resize_grid(pos, (3, 4), (3, 4), how) is pos


def test_the_resize_rules_differ_by_as_much_as_the_embedding() -> None:
    pos = torch.randn(1, 196, 8, generator=torch.Generator().manual_seed(0))
    results = [ops.resize_grid(pos, (14, 14), (10, 10), rule) for rule in get_args(GridResize)]
    for i, a in enumerate(results):
        for b in results[i + 1 :]:
            assert (a - b).abs().max() > 0.1


def test_resize_keeps_the_dtype_and_refuses_a_wrong_grid() -> None:
    assert ops.resize_grid(torch.randn(1, 4, 8).bfloat16(), (2, 2), (3, 3), "bicubic").dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"4 positions .*3x3 grid"):
        ops.resize_grid(torch.randn(1, 4, 8), (3, 3), (2, 2), "bilinear")


def test_sincos2d_by_hand() -> None:
    rows, cols, width = 3, 5, 16
    omega = 1 / 10_000 ** (np.arange(4) / 3)
    y, x = np.mgrid[:rows, :cols]
    y, x = y.flatten()[:, None] * omega, x.flatten()[:, None] * omega
    expected = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    np.testing.assert_allclose(ops.sincos2d((rows, cols), width, torch.device("cpu"))[0].numpy(), expected, atol=1e-5)


def test_relative_logits_by_a_plain_loop() -> None:
    q, table = torch.randn(2, 3, 5, 4), torch.randn(9, 4)
    found = ops.relative_logits(q, table)
    for i in range(5):
        for j in range(5):
            torch.testing.assert_close(found[:, :, i, j], q[:, :, i] @ table[i - j + 4] / 2)


@pytest.mark.parametrize("axis", [0, 1])
def test_axial_folding_is_undone(axis: int) -> None:
    x = torch.randn(2, 12, 4)
    folded = ops.fold_axis(x, (3, 4), axis)
    assert folded.shape == ((2 * 3, 4, 4) if axis == 0 else (2 * 4, 3, 4))
    assert torch.equal(ops.unfold_axis(folded, (3, 4), axis), x)
    second = folded[1]  # row 1 or column 1 of the first image
    assert torch.equal(second, x[0].reshape(3, 4, 4)[1] if axis == 0 else x[0].reshape(3, 4, 4)[:, 1])


@pytest.mark.parametrize("rule", ["std-eps", "var-eps"])
def test_standardised_filters_have_mean_zero_and_deviation_one(rule: str) -> None:
    weight = 3 + 2 * torch.randn(16, 8, 3, 3)
    out = ops.STANDARDISATIONS[rule](weight, 1e-10)  # type: ignore[index]
    torch.testing.assert_close(out.mean(dim=(1, 2, 3)), torch.zeros(16), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.std(dim=(1, 2, 3), correction=0), torch.ones(16), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["std-eps", "var-eps"])
def test_standardisation_by_numpy(rule: str) -> None:
    """The official hybrids divide by std + eps, BiT by sqrt(var + eps); an eps this large tells them apart."""
    weight = np.random.default_rng(0).normal(size=(4, 2, 3, 3))
    for filter_in, filter_out in zip(weight, ops.STANDARDISATIONS[rule](torch.from_numpy(weight), 0.1), strict=True):  # type: ignore[index]
        scale = filter_in.std() + 0.1 if rule == "std-eps" else np.sqrt(filter_in.var() + 0.1)
        np.testing.assert_allclose(filter_out.numpy(), (filter_in - filter_in.mean()) / scale, atol=1e-12)


def test_the_two_standardisations_differ_where_eps_matters() -> None:
    weight = 1e-3 * torch.randn(4, 2, 3, 3)
    a, b = (ops.STANDARDISATIONS[rule](weight, 1e-5) for rule in ("std-eps", "var-eps"))
    assert (a - b).abs().max() > 0.1


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "before_after"),
    [(224, 7, 2, (2, 3)), (112, 3, 2, (0, 1)), (7, 3, 1, (1, 1)), (15, 3, 2, (1, 1)), (4, 1, 2, (0, 0))],
)
def test_same_padding_puts_the_odd_pixel_last(
    size: int, kernel: int, stride: int, before_after: tuple[int, int]
) -> None:
    padded = ops.pad_same(torch.ones(1, 1, size, size), kernel, stride)
    before, after = before_after
    assert torch.equal(padded, F.pad(torch.ones(1, 1, size, size), (before, after, before, after)))
    assert F.conv2d(padded, torch.ones(1, 1, kernel, kernel), stride=stride).shape[-1] == -(-size // stride)


def test_parameter_free_attention_of_the_notes_is_a_special_case() -> None:
    """w'_ij = x_i·x_j, softmax over j, y_i = Σ w_ij x_j: attention with identity projections and no scale."""
    x = torch.randn(6, 4)
    weights = (x @ x.T).softmax(dim=1)
    scaled_query = x * 4**0.5  # takes out the 1/√Dh
    found = ops.attend(scaled_query[None, None], x[None, None], x[None, None])[0, 0]
    torch.testing.assert_close(found, weights @ x, rtol=1e-5, atol=1e-5)
