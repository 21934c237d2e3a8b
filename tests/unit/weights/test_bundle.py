"""What is saved comes back bit for bit, and what was tampered with does not come back at all."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import vitlab
from vitlab.core import config, fsio
from vitlab.core.errors import FileProblem, VitlabError
from vitlab.models.build import allocate, build
from vitlab.models.efficientnet_spec import EfficientNetSpec
from vitlab.models.spec import BiTSpec, ModelSpec, TrunkSpec, ViTSpec, bit_trunk, spec_to_dict
from vitlab.weights.bundle import Bundle, load_state, read_bundle, save_bundle
from vitlab.weights.containers import npz_chunks, safetensors_chunks

MakeBundle = Callable[..., Bundle]
Rewrite = Callable[[str, bytes | str], Path]

FILES = ["model.safetensors", "config.json", "preprocess.json", "labels.json", "card.md"]
SMALL = ViTSpec(width=8, depth=1, mlp_dim=16, heads=2, patch=4, image_size=(8, 8), in_channels=1, num_classes=3)
HYBRID = dataclasses.replace(SMALL, patch=1, image_size=(16, 16), stem=TrunkSpec(stages=(1,)), head="mlp-tanh")
RESNET = BiTSpec(trunk=bit_trunk((1,), 1), image_size=(8, 8), in_channels=1, num_classes=3)
EFFICIENTNET = EfficientNetSpec(
    stem_width=4,
    widths=(4,) * 7,
    depths=(1,) * 7,
    last_width=8,
    image_size=(8, 8),
    in_channels=1,
    num_classes=3,
)


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SMALL, HYBRID, RESNET, EFFICIENTNET], ids=["vit", "hybrid", "bit", "efficientnet"])
def test_bundle_comes_back_bit_for_bit(tmp_path: Path, make_bundle: MakeBundle, spec: ModelSpec) -> None:
    before = make_bundle(spec)
    save_bundle(tmp_path / "b", before)
    after = read_bundle(tmp_path / "b")
    assert bits(after.model) == bits(before.model)
    assert after.model.spec == spec
    assert (after.preprocess, after.labels) == (before.preprocess, before.labels)
    assert (after.card, after.origin) == (before.card, before.origin)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_bundle_keeps_the_precision_and_the_library_reads_it(
    tmp_path: Path, make_bundle: MakeBundle, dtype: torch.dtype
) -> None:
    bundle = make_bundle()
    bundle.model.blocks.to(dtype)  # type: ignore[union-attr]  # the rest stays float32
    save_bundle(tmp_path / "b", bundle)
    before, after = bundle.model.state_dict(), read_bundle(tmp_path / "b").model.state_dict()
    library = safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")
    assert {tensor.dtype for tensor in before.values()} == {torch.float32, dtype}
    for name, tensor in before.items():
        for found in (after[name], library[name]):
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in after.values()), (
        "kernels round differently on unaligned memory"
    )


def test_loaded_model_is_in_eval_mode_and_can_be_trained_further(saved: Path) -> None:
    model = read_bundle(saved).model
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_folder_holds_the_promised_files_and_no_other(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {*FILES, "manifest.json"}
    assert sorted(fsio.verify_folder(saved)) == sorted(FILES)


def test_config_has_spec_format_version_and_origin(saved: Path) -> None:
    header = json.loads((saved / "config.json").read_text())
    assert header == {
        "format_version": 1,
        "spec": json.loads(json.dumps(spec_to_dict(SMALL))),
        "origin": {"format": "test"},
    }


def test_preprocessing_is_stored_with_every_step(saved: Path) -> None:
    stored = json.loads((saved / "preprocess.json").read_text())
    keys = {"decoder", "mode", "bits", "image_size", "resize", "crop_frac", "filter", "antialias", "mean", "std"}
    assert stored.keys() == keys
    assert stored == json.loads(json.dumps(config.to_dict(read_bundle(saved).preprocess)))


def test_existing_bundle_is_never_overwritten(saved: Path, make_bundle: MakeBundle) -> None:
    before = fsio.hash_file(saved / "model.safetensors")
    with pytest.raises(VitlabError, match="exists already"):
        save_bundle(saved, make_bundle())
    assert fsio.hash_file(saved / "model.safetensors") == before


def test_model_without_classes_needs_no_labels(tmp_path: Path, make_bundle: MakeBundle) -> None:
    save_bundle(tmp_path / "b", make_bundle(dataclasses.replace(SMALL, num_classes=0), ()))
    assert read_bundle(tmp_path / "b").labels == ()


# --- what never gets saved --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_weight_that_is_not_finite_is_named_and_nothing_is_saved(
    tmp_path: Path, make_bundle: MakeBundle, poison: float
) -> None:
    bundle = make_bundle()
    with torch.no_grad():
        bundle.model.blocks[0].mlp.fc1.weight[3, 2] = poison  # type: ignore[union-attr, index]
    with pytest.raises(VitlabError, match=r"blocks\.0\.mlp\.fc1\.weight"):
        save_bundle(tmp_path / "b", bundle)
    assert list(tmp_path.iterdir()) == []


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "remove"])
def test_damage_to_any_file_is_found_before_it_is_read(saved: Path, name: str, damage: str) -> None:
    path = saved / name
    raw = path.read_bytes()
    middle = len(raw) // 2
    changed = {
        "flip": raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :],
        "cut": raw[:-1] if name != "manifest.json" else raw[:-2],  # the last character is a line end
        "grow": raw + b"x",
        "empty": b"",
    }
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(changed[damage])
    with pytest.raises(FileProblem, match=r"manifest|damaged|cannot be read"):
        read_bundle(saved)


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_the_bundle_must_be_in_the_manifest(saved: Path, name: str) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest["sha256"][name]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FileProblem, match=name):
        read_bundle(saved)


def test_each_kind_of_broken_bundle_has_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"has no manifest\.json"):
        read_bundle(tmp_path)
    with pytest.raises(FileProblem, match="is not a folder"):
        read_bundle(tmp_path / "absent")


# --- content that is whole but wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [["a"], ["a", "b", "c", "d"], []])
def test_wrong_number_of_labels_is_refused(rewrite: Rewrite, labels: list[str]) -> None:
    with pytest.raises(FileProblem, match=f"has {len(labels)} labels for 3 classes"):
        read_bundle(rewrite("labels.json", json.dumps(labels)))


@pytest.mark.parametrize("version", [0, 2, "1", None, [1], {}])
def test_unknown_format_version_is_refused_with_the_known_one(rewrite: Rewrite, version: Any) -> None:
    header = {"format_version": version, "spec": spec_to_dict(SMALL), "origin": {}}
    with pytest.raises(FileProblem, match="this vitlab reads 1"):
        read_bundle(rewrite("config.json", json.dumps(header)))


def header(**changes: Any) -> str:
    spec = {**spec_to_dict(SMALL), **changes.pop("spec_changes", {})}
    return json.dumps({"format_version": 1, "spec": spec, "origin": {}, **changes})


HOSTILE = [
    ("config.json", "[" * 100_000),
    ("config.json", ""),
    ("config.json", "\ud7ff\x00"),
    ("config.json", "{}"),
    ("config.json", '{"format_version": 1}'),
    ("config.json", header(spec_changes={"kind": "os.system"})),
    ("config.json", header(spec_changes={"kind": None})),
    ("config.json", header(spec_changes={"width": "8"})),
    ("config.json", header(spec_changes={"width": -8})),
    ("config.json", header(spec_changes={"pool": ["cls"]})),
    ("config.json", header(spec_changes={"stem": {"stages": [1], "evil": 1}})),
    ("config.json", header(spec_changes={"trust_remote_code": True})),
    ("config.json", header(spec_changes={"image_size": [8]})),
    ("config.json", header(spec_changes={"heads": 3})),
    ("config.json", header(spec_changes={"norm_eps": "x"})),
    ("config.json", "[]"),
    ("config.json", "3"),
    ("config.json", header(spec=[])),
    ("config.json", header(spec=None)),
    ("config.json", header(spec_changes={"kind": []})),
    ("config.json", header(spec_changes={"norm_eps": 10**400})),
    ("config.json", header(origin=5)),
    ("config.json", header(origin=[1])),
    ("config.json", header(origin="ab")),
    ("preprocess.json", "[" * 100_000),
    ("preprocess.json", '"mode"'),
    ("preprocess.json", '{"mode": "exec"}'),
    ("preprocess.json", '{"mode": "L"}'),
    ("preprocess.json", '{"mean": [[[]]]}'),
    ("preprocess.json", '{"url": "http://example.org"}'),
    ("preprocess.json", "[]"),
    ("preprocess.json", '["mode"]'),
    ("preprocess.json", "5"),
    ("labels.json", "[" * 100_000),
    ("labels.json", "{}"),
    ("labels.json", "5"),
    ("labels.json", "null"),
    ("labels.json", '"abc"'),
    ("labels.json", '{"a": 1, "b": 2, "c": 3}'),
    ("labels.json", "[[], {}, null]"),
    ("card.md", b"\xff\xfe\x00"),
    ("model.safetensors", b""),
    ("model.safetensors", b"\xff" * 64),
    ("model.safetensors", b"\x02\x00\x00\x00\x00\x00\x00\x00{}"),
]


@pytest.mark.parametrize(("name", "content"), HOSTILE, ids=lambda value: str(value)[:60])
def test_hostile_content_ends_in_a_vitlab_error_and_nothing_else(
    rewrite: Rewrite, name: str, content: bytes | str
) -> None:
    with pytest.raises(VitlabError):
        read_bundle(rewrite(name, content))


@pytest.mark.parametrize(
    "changes", [{"depth": 1500}, {"width": 20_000_000}, {"heads": 3, "width": 20_000_000}], ids=["deep", "wide", "odd"]
)
def test_spec_far_larger_than_its_weights_is_refused_at_once(
    rewrite: Rewrite, least_seconds: Callable[..., float], changes: dict[str, int]
) -> None:
    folder = rewrite("config.json", header(spec_changes=changes))
    with pytest.raises(VitlabError):
        read_bundle(folder)
    assert least_seconds(read_bundle, folder) < 0.25


@pytest.mark.parametrize(
    "stages",
    [
        [3_000_000],
        pytest.param([1] * 3000),
    ],
    ids=["many units", "many stages"],
)
def test_trunk_far_larger_than_its_weights_is_refused_at_once(
    rewrite: Rewrite, least_seconds: Callable[..., float], stages: list[int]
) -> None:
    trunk = {**config.to_dict(bit_trunk((1,), 1)), "stages": stages}
    spec = {"kind": "bit", "trunk": trunk, "image_size": [8, 8], "in_channels": 1, "num_classes": 3}
    folder = rewrite("config.json", header(spec=spec))
    with pytest.raises(VitlabError):
        read_bundle(folder)
    assert least_seconds(read_bundle, folder) < 0.25


def test_other_containers_and_wrapped_names_are_not_a_bundle(rewrite: Rewrite) -> None:
    state = small_state()
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    for content in (b"".join(npz_chunks(state)), safetensors.torch.save(wrapped)):
        with pytest.raises(FileProblem, match="by vitlab's names"):
            read_bundle(rewrite("model.safetensors", content))


# --- load_state -------------------------------------------------------------------------------------------------------


def small_state() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in build(SMALL, seed=0).state_dict().items()}


@pytest.mark.parametrize("name", sorted(allocate(SMALL).state_dict()))
def test_each_missing_weight_is_named(name: str) -> None:
    state = small_state()
    del state[name]
    with pytest.raises(FileProblem, match=f"x lacks weights: {name}$"):
        load_state(allocate(SMALL), state, "x")


def test_unexpected_weights_are_named_three_at_most() -> None:
    state = small_state() | {f"extra{i}": torch.zeros(1) for i in range(5)}
    with pytest.raises(FileProblem, match="unknown weights: extra0, extra1, extra2 and 2 more"):
        load_state(allocate(SMALL), state, "x")


def test_misshapen_weights_are_named() -> None:
    state = small_state()
    state["head.weight"] = state["head.weight"].T.contiguous()
    with pytest.raises(FileProblem, match=r"x has misshapen weights: head\.weight"):
        load_state(allocate(SMALL), state, "x")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_weights_that_are_not_floats_are_refused(rewrite: Rewrite, dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype) for name, tensor in small_state().items()}
    with pytest.raises(FileProblem):
        read_bundle(rewrite("model.safetensors", safetensors.torch.save(state)))


# --- what no file should be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_bundle_whose_file_is_a_pipe_or_leads_elsewhere_is_refused_at_once(saved: Path, name: str) -> None:
    path, moved = saved / name, saved.parent / name
    path.rename(moved)
    path.symlink_to(moved)
    with pytest.raises(FileProblem, match=f"{name} is a link to a file outside"):
        read_bundle(saved)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FileProblem, match=f"{name} is a FIFO"):
        read_bundle(saved)


@pytest.mark.parametrize(
    "changes",
    [{"image_size": [48_000, 48_000]}, {"crop_frac": 1e-9}, {"crop_frac": 1e-320}, {"image_size": [10**400, 4]}],
)
def test_image_that_no_machine_has_memory_for_is_refused_with_the_bundle(
    tmp_path: Path, make_bundle: MakeBundle, changes: dict[str, Any]
) -> None:
    # Without positions no weight tells the size of images.
    save_bundle(tmp_path / "b", make_bundle(dataclasses.replace(SMALL, pos="none", pool="gap")))
    about = json.loads((tmp_path / "b" / "preprocess.json").read_text())
    (tmp_path / "b" / "preprocess.json").write_text(json.dumps({**about, **changes}))
    digest = fsio.hash_file(tmp_path / "b" / "preprocess.json")
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    manifest["sha256"]["preprocess.json"] = digest
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(VitlabError, match="asks for too many pixels"):
        read_bundle(tmp_path / "b")


def test_nonfinite_weights_of_others_are_reported_with_their_number(
    saved: Path, rewrite: Rewrite, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = read_bundle(saved).model.state_dict()
    tensors["head.bias"][:2] = torch.tensor([torch.nan, torch.inf])
    tensors["norm.weight"][0] = -torch.inf
    rewrite("model.safetensors", b"".join(safetensors_chunks(tensors)))
    vitlab.load(saved, device="cpu")
    reported = "warning: NaN or infinity among the values of norm.weight (1), head.bias (2)"
    assert reported in capsys.readouterr().err
    with pytest.raises(VitlabError, match="holds NaN or infinity"):
        vitlab.convert(saved, saved.parent / "again", to="vitlab")


# --- temperature ------------------------------------------------------------------------------------------------------


def test_temperature_comes_back_and_is_left_out_where_it_is_one(tmp_path: Path, make_bundle: MakeBundle) -> None:
    plain = make_bundle()
    save_bundle(tmp_path / "plain", plain)
    save_bundle(tmp_path / "fitted", dataclasses.replace(plain, temperature=1.75))
    assert read_bundle(tmp_path / "plain").temperature == 1
    assert read_bundle(tmp_path / "fitted").temperature == 1.75
    headers = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "fitted")]
    assert "temperature" not in headers[0]
    assert {**headers[0], "temperature": 1.75} == headers[1], "an older reader finds everything else where it was"


@pytest.mark.parametrize("value", [0, -1, "hot", None, True, float("inf"), [1], 10**400], ids=lambda v: str(v)[:9])
def test_temperature_that_is_not_a_number_above_zero_is_refused(saved: Path, rewrite: Rewrite, value: Any) -> None:
    header = json.loads((saved / "config.json").read_text())
    rewrite("config.json", json.dumps({**header, "temperature": value}))
    with pytest.raises(FileProblem, match="temperature must be a number above 0"):
        read_bundle(saved)


# --- thresholds -------------------------------------------------------------------------------------------------------


def test_thresholds_come_back_bit_for_bit_and_are_left_out_where_there_are_none(
    tmp_path: Path, make_bundle: MakeBundle
) -> None:
    plain = make_bundle()
    scores = tuple(k / 7 - 0.3 for k in range(len(plain.labels)))
    save_bundle(tmp_path / "plain", plain)
    save_bundle(tmp_path / "fitted", dataclasses.replace(plain, thresholds=scores))
    assert (read_bundle(tmp_path / "plain").thresholds, read_bundle(tmp_path / "fitted").thresholds) == ((), scores)
    headers = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "fitted")]
    assert "thresholds" not in headers[0]
    assert {**headers[0], "thresholds": list(scores)} == headers[1], "an older reader finds all else where it was"


@pytest.mark.parametrize(
    "value",
    [3, "low", None, {}, [None], ["0"], [True], [float("nan")], [float("inf")], [0, 10**400, 1], [-(10**400)] * 3],
    ids=lambda value: str(value)[:9],
)
def test_thresholds_that_are_not_a_list_of_numbers_are_refused(saved: Path, rewrite: Rewrite, value: Any) -> None:
    header = json.loads((saved / "config.json").read_text())
    rewrite("config.json", json.dumps({**header, "thresholds": value}))
    with pytest.raises(FileProblem, match="thresholds must be a list of numbers"):
        read_bundle(saved)


def test_thresholds_must_be_as_many_as_the_labels(
    saved: Path, rewrite: Rewrite, tmp_path: Path, make_bundle: MakeBundle
) -> None:
    header = json.loads((saved / "config.json").read_text())
    rewrite("config.json", json.dumps({**header, "thresholds": [0.5]}))
    with pytest.raises(FileProblem, match=r"config\.json has 1 thresholds for \d+ labels"):
        read_bundle(saved)
    with pytest.raises(FileProblem, match="to be saved has 1 thresholds"):
        save_bundle(tmp_path / "odd", dataclasses.replace(make_bundle(), thresholds=(0.5,)))
    assert not (tmp_path / "odd").exists()
