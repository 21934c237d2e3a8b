"""The answer of /v1/explain: its maps are those of the classifier, of rollout and of `model.attention`, for every family."""

import base64
import dataclasses
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow_cases import slow_after

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.decode import ORIENTATION
from vitlab.data.preprocess import Preprocess
from vitlab.engines.classifier import Classifier
from vitlab.inspection.rollout import rollout_rows
from vitlab.inspection.saliency import METHODS, methods_of
from vitlab.inspection.scales import measured, times_uniform
from vitlab.models.build import build
from vitlab.models.families import FAMILIES
from vitlab.models.names import parse_name
from vitlab.models.spec import AxialResNetSpec, BiTSpec, ModelSpec, ViTSpec, bit_trunk, changed
from vitlab.models.vit import ViT
from vitlab.serving.explaining import describe_methods, draw, explain, see
from vitlab.weights.bundle import Bundle

LABELS = ("ant", "<b>bee</b>", "Käfer", "d", "e", "f", "g")
SMALL = ViTSpec(width=16, depth=3, mlp_dim=32, heads=2, patch=4, image_size=(16, 24), num_classes=7)
WITH_TOKENS: dict[str, ModelSpec] = {
    "class token": SMALL,
    "mean of patches": changed(SMALL, {"pool": "gap"}),
    "attention pooling": changed(SMALL, {"pool": "map"}),
    "registers": changed(SMALL, {"registers": 2}),
    "no classes": changed(SMALL, {"num_classes": 0}),
}
WITHOUT_TOKENS: dict[str, ModelSpec] = {
    "BiT": BiTSpec(trunk=bit_trunk((1, 2), 1), image_size=(16, 24), num_classes=7),
    "AxialResNet": AxialResNetSpec(stages=(1, 1), width=8, image_size=(16, 24), num_classes=7),
    "EfficientNet": changed(parse_name("EfficientNet-B0"), {"image_size": [64, 96], "num_classes": 7}),
}
EVERY = {**WITH_TOKENS, **WITHOUT_TOKENS}


def classifier(spec: ModelSpec, thresholds: tuple[float, ...] = (), **rule: Any) -> Classifier:
    model = build(spec, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    preprocess = Preprocess(image_size=spec.image_size, mean=(0.5,) * 3, std=(0.5,) * 3, **rule)
    labels = LABELS[: spec.num_classes]
    bundle = Bundle(model, preprocess, labels, "card", {})
    return Classifier(dataclasses.replace(bundle, thresholds=thresholds) if thresholds else bundle, "cpu")


def photo(size: tuple[int, int] = (90, 60), kind: str = "PNG", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(buffer, kind, **options)
    return buffer.getvalue()


def asked(clf: Classifier, image: bytes, *given: Any) -> dict[str, Any]:
    """Through JSON, as a client gets it."""
    return json.loads(json.dumps(explain(clf, see(image, clf.preprocess), *given), allow_nan=False))


def places(drawn: dict[str, Any], *shape: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(drawn["places"]), np.uint8).reshape(*shape, *drawn["grid"])


def test_every_family_is_here() -> None:
    assert {spec.kind for spec in EVERY.values()} == set(FAMILIES)


@pytest.mark.parametrize("kind", slow_after(len(EVERY) - 1, EVERY))  # but for the deep EfficientNet
def test_map_of_every_method_is_that_of_the_classifier(kind: str) -> None:
    clf = classifier(EVERY[kind])
    label = LABELS[2] if clf.labels else None
    for method in methods_of(clf.model.spec):
        answer, truth = asked(clf, photo(), method, label, "map"), clf.explain(photo(), method, label=label)
        found = answer["map"]
        np.testing.assert_allclose(np.reshape(found["values"], found["grid"]), truth.heat_YX.numpy(), atol=6e-5)
        heat_YX, scale = measured(truth.heat_YX, "strongest" if method == "grad-cam" else "mean")
        assert np.abs(places(found, 1)[0] / 255 - scale.place(heat_YX.numpy())).max() < 1 / 255
        assert (found["method"], found["caption"]) == (method, truth.caption)
        assert found["scale"] == {
            "sentence": truth.scale.sentence,
            "ticks": [[round(place, 4), text] for place, text in truth.scale.ticks()],
        }
        assert [one["label"] for one in answer["top"]] == [one.label for one in truth.top]
        assert [one["p"] for one in answer["top"]] == [one.p for one in truth.top]
        about_label = next(one["by_label"] for one in answer["methods"] if one["name"] == method)
        assert found["label"] == (label if about_label else None)


@pytest.mark.parametrize("kind", WITH_TOKENS)
def test_rollout_after_every_layer_and_every_head_are_those_of_the_model(kind: str) -> None:
    clf = classifier(WITH_TOKENS[kind])
    answer, x_BCYX, vit = asked(clf, photo()), clf.pixels(photo()), clf.model
    assert isinstance(vit, ViT)
    depths = torch.cat([rollout_rows(vit, x_BCYX, depth=depth) for depth in (1, 2, 3)])
    values, scale = measured(depths.detach())
    assert answer["rollout"]["depths"] == 3
    np.testing.assert_array_equal(places(answer["rollout"], 3), np.rint(255 * scale.place(values.numpy())))
    assert answer["rollout"]["scale"]["sentence"] == scale.sentence
    maps = vit.attention(x_BCYX)
    weights_LHTT = torch.stack([maps.layers[layer][0] for layer in range(3)])
    patches = weights_LHTT[:, :, :, maps.num_prefix :]
    rows = patches[:, :, 0] if vit.spec.uses_cls else patches[:, :, maps.num_prefix :].mean(dim=2)
    values, scale = times_uniform(rows.detach().reshape(6, *maps.grid), len(maps.tokens))
    assert (answer["heads"]["layers"], answer["heads"]["heads"]) == (3, 2)
    found = places(answer["heads"], 6).astype(float)
    assert np.abs(found - 255 * scale.place(values.numpy())).max() < 0.51
    assert len(np.unique(found, axis=0)) == 6, "no two heads look alike"


@pytest.mark.parametrize("kind", WITHOUT_TOKENS)
def test_model_without_tokens_has_neither_rollout_nor_heads(kind: str) -> None:
    answer = asked(classifier(WITHOUT_TOKENS[kind]), photo())
    assert answer["rollout"] is None and answer["heads"] is None
    assert answer["map"]["method"] == "grad-cam" and answer["picture"].startswith("data:image/png;base64,")
    assert [one["name"] for one in answer["methods"]] == ["grad-cam", "integrated-gradients"]


def test_methods_say_whether_they_are_about_a_label() -> None:
    by_label = {one["name"]: one["by_label"] for one in describe_methods(SMALL)}
    assert tuple(by_label) == METHODS
    assert [name for name, about in by_label.items() if not about] == ["attention", "rollout"]


@pytest.mark.parametrize("resize", slow_after(1, ["shorter-side", "squash"]))
def test_photo_is_whole_and_says_what_the_model_saw_of_it(resize: str) -> None:
    clf = classifier(changed(SMALL, {"image_size": [16, 16]}), resize=resize)
    seen = asked(clf, photo((2400, 1600), "JPEG"))
    cut = resize == "shorter-side"
    assert (seen["photo"]["width"], seen["photo"]["height"]) == (2400, 1600)
    assert seen["photo"]["region"] == pytest.approx([0, 400, 1600, 1600] if cut else [0, 0, 1600, 2400], abs=1)
    assert (seen["photo"]["note"] is not None) == cut
    shown = Image.open(io.BytesIO(base64.b64decode(seen["picture"].partition(",")[2])))
    assert shown.size == (1024, 683)
    drawn = Image.open(io.BytesIO(draw(clf, see(photo((2400, 1600), "JPEG"), clf.preprocess))))
    assert drawn.size == (1024, 683)
    truth = np.asarray(clf.explain(photo((2400, 1600), "JPEG")).overlay.resize(drawn.size)).astype(float)
    assert np.abs(np.asarray(drawn).astype(float) - truth).mean() < 2


def test_turned_photo_is_upright() -> None:
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    answer = asked(classifier(SMALL), photo((300, 150), "JPEG", exif=turned))
    assert (answer["photo"]["width"], answer["photo"]["height"]) == (150, 300)
    assert Image.open(io.BytesIO(base64.b64decode(answer["picture"].partition(",")[2]))).size == (150, 300)


def test_several_labels_of_an_image_are_marked() -> None:
    clf = classifier(SMALL, thresholds=(0.0,) * 7)
    assert [one["has"] for one in asked(clf, photo())["top"]] == [one.has for one in clf(photo())]
    assert all("has" not in one for one in asked(classifier(SMALL), photo())["top"])


def test_what_cannot_be_read_or_explained_is_refused() -> None:
    clf = classifier(SMALL)
    with pytest.raises(FileProblem, match="not a readable image"):
        see(b"no image", clf.preprocess)
    for given in (("gradcam",), ("grad-cam", "wasp")):
        with pytest.raises(UsageError, match=r"gradcam|wasp"):
            explain(clf, see(photo(), clf.preprocess), *given)
    resnet = classifier(WITHOUT_TOKENS["BiT"])
    with pytest.raises(UsageError, match="needs attention"):
        draw(resnet, see(photo(), resnet.preprocess), "rollout")
