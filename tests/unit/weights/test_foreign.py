"""Anybody's weights in and out through real files: bit-exact, reported in words, and refused in words."""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_cases import slow_after

import vitlab
from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.data import decode
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import build
from vitlab.models.efficientnet_spec import EfficientNetSpec
from vitlab.models.spec import BiTSpec, ModelSpec, ViTSpec, bit_trunk, changed
from vitlab.weights import conventions
from vitlab.weights.bundle import Bundle, save_bundle
from vitlab.weights.containers import npz_chunks, read_arrays, safetensors_chunks
from vitlab.weights.formats.table import assumed_preprocess

# Heads are not stored in any file but Google's; a width of 64·heads is what the others' readers assume.
TINY = ViTSpec(width=128, depth=2, mlp_dim=96, heads=2, patch=4, image_size=(16, 16), num_classes=3, gelu="exact")
BIT = BiTSpec(trunk=bit_trunk((1, 1), 1), num_classes=3)
EFF = EfficientNetSpec(
    stem_width=8,
    widths=(8, 8, 16, 16, 16, 24, 24),
    depths=(1, 2, 1, 1, 1, 1, 1),
    last_width=32,
    image_size=(32, 32),
    num_classes=3,
)


def bundle_of(spec: ModelSpec, folder: Path) -> Path:
    model = build(spec, seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for buffer in model.buffers():  # running statistics, other than those that a model starts with
            buffer += torch.ones_like(buffer)
    rule = Preprocess(image_size=spec.image_size)
    save_bundle(folder, Bundle(model, rule, ("ant", "bee", "cat")[: spec.num_classes], "card", {}))
    return folder


def same_weights(a: Path, b: Path) -> bool:
    first, second = (vitlab.load(path, quiet=True).model.state_dict() for path in (a, b))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def spelled(to: str, changes: dict[str, Any], *marks: Any) -> Any:
    return pytest.param(to, changed(TINY, changes), id=f"{to} {changes or ''}", marks=marks)


SLOW = pytest.mark.slow
WAYS = [
    spelled("google-npz", {}),
    spelled("google-npz", {"head": "mlp-tanh"}, SLOW),
    spelled("google-npz", {"stem": {"stages": [1, 1]}, "patch": 1, "image_size": [32, 32]}, SLOW),
    spelled("big-vision", {"cls_in_pos": False}),
    spelled("big-vision", {"pool": "map", "cls_in_pos": False}, SLOW),
    spelled("timm", {}),
    spelled("hf", {"pos_resize": "bicubic"}),
    spelled("torchvision", {}),
    pytest.param("google-npz", BIT, id="google-npz BiT", marks=SLOW),
    pytest.param("timm", BIT, id="timm BiT"),
    pytest.param("timm", EFF, id="timm EfficientNet", marks=SLOW),
    pytest.param("torchvision", EFF, id="torchvision EfficientNet", marks=SLOW),
]


@pytest.mark.parametrize(("to", "spec"), WAYS)
def test_out_and_in_again_is_bit_exact(tmp_path: Path, to: Any, spec: ModelSpec) -> None:
    start = bundle_of(spec, tmp_path / "start")
    suffix = (
        ".npz"
        if to in ("google-npz", "big-vision")
        else ".safetensors"
        if spec in (BIT, EFF) or to == "torchvision"
        else ""
    )
    there = tmp_path / f"there{suffix}"
    report = vitlab.convert(start, there, to=to)
    assert report.missing == report.unexpected == ()
    assert same_weights(start, there)
    # And once more through a bundle, which remembers the dialect: the very same arrays come out.
    vitlab.convert(there, tmp_path / "bundle")
    again = tmp_path / f"again{suffix}"
    vitlab.convert(tmp_path / "bundle", again, to=to)
    files = [path / "model.safetensors" if path.is_dir() else path for path in (there, again)]
    first, second = (read_arrays(path) for path in files)
    assert list(first.arrays) == list(second.arrays)
    assert all(torch.equal(first.arrays[name], second.arrays[name]) for name in first.arrays)


def test_a_chain_through_every_format_ends_where_it_began(tmp_path: Path) -> None:
    here = bundle_of(TINY, tmp_path / "start")
    for name, to in (
        ("1.npz", "google-npz"),
        ("2.safetensors", "timm"),
        ("3", "hf"),
        ("4.safetensors", "torchvision"),
        ("5", "timm"),
        ("6.npz", "google-npz"),
        ("7", "vitlab"),
    ):
        vitlab.convert(here, tmp_path / name, to=to)  # type: ignore[arg-type]
        here = tmp_path / name
    assert same_weights(tmp_path / "start", here)


def test_labels_and_preprocessing_travel_with_a_transformers_folder(tmp_path: Path) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "hf", to="hf")
    found = vitlab.load(tmp_path / "hf", quiet=True)
    assert found.labels == ("ant", "bee", "cat")
    assert found.preprocess.mean == (0.5, 0.5, 0.5)


def test_what_is_assumed_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "x.npz", to="google-npz")
    vitlab.load(tmp_path / "x.npz")
    captured = capsys.readouterr()
    assert "google-npz convention is assumed" in captured.err and captured.out == ""
    vitlab.load(tmp_path / "x.npz", quiet=True)
    assert capsys.readouterr().err == ""


def test_all_zero_head_is_recognised_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(TINY, seed=0)
    save_bundle(tmp_path / "b", Bundle(model, Preprocess(image_size=(16, 16)), ("a", "b", "c"), "card", {}))
    report = vitlab.convert(tmp_path / "b", tmp_path / "x.npz", to="google-npz")
    assert any("all zeros" in note for note in report.notes)
    for path in (tmp_path / "b", tmp_path / "x.npz"):
        capsys.readouterr()
        vitlab.load(path)
        assert capsys.readouterr().err.count("The head is all zeros") == 1
    assert not any("all zeros" in note for note in vitlab.convert(tmp_path / "b", tmp_path / "c", classes=2).notes)


def test_a_leftover_must_be_named(tmp_path: Path) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "x.npz", to="google-npz")
    arrays = {**read_arrays(tmp_path / "x.npz").arrays, "step": torch.zeros(1)}
    (tmp_path / "y.npz").write_bytes(b"".join(npz_chunks(arrays)))
    with pytest.raises(FileProblem, match="has no use for step"):
        vitlab.convert(tmp_path / "y.npz", tmp_path / "out")
    report = vitlab.convert(tmp_path / "y.npz", tmp_path / "out", drop=["step"])
    assert report.unexpected == ("step",)
    assert same_weights(tmp_path / "start", tmp_path / "out")


def test_a_part_that_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    start = bundle_of(changed(TINY, {"head": "mlp-tanh"}), tmp_path / "start")
    with pytest.raises(UsageError, match="pre_logits"):
        vitlab.convert(start, tmp_path / "out", to="timm")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_targets_are_a_closed_set(tmp_path: Path) -> None:
    start = bundle_of(TINY, tmp_path / "start")
    with pytest.raises(UsageError, match="exists already"):
        vitlab.convert(start, start)
    with pytest.raises(UnknownName, match="google-npz"):
        vitlab.convert(start, tmp_path / "x", to="npz")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", slow_after(2, ["[" * 100_000, '{"hidden_act": []}', "[]", "3", "{"]))
def test_hostile_settings_beside_weights_are_a_sentence(tmp_path: Path, text: str) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "hf", to="hf")
    (tmp_path / "hf" / "config.json").write_text(text)
    with pytest.raises(vitlab.VitlabError):
        vitlab.load(tmp_path / "hf", quiet=True)


@pytest.mark.parametrize(
    ("to", "name", "keys"),
    slow_after(
        3,
        [
            ("hf", "config.json", ("image_size",)),
            ("hf", "preprocessor_config.json", ("image_mean",)),
            ("timm", "config.json", ("pretrained_cfg", "crop_pct")),
            ("hf", "config.json", ("model_type",)),
            ("hf", "config.json", ("layer_norm_eps",)),
            ("hf", "preprocessor_config.json", ("size", "height")),
            ("timm", "config.json", ("pretrained_cfg",)),
            ("timm", "config.json", ("pretrained_cfg", "input_size")),
        ],
    ),
)
def test_hostile_value_in_settings_is_an_error_of_ours(
    tmp_path: Path, to: Any, name: str, keys: tuple[str, ...]
) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "x", to=to)
    table = json.loads((tmp_path / "x" / name).read_text())
    around = functools.reduce(lambda inner, key: inner[key], keys[:-1], table)
    for value in (10**400, -(10**400), [["vit"]], float("nan"), *([1e-320] if keys[-1] == "crop_pct" else [])):
        around[keys[-1]] = value
        (tmp_path / "x" / name).write_text(json.dumps(table))
        with pytest.raises(vitlab.VitlabError):
            vitlab.load(tmp_path / "x", quiet=True, device="cpu")


def test_arrays_of_an_unknown_layout_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"".join(npz_chunks({"a": torch.zeros(2), "b": torch.zeros(3)})))
    with pytest.raises(FileProblem, match="no known layout: a, b"):
        vitlab.load(tmp_path / "x.npz")


def test_truncated_safetensors_is_cut_short(tmp_path: Path) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "x.safetensors", to="timm")
    data = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "y.safetensors").write_bytes(data[:-5])
    with pytest.raises(FileProblem, match="is cut short"):
        vitlab.load(tmp_path / "y.safetensors")


# --- settings beside the arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "key", "value"),
    [
        *(("hf", key, 3) for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "patch_size")),
        *(("timm", key, 3) for key in ("depth", "embed_dim", "patch_size")),
    ],
)
def test_settings_that_the_arrays_contradict_are_refused(tmp_path: Path, to: Any, key: str, value: int) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "x", to=to)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    (config if to == "hf" else config["model_args"])[key] = value
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileProblem, match=f"settings say {key}=3, .*arrays"):
        vitlab.load(tmp_path / "x")


def test_heads_of_a_timm_folder_are_those_of_its_architecture(tmp_path: Path) -> None:
    """What is as in vit_base_patch16_224 is not written into its arguments."""
    spec = changed(TINY, {"width": 96, "heads": 12, "pos_resize": "bicubic-antialias"})
    vitlab.convert(bundle_of(spec, tmp_path / "start"), tmp_path / "x", to="timm")
    assert vitlab.load(tmp_path / "x").model.spec == spec
    with pytest.raises(UsageError, match="states that heads is 12, not 6"):
        vitlab.load(tmp_path / "x", heads=6)


def test_size_that_is_changed_on_loading_resets_what_was_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = vitlab.load(bundle_of(TINY, tmp_path / "start")).bundle
    save_bundle(tmp_path / "fitted", dataclasses.replace(made, temperature=0.5))
    assert vitlab.load(tmp_path / "fitted", image_size=32).bundle.temperature == 1.0
    assert "temperature and thresholds reset" in capsys.readouterr().err


def test_folder_of_timm_with_metas_names_is_timms(tmp_path: Path) -> None:
    """DINOv2 without registers has the same names in both; positions for one size, images of another."""
    spec = changed(SCALED, {"pos_resize": "bicubic-antialias"})
    made = vitlab.load(bundle_of(spec, tmp_path / "start")).bundle
    rule = Preprocess(image_size=(8, 8), mean=(0.1, 0.2, 0.3))
    save_bundle(tmp_path / "small", dataclasses.replace(made, preprocess=rule))
    vitlab.convert(tmp_path / "small", tmp_path / "x", to="timm")
    arguments = json.loads((tmp_path / "x" / "config.json").read_text())["model_args"]
    assert (arguments["img_size"], arguments["dynamic_img_size"]) == (16, True)
    found = vitlab.load(tmp_path / "x")
    assert (found.model.spec, found.preprocess) == (spec, rule)
    vitlab.convert(tmp_path / "start", tmp_path / "y", to="timm")
    assert "dynamic_img_size" not in json.loads((tmp_path / "y" / "config.json").read_text())["model_args"]


def test_missing_last_block_is_not_a_shallower_model(tmp_path: Path) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "x", to="hf")
    weights = tmp_path / "x" / "model.safetensors"
    kept = {name: array for name, array in read_arrays(weights).arrays.items() if ".layer.1." not in name}
    weights.write_bytes(b"".join(safetensors_chunks(kept)))
    with pytest.raises(FileProblem, match="say num_hidden_layers=2, but its arrays hold 1"):
        vitlab.load(tmp_path / "x")


def test_preprocessing_that_cannot_be_read_names_its_file_and_the_way_out(tmp_path: Path) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "hf", to="hf")
    (tmp_path / "hf" / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    vitlab.convert(tmp_path / "start", tmp_path / "timm", to="timm")
    config = json.loads((tmp_path / "timm" / "config.json").read_text())
    config["pretrained_cfg"]["crop_mode"] = "border"
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config))
    for folder, file in (("hf", "preprocessor_config.json"), ("timm", "config.json")):
        with pytest.raises(FileProblem, match=rf"{folder}/{file}: .*\n.*--preprocess"):
            vitlab.load(tmp_path / folder)
        assert vitlab.load(tmp_path / folder, preprocess="minus-one-to-one", quiet=True).preprocess.mean[0] == 0.5


# --- conventions ------------------------------------------------------------------------------------------------------

SCALED = changed(TINY, {"layer_scale": 1.0, "num_classes": 0})
HALF, IMAGENET = "mean 0.5, std 0.5", "mean 0.485 0.456 0.406, std 0.229 0.224 0.225"


@pytest.mark.parametrize(
    ("name", "spec", "reported"),
    [
        ("google-npz", TINY, f"squashed to 16x16, bilinear without antialiasing, {HALF}"),
        ("bit-npz", BIT, f"squashed to 224x224, bilinear without antialiasing, {HALF}"),
        ("big-vision", TINY, f"scaled to cover 18x18, centre of 16x16, area, {HALF}"),
        (
            "timm",
            changed(TINY, {"image_size": [224, 224]}),
            f"scaled to cover 248x248, centre of 224x224, bicubic, {HALF}",
        ),
        ("timm", BIT, f"scaled to cover 256x256, centre of 224x224, bicubic, {HALF}"),
        ("hf", TINY, f"squashed to 16x16, bilinear, {HALF}"),
        ("hf", SCALED, f"scaled to cover 256x256, centre of 224x224, bicubic, {IMAGENET}"),
        ("dinov2", SCALED, f"scaled to cover 256x256, centre of 224x224, bicubic, {IMAGENET}"),
        ("torchvision", TINY, f"scaled to cover 18x18, centre of 16x16, bilinear, {IMAGENET}"),
        (
            "hf",
            BIT,
            "scaled to cover 224x224, centre of 224x224, bicubic, mean 0.4815 0.4578 0.4082, std 0.2686 0.2613 0.2758",
        ),
    ],
    ids=str,
)
def test_each_format_has_its_own_convention_stated_in_full(name: str, spec: ModelSpec, reported: str) -> None:
    assert conventions.describe(assumed_preprocess(name, spec)) == reported


def area_weights(old: int, new: int) -> np.ndarray:
    """[new, old]: TensorFlow's `ResizeArea` along one side; what a new pixel covers of each old one, over what it covers."""
    found = np.zeros((new, old))
    for i in range(new):
        first, last = i * old / new, (i + 1) * old / new
        for j in range(int(first), min(old, int(np.ceil(last)))):
            found[i, j] = (min(j + 1, last) - max(j, first)) / (old / new)
    return found


def big_vision_by_hand(image_YXC: np.ndarray) -> np.ndarray:
    """`resize_small(256)|central_crop(224)` of its configs: area, cut to whole levels."""
    factor = 256 / min(image_YXC.shape[:2])
    down, across = (area_weights(side, round(side * factor)) for side in image_YXC.shape[:2])
    scaled = np.floor(np.einsum("yj,jkc,xk->yxc", down, image_YXC, across, optimize=True) + 1e-6)
    top, left = (scaled.shape[0] - 224) // 2, (scaled.shape[1] - 224) // 2
    return scaled[top : top + 224, left : left + 224]


@pytest.mark.parametrize("shape", [(375, 500, 3), (500, 333, 3), (96, 130, 3)], ids=str)
def test_big_vision_files_see_the_pixels_of_its_own_preprocessing(shape: tuple[int, ...]) -> None:
    image_YXC = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    rule = assumed_preprocess("big-vision", changed(TINY, {"image_size": [224, 224]}))
    ours = decode.read(image_YXC, rule).permute(1, 2, 0).numpy().astype(float)
    assert np.abs(ours - big_vision_by_hand(image_YXC)).max() <= 1, "they cut to whole levels, vitlab rounds"


# --- precision --------------------------------------------------------------------------------------------------------


def arrays_of(path: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    arrays = read_arrays(path).arrays
    return {name: (x.dtype, x.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, x in arrays.items()}


@pytest.mark.parametrize(
    ("to", "dtype"),
    [
        ("google-npz", torch.bfloat16),
        ("timm", torch.float16),
        *slow_after(
            0,
            [
                ("google-npz", torch.float16),
                ("google-npz", torch.float64),
                ("timm", torch.float8_e4m3fn),
                ("torchvision", torch.bfloat16),
            ],
        ),
    ],
    ids=str,
)
def test_stored_precision_survives_a_bundle_and_float32_computes(tmp_path: Path, to: Any, dtype: torch.dtype) -> None:
    write = npz_chunks if to == "google-npz" else safetensors_chunks
    suffix = ".npz" if to == "google-npz" else ".safetensors"
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / f"whole{suffix}", to=to)
    arrays = {name: array.to(dtype) for name, array in read_arrays(tmp_path / f"whole{suffix}").arrays.items()}
    (tmp_path / "there.bin").write_bytes(b"".join(write(arrays)))
    vitlab.convert(tmp_path / "there.bin", tmp_path / "bundle")
    vitlab.convert(tmp_path / "bundle", tmp_path / f"back{suffix}", to=to)
    assert {kept for kept, _ in arrays_of(tmp_path / "bundle" / "model.safetensors").values()} == {dtype}
    assert arrays_of(tmp_path / f"back{suffix}") == arrays_of(tmp_path / "there.bin")
    clf = vitlab.load(tmp_path / "there.bin", quiet=True)
    assert {parameter.dtype for parameter in clf.model.parameters()} == {torch.float32}
    assert clf.logits([torch.zeros(16, 16, 3, dtype=torch.uint8).numpy()]).dtype == torch.float32
    clf.save(tmp_path / "saved")
    assert {kept for kept, _ in arrays_of(tmp_path / "saved" / "model.safetensors").values()} == {dtype}


def test_mixed_precision_survives_where_arrays_stay_apart_and_no_value_changes_where_they_join(tmp_path: Path) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "whole.npz", to="google-npz")
    kinds = {"Dense_0/kernel": torch.float16, "Dense_1/kernel": torch.bfloat16, "query/kernel": torch.float16}
    arrays = read_arrays(tmp_path / "whole.npz").arrays
    arrays = {name: array.to(kinds.get("/".join(name.split("/")[-2:]))) for name, array in arrays.items()}
    (tmp_path / "there.npz").write_bytes(b"".join(npz_chunks(arrays)))
    vitlab.convert(tmp_path / "there.npz", tmp_path / "bundle")
    vitlab.convert(tmp_path / "bundle", tmp_path / "back.npz", to="google-npz")
    before, after = (read_arrays(tmp_path / f"{name}.npz").arrays for name in ("there", "back"))
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before)
    widened = {name.split("/")[-2] for name in before if before[name].dtype != after[name].dtype}
    assert widened == {"query"}, "the key and the value beside it were float32"


def test_weights_that_are_not_floats_are_refused(tmp_path: Path) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "x.safetensors", to="timm")
    arrays = read_arrays(tmp_path / "x.safetensors").arrays
    arrays["head.bias"] = torch.arange(3)
    (tmp_path / "y").write_bytes(b"".join(safetensors_chunks(arrays)))
    with pytest.raises(FileProblem, match=r"has non-float weights: head\.bias"):
        vitlab.load(tmp_path / "y", quiet=True)


# --- real files -------------------------------------------------------------------------------------------------------


def real_dinov2() -> Path:
    folder = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared" / "data"))
    return folder / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors"


@pytest.mark.skipif(not real_dinov2().is_file(), reason="needs the DINOv2 weights in VITLAB_DATA")
@pytest.mark.slow
def test_real_dinov2_weights_load_in_one_call(tmp_path: Path) -> None:
    clf = vitlab.load(real_dinov2(), quiet=True)
    spec = clf.model.spec
    assert isinstance(spec, ViTSpec)
    assert (spec.width, spec.depth, spec.heads, spec.patch, spec.grid) == (384, 12, 6, 14, (37, 37))
    assert spec.layer_scale is not None and spec.num_classes == 0 and spec.pos_resize == "bicubic-offset"
    assert clf.preprocess.image_size == (224, 224)
    vector = clf.embed([torch.randint(0, 256, (60, 80, 3), dtype=torch.uint8).numpy()])
    assert vector.shape == (1, 384) and torch.isfinite(vector).all()
    report = vitlab.convert(real_dinov2(), tmp_path / "bundle")
    assert json.loads((tmp_path / "bundle" / "config.json").read_text())["origin"]["format"] == "dinov2"
    assert report.matched == 174 and not any("offset" in note for note in report.notes)
