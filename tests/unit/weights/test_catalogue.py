"""The catalogue's own facts: complete, consistent with our exact counts, and strict about what it is reported."""

import functools
import re
import tempfile
from pathlib import Path

import pytest
import torch

import vitlab
from vitlab.core import config
from vitlab.core.environment import cache_folder
from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.data.preprocess import Preprocess, scaled_size
from vitlab.models.build import allocate, build
from vitlab.models.cost import count_params
from vitlab.models.names import format_name
from vitlab.models.spec import ModelSpec, ViTSpec, changed
from vitlab.weights import catalogue
from vitlab.weights.bundle import Bundle, read_bundle
from vitlab.weights.catalogue import Checkpoint, find, is_name, list_pretrained
from vitlab.weights.containers import read_arrays
from vitlab.weights.conventions import named
from vitlab.weights.foreign import read_foreign
from vitlab.weights.formats import dinov2
from vitlab.weights.formats.table import assumed_preprocess
from vitlab.weights.targets import write_foreign

NAMES = list_pretrained()
FORMATS = {"google-npz", "big-vision", "bit-npz", "dinov2"}


@functools.cache
def built_params(spec: ModelSpec) -> int:
    return sum(parameter.numel() for parameter in allocate(spec).parameters())


@pytest.fixture(params=NAMES)
def entry(request: pytest.FixtureRequest) -> Checkpoint:
    return find(request.param)


# --- every entry ------------------------------------------------------------------------------------------------------


def test_spec_builds_and_is_called_by_its_name(entry: Checkpoint) -> None:
    assert format_name(entry.spec) == entry.model
    assert built_params(entry.spec) == count_params(entry.spec)


def test_facts_have_their_form(entry: Checkpoint) -> None:
    assert is_name(entry.name)
    if entry.shipped:
        assert entry.path.is_file() and not entry.address and entry.licence.startswith("Apache-2.0")
        return
    assert re.fullmatch(r"https://[a-z.]+/[\w./%-]+\.(npz|pth)", entry.address)
    assert entry.format in FORMATS
    assert entry.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
    assert entry.licence == "Apache-2.0"
    assert all(re.match(r"[\w-]+/[\w-]+ \S+\.(md|py|csv)[:,]", source) for source in entry.sources)


@pytest.mark.parametrize("name", [name for name in NAMES if find(name).format == "big-vision"])
def test_big_vision_checkpoints_are_prepared_by_area_as_its_files_are(name: str) -> None:
    rule = config.from_dict(Preprocess, find(name).preprocess, "preprocess.")
    assert rule == assumed_preprocess("big-vision", find(name).spec) and rule.filter == "area"


def test_accuracy_has_settings_and_source(entry: Checkpoint) -> None:
    if entry.expected is None:
        return
    assert 50 < entry.expected.top1 < 95
    assert len(entry.expected.settings) > 10
    assert re.match(r"[\w-]+/[\w-]+ \S+\.(md|py|csv)", entry.expected.source)
    assert entry.spec.num_classes in (0, 1000)


def test_settings_of_a_published_measurement_can_be_used(entry: Checkpoint) -> None:
    if entry.expected is None or entry.expected.preprocess is None:
        return
    rule = config.from_dict(Preprocess, dict(entry.expected.preprocess), "measured_with.")
    assert rule.image_size == tuple(entry.preprocess["image_size"])
    assert str(rule.image_size[0]) in entry.expected.settings and rule.filter in entry.expected.settings
    # timm rounds down where we round: 224 of nine tenths is 248 pixels, and not 249.
    assert scaled_size(rule, *rule.image_size)[0] == (248 if rule.crop_frac < 1 else rule.image_size[0])


def test_preprocessing_is_one_and_fits_the_model(entry: Checkpoint) -> None:
    rule = config.from_dict(Preprocess, entry.preprocess)
    size = re.search(r"-(224|384)$", entry.name)
    assert rule.channels == entry.spec.in_channels
    assert not size or rule.image_size == (int(size[1]),) * 2
    if entry.format == "google-npz":
        assert rule.image_size == entry.spec.image_size


def test_published_size_is_that_of_our_parameters(entry: Checkpoint) -> None:
    """Nine sizes were stated by the publisher. A wrong head or grid would be off by megabytes."""
    if entry.mib is not None:
        assert count_params(entry.spec) * 4 / 2**20 == pytest.approx(entry.mib, abs=1)


def test_spec_says_all_that_a_file_of_its_format_implies(entry: Checkpoint) -> None:
    """So that a body is known without its file. A small model of the same kind is written and read again."""
    spec, side = entry.spec, {"image_size": (224, 224)}
    few = min(3, spec.num_classes)
    if isinstance(spec, ViTSpec):
        stem = {"stem": {"stages": [1]}} if spec.stem else {}
        spec = changed(spec, {"width": 8, "depth": 1, "mlp_dim": 8, "heads": 1, "num_classes": few, **side, **stem})
    else:
        spec = changed(spec, {"trunk": {"stages": [1], "width_factor": 1}, "num_classes": few, **side})
    assert spec_of_file(spec, entry.format) == spec


@functools.cache
def spec_of_file(spec: ModelSpec, file_format: str) -> ModelSpec:
    """What is read from a model of that kind which was written in that format."""
    made = Bundle(build(spec, seed=0), named("minus-one-to-one", spec), tuple("abc"[: spec.num_classes]), "", {})
    with tempfile.TemporaryDirectory() as folder:
        if file_format == "dinov2":
            path = Path(folder) / "small.safetensors"
            write_foreign(made, path, "dinov2")
            arrays = read_arrays(path).arrays  # past what we say about it in our own files
            return dinov2.read_spec(arrays, "small", {"num_heads": 1, "img_size": 224})
        path = Path(folder) / "small.npz"
        write_foreign(made, path, "big-vision" if file_format == "big-vision" else "google-npz")
        return read_foreign(path)[0].model.spec


def test_nine_published_sizes_are_compared() -> None:
    assert sum(find(name).mib is not None for name in NAMES) == 9


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_addresses_and_places_are_unique() -> None:
    entries = [find(name) for name in NAMES]
    for facts in (NAMES, [entry.alias for entry in entries], [entry.address for entry in entries]):
        assert len({fact.casefold() for fact in facts}) == len(NAMES)


def test_families_that_users_ask_for_are_there() -> None:
    assert {name.partition("@")[2] for name in NAMES} >= {"i21k", "augreg-i21k", "bit-m", "dinov2", "dinov2-registers"}
    assert {"ViT-H/14@i21k", "R50+ViT-B/16@i21k", "R50+ViT-L/32@augreg-i21k", "BiT-R152x4@bit-s"} <= set(NAMES)


def test_alias_finds_the_same_and_suits_a_file_system(entry: Checkpoint) -> None:
    assert find(entry.alias) == entry
    assert re.fullmatch(r"[a-z0-9@-]+", entry.alias)
    folder = Path(vitlab.__file__).parent / "weights" / "shipped" if entry.shipped else cache_folder() / "weights"
    assert entry.path == folder / entry.alias / entry.file
    assert not set(entry.file) & set("/\\%")


def test_pattern_chooses_whatever_the_case() -> None:
    assert list_pretrained("vit-s/14@*") == ["ViT-S/14@dinov2", "ViT-S/14@dinov2-registers"]
    assert list_pretrained("nothing") == []


def test_slip_is_answered_with_the_nearest_three() -> None:
    with pytest.raises(UnknownName, match="unknown checkpoint 'ViT-B/16@augreg-i12k'") as caught:
        find("ViT-B/16@augreg-i12k")
    assert "ViT-B/16@augreg-i21k" in caught.value.nearest
    assert len(caught.value.nearest) == 3


@pytest.mark.parametrize("text", ["ViT-B/16", "runs/demo", "me@host.org", "a@b/c", "x.npz", "@i21k", "ViT-B/16@"])
def test_other_words_are_not_names(text: str) -> None:
    assert not is_name(text)


# --- a catalogue of one's own -----------------------------------------------------------------------------------------

OWN = """
[[family]]
tag = "ours"
title = "Ours"
format = "google-npz"
folder = "https://example.org/"
sources = ["our own"]
spec = { num_classes = 7 }
preprocess = { image_size = [224, 224] }
checkpoints = [{ model = "ViT-mu/16", file = "mu.npz" }]
"""


def test_own_file_adds_and_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.toml").write_text(OWN + OWN.replace('"ours"', '"i21k"').replace("mu/16", "B/16"))
    monkeypatch.setenv(catalogue.CATALOGUE_VARIABLE, str(tmp_path / "own.toml"))
    assert find("ViT-mu/16@ours").address == "https://example.org/mu.npz"
    assert find("vit-b-16@i21k").spec.num_classes == 7
    assert len(list_pretrained()) == len(NAMES) + 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[[family]]", "[family]", "tables called"),
        ("tag =", "tga =", "unknown config key 'family.tga'"),
        ('"ours"', '"Our own"', "is not a tag"),
        ("num_classes", "classes", "unknown config key 'model.classes'"),
        ("mu/16", "zz/16", "unknown model"),
        ('file = "mu.npz"', 'file = "mu.npz", sha256 = "ab"', "is not a SHA-256"),
        ('file = "mu.npz"', 'file = "mu.npz", top1 = 80.0', "need the keys settings and measured"),
        ("preprocess = { image_size = [224, 224] }", "", "family.preprocess' is missing"),
        (
            "checkpoints = [",
            'checkpoints = [{ model = "ViT-mu/16", file = "mu.npz" }, ',
            "has ViT-mu/16@ours twice",
        ),
    ],
)
def test_faults_in_it_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    (tmp_path / "own.toml").write_text(OWN.replace(old, new))
    monkeypatch.setenv(catalogue.CATALOGUE_VARIABLE, str(tmp_path / "own.toml"))
    with pytest.raises(UsageError, match=message):
        list_pretrained()


def test_missing_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalogue.CATALOGUE_VARIABLE, "/nowhere/own.toml")
    with pytest.raises(FileProblem, match=r"/nowhere/own\.toml"):
        list_pretrained()


# --- our own ----------------------------------------------------------------------------------------------------------


def test_shipped_weights_are_what_the_catalogue_says_and_small_enough_for_a_wheel() -> None:
    (entry,) = (find(name) for name in NAMES if find(name).shipped)
    bundle = read_bundle(entry.path.parent)
    assert (bundle.model.spec, bundle.labels) == (entry.spec, ())
    assert bundle.preprocess == config.from_dict(Preprocess, entry.preprocess, "preprocess.")
    assert {value.dtype for value in bundle.model.parameters()} == {torch.float16}
    assert entry.path.stat().st_size < 12e6
    assert entry.licence.partition(";")[0] in bundle.card and bundle.recipe, "card and recipe lie beside the weights"
    assert {value.dtype for value in vitlab.load(entry.name, device="cpu").model.parameters()} == {torch.float32}
