"""Anybody's weights in and out through real files: bit-exact, told in words, and refused in words."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import vitlab
from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import build
from vitlab.models.spec import BiTSpec, ModelSpec, ViTSpec, bit_trunk, changed
from vitlab.weights.bundle import Bundle, save_bundle
from vitlab.weights.containers import npz_bytes, read_arrays
from vitlab.weights.foreign import read_foreign

# Heads are not stored in any file but Google's; a width of 64·heads is what the others' readers assume.
TINY = ViTSpec(width=128, depth=2, mlp_dim=96, heads=2, patch=4, image_size=(16, 16), num_classes=3, gelu="exact")
BIT = BiTSpec(trunk=bit_trunk((1, 1), 1), num_classes=3)


def bundle_of(spec: ModelSpec, folder: Path) -> Path:
    model = build(spec, seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    rule = Preprocess(image_size=spec.image_size)
    save_bundle(folder, Bundle(model, rule, ("ant", "bee", "cat")[: spec.num_classes], "card", {}))
    return folder


def same_weights(a: Path, b: Path) -> bool:
    first, second = (vitlab.load(path, quiet=True).model.state_dict() for path in (a, b))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def spelled(to: str, changes: dict[str, Any]) -> Any:
    return pytest.param(to, changed(TINY, changes), id=f"{to} {changes or ''}")


WAYS = [
    spelled("google-npz", {}),
    spelled("google-npz", {"head": "mlp-tanh"}),
    spelled("google-npz", {"stem": {"stages": [1, 1]}, "patch": 1, "image_size": [32, 32]}),
    spelled("big-vision", {"cls_in_pos": False}),
    spelled("big-vision", {"pool": "map", "cls_in_pos": False}),
    spelled("timm", {}),
    spelled("hf", {"pos_resize": "bicubic"}),
    spelled("torchvision", {}),
    pytest.param("google-npz", BIT, id="google-npz BiT"),
    pytest.param("timm", BIT, id="timm BiT"),
]


@pytest.mark.parametrize(("to", "spec"), WAYS)
def test_out_and_in_again_is_bit_exact(tmp_path: Path, to: Any, spec: ModelSpec) -> None:
    start = bundle_of(spec, tmp_path / "start")
    there = tmp_path / f"there{'.npz' if to in ('google-npz', 'big-vision') else ''}"
    report = vitlab.convert(start, there, to=to)
    assert report.missing == report.unexpected == ()
    assert same_weights(start, there)
    # And once more through a bundle, which remembers the dialect: the very same arrays come out.
    vitlab.convert(there, tmp_path / "bundle")
    again = tmp_path / "again"
    back: Any = to if to != "big-vision" else "google-npz"
    vitlab.convert(tmp_path / "bundle", again, to=back)
    files = [path / "model.safetensors" if path.is_dir() else path for path in (there, again)]
    first, second = (read_arrays(path) for path in files)
    assert list(first.arrays) == list(second.arrays)
    assert all(torch.equal(first.arrays[name], second.arrays[name]) for name in first.arrays)


def test_a_chain_through_every_format_ends_where_it_began(tmp_path: Path) -> None:
    here = bundle_of(TINY, tmp_path / "start")
    for i, to in enumerate(("google-npz", "timm", "hf", "torchvision", "google-npz", "vitlab")):
        vitlab.convert(here, tmp_path / str(i), to=to)  # type: ignore[arg-type]
        here = tmp_path / str(i)
    assert same_weights(tmp_path / "start", here)


def test_labels_and_preprocessing_travel_with_a_transformers_folder(tmp_path: Path) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "hf", to="hf")
    found = vitlab.load(tmp_path / "hf", quiet=True)
    assert found.labels == ("ant", "bee", "cat")
    assert found.preprocess.mean == (0.5, 0.5, 0.5)


def test_what_is_assumed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "x.npz", to="google-npz")
    vitlab.load(tmp_path / "x.npz")
    captured = capsys.readouterr()
    assert "google-npz convention is assumed" in captured.err and captured.out == ""
    vitlab.load(tmp_path / "x.npz", quiet=True)
    assert capsys.readouterr().err == ""


def test_an_all_zero_head_is_recognised_and_said(tmp_path: Path) -> None:
    model = build(TINY, seed=0)
    save_bundle(tmp_path / "b", Bundle(model, Preprocess(image_size=(16, 16)), ("a", "b", "c"), "card", {}))
    report = vitlab.convert(tmp_path / "b", tmp_path / "x.npz", to="google-npz")
    _, report = read_foreign(tmp_path / "x.npz")
    assert any("all zeros" in note for note in report.notes)


def test_a_leftover_must_be_named(tmp_path: Path) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "x.npz", to="google-npz")
    arrays = {**read_arrays(tmp_path / "x.npz").arrays, "step": torch.zeros(1)}
    (tmp_path / "y.npz").write_bytes(npz_bytes(arrays))
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


@pytest.mark.parametrize("text", ["[]", "3", "{", "[" * 100_000, '{"hidden_act": []}'])
def test_hostile_settings_beside_weights_are_a_sentence(tmp_path: Path, text: str) -> None:
    vitlab.convert(bundle_of(TINY, tmp_path / "start"), tmp_path / "hf", to="hf")
    (tmp_path / "hf" / "config.json").write_text(text)
    with pytest.raises(vitlab.VitlabError):
        vitlab.load(tmp_path / "hf", quiet=True)


def test_arrays_of_no_known_layout_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(npz_bytes({"a": torch.zeros(2), "b": torch.zeros(3)}))
    with pytest.raises(FileProblem, match="no known layout: a, b"):
        vitlab.load(tmp_path / "x.npz")


def real_dinov2() -> Path:
    folder = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared" / "data"))
    return folder / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors"


@pytest.mark.skipif(not real_dinov2().is_file(), reason="needs the DINOv2 weights in VITLAB_DATA")
def test_real_dinov2_weights_load_in_one_call(tmp_path: Path) -> None:
    clf = vitlab.load(real_dinov2(), quiet=True)
    spec = clf.model.spec
    assert isinstance(spec, ViTSpec)
    assert (spec.width, spec.depth, spec.heads, spec.patch, spec.grid) == (384, 12, 6, 14, (37, 37))
    assert spec.layer_scale is not None and spec.num_classes == 0
    assert clf.preprocess.image_size == (224, 224)
    vector = clf.embed([torch.randint(0, 256, (60, 80, 3), dtype=torch.uint8).numpy()])
    assert vector.shape == (1, 384) and torch.isfinite(vector).all()
    report = vitlab.convert(real_dinov2(), tmp_path / "bundle")
    assert json.loads((tmp_path / "bundle" / "config.json").read_text())["origin"]["format"] == "dinov2"
    assert report.matched == 174
