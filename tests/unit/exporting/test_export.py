"""`vitlab export` and exported files in the place of models."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from export_models import LABELS, VIT
from PIL import Image
from slow_cases import slow_after

import vitlab
from vitlab.cli import main
from vitlab.core import fsio
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.planned import Planned
from vitlab.data.decode import decode
from vitlab.engines.exported import DATA, ONNX, read_exported
from vitlab.exporting import export_run, onnx_file
from vitlab.exporting.export_run import Export
from vitlab.exporting.graph import GraphRule
from vitlab.exporting.parity import compare, require_parity
from vitlab.weights.bundle import read_bundle

SOAK = os.environ.get("VITLAB_SOAK") == "1"
QUIET: dict[str, Any] = {"quiet": True, "threads": 1, "check_images": 12}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "onnx": ("plain.onnx", {}),
    "fixed": ("fixed", {"to": "openvino", "batch_size": 5}),
    "program": ("program.pt2", {"to": "torch-export"}),
    "inside": ("inside.onnx", {"preprocess_inside": True}),
    "openvino": ("openvino", {"to": "openvino", "preprocess_inside": True}),
}


class Exports(dict[str, Export]):
    """One of each kind that the tests below look at, made when the first of them asks for it."""

    def __init__(self, bundle: Path, photos: Path, root: Path) -> None:
        self.bundle, self.photos, self.root = bundle, photos, root

    def __missing__(self, kind: str) -> Export:
        name, options = KINDS[kind]
        self[kind] = vitlab.export(self.bundle, self.root / name, check=self.photos, **options, **QUIET)
        return self[kind]


@pytest.fixture(scope="module")
def exported(bundle: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(bundle, photos, tmp_path_factory.mktemp("exported"))


def files(photos: Path) -> list[Path]:
    return sorted(photos.rglob("*.png"), key=lambda path: int(path.stem))


@pytest.mark.parametrize("kind", slow_after(3, KINDS))
def test_file_answers_as_the_bundle_does(exported: Exports, bundle: Path, photos: Path, kind: str) -> None:
    theirs = vitlab.load(bundle, device="cpu")
    ours = vitlab.load(exported[kind].out, device="cpu", trust_pickle=kind == "program")
    assert ours.labels == theirs.labels and ours.preprocess == theirs.preprocess
    assert ours.bundle.card == theirs.bundle.card and ours.bundle.temperature == 1.5
    images = files(photos)
    assert torch.allclose(ours.logits(images), theirs.logits(images), atol=1e-5)
    assert torch.allclose(ours.embed(images), theirs.embed(images), atol=1e-5)
    assert [row[0].label for row in ours(images)] == [row[0].label for row in theirs(images)]


@pytest.mark.parametrize("kind", slow_after(3, KINDS))
def test_report_shows_what_was_compared(exported: Exports, photos: Path, kind: str) -> None:
    found = exported[kind]
    assert found.parity.images == 12 and found.parity.data == str(photos)
    assert found.parity.agreement == 1 and found.parity.speed > 0
    assert {row.batch for row in found.parity.comparisons} == ({5} if kind == "fixed" else {1, 3, 8})
    assert (found.parity.grey_levels is not None) == (kind in ("inside", "openvino"))
    assert (found.parity.grey_levels or 0) < 1.01
    text = "\n".join(found.sentences())
    assert str(found.out) in text and "12 images" in text and "100.00%" in text
    assert json.loads(json.dumps(found.to_json()))["parity"]["agreement"] == 1


def test_metadata_describe_the_whole_model(exported: Exports, bundle: Path) -> None:
    model = onnx.load(exported["onnx"].out)
    found = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert found["labels"] == list(LABELS) and found["licence"] == "CC0" and found["temperature"] == 1.5
    assert found["preprocess"] == json.loads((bundle / "preprocess.json").read_text())
    assert found["export"]["parity"]["images"] == 12 and "torch" in found["export"]["versions"]
    (given,) = model.graph.input
    assert [dim.dim_param or dim.dim_value for dim in given.type.tensor_type.shape.dim] == ["batch", 3, 32, 24]
    onnx.checker.check_model(model, full_check=True)


PLAIN = """
import json, sys
import numpy, onnxruntime
from PIL import Image
session = onnxruntime.InferenceSession(sys.argv[1])
labels = json.loads(session.get_modelmeta().custom_metadata_map["labels"])
names = []
for path in sys.argv[2:]:
    image = numpy.asarray(Image.open(path).convert("RGB"))[None]
    names.append(labels[session.run(["probabilities"], {"images": image})[0][0].argmax()])
assert "vitlab" not in sys.modules and "torch" not in sys.modules
print(json.dumps(names))
"""


@pytest.mark.slow
def test_plain_onnxruntime_gives_the_same_labels(exported: Exports, bundle: Path, photos: Path, tmp_path: Path) -> None:
    images = files(photos)
    command = [sys.executable, "-c", PLAIN, str(exported["inside"].out), *map(str, images)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    expected = [row[0].label for row in vitlab.load(bundle, device="cpu")(images)]
    assert json.loads(found.stdout) == expected and len(set(expected)) > 1


def test_evaluate_and_predict_take_the_file(exported: Exports, bundle: Path, photos: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True, "workers": 0, "resamples": 10}
    out = tmp_path / "evaluation"
    ours = vitlab.evaluate(exported["onnx"].out, photos, out=out, **settings)
    theirs = vitlab.evaluate(bundle, photos, **settings)
    assert (ours.top1, ours.n) == (theirs.top1, theirs.n) and (out / "report.html").is_file()
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    answers = vitlab.predict(exported["fixed"].out / "model.xml", [photos], device="cpu", quiet=True, workers=0)
    assert len(answers.rows) == 12


def test_what_a_file_cannot_do_is_reported(exported: Exports, photos: Path, tmp_path: Path) -> None:
    path, image = exported["onnx"].out, files(photos)[0]
    classifier = vitlab.load(path, device="cpu")
    for call in (
        lambda: classifier.explain(image),
        lambda: classifier.save(tmp_path / "saved"),
        lambda: classifier.model.features(torch.zeros(1, 3, 32, 24)),
        lambda: vitlab.convert(path, tmp_path / "converted", quiet=True),
        lambda: vitlab.train(photos, init=str(path), out=tmp_path / "run", device="cpu", quiet=True),
        lambda: vitlab.inspect(path, [image], out=tmp_path / "inspected", device="cpu", quiet=True),
        lambda: vitlab.export(path, tmp_path / "again.onnx", **QUIET),
    ):
        with pytest.raises(UsageError, match="exported"):
            call()
    with pytest.raises(UsageError, match="32x24"):
        classifier.model(torch.zeros(1, 3, 16, 16))
    with pytest.raises(UsageError, match="image_size"):
        vitlab.load(path, image_size=64, device="cpu")
    assert not list(tmp_path.iterdir())


def test_program_is_opened_only_by_who_trusts_it(
    exported: Exports, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = exported["program"].out
    with pytest.raises(UsageError, match="trust_pickle"):
        vitlab.load(path, device="cpu")
    flags = ["--device", "cpu", "--threads", "1", "--workers", "0", "--quiet", "--json"]
    for verb in ("evaluate", "predict", "embed"):
        monkeypatch.setattr(sys, "argv", ["vitlab", verb, str(path), str(photos), *flags])
        assert main._run(False) == 2 and "--trust-pickle" in capsys.readouterr().err  # pyright: ignore[reportPrivateUsage]
        sys.argv.append("--trust-pickle")
        assert main._run(False) == 0 and json.loads(capsys.readouterr().out)  # pyright: ignore[reportPrivateUsage]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_difference_above_the_limit_writes_nothing(bundle: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    settings: dict[str, Any] = {"to": "torch-export", "precision": "bf16", "check": photos, **QUIET}
    with pytest.raises(VitlabError, match="limit"):
        vitlab.export(bundle, out, limit=1e-7, **settings)
    with pytest.raises(VitlabError, match="nothing was written"):
        vitlab.export(bundle, out, agreement=1.1, **settings)
    assert not list(tmp_path.iterdir())
    assert vitlab.export(bundle, out, **settings).parity.difference > 1e-7


def test_graph_that_computes_something_else_is_caught(
    exported: Exports, bundle: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported["onnx"].out  # made before the way to make it is another

    def perturbed(*_: Any) -> Any:
        model = onnx.load(path)
        weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
        values = onnx.numpy_helper.to_array(weight).copy()
        values[0, 0] += 1.0
        weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
        return model

    monkeypatch.setattr(export_run.onnx_file, "to_onnx", perturbed)
    with pytest.raises(VitlabError, match="nothing was written"):
        vitlab.export(bundle, tmp_path / "model.onnx", check=photos, **QUIET)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["file", "link", "dangling", "hardlink", "folder", "fifo"])
def test_what_is_already_there_is_left_alone(bundle: Path, photos: Path, tmp_path: Path, kind: str) -> None:
    out, other = tmp_path / "model.onnx", tmp_path / "precious"
    other.write_text("mine")
    match kind:
        case "file":
            out.write_text("mine")
        case "link":
            out.symlink_to(other)
        case "dangling":
            out.symlink_to(tmp_path / "nowhere")
        case "hardlink":
            os.link(other, out)
        case "folder":
            out.mkdir()
        case _:
            os.mkfifo(out)
    with pytest.raises(UsageError, match="exists already"):
        vitlab.export(bundle, out, check=photos, **QUIET)
    assert other.read_text() == "mine" and not (tmp_path / "nowhere").exists()


def test_full_disk_leaves_nothing(exported: Exports, tmp_path: Path) -> None:
    model = onnx.load(exported["onnx"].out)

    def full(operation: str, path: Path) -> None:
        if operation == "fsync":
            raise OSError(28, "No space left on device")

    with fsio.intercept(full), pytest.raises(FileProblem, match="No space left"):
        onnx_file.write_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"out": "model.txt"}, "onnx"),
        ({"out": "model.xml", "to": "openvino"}, "folder"),
        ({"precision": "bf16"}, "openvino"),
        ({"to": "torch-export", "out": "model.pt2", "precision": "int8"}, "int8"),
        ({"opset": 11}, "opset"),
        ({"calibration": "photos"}, "calibration"),
        ({"to": "coreml"}, "coreml"),
        ({"batch_size": 0}, "batch"),
        ({"check_images": 0}, "check-images"),
    ],
)
def test_wrong_call_is_answered_before_the_work(
    bundle: Path, photos: Path, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    given = {"check": photos, **QUIET, **options}
    out = tmp_path / given.pop("out", "model.onnx")
    with pytest.raises(UsageError, match=match):
        vitlab.export(bundle, out, **given)
    assert not list(tmp_path.iterdir())


def test_head_of_zeros_is_not_exported_unasked(tmp_path: Path) -> None:
    vitlab.save(vitlab.create_model(VIT, seed=0), tmp_path / "zeros", labels=LABELS)
    with pytest.raises(UsageError, match="zeros"):
        vitlab.export(tmp_path / "zeros", tmp_path / "model.onnx", **QUIET)


def test_dry_run_says_what_would_be_compared(bundle: Path, tmp_path: Path) -> None:
    planned = vitlab.export(bundle, tmp_path / "model.onnx", dry_run=True, quiet=True)
    assert isinstance(planned, Planned) and "generated shapes" in str(planned.would["check"])
    assert not list(tmp_path.iterdir())


# --- precisions -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_half_precision_keeps_norms_and_ends_in_float32(
    exported: Exports, bundle: Path, photos: Path, tmp_path: Path
) -> None:
    done = vitlab.export(bundle, tmp_path / "half.onnx", precision="fp16", check=photos, **QUIET)
    model = onnx.load(done.out)
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    assert set(kinds.values()) == {onnx.TensorProto.FLOAT}
    assert 0 < done.parity.difference < 1e-2 * done.parity.largest_score
    assert done.bytes < 0.8 * exported["onnx"].bytes
    assert torch.allclose(
        vitlab.load(done.out, device="cpu").logits(files(photos)),
        vitlab.load(bundle, device="cpu").logits(files(photos)),
        atol=0.05,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model after a few steps on generated shapes: the bounds of int8 are those of trained weights."""
    out = tmp_path_factory.mktemp("trained") / "run"
    data, settings = "shapes:task=count,count=640,image_size=32", ["model.name=ViT-w64d2m128h4/8", "train.epochs=4"]
    usual: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True}
    vitlab.train(data, recipe="laptop-shapes", overrides=settings, out=out, **usual)
    return out


@pytest.mark.slow
def test_int8_has_its_weights_in_8_bits_and_prepares_images_exactly(trained: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"precision": "int8", **QUIET}
    done = vitlab.export(trained, tmp_path / "int8.onnx", preprocess_inside=True, **given)
    graph = onnx.load(done.out).graph
    eight = [
        tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1
    ]
    assert len(eight) >= 4 * 2, "every dense layer has its weights in 8 bits"
    assert done.parity.difference > 0, "within the default bounds, or there would be no file"
    assert (done.parity.grey_levels or 0) < 1.01, "images are prepared as exactly as before"
    assert done.parity.images == 12 and done.notes[0].startswith("calibrated on ") and "other" in done.notes[0]


@pytest.mark.skipif(not SOAK, reason="three exports: VITLAB_SOAK=1")
def test_int8_of_openvino_answers_as_the_run_does(trained: Path, tmp_path: Path) -> None:
    done = vitlab.export(trained, tmp_path / "int8", to="openvino", precision="int8", **QUIET)
    assert done.parity.difference > 0, "within the default bounds, or there would be no file"
    whole = vitlab.export(trained, tmp_path / "whole", to="openvino", **QUIET)
    assert done.bytes < 0.7 * whole.bytes
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True, "workers": 0, "resamples": 10}
    data = "shapes:task=count,count=200,image_size=32,seed=5"
    assert vitlab.evaluate(done.out, data, **settings).top1 == pytest.approx(
        vitlab.evaluate(trained, data, **settings).top1, abs=0.05
    )


@pytest.mark.slow
def test_int8_is_compared_on_images_that_it_was_not_calibrated_on(
    trained: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dict[str, set[bytes]]()
    quantised, compared = export_run.quantise.quantised_onnx, export_run.parity.compare

    def quantise(model: Any, images: Any) -> Any:
        seen["calibrated"] = {image.tobytes() for image in images}
        return quantised(model, images)

    def compare_on(run: Any, *given: Any) -> Any:
        def noted(images: Any) -> Any:
            seen.setdefault("compared", set()).update(image[None].tobytes() for image in images)
            return run(images)

        return compared(noted, *given)

    monkeypatch.setattr(export_run.quantise, "quantised_onnx", quantise)
    monkeypatch.setattr(export_run.parity, "compare", compare_on)
    given: dict[str, Any] = {"precision": "int8", "check": photos, "limit": 1e9, "agreement": 0.0, **QUIET}
    done = vitlab.export(trained, tmp_path / "int8.onnx", **given)
    assert done.parity.images == len(seen["compared"]) == 6 == len(seen["calibrated"])
    assert not seen["compared"] & seen["calibrated"]
    (tmp_path / "one").mkdir()
    shutil.copy(files(photos)[0], tmp_path / "one")
    with pytest.raises(UsageError, match="one image only"):
        vitlab.export(trained, tmp_path / "again.onnx", **given | {"check": tmp_path / "one"})


# --- files of others --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow_after(1, ["onnx", "inside"]))
def test_large_model_is_a_folder_with_its_weights_beside_it(
    exported: Exports, bundle: Path, photos: Path, tmp_path: Path, kind: str
) -> None:
    model = onnx.load(exported[kind].out)
    out = onnx_file.write_onnx(model, tmp_path / "large.onnx", most_bytes=1000)
    assert {path.name for path in out.iterdir()} == {ONNX, DATA, fsio.MANIFEST}
    images = files(photos)
    expected = vitlab.load(bundle, device="cpu").logits(images)
    assert torch.allclose(vitlab.load(out, device="cpu").logits(images), expected, atol=1e-5)
    outside = onnx.load(out / ONNX, load_external_data=False)
    for place in ("../precious", "/etc/passwd", "link"):
        for tensor in outside.graph.initializer:
            for entry in tensor.external_data:
                entry.value = place if entry.key == "location" else entry.value
        (tmp_path / "hostile").mkdir(exist_ok=True)
        (tmp_path / "hostile" / ONNX).write_bytes(outside.SerializeToString())
        with pytest.raises(FileProblem, match="beside it"):
            vitlab.load(tmp_path / "hostile", device="cpu")


def test_files_that_are_none_of_ours_are_refused(exported: Exports, tmp_path: Path) -> None:
    foreign = onnx.load(exported["onnx"].out)
    del foreign.metadata_props[:]
    (tmp_path / "foreign.onnx").write_bytes(foreign.SerializeToString())
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x09" + os.urandom(100))
    (tmp_path / "broken.xml").write_text("<net>")
    for name in ("foreign.onnx", "broken.onnx", "broken.xml", "missing.onnx"):
        with pytest.raises(FileProblem, match=name):
            vitlab.load(tmp_path / name, device="cpu")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format_version", "2"),
        ("labels", '["a"]'),
        ("labels", "[1, 2, 3, 4, 5]"),
        ("temperature", "0"),
        ("export", "{}"),
        ("spec", "["),
    ],
)
def test_description_that_does_not_fit_is_refused(exported: Exports, tmp_path: Path, key: str, value: str) -> None:
    model = onnx.load(exported["onnx"].out)
    for entry in model.metadata_props:
        entry.value = value if entry.key == key else entry.value
    (tmp_path / "changed.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FileProblem, match=r"changed\.onnx"):
        read_exported(tmp_path / "changed.onnx")


@pytest.mark.slow
def test_half_precision_of_openvino_is_compared_as_it_is_written(bundle: Path, photos: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"to": "openvino", "precision": "fp16", "check": photos, **QUIET}
    done = vitlab.export(bundle, tmp_path / "half", **given)
    images = files(photos)
    difference = vitlab.load(done.out, device="cpu").logits(images) - vitlab.load(bundle, device="cpu").logits(images)
    assert float(difference.abs().max()) <= 1.01 * done.parity.difference
    assert done.parity.difference > 1e-5, "weights of 16 bits are other weights"


def test_answers_that_are_not_numbers_are_refused(bundle: Path, photos: Path) -> None:
    """Not a number is not greater than anything, and its first answer is class 0."""
    model = read_bundle(bundle)
    names = sorted(photos.rglob("*.png"))[:2]

    def run(images: Any) -> dict[str, Any]:
        return {"logits": np.full((len(images), len(LABELS)), np.nan, np.float32)}

    found = compare(run, model, GraphRule(), [decode(name, "RGB") for name in names], "photos")
    with pytest.raises(VitlabError, match="differ"):
        require_parity(found, "fp32", GraphRule(), None, 0.0)


def test_other_weights_beside_the_same_graph_are_another_model(exported: Exports, tmp_path: Path) -> None:
    """Else a cache of answers would give those of the other one."""
    folder = tmp_path / "copy"
    shutil.copytree(exported["fixed"].out, folder)
    before = vitlab.load(folder, device="cpu").model.sha256
    weights = bytearray((folder / "model.bin").read_bytes())
    weights[len(weights) // 2] ^= 1
    (folder / "model.bin").write_bytes(bytes(weights))
    assert not torch.equal(before, vitlab.load(folder, device="cpu").model.sha256)


def test_openvino_does_not_report_to_its_makers(exported: Exports) -> None:
    assert exported["fixed"].out.is_dir()
    assert sys.modules["openvino_telemetry"] is None


@pytest.mark.slow
def test_photo_and_array_are_one_to_the_graph(exported: Exports, bundle: Path, photos: Path) -> None:
    """Probabilities of the graph are those of a prediction, after its temperature."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(exported["inside"].out))
    image = np.asarray(Image.open(files(photos)[3]))
    p_BK = session.run(["probabilities"], {"images": image[None]})[0]
    for answer in vitlab.load(bundle, device="cpu")(image):
        assert p_BK[0, answer.index] == pytest.approx(answer.p, abs=2e-3)
    assert read_bundle(bundle).labels == LABELS
