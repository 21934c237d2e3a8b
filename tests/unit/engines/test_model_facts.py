"""Facts of weights, wherever they lie: a bundle, a run, a file of others, a published checkpoint."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vitlab
from vitlab.core.errors import UnknownName, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.engines.model_facts import WeightsInfo
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, save_bundle
from vitlab.weights.card import write_card
from vitlab.weights.targets import write_foreign


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    model = create_model("ViT-mu/16", num_classes=5, image_size=(32, 48), seed=0)
    card = write_card(
        title="Mine", spec=model.spec, data="", command="", metrics={}, start="ViT-mu/16@ours", licence="MIT"
    )
    return Bundle(model, Preprocess(image_size=(32, 48)), tuple("abcde"), card, {"format": "timm"})


def facts(name: str | Path) -> WeightsInfo:
    found = vitlab.model_info(str(name))
    assert isinstance(found, WeightsInfo)
    return found


@pytest.mark.parametrize("place", ["mine", "run/bundle", "vit-b-16"])
def test_bundle_or_run_has_all_facts(
    place: str, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bundle(tmp_path / place, bundle)
    monkeypatch.chdir(tmp_path)
    found = facts(f"./{place}".removesuffix("/bundle"))
    named = vitlab.model_info("ViT-mu/16", image_size=(32, 48), classes=5)
    assert {name: getattr(found, name) for name in ("name", "params", "macs", "image_size", "num_classes")} == {
        name: getattr(named, name) for name in ("name", "params", "macs", "image_size", "num_classes")
    }
    assert (found.labels, found.licence, found.start) == (5, "MIT", "ViT-mu/16@ours")
    assert (found.format, found.preprocess["image_size"]) == ("vitlab, from timm", [32, 48])


def test_foreign_file_has_its_format(bundle: Bundle, tmp_path: Path) -> None:
    write_foreign(bundle, tmp_path / "theirs.safetensors", "timm")
    found = facts(tmp_path / "theirs.safetensors")
    assert (found.format, found.num_classes, found.start) == ("timm", 5, "")


def test_a_published_checkpoint_is_answered_from_the_catalogue_without_torch(tmp_path: Path) -> None:
    found = facts("ViT-S/14@dinov2")
    assert (found.licence, found.format, found.labels, found.num_classes) == ("Apache-2.0", "dinov2", 0, 0)
    code = "import sys, vitlab; vitlab.model_info('ViT-S/14@dinov2'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_name_means_the_same_in_every_folder(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_bundle(tmp_path / "vit-b-16", bundle)
    assert vitlab.model_info("vit-b-16").name == "ViT-B/16"


def test_weights_keep_their_own_size_and_what_is_nothing_is_unknown(bundle: Bundle, tmp_path: Path) -> None:
    save_bundle(tmp_path / "mine", bundle)
    with pytest.raises(UsageError, match="image size and classes of their own"):
        vitlab.model_info(str(tmp_path / "mine"), classes=3)
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(UnknownName):
        vitlab.model_info(str(tmp_path / "mine"))
