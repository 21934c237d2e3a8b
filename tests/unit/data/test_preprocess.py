"""From pixels to the numbers a model wants, checked against values worked out by hand and against Pillow."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.preprocess import (
    Box,
    Preprocess,
    as_array,
    as_tensor,
    normalise,
    resize,
    scale,
    scale_part,
    scaled_size,
)


def grey(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.uint8)[None, None]


def rule(size: tuple[int, int], *, how: str = "squash", crop: float = 1.0, antialias: bool = True) -> Preprocess:
    return Preprocess(
        mode="L",
        image_size=size,
        resize=how,  # type: ignore[arg-type]
        crop_frac=crop,
        antialias=antialias,
        mean=(0.5,),
        std=(0.5,),
    )


COLUMNS = grey([[0, 10, 20, 30, 40, 50, 60, 70]] * 4)
ROWS = COLUMNS.transpose(2, 3).contiguous()
SQUARE = grey([[10 * row + col for col in range(4)] for row in range(4)])


def test_squash_halves_with_the_antialiased_triangle() -> None:
    # Half size: each output looks at three pixels with weights 3:3:1, so 255 leaks in with 1/7.
    assert resize(rule((1, 2)), grey([[0, 0, 255, 255]])).flatten().tolist() == [36, 219]


def test_squash_without_antialias_takes_the_two_nearest() -> None:
    assert resize(rule((1, 2), antialias=False), grey([[0, 100, 200, 250]])).flatten().tolist() == [50, 225]


@pytest.mark.parametrize(
    ("image", "size", "crop", "expected"),
    [
        (COLUMNS, (4, 4), 1.0, COLUMNS[..., 2:6]),
        (ROWS, (4, 4), 1.0, ROWS[:, :, 2:6]),
        (SQUARE, (2, 2), 0.5, SQUARE[:, :, 1:3, 1:3]),
        (SQUARE, (2, 4), 1.0, SQUARE[:, :, 1:3]),
        (COLUMNS, (2, 2), 0.5, COLUMNS[:, :, 1:3, 3:5]),
    ],
    ids=["landscape", "portrait", "inner half", "wide target", "landscape, inner half"],
)
def test_shorter_side_then_centre_crop(
    image: torch.Tensor, size: tuple[int, int], crop: float, expected: torch.Tensor
) -> None:
    assert torch.equal(resize(rule(size, how="shorter-side", crop=crop), image), expected)


@pytest.mark.parametrize(
    ("height", "width", "scaled"), [(100, 115, 126), (100, 125, 138), (3456, 5184, 374), (100, 116, 128)]
)
def test_longer_side_is_rounded_exactly_a_half_to_the_even_number(height: int, width: int, scaled: int) -> None:
    size = (110, 110) if height == 100 else (249, 249)
    assert scaled_size(rule(size, how="shorter-side"), height, width) == (size[0], scaled)
    assert scaled_size(rule(size, how="shorter-side"), width, height) == (scaled, size[0])


@pytest.mark.parametrize("how", ["squash", "shorter-side"])
def test_image_of_the_right_size_is_left_alone(how: str) -> None:
    image = torch.randint(0, 256, (2, 1, 5, 7), dtype=torch.uint8)
    assert torch.equal(resize(rule((5, 7), how=how), image), image)


@pytest.mark.parametrize(("name", "method"), [("bilinear", Image.BILINEAR), ("bicubic", Image.BICUBIC)])
@pytest.mark.parametrize("size", [(16, 24), (50, 70)], ids=["shrink", "enlarge"])
def test_resize_agrees_with_pillow_to_one_grey_level(name: str, method: int, size: tuple[int, int]) -> None:
    # Mid-grey noise: Pillow clips between its two passes, which is not what is compared here.
    noise = np.random.default_rng(0).integers(90, 166, (40, 60), dtype=np.uint8)
    ours = resize(
        Preprocess(mode="L", image_size=size, filter=name, mean=(0.5,), std=(0.5,)),  # type: ignore[arg-type]
        torch.from_numpy(noise)[None, None],
    )
    pillow = np.asarray(Image.fromarray(noise).resize((size[1], size[0]), method))
    assert int((ours[0, 0].int() - torch.from_numpy(pillow.astype(np.int32))).abs().max()) <= 1


@pytest.mark.parametrize("size", [(1, 1), (7, 3), (224, 224)])
@pytest.mark.parametrize("how", ["squash", "shorter-side"])
@pytest.mark.parametrize("crop", [1.0, 0.875, 0.3])
def test_any_image_becomes_exactly_the_wanted_size(size: tuple[int, int], how: str, crop: float) -> None:
    for shape in [(1, 1), (3, 50), (50, 3), (31, 31)]:
        image = torch.full((1, 1, *shape), 77, dtype=torch.uint8)
        out = resize(rule(size, how=how, crop=crop), image)
        assert out.shape == (1, 1, *size)
        assert out.dtype == torch.uint8
        assert bool((out == 77).all()), "a flat image stays flat"


def test_strip_that_would_grow_beyond_the_pixel_limit_is_refused() -> None:
    with pytest.raises(VitlabError):
        resize(rule((64, 64), how="shorter-side"), torch.zeros(1, 1, 1, 12_000, dtype=torch.uint8))


def test_normalise_puts_black_at_minus_one_and_white_at_one() -> None:
    assert normalise(rule((1, 3)), grey([[0, 51, 255]])).flatten().tolist() == pytest.approx([-1, -0.6, 1])


@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (1, 1, 1, 3), (3, 4, 1, 3), (2, 6, 5, 1)])
def test_normalise_gives_the_same_bits_and_keeps_the_layout_where_channels_lie_together(shape: tuple[int, ...]) -> None:
    mean, std = (0.1, 0.5, 0.3)[: shape[3]], (0.2, 0.25, 0.7)[: shape[3]]
    colours = Preprocess(mode="RGB" if shape[3] == 3 else "L", mean=mean, std=std)
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    together_BCYX = torch.from_numpy(noise).permute(0, 3, 1, 2)
    out_BCYX = normalise(colours, together_BCYX)
    # The stride of a channel that is alone is free, and torch would choose the layout of a convolution by it: planar.
    planar = torch.empty(together_BCYX.shape).stride()
    assert out_BCYX.stride() == (planar if shape[3] == 1 else together_BCYX.stride())
    assert torch.equal(out_BCYX, normalise(colours, together_BCYX.contiguous()))
    assert np.array_equal(together_BCYX.permute(0, 2, 3, 1).numpy(), noise), "what is given stays"


def test_normalise_is_per_channel() -> None:
    spec = Preprocess(image_size=(1, 1), mean=(0.0, 0.5, 1.0), std=(1.0, 0.25, 0.5))
    white = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    assert normalise(spec, white).flatten().tolist() == pytest.approx([1, 2, 0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "L"},
        {"mean": (0.5,)},
        {"std": (0.5, 0.5)},
        {"image_size": (0, 8)},
        {"image_size": (8, -8)},
        {"crop_frac": 0.0},
        {"crop_frac": 1.1},
        {"crop_frac": float("nan")},
        {"std": (0.5, 0.0, 0.5)},
        {"std": (0.5, -1.0, 0.5)},
    ],
    ids=str,
)
def test_rule_that_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Preprocess(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"std": (0.5, float("nan"), 0.5)}, {"mean": (float("nan"), 0.5, 0.5)}, {"mean": (float("inf"),) * 3}]
)
def test_rule_with_numbers_that_are_not_finite_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Preprocess(**wrong)  # type: ignore[arg-type]


# --- the filters ------------------------------------------------------------------------------------------------------


def test_area_is_the_mean_of_what_a_pixel_covers() -> None:
    # Three pixels to two: each new one is a whole pixel and half of the middle one.
    assert scale(grey([[0, 90, 30]]), (1, 2), "area", True).flatten().tolist() == [30, 50]
    assert scale(grey([[0, 100], [200, 50]]), (1, 1), "area", False).flatten().tolist() == [88]


def test_area_agrees_with_a_sum_over_a_finer_grid() -> None:
    image = torch.randint(0, 256, (1, 3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    fine = image.double().repeat_interleave(7, dim=2).repeat_interleave(7, dim=3)  # 84 x 70 divides by 7 and by 10 x 12
    expected = torch.nn.functional.avg_pool2d(fine, (12, 10))
    assert torch.equal(scale(image, (7, 7), "area", True), expected.round().to(torch.uint8))


def test_bicubic_clips_between_its_directions_as_pillow_does() -> None:
    noise = np.random.default_rng(0).integers(0, 2, (30, 40), dtype=np.uint8) * 255
    ours = scale(torch.from_numpy(noise)[None, None], (64, 64), "bicubic", True)[0, 0]
    pillow = torch.from_numpy(np.asarray(Image.fromarray(noise).resize((64, 64), Image.BICUBIC)).astype(np.int32))
    assert int((ours.int() - pillow).abs().max()) <= 2


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_a_part_resized_has_the_channels_of_a_pixel_together_and_the_same_values(channels: int) -> None:
    """Together from the file to the batch: apart, the resize and the copy that follows take three times as long."""
    noise_YXC = np.random.default_rng(0).integers(0, 256, (30, 40, channels), dtype=np.uint8)
    noise_YXC.flags.writeable = False
    out_YXC = scale_part(noise_YXC, Box(2, 3, 20, 30), 1, (24, 25), "bilinear", True)
    assert out_YXC.flags.c_contiguous and out_YXC.shape == (24, 25, channels)
    apart_BCYX = torch.from_numpy(noise_YXC[2:22, 3:33].transpose(2, 0, 1).copy())[None]
    assert torch.equal(as_tensor(out_YXC), scale(apart_BCYX, (24, 25), "bilinear", True))


def test_any_array_becomes_a_tensor_and_its_memory_is_not_written_to() -> None:
    given_YXC = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    given_YXC.flags.writeable = False
    for array_YXC in (given_YXC, given_YXC[::-1], given_YXC.swapaxes(0, 1)):
        tensor_BCYX = as_tensor(array_YXC)
        assert np.array_equal(as_array(tensor_BCYX), array_YXC)
        tensor_BCYX.zero_()
    assert given_YXC.sum() == sum(range(24))


def test_memory_layout_changes_nothing() -> None:
    image = torch.randint(0, 256, (1, 3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    together = image.contiguous(memory_format=torch.channels_last)
    for how, antialias in itertools.product(("bilinear", "bicubic", "area"), (True, False)):
        expected = scale(image[:, :, 3:33, 4:44].contiguous(), (17, 60), how, antialias)  # type: ignore[arg-type]
        assert torch.equal(scale(image[:, :, 3:33, 4:44], (17, 60), how, antialias), expected)  # type: ignore[arg-type]
        assert torch.equal(scale(together[:, :, 3:33, 4:44], (17, 60), how, antialias), expected)  # type: ignore[arg-type]


# --- golden pixels ----------------------------------------------------------------------------------------------------

GOLDEN = Path(__file__).with_name("golden_pixels.json")


def golden_image() -> torch.Tensor:
    """Waves with a sharp corner, 19 x 23."""
    rows, cols = torch.meshgrid(torch.arange(19.0), torch.arange(23.0), indexing="ij")
    waves = 128 + 60 * (rows * 0.9).sin() + 60 * (cols * 0.7 + rows * 0.2).cos()
    waves[:5, :7] = 255
    return waves.round().clamp(0, 255).to(torch.uint8)[None, None]


def golden_rules() -> dict[str, Preprocess]:
    rules: dict[str, Preprocess] = {}
    for how, name, antialias in itertools.product(
        ("squash", "shorter-side"), ("bilinear", "bicubic", "area"), (True, False)
    ):
        for size, crop in (((6, 5), 0.8), ((14, 24), 1.0)):
            rules[f"{how} {name} {'antialias' if antialias else 'plain'} {size[0]}x{size[1]}"] = Preprocess(
                mode="L",
                image_size=size,
                resize=how,  # type: ignore[arg-type]
                crop_frac=crop,
                filter=name,  # type: ignore[arg-type]
                antialias=antialias,
                mean=(0.5,),
                std=(0.5,),
            )
    return rules


@pytest.mark.parametrize("name", golden_rules())
def test_pixels_stay_what_they_were(name: str) -> None:
    """Another processor may round a tie the other way: one grey level, and that seldom."""
    found = resize(golden_rules()[name], golden_image())[0, 0]
    expected = torch.tensor(json.loads(GOLDEN.read_text())[name])
    moved = (found.int() - expected).abs()
    assert int(moved.max()) <= 1
    assert float((moved > 0).float().mean()) <= 0.02


@pytest.mark.parametrize(
    ("size", "crop"),
    [((48_000, 48_000), 1), ((10**400, 1), 1), ((8, 8), 1e-9), ((8, 8), 1e-320), ((4_000, 5_000), 0.5)],
)
def test_more_pixels_than_an_image_may_have_are_never_asked_for(size: tuple[int, int], crop: float) -> None:
    with pytest.raises(UsageError, match="asks for too many pixels"):
        Preprocess(image_size=size, crop_frac=crop)
    assert Preprocess(image_size=(5_000, 5_000)).crop_frac == 1
