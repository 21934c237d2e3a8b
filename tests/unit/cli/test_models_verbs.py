"""`vitlab models`: every listed name answers, with the keys that others may rely on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitlab.models.facts import model_info
from vitlab.models.names import list_models
from vitlab.weights.catalogue import find, list_pretrained

Call = Callable[..., Any]

EFFICIENTNET_PIXELS = {"B1": 240, "B2": 260, "B3": 300, "B4": 380, "B5": 456, "B6": 528, "B7": 600, "L2": 800}
PROMISED = {"name", "params", "macs", "flops", "tokens", "grid", "image_size"}


def info(call: Call, *arguments: str) -> dict[str, Any]:
    code, out, err = call("models", "info", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize("name", list_models())
def test_every_listed_model_answers_with_the_promised_keys(call: Call, name: str) -> None:
    found = info(call, name)
    assert found.keys() >= PROMISED
    assert found["name"] == name
    assert found["params"] > 0
    assert found["flops"] == 2 * found["macs"] > 0
    _, _, size = name.partition("EfficientNet-")
    assert found["image_size"] == [EFFICIENTNET_PIXELS.get(size, 224)] * 2
    if name.startswith(("BiT", "EfficientNet", "AxialResNet")):  # no sequence of tokens
        assert found["tokens"] is None
        assert found["grid"] is None
    else:
        rows, cols = found["grid"]
        assert found["tokens"] in (rows * cols, rows * cols + 1)


@pytest.mark.parametrize("name", list_models())
def test_alias_names_the_same_model(call: Call, name: str) -> None:
    found = info(call, name)
    assert not set(found["alias"]) & set("/+ ")
    assert info(call, found["alias"]) == found


def test_paper_numbers_of_the_base_model(call: Call) -> None:
    found = info(call, "ViT-B/16")
    assert (found["params"], found["tokens"], found["grid"]) == (86_567_656, 197, [14, 14])


@pytest.mark.parametrize(("text", "size"), [("384", [384, 384]), ("224,320", [224, 320]), ("64x32", [64, 32])])
def test_image_size_is_height_and_width(call: Call, text: str, size: list[int]) -> None:
    found = info(call, "ViT-B/16", "--image-size", text)
    assert found["image_size"] == size
    assert found["grid"] == [size[0] // 16, size[1] // 16]


@pytest.mark.parametrize("classes", [0, 1, 10])
def test_classes_change_the_head_alone(call: Call, classes: int) -> None:
    body = info(call, "ViT-B/16", "--classes", "0")["params"]
    assert info(call, "ViT-B/16", "--classes", str(classes))["params"] == body + 769 * classes


@pytest.mark.parametrize("name", ["ViT-S/4", "ViT-B/14", "ViT-w64d6m128h4/2", "R101+ViT-H/32"])
def test_grammar_goes_beyond_the_list(call: Call, name: str) -> None:
    assert info(call, name)["name"] == name


def test_spec_in_the_answer_has_every_field(call: Call) -> None:
    spec = info(call, "R50+ViT-B/16")["spec"]
    assert spec["kind"] == "vit"
    assert spec["stem"]["stages"] == [3, 4, 9]


def test_text_output_has_the_same_numbers(call: Call) -> None:
    code, out, err = call("models", "info", "ViT-B/16")
    assert (code, err) == (0, "")
    assert "86,567,656" in out
    assert "vit-b-16" in out
    assert "197 (14x14 patches)" in out
    assert "tokens" not in call("models", "info", "BiT-R50x1").out


def test_list_shows_every_model_once(call: Call) -> None:
    code, out, err = call("models", "list")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:]] == list_models()


def test_list_as_json_is_info_for_each(call: Call) -> None:
    rows = json.loads(call("models", "list", "BiT-*", "--json").out)
    assert [row["name"] for row in rows] == list_models("BiT-*")
    assert rows[0] == info(call, rows[0]["name"])


@pytest.mark.parametrize("pattern", ["vit-b*", "ViT-B*"])
def test_pattern_ignores_case(call: Call, pattern: str) -> None:
    assert [line.split()[0] for line in call("models", "list", pattern).out.splitlines()[1:]] == [
        *("ViT-B/32", "ViT-B/16", "ViT-B/8"),
    ]


def test_command_and_function_agree(call: Call) -> None:
    there, here = (
        info(call, "ViT-L/16", "--image-size", "384", "--classes", "21843"),
        model_info("ViT-L/16", image_size=384, classes=21843),
    )
    assert (there["params"], there["macs"], there["tokens"]) == (here.params, here.macs, here.tokens)


# --- published checkpoints --------------------------------------------------------------------------------------------


def test_pretrained_list_shows_every_checkpoint_once(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path))
    code, out, err = call("models", "list", "--pretrained")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:]] == list_pretrained()
    line = next(line for line in out.splitlines() if line.startswith("ViT-B/16@augreg-i21k-i1k-384 "))
    assert line.split()[1:] == ["384x384", "1000", "85.5", "347", "-"]


def test_pretrained_list_reports_what_is_here(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path))
    path = find("ViT-S/14@dinov2").path
    path.parent.mkdir(parents=True)
    path.touch()
    lines = call("models", "list", "--pretrained", "ViT-S/14@*").out.splitlines()
    assert [line.split()[-1] for line in lines] == ["here", "yes", "-"]


def test_pretrained_list_as_json_has_everything(call: Call) -> None:
    (row,) = json.loads(call("models", "list", "--pretrained", "ViT-B/16@i21k-i1k-224", "--json").out)
    assert row["spec"] == {"image_size": [224, 224], "num_classes": 1000, "head": "linear"}
    assert row["expected"]["top1"] == 81.2
    assert row["address"].endswith("/imagenet21k%2Bimagenet2012/ViT-B_16-224.npz")
    assert row.keys() >= {"alias", "path", "here", "megabytes", "preprocess", "sha256", "licence", "sources", "format"}


def test_pretrained_pattern_without_a_match_is_an_error(call: Call) -> None:
    code, out, err = call("models", "list", "--pretrained", "ViT-B/16@augreg-i12k")
    assert (code, out) == (2, "")
    assert "Nearest: ViT-B/16@augreg-i21k" in err


def test_info_of_a_published_checkpoint_has_licence_format_and_preprocessing(call: Callable[..., Any]) -> None:
    printed = call("models", "info", "ViT-S/14@dinov2")
    rows = dict(line.split("  ", 1) for line in printed.out.splitlines())
    assert rows["licence"].strip() == "Apache-2.0"
    assert rows["format"].strip() == "dinov2"
    assert rows["preprocessing"].startswith("224x224, resize shorter-side")
    table = json.loads(call("models", "info", "ViT-S/14@dinov2", "--json").out)
    assert {"name", "params", "macs", "flops", "tokens", "grid", "image_size", "labels", "licence"} <= set(table)
