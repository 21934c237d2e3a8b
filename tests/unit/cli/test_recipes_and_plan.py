"""`vitlab recipes` and `vitlab plan`: what they print, and that each has its JSON."""

import json
from collections.abc import Callable
from typing import Any

from vitlab.runs.recipe import list_recipes

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
    assert "# run it:   vitlab train shards/jft --recipe paper-vit-b16-jft\n" in out
    assert "# expect:   84.15 % after transfer-imagenet (Table 6: 224 exaFLOPs)\n" in out
    assert "\nmax_grad_norm = inf\n" in out

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(call("recipes", "show", "paper-vit-b16-jft", "--json").out, parse_constant=refuse)
    assert found["recipe"]["optim"]["lr"] == 8e-4
    assert found["recipe"]["optim"]["max_grad_norm"] == "inf"
    assert found["steps"] == 517_823


def test_plan_on_paper(call: Call) -> None:
    options = ("--chips", "8", "--chip-tflops", "61.5", "--utilisation", "0.39")
    code, out, err = call("plan", "--recipe", "paper-vit-l16-i21k-90ep", "--no-measure", "--device", "cpu", *options)
    assert (code, err) == (0, "")
    (line,) = [line for line in out.splitlines() if line.startswith("on paper")]
    assert "estimated: 6" in line, "about 30 days, as the paper says"


def test_plan_as_json(call: Call) -> None:
    arguments = ("--model", "ViT-Ti/16", "--steps", "5", "--image-size", "32", "--no-measure", "--device", "cpu")
    found = json.loads(call("plan", *arguments, "--json").out)
    assert found["images_seen"] == 5 * 256
    assert found["measured_images_per_second"] is None
