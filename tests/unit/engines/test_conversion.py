"""`convert` as a person calls it: every part named or refused, every change said, nothing half done."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import vitlab
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import build
from vitlab.models.spec import ViTSpec, changed
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle
from vitlab.weights.card import card_row
from vitlab.weights.containers import npz_chunks, read_arrays

SPEC = ViTSpec(
    width=64, depth=1, mlp_dim=96, heads=1, patch=4, image_size=(16, 16), num_classes=3, gelu="exact", head="mlp-tanh"
)


def bundle(folder: Path, seed: int = 0, **changes: Any) -> Path:
    model = build(changed(SPEC, changes), seed=0)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    save_bundle(folder, Bundle(model, Preprocess(image_size=(16, 16)), ("ant", "bee", "cat"), "card", {}))
    return folder


def state(path: Path) -> dict[str, torch.Tensor]:
    return vitlab.load(path, quiet=True).model.state_dict()


def test_a_part_that_has_no_place_is_refused_until_it_is_named(tmp_path: Path) -> None:
    start = bundle(tmp_path / "start")
    with pytest.raises(UsageError, match="no place for 'pre_logits") as refused:
        vitlab.convert(start, tmp_path / "x", to="timm")
    assert "--drop pre_logits" in str(refused.value)
    assert not (tmp_path / "x").exists()
    report = vitlab.convert(start, tmp_path / "x", to="timm", drop=["pre_logits"])
    assert "pre_logits left out" in report.notes[0]
    kept = {name: tensor for name, tensor in state(start).items() if not name.startswith("pre_logits.")}
    assert all(torch.equal(tensor, kept[name]) for name, tensor in state(tmp_path / "x").items())


def test_a_name_that_nothing_has_is_a_slip(tmp_path: Path) -> None:
    start = bundle(tmp_path / "start")
    with pytest.raises(UsageError, match=r"pre_logits.*head.*'prelogits'"):
        vitlab.convert(start, tmp_path / "x", drop=["prelogits"])
    vitlab.convert(start, tmp_path / "a.npz", to="google-npz")
    with pytest.raises(UsageError, match=r"nothing.*'prelogits'"):
        vitlab.convert(tmp_path / "a.npz", tmp_path / "x", drop=["prelogits"])


def test_arrays_of_the_source_are_counted(tmp_path: Path) -> None:
    vitlab.convert(bundle(tmp_path / "start"), tmp_path / "a.npz", to="google-npz")
    report = vitlab.convert(tmp_path / "a.npz", tmp_path / "x", drop=["head/*"])
    assert report.unexpected == ("head/bias", "head/kernel")
    first, second, *_ = report.sentences()
    total = report.matched + 2
    assert first == f"google-npz: {report.model}, {report.matched} of {total} arrays matched, none missing"
    assert second == "left out: head/bias, head/kernel"


def test_surgery_is_applied_on_the_way_and_reported(tmp_path: Path) -> None:
    start = bundle(tmp_path / "start")
    report = vitlab.convert(start, tmp_path / "x", classes=5, image_size=(24, 32))
    assert report.notes == ("head replaced 3 -> 5, zeros", "grid 4x4 -> 6x8, corner-bilinear", "images 16x16 -> 24x32")
    assert report.reshaped == ("pos.table", "head.weight", "head.bias")
    made = vitlab.load(tmp_path / "x")
    assert made.model.spec.image_size == made.preprocess.image_size == (24, 32)
    assert made.labels == ("0", "1", "2", "3", "4")
    assert "head replaced 3 -> 5" in (tmp_path / "x" / "card.md").read_text()


def test_card_has_the_command_that_was_given(tmp_path: Path) -> None:
    start, out = bundle(tmp_path / "my dir" / "my bundle"), tmp_path / "my dir" / "out b"

    def command_of(path: Path) -> str | None:
        return card_row((path / "card.md").read_text(), "command")

    vitlab.convert(start, out, classes=5, image_size=(24, 32), cls_in_pos=False)
    options = "--classes 5 --image-size 24,32 --no-cls-in-pos"
    assert command_of(out) == f"`vitlab convert '{start}' '{out}' {options}`"
    vitlab.load(start, image_size=12).save(tmp_path / "loaded")
    assert command_of(tmp_path / "loaded") == f"`vitlab convert '{start}' OUT --image-size 12`"
    foreign = tmp_path / "my dir" / "a.npz"
    vitlab.convert(start, foreign, to="google-npz")
    vitlab.convert(foreign, tmp_path / "again", gelu="exact", quiet=True)
    assert command_of(tmp_path / "again") == f"`vitlab convert '{foreign}' {tmp_path / 'again'} --gelu exact`"


def test_card_of_a_bundle_that_is_only_copied_stays(tmp_path: Path) -> None:
    vitlab.convert(bundle(tmp_path / "start"), tmp_path / "x")
    assert (tmp_path / "x" / "card.md").read_text() == "card"


def test_a_new_grid_means_the_same_as_the_old_at_another_size(tmp_path: Path) -> None:
    start = bundle(tmp_path / "start")
    vitlab.convert(start, tmp_path / "x", image_size=32)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before, after = vitlab.load(start).model, vitlab.load(tmp_path / "x").model
    with torch.inference_mode():
        torch.testing.assert_close(before(x), after(x))


def test_folding_opens_the_way_to_big_vision_and_back(tmp_path: Path) -> None:
    start = bundle(tmp_path / "start")
    with pytest.raises(UsageError, match=r"no place.*class token") as refused:
        vitlab.convert(start, tmp_path / "a.npz", to="big-vision")
    assert "--no-cls-in-pos" in str(refused.value)
    vitlab.convert(start, tmp_path / "a.npz", to="big-vision", cls_in_pos=False)
    with pytest.raises(UsageError, match=r"needs.*class token"):
        vitlab.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="google-npz")
    vitlab.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="google-npz", cls_in_pos=True)
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    # The file does not say which GELU; Google's is the tanh form.
    with torch.inference_mode():
        folded, whole = (vitlab.load(tmp_path / name, quiet=True).model(x) for name in ("a.npz", "b.npz"))
    assert torch.equal(folded, whole)


def test_mean_of_checkpoints(tmp_path: Path) -> None:
    paths = [bundle(tmp_path / str(seed), seed) for seed in range(3)]
    report = vitlab.convert(paths[0], tmp_path / "mean", average_with=paths[1:])
    assert report.notes == ("mean of 3 checkpoints",)
    states = [state(path) for path in paths]
    for name, tensor in state(tmp_path / "mean").items():
        torch.testing.assert_close(tensor, sum(one[name] for one in states) / 3)


def test_ema_is_picked_by_name(tmp_path: Path) -> None:
    start, other = bundle(tmp_path / "start", head="linear"), bundle(tmp_path / "other", 1, head="linear")
    vitlab.convert(start, tmp_path / "a.safetensors", to="timm")
    vitlab.convert(other, tmp_path / "b.safetensors", to="timm")
    first, second = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in "ab")
    torch.save({"model": first, "model_ema": second}, tmp_path / "both.pth")
    with pytest.raises(FileProblem, match=r"several.*model, model_ema"):
        vitlab.convert(tmp_path / "both.pth", tmp_path / "x")
    vitlab.convert(tmp_path / "both.pth", tmp_path / "x", part="model_ema")
    assert all(torch.equal(tensor, state(other)[name]) for name, tensor in state(tmp_path / "x").items())


def test_preprocessing_can_be_given_where_the_file_has_none(tmp_path: Path) -> None:
    vitlab.convert(bundle(tmp_path / "start"), tmp_path / "a.npz", to="google-npz")
    assert "convention is assumed" in " ".join(vitlab.convert(tmp_path / "a.npz", tmp_path / "w").notes)
    report = vitlab.convert(tmp_path / "a.npz", tmp_path / "x", preprocess="imagenet")
    assert report.notes == ()
    assert vitlab.load(tmp_path / "x").preprocess.mean == (0.485, 0.456, 0.406)
    again = vitlab.load(tmp_path / "a.npz", preprocess=str(tmp_path / "x" / "preprocess.json"), quiet=True)
    assert again.preprocess == vitlab.load(tmp_path / "x").preprocess
    with pytest.raises(UsageError, match=r"'imagnet'.*preprocessing"):
        vitlab.load(tmp_path / "a.npz", preprocess="imagnet")
    report = vitlab.convert(tmp_path / "start", tmp_path / "y", preprocess="imagenet")
    assert report.notes[0].startswith("Its own preprocessing was replaced: scaled to cover 18x18, centre of 16x16")
    assert vitlab.load(tmp_path / "y").preprocess == vitlab.load(tmp_path / "x").preprocess


def test_more_channels_take_arrays(tmp_path: Path) -> None:
    vitlab.convert(bundle(tmp_path / "start"), tmp_path / "x", channels=5)
    clf = vitlab.load(tmp_path / "x")
    pixels = torch.randint(0, 256, (20, 30, 5), dtype=torch.uint8).numpy()
    assert len(clf(pixels)) == 3
    with pytest.raises(UsageError, match="uint8"):
        clf("photo.jpg")
    with pytest.raises(UsageError, match="4 channel"):
        clf(pixels[:, :, :4])


# --- sizes of the positions and of the pictures -----------------------------------------------------------------------


def unlike_sizes(folder: Path) -> Path:
    """As DINOv2: positions for 16x16, pictures of 8x8."""
    made = vitlab.load(bundle(folder.with_name("start")), quiet=True).bundle
    save_bundle(folder, dataclasses.replace(made, preprocess=Preprocess(image_size=(8, 8))))
    return folder


@pytest.mark.parametrize(
    ("asked", "positions", "pictures", "reported"),
    [
        ({"image_size": 16}, 16, 16, ("images 8x8 -> 16x16",)),
        ({"image_size": 32}, 32, 32, ("grid 4x4 -> 8x8, corner-bilinear", "images 8x8 -> 32x32")),
        ({"patch_size": 5}, 20, 10, ("images 8x8 -> 10x10",)),
        ({"patch_size": 8}, 16, 8, ("grid 4x4 -> 2x2, corner-bilinear",)),
    ],
    ids=str,
)
def test_pictures_follow_their_own_size_and_not_that_of_the_positions(
    tmp_path: Path, asked: dict[str, int], positions: int, pictures: int, reported: tuple[str, ...]
) -> None:
    report = vitlab.convert(unlike_sizes(tmp_path / "b"), tmp_path / "x", **asked)  # pyright: ignore[reportArgumentType]
    made = vitlab.load(tmp_path / "x")
    assert made.model.spec.image_size == (positions, positions)
    assert made.preprocess.image_size == (pictures, pictures)
    assert tuple(note for note in report.notes if not note.startswith("patch ")) == reported


# --- what a person says of a file -------------------------------------------------------------------------------------


def bare(path: Path, out: Path) -> Path:
    """The same arrays without the description in the header, as strangers write them."""
    safetensors.torch.save_file(safetensors.torch.load_file(path), out)
    return out


def test_heads_are_stated_where_no_array_shows_them(tmp_path: Path) -> None:
    start = bundle(tmp_path / "start", head="linear", heads=4)
    vitlab.convert(start, tmp_path / "a.safetensors", to="timm")
    file = bare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert vitlab.load(file, quiet=True).model.spec.heads == 1
    reported = vitlab.load(file, heads=4, quiet=True)
    x = torch.randn(1, 3, 16, 16)
    with torch.inference_mode():
        assert torch.equal(reported.model(x), vitlab.load(start).model(x))
    report = vitlab.convert(file, tmp_path / "x", heads=4)
    reported = "No array shows this, so it is assumed: gelu=exact, image_size=(16, 16)."
    assert f"{reported} If it is wrong: vitlab convert --gelu, --grid (in Python: gelu=, grid=)" in report.notes
    with pytest.raises(FileProblem, match=r"5 heads.*64\n.*--heads"):
        vitlab.load(file, heads=5)
    vitlab.convert(start, tmp_path / "c.npz", to="google-npz")
    with pytest.raises(UsageError, match=r"heads.*4, not 2"):
        vitlab.load(tmp_path / "c.npz", heads=2)
    with pytest.raises(UsageError, match=r"heads.*4, not 2"):
        vitlab.load(tmp_path / "a.safetensors", heads=2)


def test_gelu_and_epsilon_are_stated_where_no_array_shows_them(tmp_path: Path) -> None:
    start = bundle(tmp_path / "start", head="linear", gelu="tanh", norm_eps=1e-3)
    x = torch.randn(1, 3, 16, 16)
    with torch.inference_mode():
        expected = vitlab.load(start).model(x)
        for to in ("timm", "hf", "google-npz", "torchvision"):
            out = tmp_path / f"{to}{'.npz' if to == 'google-npz' else '.safetensors'}"
            if to == "hf":
                vitlab.convert(start, tmp_path / "hf", to=to)
                bare(tmp_path / "hf" / "model.safetensors", out)
            else:
                vitlab.convert(start, out, to=to)
            file = out if to == "google-npz" else bare(out, tmp_path / f"bare-{out.name}")
            stated = vitlab.load(file, gelu="tanh", norm_eps=1e-3, quiet=True)
            torch.testing.assert_close(stated.model(x), expected)
            assert not torch.equal(vitlab.load(file, quiet=True).model(x), expected), "assumed otherwise"
    report = vitlab.convert(tmp_path / "hf.safetensors", tmp_path / "x", gelu="tanh", norm_eps=1e-3, heads=1)
    assert not any("gelu=" in note or "norm_eps=" in note for note in report.notes)
    with pytest.raises(UsageError, match=r"gelu.*tanh, not exact"):
        vitlab.load(tmp_path / "hf", gelu="exact")
    with pytest.raises(UsageError, match="own spec"):
        vitlab.load(start, gelu="exact")
    with pytest.raises(UsageError, match="gelu"):
        vitlab.load(file, gelu="relu")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("to", ["timm", "google-npz"])
def test_oblong_grid_is_stated(tmp_path: Path, to: Any) -> None:
    start = bundle(tmp_path / "start", head="linear", pool="gap", image_size=[16, 32])
    vitlab.convert(start, tmp_path / "timm.safetensors", to="timm")
    file = bare(tmp_path / "timm.safetensors", tmp_path / "bare.safetensors")
    if to == "google-npz":  # whose own code has square grids only
        vitlab.convert(bundle(tmp_path / "square", head="linear", pool="gap"), tmp_path / "square.npz", to=to)
        arrays = read_arrays(tmp_path / "square.npz").arrays
        name = "Transformer/posembed_input/pos_embedding"
        file = tmp_path / "oblong.npz"
        file.write_bytes(b"".join(npz_chunks({**arrays, name: state(start)["pos.table"]})))
    with pytest.raises(FileProblem, match=r"grid.*\n.*--grid.*grid=\("):
        vitlab.load(file)
    found = vitlab.load(file, grid=[4, 8], preprocess="minus-one-to-one", quiet=True)
    assert found.model.spec.image_size == (16, 32)
    assert torch.equal(found.model.state_dict()["pos.table"], state(start)["pos.table"])
    for grid in ((4, 7), (8,), 32, (0, 1), ("4", "8")):
        with pytest.raises(vitlab.VitlabError):
            vitlab.load(file, grid=grid)  # pyright: ignore[reportArgumentType]


def test_load_leaves_out_and_carries_as_convert_does(tmp_path: Path) -> None:
    vitlab.convert(bundle(tmp_path / "start"), tmp_path / "x.npz", to="google-npz")
    arrays = {**read_arrays(tmp_path / "x.npz").arrays, "step": torch.zeros(1)}
    (tmp_path / "y.npz").write_bytes(b"".join(npz_chunks(arrays)))
    with pytest.raises(FileProblem, match=r"no use.*step\n.*drop=\["):
        vitlab.load(tmp_path / "y.npz")
    vitlab.convert(tmp_path / "y.npz", tmp_path / "z", drop=["step", "head"], image_size=(16, 24))
    found = vitlab.load(tmp_path / "y.npz", drop=["step", "head"], image_size=(16, 24), quiet=True)
    expected = vitlab.load(tmp_path / "z")
    assert (found.model.spec, found.preprocess, found.labels) == (expected.model.spec, expected.preprocess, ())
    assert all(map(torch.equal, found.model.state_dict().values(), expected.model.state_dict().values()))
    assert vitlab.load(tmp_path / "start", drop=["pre_logits"], quiet=True).model.spec.head == "linear"
    with pytest.raises(UsageError, match=r"left out.*'cls'"):
        vitlab.load(tmp_path / "start", drop=["cls"])


def test_pre_logits_of_a_foreign_file_are_dropped_with_the_same_warning(tmp_path: Path) -> None:
    vitlab.convert(bundle(tmp_path / "start"), tmp_path / "a.npz", to="google-npz")
    report = vitlab.convert(tmp_path / "a.npz", tmp_path / "x", drop=["pre_logits"])
    assert report.notes[0] == "pre_logits left out: the head was trained behind it and means nothing without it"
    report = vitlab.convert(tmp_path / "a.npz", tmp_path / "y", drop=["head"])
    assert report.notes[0] == "head of 3 classes left out"


def test_mean_of_foreign_files_reads_them_all_alike(tmp_path: Path) -> None:
    parts: dict[str, Any] = {}
    for seed, name in enumerate(("model", "model_ema")):
        vitlab.convert(bundle(tmp_path / name, seed, head="linear"), tmp_path / f"{name}.safetensors", to="timm")
        parts[name] = safetensors.torch.load_file(tmp_path / f"{name}.safetensors")
    for file in ("a.pth", "b.pth"):
        torch.save(parts, tmp_path / file)
    vitlab.convert(
        tmp_path / "a.pth", tmp_path / "x", average_with=[tmp_path / "b.pth"], part="model_ema", preprocess="imagenet"
    )
    assert vitlab.load(tmp_path / "x").preprocess.mean == (0.485, 0.456, 0.406)
    for name, tensor in state(tmp_path / "model_ema").items():
        torch.testing.assert_close(state(tmp_path / "x")[name], tensor)


def test_preprocessing_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    start = bundle(tmp_path / "start")
    vitlab.convert(start, tmp_path / "a.npz", to="google-npz")
    four = Preprocess(mode="array", image_size=(16, 16), mean=(0.5,) * 4, std=(0.5,) * 4)
    (tmp_path / "p.json").write_text(json.dumps(dataclasses.asdict(four)))
    for path in (start, tmp_path / "a.npz"):
        with pytest.raises(FileProblem, match=r"4 channel.*\b3\b"):
            vitlab.load(path, preprocess=str(tmp_path / "p.json"))


def test_way_out_that_a_refusal_names_leads_out(tmp_path: Path) -> None:
    made = vitlab.load(bundle(tmp_path / "start", head="linear"), quiet=True).bundle
    rule = dataclasses.replace(made.preprocess, resize="shorter-side", crop_frac=0.875)
    save_bundle(tmp_path / "b", dataclasses.replace(made, preprocess=rule))
    (tmp_path / "p.json").write_text(json.dumps(dataclasses.asdict(made.preprocess)))
    for to in ("timm", "hf"):
        with pytest.raises(UsageError, match=r"\n.*--preprocess .*resize=squash"):
            vitlab.convert(tmp_path / "b", tmp_path / to, to=to, image_size=(32, 64))
        vitlab.convert(tmp_path / "b", tmp_path / to, to=to, image_size=(32, 64), preprocess=str(tmp_path / "p.json"))
        assert vitlab.load(tmp_path / to, quiet=True).preprocess.image_size == (32, 64)


def test_only_what_can_be_left_out_is_proposed(tmp_path: Path) -> None:
    start = bundle(tmp_path / "start", head="linear", layer_scale=0.1)
    with pytest.raises(UsageError, match=r"no place for 'blocks\.0\.scale1'") as refused:
        vitlab.convert(start, tmp_path / "x.npz", to="google-npz")
    assert refused.value.hint is None
    with pytest.raises(FileProblem, match=r"\n.*--part model.*part='model'"):
        torch.save({"model": {"a": torch.zeros(1)}, "ema": {"a": torch.zeros(1)}}, tmp_path / "x.pth")
        vitlab.load(tmp_path / "x.pth")


# --- where weights lie ------------------------------------------------------------------------------------------------


def test_weights_are_found_by_the_folder_or_by_the_file(tmp_path: Path) -> None:
    start = bundle(tmp_path / "start", head="linear", heads=4, gelu="tanh")
    assert vitlab.load(start / "model.safetensors").labels == ("ant", "bee", "cat"), "the bundle around it is meant"
    vitlab.convert(start, tmp_path / "hf", to="hf")
    inside = vitlab.load(tmp_path / "hf" / "model.safetensors", quiet=True)
    assert (inside.model.spec, inside.labels) == (vitlab.load(tmp_path / "hf").model.spec, ("ant", "bee", "cat"))
    (tmp_path / "one").mkdir()
    vitlab.convert(start, tmp_path / "one" / "a.npz", to="google-npz")
    assert vitlab.load(tmp_path / "one", quiet=True).model.spec.heads == 4
    vitlab.convert(start, tmp_path / "one" / "b.npz", to="google-npz")
    with pytest.raises(FileProblem, match=r"several.*a\.npz, b\.npz"):
        vitlab.load(tmp_path / "one")


def test_temperature_is_kept_until_the_model_is_changed(tmp_path: Path) -> None:
    start = read_bundle(bundle(tmp_path / "start"))
    save_bundle(tmp_path / "fitted", dataclasses.replace(start, temperature=1.5))
    vitlab.convert(tmp_path / "fitted", tmp_path / "same")
    vitlab.convert(tmp_path / "fitted", tmp_path / "fewer", labels=["ant", "bee"])
    assert (read_bundle(tmp_path / "same").temperature, read_bundle(tmp_path / "fewer").temperature) == (1.5, 1)


def test_thresholds_are_kept_until_the_model_is_changed_and_are_then_an_even_chance(tmp_path: Path) -> None:
    start = read_bundle(bundle(tmp_path / "start"))
    fitted = dataclasses.replace(start, thresholds=tuple(float(k) for k in range(len(start.labels))))
    save_bundle(tmp_path / "fitted", fitted)
    vitlab.convert(tmp_path / "fitted", tmp_path / "same")
    vitlab.convert(tmp_path / "fitted", tmp_path / "fewer", labels=["ant", "bee"])
    assert read_bundle(tmp_path / "same").thresholds == fitted.thresholds
    assert read_bundle(tmp_path / "fewer").thresholds == (0.0, 0.0), "the images can still have several labels"
