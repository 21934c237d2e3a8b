"""One object that takes any image in any form and always feeds the model what it was trained on."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.decode import ORIENTATION, decode
from vitlab.data.preprocess import Preprocess, normalise, resize
from vitlab.engines.classifier import Classifier, Prediction, list_images, load, save
from vitlab.inspection.saliency import METHODS, Method, Target, saliency
from vitlab.models.build import build
from vitlab.models.names import parse_name
from vitlab.models.spec import AxialResNetSpec, BiTSpec, ModelSpec, ViTSpec, bit_trunk, changed
from vitlab.weights.bundle import Bundle, save_bundle

SMALL = ViTSpec(width=16, depth=2, mlp_dim=32, heads=2, patch=4, image_size=(8, 12), in_channels=1, num_classes=7)
LABELS = tuple("abcdefg")
PICTURES = np.random.default_rng(0).integers(0, 256, (130, 20, 30), dtype=np.uint8)


def classifier(spec: ModelSpec = SMALL, labels: tuple[str, ...] = LABELS) -> Classifier:
    model = build(spec, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    rule = Preprocess(mode="L", image_size=spec.image_size, mean=(0.5,), std=(0.5,))
    return Classifier(Bundle(model, rule, labels, "card", {}), "cpu")


def png(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def clf() -> Classifier:
    return classifier()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    for name, picture in zip(["c.png", "a.PNG", "b/z.png", "b/y.png"], PICTURES, strict=False):
        (tmp_path / name).write_bytes(png(picture))
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


# --- answers ----------------------------------------------------------------------------------------------------------


def test_every_way_to_give_an_image_gives_the_same_answer(clf: Classifier, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(png(PICTURES[0]))
    answers = [clf(source) for source in (path, str(path), path.read_bytes(), PICTURES[0], Image.open(path))]
    assert all(answer == answers[0] for answer in answers)
    assert all(isinstance(prediction, Prediction) for prediction in answers[0])


def test_tensors_and_batches_of_them_give_the_same_answers(clf: Classifier) -> None:
    one, several = clf(PICTURES[0]), clf(list(PICTURES[:3]))
    tensor_BCYX = torch.from_numpy(PICTURES[:3])[:, None]
    for given in (tensor_BCYX[0], tensor_BCYX[0] / 255, PICTURES[0][:, :, None], PICTURES[0] / 255):
        assert clf(given) == one
    for given in (tensor_BCYX, tensor_BCYX / 255, PICTURES[:3, :, :, None], list(tensor_BCYX)):
        assert clf(given) == several
    assert clf.logits(tensor_BCYX).shape == (3, 7) and clf.logits(tensor_BCYX[0]).shape == (1, 7)
    assert torch.equal(clf.embed(tensor_BCYX), clf.embed(list(PICTURES[:3])))
    assert clf.explain(tensor_BCYX[0]).top == one
    with pytest.raises(UsageError, match="no images were given"):
        clf(tensor_BCYX[:0])
    with pytest.raises(UsageError, match=r"from -1 to 1"):
        clf(tensor_BCYX / 127.5 - 1)


def test_one_image_gives_a_list_and_several_give_a_list_of_lists(clf: Classifier) -> None:
    one, several = clf(PICTURES[0]), clf([PICTURES[0], PICTURES[1]])
    assert [len(row) for row in several] == [5, 5]
    assert [answer.index for answer in several[0]] == [answer.index for answer in one]
    assert [answer.p for answer in several[0]] == pytest.approx([answer.p for answer in one], abs=1e-5)
    assert clf((PICTURES[0],)) == [one]


def test_answer_is_the_softmax_of_the_model_on_the_prepared_image(clf: Classifier) -> None:
    x = normalise(clf.preprocess, resize(clf.preprocess, decode(PICTURES[0], "L")[None]))
    with torch.no_grad():
        p_K = clf.model(x).softmax(dim=1)[0]
    answers = clf(PICTURES[0], top=7)
    assert [answer.p for answer in answers] == pytest.approx(sorted(p_K.tolist(), reverse=True))
    for answer in answers:
        assert answer.p == pytest.approx(float(p_K[answer.index]))
        assert answer.label == LABELS[answer.index]


def test_answers_keep_the_order_of_the_images_across_batches(clf: Classifier) -> None:
    together = clf.logits(list(PICTURES))
    alone = torch.cat([clf.logits([picture]) for picture in PICTURES])
    assert together.shape == (130, 7)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert len(together.unique(dim=0)) == 130


@pytest.mark.parametrize(("top", "count"), [(1, 1), (3, 3), (7, 7), (100, 7)])
def test_top_says_how_many_labels(clf: Classifier, top: int, count: int) -> None:
    assert len(clf(PICTURES[0], top=top)) == count


def test_of_equal_scores_the_lower_index_comes_first() -> None:
    spec = dataclasses.replace(SMALL, num_classes=30)
    clf = classifier(spec, tuple(f"class{i}" for i in range(30)))
    with torch.no_grad():
        for parameter in clf.model.head.parameters():  # type: ignore[union-attr]
            parameter.zero_()
    assert [answer.index for answer in clf(PICTURES[0])] == [0, 1, 2, 3, 4]


def test_rank_of_unlikely_labels_follows_their_scores() -> None:
    clf = classifier()
    with torch.no_grad():
        clf.model.head.weight.mul_(1000)  # type: ignore[union-attr]
    scores = clf.logits([PICTURES[0]])[0]
    assert [answer.index for answer in clf(PICTURES[0], top=7)] == scores.argsort(descending=True).tolist()


def test_answers_do_not_depend_on_training_mode_or_on_what_came_before() -> None:
    clf = classifier(dataclasses.replace(SMALL, dropout=0.5, stochastic_depth=0.5))
    assert clf(PICTURES[0]) == clf(PICTURES[0])


# --- embed, explain ---------------------------------------------------------------------------------------------------


def test_embedding_is_the_class_token(clf: Classifier) -> None:
    seen = [resize(clf.preprocess, decode(picture, "L")[None]) for picture in PICTURES[:3]]
    x = normalise(clf.preprocess, torch.cat(seen))
    with torch.no_grad():
        torch.testing.assert_close(clf.embed(list(PICTURES[:3])), clf.model.features(x).last)
    assert clf.embed(list(PICTURES[:3])).shape == (3, 16)


def test_folder_is_embedded_in_name_order(clf: Classifier, folder: Path) -> None:
    names = ["a.PNG", "b/y.png", "b/z.png", "c.png"]
    assert list_images(folder) == [folder / name for name in names]
    assert torch.equal(clf.embed(folder), clf.embed([folder / name for name in names]))
    assert torch.equal(clf.embed(str(folder)), clf.embed(folder))


def test_folder_named_like_an_image_is_not_taken_for_one(folder: Path) -> None:
    before = list_images(folder)
    (folder / "album.jpg").mkdir()
    assert list_images(folder) == before


def test_explanation_has_the_answer_and_where_it_comes_from(clf: Classifier) -> None:
    explained = clf.explain(PICTURES[0])
    assert [answer.index for answer in explained.top] == [answer.index for answer in clf(PICTURES[0])]
    assert explained.heat_YX.shape == (2, 3)
    assert float(explained.heat_YX.max()) == pytest.approx(1)
    assert float(explained.heat_YX.min()) >= 0
    assert explained.overlay.size == (330, 220), "20 x 30 pixels, each enlarged to 11"
    assert "does not prove what the answer depends on" in explained.caption
    assert explained.figure().width > 480 and explained.scale.unit == "times the mean patch"


@pytest.mark.parametrize("method", METHODS)
def test_explanation_by_each_method_says_what_it_is_about(clf: Classifier, method: Method) -> None:
    explained = clf.explain(PICTURES[0], method)
    x_BCYX = clf.pixels(PICTURES[0])
    heat_YX = saliency(clf.model, x_BCYX, method, Target.classes([explained.top[0].index]))[0]
    torch.testing.assert_close(explained.heat_YX, heat_YX / heat_YX.max())
    about = method not in ("attention", "rollout")
    assert (f"The score is that of {explained.top[0].label}." in explained.caption) == about
    other = clf.explain(PICTURES[0], method, label="c")
    assert ("that of c." in other.caption) == about == (not torch.equal(other.heat_YX, explained.heat_YX))


def test_what_cannot_be_explained_is_refused(clf: Classifier) -> None:
    with pytest.raises(UsageError, match=r"no class 'bee'\nNearest: "):
        clf.explain(PICTURES[0], "grad-cam", label="bee")
    with pytest.raises(UsageError, match=r"method.*gradcam"):
        clf.explain(PICTURES[0], "gradcam")  # type: ignore[arg-type]


def test_explanation_without_classes_is_about_the_representation() -> None:
    headless = classifier(dataclasses.replace(SMALL, num_classes=0), ())
    assert "The model has no classes" in headless.explain(PICTURES[0], "gradient-rollout").caption


@pytest.mark.parametrize("size", [(160, 240), (240, 160)])
def test_explanation_is_as_large_as_the_photo_and_fades_what_was_cut_off(size: tuple[int, int]) -> None:
    photo_YX3 = np.full((*size, 3), 230, np.uint8)
    squash = classifier(dataclasses.replace(SMALL, image_size=(8, 8)))
    rule = dataclasses.replace(squash.preprocess, resize="shorter-side")
    cut = Classifier(dataclasses.replace(squash.bundle, preprocess=rule), "cpu").explain(photo_YX3)
    whole = squash.explain(photo_YX3)
    assert cut.overlay.size == whole.overlay.size == (size[1], size[0])
    assert "white line" in cut.caption and "white line" not in whole.caption
    assert np.asarray(cut.overlay)[5, 5].max() < 200 < np.asarray(whole.overlay)[5, 5].max()


def test_explanation_of_a_turned_photo_is_upright(clf: Classifier) -> None:
    buffer, turned = io.BytesIO(), Image.Exif()
    turned[ORIENTATION] = 6
    Image.new("L", (300, 150)).save(buffer, "JPEG", exif=turned)
    assert clf.explain(buffer.getvalue()).overlay.size == (150, 300)


def test_borders_of_patches_are_drawn_on_request(clf: Classifier) -> None:
    plain, lined = (np.asarray(clf.explain(PICTURES[0], grid=grid).overlay).astype(int) for grid in (False, True))
    changed_YX = (plain != lined).any(axis=2)
    columns = np.flatnonzero(changed_YX.mean(axis=0) > 0.5)
    assert 0 < changed_YX.mean() < 0.2
    assert {round(column / 110) for column in columns.tolist()} == {1, 2}, "between three columns of patches"


RESNET = BiTSpec(trunk=bit_trunk((1, 2), 1), image_size=(16, 24), in_channels=1, num_classes=7)
WITHOUT_TOKENS: dict[str, ModelSpec] = {
    "BiT": RESNET,
    "BiT+NL": changed(RESNET, {"trunk": {"non_local": [1]}}),
    "AxialResNet": AxialResNetSpec(stages=(1, 1), width=8, image_size=(16, 24), in_channels=1, num_classes=7),
    "EfficientNet": changed(
        parse_name("EfficientNet-B0"), {"image_size": [64, 96], "in_channels": 1, "num_classes": 7}
    ),
}


@pytest.mark.parametrize("kind", WITHOUT_TOKENS)
def test_a_model_without_tokens_is_explained_by_grad_cam(kind: str) -> None:
    clf = classifier(WITHOUT_TOKENS[kind])
    usual = clf.explain(PICTURES[0], label="b")
    assert usual.caption.startswith("Grad-CAM: the last feature map") and "that of b." in usual.caption
    heat_YX = saliency(clf.model, clf.pixels(PICTURES[0]), "grad-cam", Target.classes([LABELS.index("b")]))[0]
    torch.testing.assert_close(usual.heat_YX, heat_YX / heat_YX.max().clamp(min=1e-30))
    assert usual.heat_YX.shape == clf.model.spec.grid and usual.overlay.size == (330, 220)
    assert clf.explain(PICTURES[0], "integrated-gradients").overlay.size == (330, 220)
    assert len(clf(PICTURES[0])) == 5
    for method in ("attention", "rollout", "gradient-rollout"):
        with pytest.raises(UsageError, match=rf"{method} needs .*\nUse method='grad-cam' or 'integrated-gradients'"):
            clf.explain(PICTURES[0], method)


# --- save, load -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1),
        *(2, 9, 64),
    ],
)
def test_saved_and_loaded_classifier_gives_the_same_bits(clf: Classifier, tmp_path: Path, count: int) -> None:
    clf.save(tmp_path / "out")
    again = load(tmp_path / "out", device="cpu")
    assert torch.equal(again.logits(list(PICTURES[:count])), clf.logits(list(PICTURES[:count])))
    assert (again.labels, again.preprocess) == (clf.labels, clf.preprocess)


def test_loaded_weights_are_as_aligned_as_torchs_own(clf: Classifier, tmp_path: Path) -> None:
    clf.save(tmp_path / "out")
    weights = load(tmp_path / "out", device="cpu").model.state_dict()
    assert [name for name, tensor in weights.items() if tensor.data_ptr() % 64] == []


def test_run_folder_is_loaded_through_its_bundle(clf: Classifier, tmp_path: Path) -> None:
    save_bundle(tmp_path / "run" / "bundle", clf.bundle)
    run, bundle = load(str(tmp_path / "run"), device="cpu"), load(tmp_path / "run" / "bundle", device="cpu")
    assert run(PICTURES[0]) == bundle(PICTURES[0])


def test_printed_classifier_says_what_it_is(clf: Classifier) -> None:
    assert "ViT-w16d2m32h2/4" in repr(clf)
    assert "7" in repr(clf)
    assert "0x" not in repr(clf)


# --- wrong calls ------------------------------------------------------------------------------------------------------


def test_each_wrong_call_has_its_own_error(clf: Classifier, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no images were given"):
        clf([])
    with pytest.raises(UsageError, match=r"top must be .*at least 1, not 0"):
        clf(PICTURES[0], top=0)
    with pytest.raises(FileProblem, match=r"absent\.jpg does not exist"):
        clf("absent.jpg")
    with pytest.raises(FileProblem, match=r"absent\.jpg does not exist"):
        clf([PICTURES[0], "absent.jpg"])
    with pytest.raises(FileProblem, match="is not a folder of images"):
        clf.embed(tmp_path / "absent")
    with pytest.raises(FileProblem, match=r"holds no images\nLooked for: \.avif"):
        clf.embed(tmp_path)


def test_model_without_classes_points_to_embed() -> None:
    headless = classifier(dataclasses.replace(SMALL, num_classes=0), ())
    with pytest.raises(UsageError, match="Use embed"):
        headless(PICTURES[0])
    assert headless.embed([PICTURES[0]]).shape == (1, 16)
    assert headless.explain(PICTURES[0]).top == []


def test_load_of_a_missing_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileProblem, match="does not exist"):
        load(tmp_path / "absent")
    with pytest.raises(FileProblem, match=r"file of weights that vitlab knows"):
        load(tmp_path / "file")
    with pytest.raises(FileProblem, match=r"holds no bundle and no weights"):
        load(tmp_path)


def test_stopped_run_is_refused_with_the_resume_command(tmp_path: Path) -> None:
    stopped = tmp_path / "my run"
    (stopped / "checkpoints").mkdir(parents=True)
    for name in ("config.toml", "env.json"):
        (stopped / name).write_text("")
    with pytest.raises(FileProblem, match="is a run that is not finished") as caught:
        load(stopped)
    assert caught.value.hint == f"Finish it with:  vitlab train --resume '{stopped}'"


def test_device_that_is_not_there_is_refused(clf: Classifier) -> None:
    with pytest.raises(UsageError, match="not a device"):
        Classifier(clf.bundle, "gpu")


def test_temperature_of_the_bundle_makes_the_probabilities_and_nothing_else(clf: Classifier) -> None:
    calm = Classifier(dataclasses.replace(clf.bundle, temperature=2.0), "cpu")
    before, after = clf(PICTURES[0], top=7), calm(PICTURES[0], top=7)
    assert [row.index for row in before] == [row.index for row in after]
    expected = (clf.logits([PICTURES[0]])[0] / 2).softmax(0)
    assert [row.p for row in after] == pytest.approx([float(expected[row.index]) for row in after])
    assert torch.equal(calm.logits([PICTURES[0]]), clf.logits([PICTURES[0]]))
    assert [row.p for row in calm.explain(PICTURES[0]).top] == [row.p for row in calm(PICTURES[0])]


def test_thresholds_make_every_label_a_yes_or_no_of_its_own(clf: Classifier) -> None:
    pictures = list(PICTURES[:3])
    logits_BK = clf.logits(pictures)
    middle_K = (
        logits_BK.double().sort(dim=0).values[1]
    )  # of three scores one is above it: a label for one image of three
    asked = Classifier(dataclasses.replace(clf.bundle, thresholds=tuple(middle_K.tolist()), temperature=2.0), "cpu")
    for answers, scores_K in zip(asked(pictures, top=len(clf.labels)), logits_BK, strict=True):
        assert [row.index for row in answers] == scores_K.sort(descending=True, stable=True).indices.tolist()
        assert [row.p for row in answers] == pytest.approx(
            [float((scores_K[row.index] / 2).sigmoid()) for row in answers]
        )
        assert [row.has for row in answers] == [bool(scores_K[row.index] > middle_K[row.index]) for row in answers]
    assert all(row.has is None for row in clf(PICTURES[0]))


def test_labels_that_an_image_has_are_reported_beyond_the_top(clf: Classifier) -> None:
    scores_K = clf.logits([PICTURES[0]])[0].double()
    last = int(scores_K.argmin())
    thresholds = [100.0] * len(clf.labels)
    thresholds[last] = -100.0
    asked = Classifier(dataclasses.replace(clf.bundle, thresholds=tuple(thresholds)), "cpu")
    assert [(row.index, row.has) for row in asked(PICTURES[0], top=1)] == [
        (int(scores_K.argmax()), False),
        (last, True),
    ]


# --- for a training loop of one's own ---------------------------------------------------------------------------------


def test_pixels_are_what_the_model_sees(clf: Classifier, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(png(PICTURES[0]))
    pixels_BCYX = clf.pixels([path, PICTURES[1]])
    assert list(pixels_BCYX.shape) == [2, 1, 8, 12] and pixels_BCYX.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(clf.model(pixels_BCYX).cpu(), clf.logits([path, PICTURES[1]]))
    assert torch.equal(clf.pixels(path), pixels_BCYX[:1])
    with pytest.raises(UsageError, match="no images"):
        clf.pixels([])


def test_a_gradient_goes_through_what_pixels_gives() -> None:
    clf = classifier()
    clf.model(clf.pixels(PICTURES[0])).sum().backward()
    assert all(parameter.grad is not None for parameter in clf.model.parameters())


def test_a_saved_model_answers_as_before(clf: Classifier, tmp_path: Path) -> None:
    save(clf.model, tmp_path / "out", labels=LABELS, preprocess=clf.preprocess)
    again = load(tmp_path / "out", device="cpu", quiet=True)
    assert again.labels == LABELS and again.preprocess == clf.preprocess
    assert torch.equal(again.logits(list(PICTURES[:3])), clf.logits(list(PICTURES[:3])))
    assert not (again.bundle.model.training or again.model.training)


def test_labels_and_preprocessing_have_defaults_for_any_channels(clf: Classifier, tmp_path: Path) -> None:
    save(clf.model, tmp_path / "out")
    again = load(tmp_path / "out", device="cpu", quiet=True)
    assert again.labels == tuple("0123456")
    assert (again.preprocess.mode, again.preprocess.mean, again.preprocess.image_size) == ("L", (0.5,), (8, 12))


@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.DataParallel,
        lambda m: torch.compile(m, backend="eager"),
        lambda m: torch.compile(torch.nn.DataParallel(m), backend="eager"),
        lambda m: torch.nn.DataParallel(torch.compile(m, backend="eager")),
    ],
)
def test_a_wrapped_model_is_saved_without_its_wrapper(clf: Classifier, tmp_path: Path, wrap: Any) -> None:
    save(wrap(clf.model), tmp_path / "out", labels=LABELS)
    assert torch.equal(load(tmp_path / "out", device="cpu", quiet=True).model.head.weight, clf.model.head.weight)


def test_what_cannot_be_saved_is_refused(clf: Classifier, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not Linear"):
        save(torch.nn.Linear(2, 2), tmp_path / "out")
    with pytest.raises(FileProblem, match="2 labels for 7 classes"):
        save(clf.model, tmp_path / "out", labels=["a", "b"])
    with pytest.raises(UsageError, match="not a preprocessing"):
        save(clf.model, tmp_path / "out", preprocess="imagenet")  # which is for three channels
    assert not (tmp_path / "out").exists()
