"""One decoder: training, evaluation and a loaded model see the same numbers, whatever way a file keeps its picture."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.data.augmentation.crops import CropRule
from vitlab.data.batches import Order
from vitlab.data.decode import decode
from vitlab.data.loader import BadImages, TrainInputs, eval_batches, train_batches
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.data.sources.folders import open_folder
from vitlab.engines.exported import hushed
from vitlab.exporting.graph import Graph, GraphRule, output_names, traced
from vitlab.exporting.onnx_file import onnx_run, to_onnx
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, save_bundle

PIXELS = np.random.default_rng(0).integers(0, 256, (22, 14, 4), dtype=np.uint8)
COLOUR = Image.fromarray(PIXELS[:, :, :3])
GREY = PIXELS[:, :, 0]
WHOLE = CropRule(how="squash", crop_frac=1.0)  # nothing cut off, so that training sees what evaluation does
RULE = Preprocess(image_size=(16, 16))

# Twelve ways to keep colours, each in a format that loses nothing.
MODES: dict[str, Callable[[], tuple[Image.Image, str]]] = {
    "1": lambda: (Image.fromarray(GREY > 127), "png"),
    "L": lambda: (Image.fromarray(GREY), "png"),
    "LA": lambda: (Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(PIXELS[:, :, 3])]), "png"),
    "P": lambda: (COLOUR.quantize(64), "png"),
    "RGB": lambda: (COLOUR, "png"),
    "RGBA": lambda: (Image.fromarray(PIXELS), "png"),
    "I;16": lambda: (Image.fromarray(GREY.astype(np.uint16) * 257), "png"),
    "I": lambda: (Image.fromarray(GREY.astype(np.int32) * 257), "tif"),
    "F": lambda: (Image.fromarray(GREY.astype(np.float32) / 255), "tif"),
    "CMYK": lambda: (COLOUR.convert("CMYK"), "tif"),
    "YCbCr": lambda: (COLOUR.convert("YCbCr"), "tif"),
    "LAB": lambda: (Image.merge("LAB", Image.fromarray(PIXELS[:, :, :3]).split()), "tif"),
}
# What a camera did to the picture that a tag says how to turn upright; 6 and 8 undo each other.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def store(root: Path, mode: str, orientation: int) -> None:
    picture, suffix = MODES[mode]()
    turn = STORED[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    folder = root / mode.replace(";", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (picture if turn is None else picture.transpose(turn)).save(folder / f"{orientation}.{suffix}", exif=exif)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file under `data`, and a bundle."""
    root = tmp_path_factory.mktemp("modes")
    for mode in MODES:
        for orientation in STORED:
            store(root / "data", mode, orientation)
    model = create_model("ViT-mu/16", num_classes=2, image_size=16, seed=0)
    save_bundle(root / "bundle", Bundle(model, RULE, ("a", "b"), "card", {}))
    return root


@pytest.fixture(scope="module")
def seen(root: Path) -> dict[str, torch.Tensor]:
    """What the model sees of every file, [96, 3, 16, 16], on each of the three ways."""
    data, bad = open_folder(root / "data").parts["all"], BadImages(0)
    order = Order(len(data), len(data), 0)
    (train,) = train_batches(TrainInputs(data, RULE, WHOLE, order), range(1), bad=bad)
    (evaluated,) = eval_batches(data, RULE, batch_size=len(data), bad=bad)
    classifier = vitlab.load(root / "bundle", device="cpu")
    files = [root / "data" / key for key in data.keys]
    return {
        "training": normalise(RULE, train.images[train.ids.argsort()]),
        "evaluation": normalise(RULE, evaluated.images),
        "load": classifier._run(files, lambda x_BCYX: x_BCYX),
    }


def exported(bundle: Bundle, files: list[Path]) -> torch.Tensor:
    """The same through an ONNX graph with the preprocessing inside, which is given what was decoded."""
    rule = GraphRule(preprocess_inside=True)
    outputs = output_names(bundle.model, rule)
    with hushed():
        program = traced(Graph(bundle, rule), bundle, rule)
    run = onnx_run(to_onnx(program, outputs, rule, 20), outputs)
    images = [decode(path, RULE.mode, RULE.bits).permute(1, 2, 0)[None].contiguous() for path in files]
    return torch.cat([torch.from_numpy(run(image.numpy())["pixels"]) for image in images])


def test_training_evaluation_and_load_see_the_same_tensors(seen: dict[str, torch.Tensor]) -> None:
    assert seen["load"].shape == (96, 3, 16, 16)
    assert torch.equal(seen["training"], seen["load"])
    assert torch.equal(seen["evaluation"], seen["load"])


@pytest.mark.slow
def test_exported_graph_sees_them_to_one_grey_level(root: Path, seen: dict[str, torch.Tensor]) -> None:
    keys = open_folder(root / "data").parts["all"].keys
    found = exported(vitlab.load(root / "bundle", device="cpu").bundle, [root / "data" / key for key in keys])
    levels = (found - seen["load"]).abs() * 0.5 * 255
    assert found.shape == (96, 3, 16, 16) and levels.max() < 1.01
    assert (levels > 0.01).float().mean() < 0.01, "nearly all are the same"


def test_all_orientations_are_one_picture_and_the_modes_are_different_ones(seen: dict[str, torch.Tensor]) -> None:
    by_mode = seen["load"].unflatten(0, (12, 8))
    assert torch.equal(by_mode, by_mode[:, :1].expand_as(by_mode))
    assert len({picture.numpy().tobytes() for picture in by_mode[:, 0]}) >= 6, "grey ones are alike"
