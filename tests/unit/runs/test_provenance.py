"""The card of a trained bundle says which weights it started from and on what terms, through every step of the chain."""

from pathlib import Path
from typing import Any

from vitlab.data.preprocess import Preprocess
from vitlab.engines.provenance import provenance_of
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle
from vitlab.weights.card import card_row, write_card
from vitlab.weights.catalogue import find
from vitlab.weights.surgery import Changes, operate
from vitlab.weights.targets import write_foreign


def bundle(card: str = "# My start\n") -> Bundle:
    model = create_model("ViT-mu/16", num_classes=2, image_size=32, seed=0)
    return Bundle(model, Preprocess(image_size=(32, 32)), ("a", "b"), card, {"format": "vitlab"})


def test_a_published_checkpoint_gives_its_name_address_and_licence() -> None:
    entry, found = find("ViT-S/14@dinov2"), provenance_of("vit-s-14@dinov2")
    assert found.start.startswith("ViT-S/14@dinov2 (") and entry.address in found.start
    assert found.licence == "Apache-2.0 (start weights ViT-S/14@dinov2); the data's besides; vitlab adds none"


def test_a_foreign_file_gives_its_name_and_format(tmp_path: Path) -> None:
    write_foreign(bundle(), tmp_path / "theirs.npz", "google-npz")
    found = provenance_of(str(tmp_path / "theirs.npz"))
    assert found.start == "theirs.npz (google-npz weights)"
    assert "theirs.npz, which do not state it" in found.licence


def test_run_passes_on_what_its_own_card_has(tmp_path: Path) -> None:
    first = provenance_of("ViT-S/14@dinov2")
    spec = bundle().model.spec
    card = write_card(
        title="Mine", spec=spec, data="", command="", metrics={}, start=first.start, licence=first.licence
    )
    save_bundle(tmp_path / "run" / "bundle", bundle(card))
    second = provenance_of(str(tmp_path / "run"))
    assert second.start == f"{tmp_path / 'run'} (Mine), which started from {first.start}"
    assert second.licence == first.licence
    assert provenance_of(str(tmp_path / "run" / "bundle" / "model.safetensors")).licence == first.licence


def test_weights_that_have_gone_are_still_named() -> None:
    assert provenance_of("gone/away.pth").start == "gone/away.pth"


def test_the_card_of_a_trained_bundle_has_the_rows(pretraining: Any, transfer: Any) -> None:
    before, after = (read_bundle(run.result.folder / "bundle").card for run in (pretraining, transfer))
    assert card_row(before, "start weights") == "none: trained from scratch"
    assert card_row(before, "licence") == "that of the data; vitlab adds none"
    assert (card_row(after, "start weights") or "").startswith(f"{pretraining.result.folder / 'bundle'} (")


def test_a_changed_model_keeps_its_licence_and_start() -> None:
    spec = bundle().model.spec
    card = write_card(title="Mine", spec=spec, data="", command="", metrics={}, start="a | b", licence="MIT")
    changed, _ = operate(bundle(card), Changes(classes=3), "mine")
    assert card_row(changed.card, "licence") == "MIT"
    assert card_row(changed.card, "start weights") == "a | b"
