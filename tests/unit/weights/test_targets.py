"""What is written is read back as the same model, or it was refused, or the answer named what differs."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow_after

import vitlab
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import build
from vitlab.models.spec import BiTSpec, ModelSpec, ViTSpec, bit_trunk, changed
from vitlab.weights import conventions
from vitlab.weights.bundle import Bundle, Description, read_bundle, save_bundle
from vitlab.weights.containers import npz_chunks, read_arrays, safetensors_chunks
from vitlab.weights.foreign import read_foreign
from vitlab.weights.formats.table import assumed_preprocess
from vitlab.weights.targets import TARGETS, Target, write_foreign

# One head on a width of 64 is what readers assume, so two are lost wherever nothing carries them.
PLAIN = ViTSpec(width=64, depth=2, mlp_dim=64, heads=2, patch=8, image_size=(32, 32), num_classes=3)
DINO = {"num_classes": 0, "layer_scale": 1.0}
PLACES: dict[str, tuple[Target, str, dict[str, Any]]] = {
    "google-npz": ("google-npz", "x.npz", {}),
    "big-vision": ("big-vision", "x.npz", {"cls_in_pos": False}),
    "big-vision, gap": ("big-vision", "x.npz", {"pool": "gap"}),
    "timm file": ("timm", "x.safetensors", {}),
    "timm folder": ("timm", "x", {}),
    "timm folder of DINOv2": ("timm", "x", DINO),
    "hf": ("hf", "x", {}),
    "hf DINOv2": ("hf", "x", DINO),
    "torchvision": ("torchvision", "x.safetensors", {}),
    "dinov2": ("dinov2", "x.safetensors", DINO),
}
CHANGES: tuple[dict[str, Any], ...] = (
    *({"width": 128, "depth": 1, "mlp_dim": 128, "patch": 16}, {"heads": 4}, {"in_channels": 1}),
    *({"num_classes": 0}, {"image_size": [64, 64]}, {"image_size": [24, 40]}, {"image_size": [16, 64]}),
    *({"pool": "gap"}, {"pool": "map"}, {"pos": "none"}, {"pos": "learned2d"}, {"pos": "relative"}),
    *({"pos": "sincos2d"}, {"pos": "sincos2d", "pool": "gap"}, {"pos_at": "every"}, {"pos_at": "shared"}),
    *({"cls_in_pos": False}, {"cls_in_pos": True}, {"pos_resize": "bicubic"}, {"pos_resize": "bicubic-antialias"}),
    {"pos_resize": "bicubic-offset"},
    *({"attention": "axial", "pool": "gap"}, {"head": "mlp-tanh"}, {"gelu": "exact"}, {"norm_eps": 1e-3}),
    *({"layer_scale": 0.5}, {"registers": 2}, {"dropout": 0.1, "attention_dropout": 0.1, "stochastic_depth": 0.1}),
    {"patch_dropout": 0.1},
    {"stem": {"stages": [1]}, "patch": 2},
    {"stem": {"stages": [1], "gn_eps": 1e-5, "ws_eps": 1e-3, "ws": "var-eps", "padding": "fixed"}, "patch": 2},
)
ONLY_IN_TRAINING = (
    "dropout",
    "attention_dropout",
    "stochastic_depth",
    "patch_dropout",
    "layer_scale",
)  # the last is where it starts


def bundle_of(spec: ModelSpec, rule: Preprocess | None = None, **origin: Any) -> Bundle:
    model = build(spec, seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    rule = rule or conventions.named("minus-one-to-one", spec)
    return Bundle(model.eval(), rule, ("ant", "bee", "cat")[: spec.num_classes], "card", origin)


def test_every_target_is_tried() -> None:
    assert {"vitlab", *(to for to, _, _ in PLACES.values())} == set(TARGETS), "bundles have tests of their own"
    fields = {name for changes in CHANGES for name in changes}
    assert fields == {field.name for field in dataclasses.fields(ViTSpec)}, (
        "a new field of the spec belongs into CHANGES"
    )


@pytest.mark.parametrize("place", slow_after(2, dict.fromkeys(("google-npz", "dinov2", *PLACES))))
def test_what_is_written_is_read_back_as_the_same_model_or_refused(tmp_path: Path, place: str) -> None:
    to, name, usual = PLACES[place]
    for number, changes in enumerate(({}, *CHANGES)):
        try:
            spec = changed(PLAIN, {**usual, **changes})
        except UsageError:
            continue  # no model at all
        before, out = bundle_of(spec), tmp_path / str(number) / name
        try:
            report = write_foreign(before, out, to)
        except UsageError:
            assert changes, "the plain model must have a way out"
            assert not out.exists()
            continue
        after = vitlab.load(out, quiet=True, device="cpu")
        differing = unlike(spec, after.model.spec)
        unsaid = [field for field in differing if not any(f"{field} is" in note for note in report.notes)]
        assert not unsaid, f"{changes}: read back with {differing}, after {report.notes}"
        if not differing:
            assert_same_answers(before, after.model)


BIT = BiTSpec(trunk=bit_trunk((1,), 1), image_size=(32, 32), num_classes=3)


@pytest.mark.parametrize(("to", "name"), [("google-npz", "x.npz"), ("timm", "x.safetensors"), ("hf", "x")])
def test_bit_whose_max_pool_pads_otherwise_is_read_back_or_named(tmp_path: Path, to: Target, name: str) -> None:
    """Both official codes read the same files: zeros in big_transfer, -inf in big_vision."""
    spec = changed(BIT, {"trunk": {"pool_padding": "neg-inf"}})
    report = write_foreign(bundle_of(spec), tmp_path / name, to)
    assert "trunk.pool_padding is zero there, neg-inf here" in report.notes
    after = read_foreign(tmp_path / name)[0].model.spec
    assert isinstance(after, BiTSpec)
    assert after.trunk.pool_padding == ("neg-inf" if name.endswith(".safetensors") else "zero")


def unlike(before: ModelSpec, after: ModelSpec) -> dict[str, Any]:
    ours, theirs = (_flat(vars(spec)) for spec in (before, after))
    idle = {*ONLY_IN_TRAINING, *(() if getattr(before, "uses_cls", False) else ("cls_in_pos",))}
    keys = (ours.keys() | theirs.keys()) - idle
    return {key: theirs.get(key) for key in keys if ours.get(key) != theirs.get(key)}


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    stem = table.get("stem")
    more = {f"stem.{key}": value for key, value in vars(stem).items()} if stem else {}
    return {**{key: value for key, value in table.items() if key != "stem"}, **more}


def assert_same_answers(before: Bundle, after: torch.nn.Module) -> None:
    spec = before.model.spec
    x = torch.randn(2, spec.in_channels, *spec.image_size, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        assert torch.equal(before.model(x), after(x))


# --- what a file says of itself ---------------------------------------------------------------------------------------

RULE = Preprocess(image_size=(24, 40), resize="squash", filter="bicubic", mean=(0.1, 0.2, 0.3))


def test_single_safetensors_file_carries_labels_preprocessing_heads_and_gelu(tmp_path: Path) -> None:
    spec = changed(PLAIN, {"image_size": [24, 40], "gelu": "exact"})  # 3x5 patches and a class token, or 4x4 and none
    write_foreign(bundle_of(spec, RULE), tmp_path / "x.safetensors", "timm")
    bundle, report = read_foreign(tmp_path / "x.safetensors")
    assert (bundle.model.spec, bundle.preprocess, bundle.labels) == (spec, RULE, ("ant", "bee", "cat"))
    assert report.notes == ()


def described(tmp_path: Path, change: Mapping[str, Any], arrays: Mapping[str, torch.Tensor] | None = None) -> Path:
    write_foreign(bundle_of(PLAIN), tmp_path / "x.safetensors", "timm")
    found = read_arrays(tmp_path / "x.safetensors")
    table = json.loads(found.metadata["vitlab"])
    for key, value in change.items():
        table[key] = {**table[key], **value} if isinstance(value, dict) else value
    data = safetensors_chunks({**found.arrays, **(arrays or {})}, {"vitlab": json.dumps(table)})
    (tmp_path / "y.safetensors").write_bytes(b"".join(data))
    return tmp_path / "y.safetensors"


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"spec": {"depth": 3}}, "holds .* numbers, but describes itself as a model of"),
        ({"spec": {"depth": 1000}}, "holds .* numbers, but describes itself as a model of"),
        ({"spec": {"depth": 10**9}}, "describes itself in its header, but not as vitlab does"),
        ({"spec": {"width": 32, "heads": 1}}, "describes itself as"),
        ({"spec": {"pool": "max"}}, "describes itself in its header, but not as vitlab does"),
        ({"labels": "abc"}, "not as vitlab does"),
        ({"labels": ["a", "b"]}, "has 2 labels for 3 classes"),
        ({"preprocess": {"mean": [0.5]}}, "not as vitlab does"),
        ({"preprocess": {"image_size": [33, 33]}}, "prepares images that do not fit"),
    ],
)
def test_description_that_the_arrays_contradict_is_refused(tmp_path: Path, change: Any, reported: str) -> None:
    with pytest.raises(FileProblem, match=reported):
        read_foreign(described(tmp_path, change))


def test_description_as_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    write_foreign(bundle_of(PLAIN), tmp_path / "x.safetensors", "torchvision")
    found = read_arrays(tmp_path / "x.safetensors")
    bit = Description(BiTSpec(trunk=bit_trunk((1,), 1), num_classes=3), Preprocess(), ("a", "b", "c"))
    (tmp_path / "y").write_bytes(b"".join(safetensors_chunks(found.arrays, {"vitlab": bit.to_json()})))
    with pytest.raises(FileProblem, match=r"as a BiT.*torchvision does not have"):
        read_foreign(tmp_path / "y")


def test_description_of_the_same_size_but_another_shape_is_refused(tmp_path: Path) -> None:
    kernel = torch.zeros(64, 3, 4, 16)
    with pytest.raises(FileProblem, match="has shape"):
        read_foreign(described(tmp_path, {}, {"patch_embed.proj.weight": kernel}))


@pytest.mark.parametrize("to", ["timm", "hf"])
@pytest.mark.parametrize("change", [{"filter": "area"}, {"antialias": False}, {"bits": 12}], ids=str)
def test_rule_that_a_peer_has_not_comes_back_from_its_folder(tmp_path: Path, to: Target, change: Any) -> None:
    rule = Preprocess(image_size=(32, 32), resize="shorter-side", crop_frac=0.875, **change)
    report = write_foreign(bundle_of(PLAIN, rule), tmp_path / "x", to)
    reported = "bits=12" if "bits" in change else "resize antialiases"
    assert any(reported in note for note in report.notes), "the peer will compute otherwise"
    assert vitlab.load(tmp_path / "x", quiet=True, device="cpu").preprocess == rule


def test_area_is_read_from_a_timm_folder_that_lost_our_rule(tmp_path: Path) -> None:
    rule = Preprocess(image_size=(32, 32), resize="shorter-side", crop_frac=0.875, filter="area")
    write_foreign(bundle_of(PLAIN, rule), tmp_path / "x", "timm")
    settings = json.loads((tmp_path / "x" / "config.json").read_text())
    del settings["vitlab_preprocess"]
    (tmp_path / "x" / "config.json").write_text(json.dumps(settings))
    assert vitlab.load(tmp_path / "x", quiet=True, device="cpu").preprocess.filter == "area"


def test_what_an_npz_leaves_behind_is_reported(tmp_path: Path) -> None:
    usual = assumed_preprocess("google-npz", PLAIN)
    numbers = Bundle(bundle_of(PLAIN).model, usual, ("0", "1", "2"), "", {})
    assert write_foreign(numbers, tmp_path / "a.npz", "google-npz").notes == ()
    report = write_foreign(bundle_of(PLAIN, usual), tmp_path / "b.npz", "google-npz")
    assert report.notes == ("labels stay behind: this format has no place for them",)
    report = write_foreign(bundle_of(PLAIN), tmp_path / "c.npz", "google-npz")
    assert report.notes[0].startswith("labels and preprocessing stay behind")
    bit = BiTSpec(trunk=bit_trunk((1,), 1), num_classes=3)
    odd = changed(bit, {"trunk": {"gn_eps": 1e-3}})
    assert (
        "trunk.gn_eps is 1e-05 there, 0.001 here"
        in write_foreign(bundle_of(odd), tmp_path / "d.npz", "google-npz").notes
    )


# --- positions that are not there -------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"stem": {"stages": [1]}, "patch": 2}, {"pool": "gap"}])
def test_npz_that_lost_its_positions_is_not_a_model_without_any(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_foreign(bundle_of(changed(PLAIN, changes)), tmp_path / "x.npz", "google-npz")
    name = "Transformer/posembed_input/pos_embedding"
    arrays = {key: array for key, array in read_arrays(tmp_path / "x.npz").arrays.items() if key != name}
    (tmp_path / "y.npz").write_bytes(b"".join(npz_chunks(arrays)))
    with pytest.raises(FileProblem, match=f"lacks {name}"):
        read_foreign(tmp_path / "y.npz")
    with pytest.raises(FileProblem, match=f"lacks {name}"):
        vitlab.convert(tmp_path / "x.npz", tmp_path / "z", drop=["Transformer/posembed_input"])


def test_computed_positions_of_big_vision_are_reported_as_assumed(tmp_path: Path) -> None:
    spec = changed(PLAIN, {"pool": "gap", "pos": "sincos2d"})
    report = write_foreign(bundle_of(spec), tmp_path / "x.npz", "big-vision")
    assert "image_size is (224, 224) there, (32, 32) here" in report.notes
    bundle, read = read_foreign(tmp_path / "x.npz")
    assert bundle.model.spec.image_size == (224, 224)
    reported = "No array shows this, so it is assumed: pos=sincos2d, for images of 224x224. If the size is wrong: "
    assert f"{reported}vitlab convert --grid (in Python: grid=)" in read.notes


def test_attention_pooling_is_refused_where_the_code_has_none(tmp_path: Path) -> None:
    pooled = bundle_of(changed(PLAIN, {"pool": "map"}))
    with pytest.raises(UsageError, match=r"google-npz format has no attention pooling.*\n.*big-vision"):
        write_foreign(pooled, tmp_path / "x.npz", "google-npz")
    assert list(tmp_path.iterdir()) == []
    write_foreign(pooled, tmp_path / "x.npz", "big-vision")


@pytest.mark.parametrize("to", ["google-npz", "big-vision"])
def test_oblong_grid_is_refused_with_a_way_out(tmp_path: Path, to: Target) -> None:
    spec = changed(PLAIN, {"image_size": [16, 64], "pool": "gap"})
    with pytest.raises(UsageError, match=r"square; this one is 2x8\n.*--image-size"):
        write_foreign(bundle_of(spec), tmp_path / "x.npz", to)


# --- names and places -------------------------------------------------------------------------------------------------


def test_prefix_of_a_training_program_is_not_written_again(tmp_path: Path) -> None:
    write_foreign(bundle_of(changed(PLAIN, {"heads": 1})), tmp_path / "hf", "hf")
    plain = read_arrays(tmp_path / "hf" / "model.safetensors").arrays
    torch.save(
        {"state_dict": {f"model.{name}": array for name, array in plain.items()}, "epoch": 3}, tmp_path / "x.ckpt"
    )
    report = vitlab.convert(tmp_path / "x.ckpt", tmp_path / "bundle")
    assert "Beside the weights, not read: epoch" in report.notes
    vitlab.convert(tmp_path / "bundle", tmp_path / "again", to="hf")
    assert read_arrays(tmp_path / "again" / "model.safetensors").arrays.keys() == plain.keys()
    arrays = safetensors_chunks(read_arrays(tmp_path / "again" / "model.safetensors").arrays)
    assert b"model.vit" not in b"".join(arrays)[:5000]


@pytest.mark.parametrize(
    ("to", "name"),
    [
        *(("timm", "x.pth"), ("timm", "x.npz"), ("google-npz", "x.safetensors"), ("google-npz", "x"), ("hf", "x.npz")),
        *(("torchvision", "x"), ("dinov2", "x.pth"), ("vitlab", "x.safetensors"), ("big-vision", "x.bin")),
    ],
)
def test_suffix_that_promises_another_file_is_refused(tmp_path: Path, to: Target, name: str) -> None:
    with pytest.raises(UsageError, match=f"{to} writes a .*; {name} is the name of something else"):
        write_foreign(bundle_of(PLAIN), tmp_path / name, to)
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_the_other_side_needs_are_named(tmp_path: Path) -> None:
    report = write_foreign(bundle_of(PLAIN), tmp_path / "a.safetensors", "torchvision")
    assert (
        "torchvision needs: VisionTransformer(**{'image_size': 32, 'patch_size': 8, 'num_layers': 2" in report.notes[0]
    )
    report = write_foreign(bundle_of(changed(PLAIN, DINO)), tmp_path / "b.safetensors", "dinov2")
    assert "DINOv2 needs: DinoVisionTransformer(**{'img_size': 32" in report.notes[0]
    assert "mask_token" in report.notes[1]
    with pytest.raises(UsageError, match="--drop head"):
        write_foreign(bundle_of(changed(PLAIN, {"layer_scale": 1.0})), tmp_path / "c.safetensors", "dinov2")


def test_model_that_timm_does_not_build_is_reported(tmp_path: Path) -> None:
    bundle = bundle_of(BiTSpec(trunk=bit_trunk((1,), 1), num_classes=3))
    with pytest.raises(UsageError, match=r"no entry point that builds .*\n.*\.safetensors"):
        write_foreign(bundle, tmp_path / "x", "timm")
    assert not (tmp_path / "x").exists()
    assert "no entry point" in write_foreign(bundle, tmp_path / "x.safetensors", "timm").notes[0]


def test_four_channels_come_back_from_a_timm_folder(tmp_path: Path) -> None:
    bundle = bundle_of(changed(PLAIN, {"in_channels": 4}))
    write_foreign(bundle, tmp_path / "x", "timm")
    assert vitlab.load(tmp_path / "x", quiet=True).preprocess.mode == "array"


def test_bundle_remembers_no_prefix_but_googles(tmp_path: Path) -> None:
    save_bundle(tmp_path / "b", bundle_of(changed(PLAIN, {"heads": 1}), format="hf", prefix="model.", dialect={}))
    vitlab.convert(tmp_path / "b", tmp_path / "x", to="hf")
    assert "vit.embeddings.cls_token" in read_arrays(tmp_path / "x" / "model.safetensors").arrays


def test_temperature_that_stays_behind_is_reported(tmp_path: Path) -> None:
    fitted = dataclasses.replace(bundle_of(PLAIN), temperature=2.5)
    reported = write_foreign(fitted, tmp_path / "x.npz", "google-npz").notes
    assert any("temperature 2.5 stays behind" in note for note in reported)
    assert not any(
        "temperature" in note for note in write_foreign(bundle_of(PLAIN), tmp_path / "y.npz", "google-npz").notes
    )
    write_foreign(fitted, tmp_path / "bundle", "vitlab")
    assert read_bundle(tmp_path / "bundle").temperature == 2.5


def test_thresholds_that_stay_behind_are_reported(tmp_path: Path) -> None:
    plain = bundle_of(PLAIN)
    several = dataclasses.replace(plain, thresholds=(0.25,) * len(plain.labels))
    for name, to in (("x.npz", "google-npz"), ("x", "timm")):
        assert any("thresholds stay behind" in note for note in write_foreign(several, tmp_path / name, to).notes)
    assert not any("threshold" in note for note in write_foreign(plain, tmp_path / "y.npz", "google-npz").notes)
    write_foreign(several, tmp_path / "bundle", "vitlab")
    assert read_bundle(tmp_path / "bundle").thresholds == several.thresholds
