"""A crop depends on its keys alone, keeps to its rule, and is what cutting and resizing by hand would give."""

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core.config import from_dict, to_dict
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.augmentation import crops
from vitlab.data.augmentation.crops import Box, CropRule, crop_and_resize, draw_box
from vitlab.data.decode import decode, opened, pixel_array, read
from vitlab.data.preprocess import Preprocess, as_tensor, scale

RULES = ("inception", "torchvision", "squash", "shorter-side")
SMALL = Preprocess(image_size=(24, 20))
NOISE = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
KEYS = {"seed": 1, "epoch": 2, "sample": 3}


def boxes(how: Any, height: int, width: int, count: int = 2000, **options: Any) -> np.ndarray[Any, Any]:
    rule = CropRule(how=how, **options)
    return np.array([draw_box(rule, height, width, crops._draws(0, 0, sample, 0)) for sample in range(count)])


def jpeg(image: np.ndarray[Any, Any] | Image.Image) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def test_numbers_are_uniform_and_different_for_every_key() -> None:
    keys = [(epoch, sample, copy) for epoch in (0, 1) for sample in range(500) for copy in (0, 1)]
    first = np.array([crops._draws(0, *key)() for key in keys])
    assert len(set(first.tolist())) == 2000
    assert abs(first.mean() - 0.5) < 0.02
    assert first.min() >= 0 and first.max() < 1


@pytest.mark.parametrize("how", RULES)
def test_crop_is_a_function_of_its_keys(how: Any) -> None:
    rule = CropRule(how=how)
    first = crop_and_resize(NOISE, SMALL, rule, **KEYS)
    assert first.shape == (3, 24, 20) and first.dtype == torch.uint8
    torch.rand(3)
    assert torch.equal(crop_and_resize(NOISE, SMALL, rule, **KEYS), first)
    for name in KEYS:
        assert not torch.equal(crop_and_resize(NOISE, SMALL, rule, **{**KEYS, name: 9}), first), name
    assert not torch.equal(crop_and_resize(NOISE, SMALL, rule, **KEYS, copy=1), first)


def tf_bilinear(image_YXC: np.ndarray[Any, Any], rows: int, cols: int) -> np.ndarray[Any, Any]:
    """`tf.image.resize` without antialias: between the two pixels that are nearest to each centre, the last repeated."""
    out = image_YXC.astype(float)
    for axis, new in enumerate((rows, cols)):
        old = out.shape[axis]
        centre = ((np.arange(new) + 0.5) * old / new - 0.5).clip(0, old - 1)
        low = np.floor(centre).astype(int)
        share = (centre - low).reshape(-1, *[1] * (2 - axis))
        out = (1 - share) * out.take(low, axis) + share * out.take(np.minimum(low + 1, old - 1), axis)
    return out


@pytest.mark.parametrize("size", [(24, 20), (80, 100)], ids=["shrink", "enlarge"])
def test_crop_has_its_own_way_to_resize(size: tuple[int, int]) -> None:
    """As big_vision trains: crops bilinear without antialias, while images are tested by area."""
    tested = Preprocess(image_size=size, resize="shorter-side", crop_frac=0.875, filter="area")
    rule = CropRule(filter="bilinear", antialias=False)
    top, left, rows, cols = draw_box(rule, 60, 90, crops._draws(1, 2, 3, 0))
    expected = tf_bilinear(NOISE[top : top + rows, left : left + cols], *size)
    ours = crop_and_resize(NOISE, tested, rule, **KEYS).permute(1, 2, 0).numpy()
    assert np.abs(ours - expected).max() <= 1
    assert torch.equal(
        crop_and_resize(NOISE, tested, CropRule(filter="area"), **KEYS),
        crop_and_resize(NOISE, tested, CropRule(), **KEYS),
    )


@pytest.mark.parametrize("how", ["inception", "torchvision"])
@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (64, 64)])
def test_boxes_keep_to_area_and_aspect_and_lie_inside(how: str, height: int, width: int) -> None:
    top, left, rows, cols = boxes(how, height, width, area=(0.1, 0.6)).T
    assert top.min() >= 0 and left.min() >= 0
    assert (top + rows).max() <= height and (left + cols).max() <= width
    share, aspect = rows * cols / (height * width), cols / rows
    slack = 1.5 / min(rows.min(), cols.min())
    assert 0.1 - slack <= share.min() < 0.13 and 0.57 < share.max() <= 0.6 + slack
    assert 0.75 - slack <= aspect.min() < 0.77 and 1.31 < aspect.max() <= 1.33 + slack
    assert abs((top / (height - rows).clip(1)).mean() - 0.5) < 0.05, "anywhere with equal chance"


def test_torchvision_draws_areas_evenly_and_inception_sides() -> None:
    even = boxes("torchvision", 400, 400, area=(0.04, 0.36))
    assert abs((even[:, 2] * even[:, 3] / 400**2).mean() - 0.2) < 0.005
    sides = boxes("inception", 400, 400, area=(0.04, 0.36))
    assert abs(np.sqrt(sides[:, 2] * sides[:, 3]).mean() / 400 - 0.4) < 0.005


def test_no_fitting_box_means_the_middle_or_the_whole() -> None:
    assert boxes("torchvision", 10, 1000, 1, area=(0.9, 1.0)).tolist() == [[0, 493, 10, 13]]
    assert boxes("torchvision", 1000, 10, 1, area=(0.9, 1.0)).tolist() == [[493, 0, 13, 10]]
    assert boxes("inception", 10, 1000, 1, area=(0.9, 1.0)).tolist() == [[0, 0, 10, 1000]]


@pytest.mark.parametrize("shape", [(1, 1), (1, 500), (500, 1), (3, 2)])
@pytest.mark.parametrize("how", RULES)
def test_tiny_and_thin_images_give_a_crop(how: Any, shape: tuple[int, int]) -> None:
    out = crop_and_resize(np.full((*shape, 3), 77, np.uint8), SMALL, CropRule(how=how), **KEYS)
    assert out.shape == (3, 24, 20)
    assert bool((out == 77).all())


@pytest.mark.parametrize("how", ["inception", "torchvision"])
def test_crop_is_the_box_cut_out_and_resized(how: Any) -> None:
    rule = CropRule(how=how)
    top, left, rows, cols = draw_box(rule, 60, 90, crops._draws(1, 2, 3, 0))
    cut = torch.from_numpy(NOISE).permute(2, 0, 1)[None, :, top : top + rows, left : left + cols]
    assert torch.equal(crop_and_resize(NOISE, SMALL, rule, **KEYS), scale(cut, (24, 20), "bilinear", True)[0])


@pytest.mark.parametrize("how", ["squash", "shorter-side"])
def test_resized_whole_holds_the_crop_somewhere(how: Any) -> None:
    rule = CropRule(how=how, crop_frac=0.5)
    out = crop_and_resize(NOISE, SMALL, rule, **KEYS)
    whole = scale(decode(NOISE, "RGB")[None], (48, 40) if how == "squash" else (48, 72), "bilinear", True)[0]
    places = whole.unfold(1, 24, 1).unfold(2, 20, 1)
    assert bool((places == out[:, None, None]).all(dim=(0, 3, 4)).any())


def test_rule_that_leaves_no_choice_is_the_evaluation() -> None:
    for how in ("squash", "shorter-side"):
        plain = Preprocess(image_size=(24, 24), resize=how)  # type: ignore[arg-type]
        square = NOISE[:, :60]
        crop = crop_and_resize(square, plain, CropRule(how=how, crop_frac=1.0), **KEYS)  # type: ignore[arg-type]
        assert torch.equal(crop, read(square, plain))


def test_large_jpeg_is_cropped_as_if_it_were_decoded_in_full() -> None:
    smooth = Image.fromarray(NOISE).resize((1080, 720), Image.BICUBIC)
    raw, rule, shrunk = jpeg(smooth), CropRule(area=(0.3, 1.0)), 0
    for sample in range(8):
        with opened(raw) as image:
            box = draw_box(rule, 720, 1080, crops._draws(1, 2, sample, 0))
            factor = crops.shrinkage(image, box[2:], (24, 20), SMALL)
            full = pixel_array(image, "RGB")
        shrunk += factor > 1
        exact = scale(as_tensor(crops._cut_out(full, box)), (24, 20), "bilinear", True)[0]
        ours = crop_and_resize(raw, SMALL, rule, seed=1, epoch=2, sample=sample)
        assert float((ours.float() - exact.float()).abs().mean()) < 1
    assert shrunk >= 4


def test_arrays_of_other_channels_are_cropped_too() -> None:
    five, plain = np.concatenate([NOISE, NOISE[..., :2]], axis=2), (0.5,) * 5
    rule = Preprocess(mode="array", image_size=(24, 20), mean=plain, std=plain)
    out = crop_and_resize(five, rule, CropRule(), **KEYS)
    assert torch.equal(out[:3], crop_and_resize(NOISE, SMALL, CropRule(), **KEYS))
    assert torch.equal(out[3:], out[:2])


@pytest.mark.parametrize("how", [*RULES, "whole"])
def test_the_array_of_a_crop_is_the_crop(how: Any) -> None:
    for size in ((24, 20), (60, 90)):
        rule = Preprocess(image_size=size)
        crop_YXC = crops.crop_array(jpeg(NOISE), rule, CropRule(how=how), **KEYS)
        assert np.array_equal(
            crop_YXC.transpose(2, 0, 1), crop_and_resize(jpeg(NOISE), rule, CropRule(how=how), **KEYS)
        )


def test_bad_file_is_the_decoders_error() -> None:
    with pytest.raises(FileProblem, match="not a readable image"):
        crop_and_resize(jpeg(NOISE)[:300], SMALL, CropRule(), **KEYS)


def test_rule_is_plain_data() -> None:
    rule = CropRule(how="torchvision", area=(0.08, 1.0))
    assert from_dict(CropRule, to_dict(rule)) == rule
    assert Box(1, 2, 3, 4)[2:] == (3, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"area": (0.0, 1.0)},
        {"area": (0.5, 0.2)},
        {"area": (0.5, 1.5)},
        {"aspect": (0.0, 1.0)},
        {"aspect": (2.0, 1.0)},
        {"aspect": (1.0, math.inf)},
        {"crop_frac": 0.0},
        {"crop_frac": math.nan},
    ],
    ids=str,
)
def test_rule_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CropRule(**wrong)
