"""`vitlab inspect`: which figures are made of which model, what is written, and what is refused before any work."""

import dataclasses
import io
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow_cases import slow_after

import vitlab
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.engines import inspecting
from vitlab.models.build import build
from vitlab.models.spec import TrunkSpec, ViTSpec
from vitlab.runs.inspection_run import InspectResult
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle

SMALL: dict[str, Any] = {"width": 16, "depth": 3, "mlp_dim": 32, "heads": 2, "patch": 8, "image_size": (32, 32)}
QUIETLY: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True}
METHODS = ("attention", "rollout", "gradient_rollout", "grad_cam", "integrated_gradients")
SPECS: dict[str, dict[str, Any]] = {
    "class token": {},
    "registers": {"registers": 2},
    "mean pooling": {"pool": "gap"},
    "attention pooling": {"pool": "map"},
    "axial": {"attention": "axial", "pool": "gap"},
    "relative": {"pos": "relative"},
    "sine": {"pos": "sincos2d"},
    "two-dimensional": {"pos": "learned2d", "pos_at": "every"},
    "no positions": {"pos": "none"},
    "hybrid": {"stem": TrunkSpec(stages=(1, 1)), "patch": 1, "image_size": (32, 48)},
    "rectangle": {"image_size": (32, 48)},
    "no head": {"num_classes": 0},
}

SOAK = os.environ.get("VITLAB_SOAK") == "1"
SOME = ("attention pooling", "no positions", "hybrid", "no head")  # each draws something else


def bundle_of(folder: Path, **changes: Any) -> Path:
    spec = ViTSpec(**{**SMALL, "num_classes": 3, **changes})
    model = build(spec, seed=1)
    if model.head is not None:
        with torch.no_grad():  # a head starts at zero, and would say the same of everything
            model.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    labels = ("ant", "bee", "cat")[: spec.num_classes]
    save_bundle(folder, Bundle(model, Preprocess(image_size=spec.image_size), labels, "card", {}))
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for number in range(6):
        pixels = draw.integers(0, 256, (5, 7, 3), np.uint8)
        Image.fromarray(pixels).resize((70, 50), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle_of(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def inspected(model: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> InspectResult:
    return vitlab.inspect(model, photos, photos=2, out=tmp_path_factory.mktemp("inspected") / "out", **QUIETLY)


def test_everything_is_written_and_in_the_result(model: Path, photos: Path, inspected: InspectResult) -> None:
    result = inspected
    assert result.grid == (4, 4) and result.tokens[:2] == ("cls", "patch(0,0)") and len(result.photos) == 2
    stored = json.loads((result.out / "inspection.json").read_text())
    assert stored["model"]["attention"]["images"] == 6
    assert set(stored["model"]["saliency"]) == {name.replace("_", "-") for name in METHODS}
    with np.load(result.out / "arrays.npz", allow_pickle=False) as arrays:
        assert set(arrays) == set(result.arrays)
        assert arrays["attention_distance"].shape == (3, 2)
        assert arrays["cka"].shape == (3, 3) and arrays["tokens"].tolist() == list(result.tokens)
        for name in METHODS:
            assert arrays[f"saliency_{name}"].shape == (2, 4, 4)
            assert arrays[f"deletion_{name}"].shape == (2, len(arrays["fractions"]))
        np.testing.assert_allclose(
            arrays["lens_logits"][-1],
            vitlab.load(model, quiet=True).logits([photos / Path(name).name for name in result.photos]).numpy(),
            atol=1e-4,
        )
    files = {path.name for path in result.out.iterdir()}
    assert files == {*result.figures, "inspection.json", "arrays.npz", "report.html", "manifest.json"}
    for name, data in result.figures.items():
        assert (result.out / name).read_bytes() == data
        if name.endswith(".png"):
            Image.open(io.BytesIO(data)).verify()
        assert name.replace(".png", ".svg") in result.figures  # every picture in both formats
    page = result.report.read_text()
    for printed in (
        "Saliency maps",
        "Do the maps mean anything?",
        "Mean attention distance",
        "Filters",
        "Positions",
        "CKA",
    ):
        assert printed in page
    assert any("Report:" in line for line in result.sentences())


@pytest.mark.parametrize("kind", SPECS if SOAK else slow_after(0, SOME))
def test_every_kind_of_vit_has_all_that_it_can_have(kind: str, photos: Path, tmp_path: Path) -> None:
    result = vitlab.inspect(bundle_of(tmp_path / "m", **SPECS[kind]), photos, out=tmp_path / "out", photos=2, **QUIETLY)
    wanted = {"filters", "attention_distance", "saliency_rollout", "patch_pca", "token_norms", "lens_similarity", "cka"}
    assert wanted <= set(result.arrays)
    assert ("position_similarity" in result.arrays) == (kind != "no positions")
    assert ("lens_logits" in result.arrays) == (kind != "no head")
    assert bool(result.notes) == (kind == "no positions")
    rows, cols = result.grid
    for name in METHODS:
        assert result.arrays[f"saliency_{name}"].shape == (2, rows, cols)
        assert np.isfinite(result.arrays[f"saliency_{name}"]).all()


@pytest.mark.slow
def test_two_models_stand_beside_each_other(model: Path, photos: Path, tmp_path: Path) -> None:
    finer = bundle_of(tmp_path / "finer", patch=4, depth=2)
    result = vitlab.inspect(model, photos, compare=finer, out=tmp_path / "out", photos=1, **QUIETLY)
    assert result.arrays["attention_distance_b"].shape == (2, 2)
    assert result.arrays["saliency_rollout_b"].shape == (1, 8, 8)
    assert result.arrays["cka"].shape == (3, 2)
    assert {"filters.svg", "filters-b.svg", "saliency-1-b.png"} <= set(result.figures)
    assert result.numbers["compare"]["name"] == "finer"


def test_without_images_the_weights_are_shown(model: Path, tmp_path: Path) -> None:
    result = vitlab.inspect(model, out=tmp_path / "out", **QUIETLY)
    assert result.photos == () and {"filters.png", "positions.svg"} <= set(result.figures)
    assert not any(name.startswith(("saliency", "attention")) for name in result.arrays)


@pytest.mark.slow
def test_a_run_shows_the_images_that_it_held_out(tmp_path: Path) -> None:
    few = ["train.steps=2", "train.batch_size=16", "data.image_size=[16,16]"]
    run = vitlab.train(
        "digits", model="ViT-w16d2m32h2/8", init="scratch", overrides=few, out=tmp_path / "run", **QUIETLY
    )
    result = vitlab.inspect(run.run, figures=["distance"], max_images=20, photos=3, out=tmp_path / "out", **QUIETLY)
    split = (Path(run.run) / "split.csv").read_text()
    held_out = {line.split(",")[0] for line in split.splitlines() if line.endswith(",test")}
    assert set(result.photos) <= held_out and len(held_out) < 400
    assert result.numbers["model"]["attention"]["images"] == 20


def test_each_seed_measures_photos_of_its_own(model: Path, photos: Path, tmp_path: Path) -> None:
    """Of six, two at a time: the three sets together are all, so that their means have the mean of all."""

    def distance(name: str, **options: int) -> np.ndarray[Any, Any]:
        found = vitlab.inspect(model, photos, figures=["distance"], photos=1, out=tmp_path / name, **options, **QUIETLY)
        return found.arrays["attention_distance"]

    sets = [distance(f"seed-{seed}", max_images=2, seed=seed) for seed in range(4)]
    np.testing.assert_allclose(np.mean(sets[:3], axis=0), distance("all"), rtol=1e-5)
    assert all((one != other).any() for one, other in itertools.combinations(sets[:3], 2))
    np.testing.assert_array_equal(sets[3], sets[0], err_msg="where no photos are left, it begins again")


def test_only_what_was_asked_for_is_made(model: Path, photos: Path, tmp_path: Path) -> None:
    result = vitlab.inspect(model, photos, figures=["filters", "entropy"], out=tmp_path / "out", **QUIETLY)
    assert {name.split(".")[0] for name in result.figures} == {"filters", "attention-entropy"}
    assert "saliency_rollout" not in result.arrays


def test_figures_of_images_are_refused_where_there_are_none(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="saliency is made of images"):
        vitlab.inspect(model, figures=["filters", "saliency"], out=tmp_path / "out", **QUIETLY)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_few_photos_have_all_but_what_needs_more(count: int, model: Path, photos: Path, tmp_path: Path) -> None:
    given = sorted(photos.iterdir())[:count]
    result = vitlab.inspect(model, given, photos=1, out=tmp_path / "out", **QUIETLY)
    assert "cka" not in result.arrays and "saliency_rollout" in result.arrays
    assert f"CKA needs at least 4 images, not {count}" in result.notes


@pytest.mark.slow
def test_a_model_of_several_labels_is_judged_by_each_labels_own_probability(photos: Path, tmp_path: Path) -> None:
    folder = bundle_of(tmp_path / "single")
    bundle = read_bundle(folder)
    save_bundle(tmp_path / "several", dataclasses.replace(bundle, thresholds=(0.0,) * 3))
    result = vitlab.inspect(
        tmp_path / "several", photos, photos=2, figures=["saliency", "lens"], out=tmp_path / "out", **QUIETLY
    )
    chances = [row[0]["p"] for row in result.numbers["model"]["predictions"]]
    np.testing.assert_allclose(result.arrays["deletion_rollout"][:, 0], chances, atol=0.02)
    lens = (result.out / "lens.svg").read_text()
    assert (
        lens
        != (
            vitlab.inspect(folder, photos, photos=2, figures=["lens"], out=tmp_path / "one", **QUIETLY).out / "lens.svg"
        ).read_text()
    )


def test_models_that_see_different_parts_of_a_photo_have_pictures_of_their_own(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    wide = bundle_of(tmp_path / "wide", image_size=(32, 48))
    same, other = (
        vitlab.inspect(model, photos, compare=each, figures=["viewer"], photos=2, out=tmp_path / name, **QUIETLY)
        for name, each in (("same", bundle_of(tmp_path / "finer", patch=4)), ("other", wide))
    )
    assert same.report.read_text().count('alt="" hidden') == 0
    assert other.report.read_text().count('alt="" hidden') == 2


def test_heads_are_those_of_the_layers_and_the_patch_that_were_named(model: Path, photos: Path, tmp_path: Path) -> None:
    result = vitlab.inspect(
        model, photos, figures=["heads"], layers=[-1], heads=[1], query=[2, 3], out=tmp_path / "out", **QUIETLY
    )
    assert set(result.figures) == {"heads-layer-3.svg", "heads-layer-3.png"}
    assert "patch (2, 3)" in result.report.read_text()


@pytest.mark.slow
def test_maps_are_about_the_class_that_was_named(model: Path, photos: Path, tmp_path: Path) -> None:
    ant, cat = (
        vitlab.inspect(model, photos, label=label, figures=["saliency"], photos=1, out=tmp_path / label, **QUIETLY)
        for label in ("ant", "cat")
    )
    same = "saliency_rollout"  # knows no class
    np.testing.assert_array_equal(ant.arrays[same], cat.arrays[same])
    for name in ("gradient_rollout", "grad_cam", "integrated_gradients"):
        assert not np.allclose(ant.arrays[f"saliency_{name}"], cat.arrays[f"saliency_{name}"])


@pytest.mark.slow
def test_rollout_of_some_layers_without_the_identity_is_another(
    model: Path, photos: Path, inspected: InspectResult, tmp_path: Path
) -> None:
    short, plain = (
        vitlab.inspect(model, photos, figures=["saliency"], photos=1, out=tmp_path / str(i), **how, **QUIETLY)
        for i, how in enumerate(({"depth": 1}, {"identity": False}))
    )
    assert short.photos == plain.photos == inspected.photos[:1]
    maps = [result.arrays["saliency_rollout"][0] for result in (inspected, short, plain)]
    assert not np.allclose(maps[0], maps[1]) and not np.allclose(maps[0], maps[2])
    assert "through the first 1 layers alone" in short.report.read_text()
    assert "without the residual path" in plain.report.read_text()


@pytest.mark.slow
def test_random_weights_are_rolled_out_as_the_model_is(
    model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With its own weights in place of random ones, every map is the same again.
    monkeypatch.setattr(inspecting, "randomised", lambda same, **_: same)
    result = vitlab.inspect(
        model, photos, figures=["saliency"], photos=2, depth=1, identity=False, out=tmp_path / "out", **QUIETLY
    )
    np.testing.assert_allclose(result.arrays["randomised_rollout"], 1, atol=1e-6)


def test_outliers_are_counted_at_the_layer_that_the_page_shows(model: Path, photos: Path, tmp_path: Path) -> None:
    result = vitlab.inspect(model, photos, figures=["norms"], out=tmp_path / "out", **QUIETLY)
    counted, outliers = result.numbers["model"]["norm_outliers"], result.arrays["norm_outliers"]
    assert counted["patches"] == outliers[counted["layer"] - 1].sum() == outliers.sum(axis=(1, 2, 3)).max()


def test_rank_correlation_is_the_one_that_the_verdict_is_of(inspected: InspectResult) -> None:
    for method, numbers in inspected.numbers["model"]["saliency"].items():
        rho = np.abs(inspected.arrays[f"randomised_{method.replace('-', '_')}"]).mean()
        assert numbers["randomised_weights_correlation"] == pytest.approx(rho, abs=1e-4)


def test_a_file_that_cannot_be_read_gives_its_place_to_another(model: Path, photos: Path, tmp_path: Path) -> None:
    given = [*sorted(photos.iterdir()), tmp_path / "broken.jpg"]
    given[-1].write_bytes(b"no picture")
    result = vitlab.inspect(model, given, photos=6, figures=["distance"], out=tmp_path / "out", **QUIETLY)
    assert len(result.photos) == 6 and not any("broken" in name for name in result.photos)
    assert result.numbers["model"]["attention"]["images"] == 6
    with pytest.raises(FileProblem, match="none of the 1 images"):
        vitlab.inspect(model, given[-1], out=tmp_path / "none", **QUIETLY)


@pytest.mark.slow
def test_the_same_call_writes_the_same_numbers(
    model: Path, photos: Path, inspected: InspectResult, tmp_path: Path
) -> None:
    first, second = inspected, vitlab.inspect(model, photos, photos=2, out=tmp_path / "again", **QUIETLY)
    assert first.figures == second.figures
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, second.arrays[name])


REFUSED: dict[str, dict[str, Any]] = {
    "--figures": {"figures": ["rollouts"]},
    "names none": {"figures": []},
    "--photos": {"photos": 0},
    "--max-images": {"max_images": 0},
    "class": {"label": "dog"},
    "layer": {"layers": [7]},
    "head": {"heads": [2]},
    "--depth": {"depth": 4},
    "patch": {"query": [4, 0]},
    "--query": {"query": [4]},
    "components": {"components": 1000},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_a_model_has_not_is_refused_before_any_work(word: str, model: Path, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=word):
        vitlab.inspect(model, photos, out=tmp_path / "out", **REFUSED[word], **QUIETLY)
    assert not (tmp_path / "out").exists()


# --- models without a sequence of tokens ------------------------------------------------------------------------------

OTHERS = ("BiT-R26x1", "EfficientNet-B0", "BiT-R26x1+NL", "AxialResNet-26-w8")
SHORT: dict[str, dict[str, Any]] = {  # of some, one unit in each stage is enough to look at
    "BiT-R26x1": {"trunk": {"stages": [1, 1, 1, 1]}},
    "EfficientNet-B0": {"depths": [1] * 7},
    "BiT-R26x1+NL": {"trunk": {"stages": [1, 2, 2, 1]}},
}
OF_ATTENTION = ("attention_distance", "attention_distance_with_prefix", "attention_entropy", "attention_to_prefix")


class Others(dict[str, Path]):
    """Models by name, each made when the first test asks for it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        model = vitlab.create_model(name, num_classes=3, image_size=64, seed=1, overrides=SHORT.get(name))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        self[name] = self._folder / name
        vitlab.save(model, self[name], labels=("ant", "bee", "cat"))
        return self[name]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models with a head that tells classes apart, and attention that takes part."""
    return Others(tmp_path_factory.mktemp("others"))


@pytest.mark.parametrize("name", OTHERS if SOAK else slow_after(1, OTHERS[1:]))
def test_a_model_without_tokens_has_what_makes_sense_for_it(
    name: str, others: dict[str, Path], photos: Path, tmp_path: Path
) -> None:
    attends = name.startswith("Axial") or name.endswith("+NL")
    result = vitlab.inspect(others[name], photos, out=tmp_path / "out", photos=2, **QUIETLY)
    maps = [
        f"{kind}_{way}"
        for way in ("grad_cam", "integrated_gradients")
        for kind in ("saliency", "deletion", "insertion", "randomised")
    ]
    common = {"photos", "grid", "tokens", "fractions", "deletion_random", "insertion_random", *maps}
    common |= {"filters", "filters_explained", "first_filters", "patch_pca", "patch_similarity", "cka"}
    assert set(result.arrays) == common | (set(OF_ATTENTION) if attends else set())
    assert result.grid == (2, 2) and result.tokens == ("patch(0,0)", "patch(0,1)", "patch(1,0)", "patch(1,1)")
    for method in ("grad_cam", "integrated_gradients"):
        assert result.arrays[f"saliency_{method}"].shape == (2, 2, 2)
        assert np.isfinite(result.arrays[f"saliency_{method}"]).all()
    assert set(result.numbers["model"]["saliency"]) == {"grad-cam", "integrated-gradients"}
    drawn = {figure.rsplit(".", 1)[0] for figure in result.figures}
    assert {"filters", "saliency-1", "features", "deletion", "insertion"} <= drawn
    assert ("attention-distance" in drawn) == ("attention-2" in drawn) == attends
    assert any(each.startswith("heads-layer-") for each in drawn) == name.startswith("Axial")
    (note,) = result.notes
    assert ("no attention and no tokens" in note) != attends and ("grids that shrink" in note) == attends
    page = result.report.read_text()
    assert page.count(note) == 1 and "Do the maps mean anything?" in page and "Token norms" not in page
    assert ("Mean attention distance" in page) == attends


@pytest.mark.slow
def test_each_layer_names_its_grid(others: dict[str, Path], photos: Path, tmp_path: Path) -> None:
    axial, non_local = (
        vitlab.inspect(others[name], photos, figures=["distance"], out=tmp_path / name[:3], **QUIETLY)
        for name in ("AxialResNet-26-w8", "BiT-R26x1+NL")
    )
    assert axial.arrays["attention_distance"].shape == (16, 8)
    layers = axial.numbers["model"]["attention"]["layers"]
    assert [layer["name"] for layer in layers[:2]] == ["stage0/unit00/down", "stage0/unit00/across"]
    assert layers[0]["grid"] == [16, 16] and layers[-1]["grid"] == [4, 4] and layers[-1]["stride"] == 16
    assert layers[0]["uniform_distance_px"] == pytest.approx(4 * (16**2 - 1) / (3 * 16), abs=0.01)
    assert non_local.arrays["attention_distance"].shape == (2, 1)
    layers = non_local.numbers["model"]["attention"]["layers"]
    assert [(layer["grid"], layer["key_grid"]) for layer in layers] == [([8, 8], [4, 4]), ([4, 4], [2, 2])]
    assert "stage2/unit01" in non_local.report.read_text()


@pytest.mark.slow
def test_head_maps_on_shrinking_grids_are_those_that_were_named(
    others: dict[str, Path], photos: Path, tmp_path: Path
) -> None:
    model = others["AxialResNet-26-w8"]
    first, other = (
        vitlab.inspect(
            model, photos, figures=["heads"], layers=[4], heads=[1], query=query, photos=1, out=tmp_path / str(query[0]),
            **QUIETLY,
        )
        for query in ([0, 0], [1, 1])
    )  # fmt: skip
    names = {f"{name}.{ending}" for name in ("attention-1", "heads-layer-5") for ending in ("svg", "png")}
    assert set(first.figures) == names and all(first.figures[name] != other.figures[name] for name in names)
    assert "(1, 1) of 2x2" in other.report.read_text() and "stage1/unit01/down" in other.report.read_text()


@pytest.mark.slow
def test_a_cnn_stands_beside_a_vit(model: Path, others: dict[str, Path], photos: Path, tmp_path: Path) -> None:
    result = vitlab.inspect(model, photos, compare=others["BiT-R26x1+NL"], out=tmp_path / "out", photos=1, **QUIETLY)
    assert {"saliency_rollout", "saliency_grad_cam_b", "attention_distance_b"} <= set(result.arrays)
    assert "saliency_rollout_b" not in result.arrays and result.arrays["cka"].shape == (3, 4)
    assert {"attention-1-b.png", "filters-b.png", "attention-distance.png"} <= set(result.figures)


def test_without_images_a_cnn_shows_its_filters(others: dict[str, Path], tmp_path: Path) -> None:
    result = vitlab.inspect(others["EfficientNet-B0"], out=tmp_path / "out", **QUIETLY)
    assert set(result.figures) == {"filters.svg", "filters.png"} and result.arrays["first_filters"].shape == (
        32,
        3,
        3,
        3,
    )
    assert "All 32 filters of the first convolution" in result.report.read_text()
    some = vitlab.inspect(others["EfficientNet-B0"], components=5, out=tmp_path / "some", **QUIETLY)
    assert "first_filters" not in some.arrays and "The first 5 principal components" in some.report.read_text()


NOT_OF_OTHERS: dict[str, dict[str, Any]] = {
    r"--figures heads,distance: BiT-R\(1,1,1,1\)x1 \(.*\) has no attention": {
        "figures": ["filters", "heads", "distance"]
    },
    "--figures positions": {"figures": ["positions"]},
    "--layers: a BiT model has no attention": {"layers": [0]},
    "--query": {"query": [0, 0]},
    "--depth": {"depth": 1},
    "--no-identity": {"identity": False},
}


@pytest.mark.parametrize("words", NOT_OF_OTHERS)
def test_what_a_cnn_has_not_is_refused_where_it_is_named(
    words: str, others: dict[str, Path], photos: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        vitlab.inspect(others["BiT-R26x1"], photos, out=tmp_path / "out", **NOT_OF_OTHERS[words], **QUIETLY)
    assert not (tmp_path / "out").exists()


def test_figures_of_tokens_are_refused_where_grids_shrink(
    others: dict[str, Path], photos: Path, tmp_path: Path
) -> None:
    for how in ({"figures": ["viewer"]}, {"figures": ["lens"]}, {"depth": 2}, {"layers": [16]}, {"heads": [8]}):
        with pytest.raises(UsageError, match=r"grids that shrink|no layer 16|no head 8"):
            vitlab.inspect(others["AxialResNet-26-w8"], photos, out=tmp_path / "out", **how, **QUIETLY)


def test_nothing_that_exists_is_overwritten(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        vitlab.inspect(model, out=tmp_path, **QUIETLY)


def test_names_of_photos_are_text_on_the_page(model: Path, photos: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "<img src=x onerror=alert(1)>.png"
    hostile.write_bytes(next(photos.iterdir()).read_bytes())
    result = vitlab.inspect(model, hostile, figures=["viewer", "heads", "lens"], out=tmp_path / "out", **QUIETLY)
    assert "<img src=x" not in result.report.read_text()
