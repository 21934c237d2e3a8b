"""`vitlab recipes` and `vitlab plan`: what they print, and that each has its JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitlab.training.recipe import list_recipes

Call = Callable[..., Any]


def test_list_names_every_recipe_and_takes_a_pattern(call: Call) -> None:
    code, out, err = call("recipes", "list")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:]] == list_recipes()
    rows = json.loads(call("recipes", "list", "better-*", "--json").out)
    assert [row["name"] for row in rows] == list_recipes("better-*")
    assert {row["expected_top1"] for row in rows} == {0.765, 0.785, 0.8}


def test_pattern_that_matches_nothing_is_refused(call: Call) -> None:
    code, _, err = call("recipes", "list", "papre-vit-b16-jft")
    assert code == 2
    assert "paper-vit-b16-jft" in err


def test_show_prints_toml_or_strict_json(call: Call) -> None:
    code, out, err = call("recipes", "show", "paper-vit-b16-jft")
    assert (code, err) == (0, "")
    assert "# run it:   vitlab train --recipe paper-vit-b16-jft --out runs/paper-vit-b16-jft\n" in out
    assert "# expect:   84.15 % after transfer-imagenet (Table 6: 224 exaFLOPs)\n" in out
    assert "\nmax_grad_norm = inf\n" in out

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(call("recipes", "show", "paper-vit-b16-jft", "--json").out, parse_constant=refuse)
    assert found["recipe"]["optim"]["lr"] == 8e-4
    assert found["recipe"]["optim"]["max_grad_norm"] == "inf"
    assert found["steps"] == 517_823


def test_show_of_a_file_that_is_not_there_is_a_wrong_call(call: Call) -> None:
    assert call("recipes", "show", "nope.toml") == (2, "", "vitlab: nope.toml does not exist\n")


def test_show_takes_a_file_that_leaves_the_data_to_the_command_line(call: Call, tmp_path: Path) -> None:
    lines = ['title = "mine"', "data.image_size = 16", 'model.name = "ViT-w16d2m32h2/4"']
    (tmp_path / "mine.toml").write_text("\n".join([*lines, "train = {epochs = 2, batch_size = 8}", "optim.lr = 0.5"]))
    code, out, err = call("recipes", "show", "mine.toml")
    assert (code, err) == (0, "")
    command = "vitlab train DATA --recipe mine.toml --out runs/mine"
    assert out.startswith(f"# mine.toml: mine\n# run it:   {command}\n# ViT-w16d2m32h2/4\n")
    assert "\nweight_decay = 0.0\n" in out, "every key is written out"
    assert "source" not in out and "num_classes" not in out, "nothing is made up"
    found = json.loads(call("recipes", "show", "mine.toml", "--json").out)
    assert (found["steps"], found["images"], "source" in found["recipe"]["data"]) == (None, None, False)
    (tmp_path / "whole.toml").write_text(out)
    again = call("recipes", "show", "whole.toml").out
    assert again.replace("whole", "mine") == out
    settled = [
        call("train", "shapes:count=20,image_size=16", "--recipe", name, "--print-config")
        for name in ("mine.toml", "whole.toml")
    ]
    assert settled[0].code == 0, settled[0].err
    assert settled[0].out == settled[1].out, "and what is shown is a recipe"


def test_show_still_reports_what_else_a_file_lacks(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('title = "mine"\ndata.mode = "L"\n')
    code, _, err = call("recipes", "show", "mine.toml")
    assert (code, err) == (2, "vitlab: config key 'data.image_size' is missing\n")


def test_plan_as_json(call: Call) -> None:
    arguments = ("--model", "ViT-Ti/16", "--steps", "5", "--image-size", "32", "--no-measure", "--device", "cpu")
    found = json.loads(call("plan", *arguments, "--json").out)
    assert found["images_seen"] == 5 * 256
    assert found["measured_images_per_second"] is None
