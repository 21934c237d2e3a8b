"""Google's files: names, bit-exact round trips, and logits equal to the official equations in NumPy."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from vitlab.core.errors import FileProblem, UsageError
from vitlab.models.build import build
from vitlab.models.names import parse_name
from vitlab.models.spec import BiTSpec, ModelSpec, ViTSpec, bit_trunk, changed
from vitlab.weights.bundle import load_state
from vitlab.weights.foreign import Reading, read_foreign
from vitlab.weights.formats import bit, google
from vitlab.weights.formats.bit import BiTDialect
from vitlab.weights.formats.google import GoogleDialect
from vitlab.weights.rules import bring_in, link, send_out
from vitlab.weights.targets import write_foreign


def _beside(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = _beside("numpy_reference")

TINY = ViTSpec(width=32, depth=2, mlp_dim=48, heads=4, patch=4, image_size=(16, 16), num_classes=5)
HYBRID: dict[str, Any] = {"stem": {"stages": [1, 2]}, "patch": 1, "image_size": [32, 32]}
CASES: dict[str, tuple[dict[str, Any], GoogleDialect]] = {
    "linen": ({}, GoogleDialect()),
    "pre-linen with pre_logits": ({"head": "mlp-tanh"}, GoogleDialect(pre_linen=True)),
    "gap": ({"pool": "gap"}, GoogleDialect()),
    "big_vision": ({"cls_in_pos": False}, GoogleDialect(big_vision=True)),
    "big_vision map": ({"cls_in_pos": False, "pool": "map"}, GoogleDialect(big_vision=True)),
    "big_vision sincos2d": ({"cls_in_pos": False, "pool": "gap", "pos": "sincos2d"}, GoogleDialect(big_vision=True)),
    "big_vision sincos2d, class token": ({"cls_in_pos": False, "pos": "sincos2d"}, GoogleDialect(big_vision=True)),
    "big_vision before 2022": ({}, GoogleDialect(big_vision=True, pos_in_encoder=True)),
    "big_vision before 2022, gap": ({"pool": "gap"}, GoogleDialect(big_vision=True, pos_in_encoder=True)),
    "big_vision before MAPHead": (
        {"pool": "map"},
        GoogleDialect(big_vision=True, pos_in_encoder=True, inlined_map=True),
    ),
    "scan": ({"cls_in_pos": False, "pool": "gap"}, GoogleDialect(big_vision=True, scan=True)),
    "scan sincos2d": (
        {"cls_in_pos": False, "pool": "gap", "pos": "sincos2d"},
        GoogleDialect(big_vision=True, scan=True),
    ),
    "scan, one block": ({"cls_in_pos": False, "depth": 1}, GoogleDialect(big_vision=True, scan=True)),
    "image tower, map": (
        {"cls_in_pos": False, "pool": "map", "num_classes": 0},
        GoogleDialect(big_vision=True, scan=True, prefix="img/"),
    ),
    "headless": ({"num_classes": 0}, GoogleDialect()),
    "hybrid": (HYBRID, GoogleDialect()),
    "hybrid, old GroupNorm": (HYBRID, GoogleDialect(four_axes=True, pre_linen=True)),
    "root-only hybrid": ({"stem": {"stages": []}, "patch": 2, "image_size": [32, 32]}, GoogleDialect()),
    "one channel": ({"in_channels": 1}, GoogleDialect()),
}
# The reference knows no stacks; that they hold the same numbers is tested by themselves.
WITH_LOGITS = [case for case, (_, dialect) in CASES.items() if not dialect.scan]
WITH_LOGITS.remove("headless")
BIT = BiTSpec(trunk=bit_trunk((1, 2), 1), num_classes=5)


def google_spec(case: str) -> tuple[ViTSpec, GoogleDialect]:
    changes, dialect = CASES[case]
    spec = changed(TINY, changes)
    assert isinstance(spec, ViTSpec)
    return spec, dialect


def random_state(spec: ModelSpec) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    state = build(spec, seed=0).state_dict()
    return {name: tensor + 0.1 * torch.randn(tensor.shape, generator=draw) for name, tensor in state.items()}


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_exact_and_spec_and_dialect_are_read_from_the_arrays(case: str) -> None:
    spec, dialect = google_spec(case)
    state = random_state(spec)
    links = link(google.rules(spec, dialect), spec, "google-npz")
    arrays = send_out(links, state)
    assert google.recognises(arrays) and not bit.recognises(arrays)
    assert google.read_dialect(arrays) == dialect
    # Fixed positions leave no trace of the image size in the file.
    reported = changed(spec, {"image_size": [224, 224]}) if spec.pos == "sincos2d" else spec
    assert google.read_spec(arrays, "x") == reported
    back = bring_in(links, dict(arrays), spec, "x")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    again = send_out(links, back)
    assert again.keys() == arrays.keys()
    assert all(torch.equal(again[name], array) for name, array in arrays.items())


@pytest.mark.parametrize("pool", ["gap", "map", "cls"])
def test_scan_holds_the_blocks_of_the_loop_one_above_the_other(pool: str) -> None:
    spec = changed(TINY, {"cls_in_pos": False, "pool": pool, "depth": 11})
    assert isinstance(spec, ViTSpec)
    state = random_state(spec)
    loop, scan = (
        send_out(link(google.rules(spec, GoogleDialect(big_vision=True, scan=scan)), spec, "google-npz"), state)
        for scan in (False, True)
    )
    block = "Transformer/encoderblock_0/"
    expected = {name: array for name, array in loop.items() if "encoderblock" not in name}
    for name in loop:
        if name.startswith(block):
            parts = [loop[name.replace("_0/", f"_{number}/", 1)] for number in range(11)]
            expected[name.replace("_0/", "/", 1)] = torch.stack(parts)
    assert scan.keys() == expected.keys()
    assert all(torch.equal(scan[name], array) for name, array in expected.items())
    assert google.read_spec(scan, "x") == google.read_spec(loop, "x") == spec


def test_parameters_from_a_stack_have_memory_of_their_own() -> None:
    spec, dialect = google_spec("scan")
    links = link(google.rules(spec, dialect), spec, "google-npz")
    for tensor in bring_in(links, send_out(links, random_state(spec)), spec, "x").values():
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("how", ["one too many", "one too few", "flat", "a million"])
def test_stacks_of_unequal_height_are_refused(how: str) -> None:
    spec, dialect = google_spec("scan")
    arrays = send_out(link(google.rules(spec, dialect), spec, "google-npz"), random_state(spec))
    victim = "Transformer/encoderblock/LayerNorm_1/bias"
    if how == "a million":
        victim = "Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel"
        arrays[victim] = torch.zeros(1, 1, 1, 1).expand(1_000_000, 1, 1, 1)
    else:
        bias = arrays[victim]
        arrays[victim] = {"one too many": torch.cat([bias, bias[:1]]), "one too few": bias[:1]}.get(how, bias.flatten())
    with pytest.raises(FileProblem, match="more than any model" if how == "a million" else victim):
        reported = google.read_spec(arrays, "x")
        bring_in(link(google.rules(reported, dialect), reported, "google-npz"), arrays, reported, "x")


def save_npz(path: Path, arrays: dict[str, torch.Tensor]) -> Path:
    np.savez(path, **{name: array.numpy() for name, array in arrays.items()})  # pyright: ignore[reportArgumentType]
    return path


def test_image_tower_is_read_once_the_rest_is_named(tmp_path: Path) -> None:
    """SigLIP's form: both towers, a temperature and a bias, all under `params/`."""
    spec, dialect = google_spec("image tower, map")
    tower = send_out(link(google.rules(spec, dialect), spec, "google-npz"), random_state(spec))
    beside = {"txt/Embed_0/embedding": torch.zeros(3, 2), "txt/head/bias": torch.zeros(2), "t": torch.zeros(1)}
    both = {f"params/{name}": array for name, array in {**tower, **beside, "b": torch.zeros(1)}.items()}
    path = save_npz(tmp_path / "both.npz", both)
    with pytest.raises(FileProblem, match=r"more than an image model.*\n.*--drop b --drop t --drop txt"):
        read_foreign(path)
    bundle, _ = read_foreign(path, Reading(drop=("b", "t", "txt")))
    assert bundle.model.spec == spec
    write_foreign(bundle, tmp_path / "tower.npz", "big-vision")
    again = np.load(tmp_path / "tower.npz")
    assert set(again) == {f"params/{name}" for name in tower}
    assert all(np.array_equal(again[name], both[name].numpy()) for name in again)


@pytest.mark.parametrize("prefix", ["params/", "opt/target/", "opt/target/params/"])
@pytest.mark.parametrize("beside", [{}, {"state/step": torch.zeros(1), "state/mu/cls": torch.zeros(2)}])
def test_training_states_are_read_and_written_with_their_prefix(
    prefix: str, beside: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    if beside and prefix == "opt/target/params/":
        pytest.skip("no program of Google's writes that")
    spec, dialect = google_spec("scan")
    arrays = send_out(link(google.rules(spec, dialect), spec, "google-npz"), random_state(spec))
    arrays = {prefix + name: array for name, array in arrays.items()}
    path = save_npz(tmp_path / "a.npz", {**arrays, **beside})
    bundle, _ = read_foreign(path, Reading(drop=("state",) if beside else ()))
    assert bundle.model.spec == spec
    write_foreign(bundle, tmp_path / "b.npz", "big-vision")
    again = np.load(tmp_path / "b.npz")
    assert set(again) == arrays.keys()
    assert all(np.array_equal(again[name], array.numpy()) for name, array in arrays.items())


@pytest.mark.parametrize("beside", ["opt/state", "opt/target_ema", "state"])
def test_advice_on_an_optimizers_state_keeps_the_model(beside: str, tmp_path: Path) -> None:
    spec, dialect = google_spec("scan")
    arrays = send_out(link(google.rules(spec, dialect), spec, "google-npz"), random_state(spec))
    both = {f"opt/target/{name}": array for name, array in arrays.items()} | {f"{beside}/step": torch.zeros(1)}
    path = save_npz(tmp_path / "a.npz", both)
    with pytest.raises(FileProblem, match="more than an image model") as refused:
        read_foreign(path)
    assert f"--drop {beside}" in str(refused.value.hint) and f"drop=['{beside}']" in str(refused.value.hint)
    assert read_foreign(path, Reading(drop=(beside,)))[0].model.spec == spec


def test_class_token_does_not_hide_lost_positions_in_a_file_of_the_first_code() -> None:
    spec, dialect = google_spec("pre-linen with pre_logits")
    arrays = send_out(link(google.rules(spec, dialect), spec, "google-npz"), random_state(spec))
    del arrays["Transformer/posembed_input/pos_embedding"]
    with pytest.raises(FileProblem, match="lacks Transformer/posembed_input/pos_embedding"):
        google.read_spec(arrays, "x")


def test_bfloat16_as_numpy_keeps_it(tmp_path: Path) -> None:
    """numpy has no such type: Google's files hold two bytes of nothing in particular, `|V2`."""
    spec, dialect = google_spec("scan")
    arrays = send_out(link(google.rules(spec, dialect), spec, "google-npz"), random_state(spec))
    halves = {name: array.bfloat16() for name, array in arrays.items()}
    raw = {name: array.view(torch.int16).numpy().view("V2") for name, array in halves.items()}
    np.savez(tmp_path / "a.npz", **raw)  # pyright: ignore[reportArgumentType]
    bundle, _ = read_foreign(tmp_path / "a.npz")
    expected = bring_in(link(google.rules(spec, dialect), spec, "google-npz"), halves, spec, "x")
    for name, tensor in bundle.model.state_dict().items():
        assert torch.equal(tensor.float(), expected[name].float())


def test_bit_round_trip_with_and_without_counted_names(tmp_path: Path) -> None:
    state = random_state(BIT)
    arrays = send_out(link(bit.rules(BIT, BiTDialect()), BIT, "google-npz"), state)
    assert bit.recognises(arrays) and not google.recognises(arrays)
    counted = {
        name.replace("standardized_conv2d/", f"standardized_conv2d_{i}/"): array
        for i, (name, array) in enumerate(arrays.items())
    }
    for given in (arrays, counted):
        assert bit.read_spec(given, "x") == BIT
        back = bring_in(link(bit.rules(BIT, bit.read_dialect(given)), BIT, "x"), dict(given), BIT, "x")
        assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    bundle, report = read_foreign(save_npz(tmp_path / "a.npz", counted))
    assert (bundle.model.spec, report.matched, report.unexpected) == (BIT, len(arrays), ())
    write_foreign(bundle, tmp_path / "b.npz", "google-npz")
    with np.load(tmp_path / "b.npz") as again:
        assert set(again.files) == set(counted), "the numbers are remembered"


def test_bit_convolution_that_stands_there_twice_is_refused(tmp_path: Path) -> None:
    arrays = send_out(link(bit.rules(BIT, BiTDialect()), BIT, "google-npz"), random_state(BIT))
    name = "resnet/block1/unit01/b/standardized_conv2d/kernel"
    arrays[name.replace("2d/", "2d_9/")] = 2 * arrays[name]
    with pytest.raises(FileProblem, match=f"holds {name} 2 times"):
        read_foreign(save_npz(tmp_path / "a.npz", arrays))


def logits_of(spec: ModelSpec, state: dict[str, torch.Tensor], images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    model = load_state(build(spec), state, "x").double().eval()
    with torch.inference_mode():
        return model(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()


def doubles(arrays: dict[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: array.double().numpy() for name, array in arrays.items()}


def modern(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Old files as big_vision's loader mends them: its `fix_old_checkpoints` moves these names, and adds up the class token."""
    if "Transformer/pos_embedding" not in arrays:
        return arrays
    moved = dict(arrays)
    positions = moved.pop("Transformer/pos_embedding")
    if "cls" in moved:
        moved["cls"], positions = moved["cls"] + positions[:, :1], positions[:, 1:]
    head = ("probe", "MlpBlock_0/", "MultiHeadDotProductAttention_0/", "LayerNorm_0/")
    renamed = {f"MAPHead_0/{name}" if name.startswith(head) else name: array for name, array in moved.items()}
    return {**renamed, "pos_embedding": positions}


def computed_positions(side: int, width: int) -> np.ndarray[Any, Any]:
    """big_vision's `posemb_sincos_2d` on a square grid."""
    rows, cols = np.mgrid[:side, :side].reshape(2, -1, 1)
    omega = 10_000.0 ** -(np.arange(width // 4) / (width // 4 - 1))
    parts = (np.sin(cols * omega), np.cos(cols * omega), np.sin(rows * omega), np.cos(rows * omega))
    return np.concatenate(parts, axis=1)[None]


@pytest.mark.parametrize("case", WITH_LOGITS)
def test_logits_equal_the_official_equations(case: str) -> None:
    spec, dialect = google_spec(case)
    state = random_state(spec)
    arrays = send_out(link(google.rules(spec, dialect), spec, "google-npz"), state)
    images = np.random.default_rng(0).normal(size=(2, *spec.image_size, spec.in_channels))
    mended, computed = modern(doubles(arrays)), spec.pos == "sincos2d"
    mended |= {"pos_embedding": computed_positions(spec.grid[0], spec.width)} if computed else {}
    expected = reference.vit(mended, images, pre_linen=dialect.pre_linen, big_vision=dialect.big_vision)
    close = 1e-5 if computed else 1e-9  # computed in float32, as big_vision does
    np.testing.assert_allclose(logits_of(spec, state, images), expected, rtol=close, atol=close)


def test_bit_logits_equal_the_official_equations() -> None:
    state = random_state(BIT)
    arrays = send_out(link(bit.rules(BIT, BiTDialect()), BIT, "google-npz"), state)
    images = np.random.default_rng(0).normal(size=(2, 32, 48, 3))
    np.testing.assert_allclose(
        logits_of(BIT, state, images), reference.bit(doubles(arrays), images), rtol=1e-9, atol=1e-9
    )


def test_published_array_names_and_shapes_of_vit_b_16() -> None:
    spec = changed(parse_name("ViT-B/16"), {"head": "mlp-tanh", "num_classes": 21_843})
    assert isinstance(spec, ViTSpec)
    with torch.device("meta"):
        state = build(spec).state_dict()
    arrays = send_out(link(google.rules(spec, GoogleDialect(pre_linen=True)), spec, "google-npz"), state)
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    assert len(shapes) == 202
    block = "Transformer/encoderblock_11/"
    for name, shape in {
        "cls": (1, 1, 768),
        "embedding/kernel": (16, 16, 3, 768),
        "Transformer/posembed_input/pos_embedding": (1, 197, 768),
        f"{block}MultiHeadDotProductAttention_1/query/kernel": (768, 12, 64),
        f"{block}MultiHeadDotProductAttention_1/value/bias": (12, 64),
        f"{block}MultiHeadDotProductAttention_1/out/kernel": (12, 64, 768),
        f"{block}LayerNorm_2/scale": (768,),
        f"{block}MlpBlock_3/Dense_0/kernel": (768, 3072),
        "Transformer/encoder_norm/bias": (768,),
        "pre_logits/kernel": (768, 768),
        "head/kernel": (768, 21_843),
    }.items():
        assert shapes[name] == shape


@pytest.mark.parametrize("change", ["missing", "extra", "misshapen", "transposed"])
def test_every_array_is_accounted_for(change: str) -> None:
    spec, dialect = google_spec("linen")
    links = link(google.rules(spec, dialect), spec, "google-npz")
    arrays = send_out(links, random_state(spec))
    victim = "Transformer/encoderblock_1/MlpBlock_0/Dense_0/kernel"
    if change == "missing":
        del arrays[victim]
    elif change == "extra":
        arrays["opt/step"] = torch.zeros(1)
    else:
        arrays[victim] = arrays[victim][:-1] if change == "misshapen" else arrays[victim].T
    with pytest.raises(FileProblem, match="opt/step" if change == "extra" else victim):
        bring_in(links, dict(arrays), spec, "x")


def test_a_part_without_a_place_is_refused_by_name() -> None:
    spec = changed(TINY, {"registers": 2})
    assert isinstance(spec, ViTSpec)
    with pytest.raises(UsageError, match="no place for 'registers'"):
        link(google.rules(spec, GoogleDialect()), spec, "google-npz")


@pytest.mark.parametrize("name", ["Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel", "embedding/kernel"])
def test_arrays_too_broken_for_a_spec_are_refused_in_a_sentence(name: str) -> None:
    spec, dialect = google_spec("linen")
    arrays = send_out(link(google.rules(spec, dialect), spec, "google-npz"), random_state(spec))
    arrays[name] = torch.zeros(3)
    with pytest.raises((FileProblem, UsageError)):
        google.read_spec(arrays, "x")
