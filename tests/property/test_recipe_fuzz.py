"""Recipes and `--set` values of any kind: a plan in numbers, or one error of ours, at once and in little memory."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import ODD, SOAK, Files, Reader, damaged, hold, limits_only, nested
from slow_cases import slow_after

from vitlab.core import config
from vitlab.core.errors import VitlabError, printable
from vitlab.models.build import allocate
from vitlab.models.cost import count_macs, training_exaflops
from vitlab.models.names import format_name
from vitlab.training.memory import estimate_memory, require_room
from vitlab.training.recipe import (
    list_recipes,
    read_recipe,
    recipe_from_dict,
    recipe_text,
    recipe_to_toml,
    with_changes,
)
from vitlab.training.sweep import read_grid

Draw = random.Random
FEW_BLOCKS = 50  # whose modules are made within the time, on a busy machine too
WORDS = [
    b"=",
    b".",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"""',
    b"\n[data]\n",
    b"nan",
    b"inf",
    b"1e999",
    b"0x",
    b"true",
    b"1979-05-27",
]
ODD_TOML = [
    *("nan", "-inf", "1e999", "0x" + "F" * 20, "0x" + "F" * 20_000, "9" * 5000, "1979-05-27", "07:32:00"),
    *(
        '"\\u001b[31m"',
        "'''\n'''",
        "{}",
        "{a = {a = {a = 1}}}",
        "[[1], 2]",
        "[1, 'a', {b = 2}]",
        "true",
        "",
        "]",
        "\x00",
    ),
    *(nested(10), nested(900), nested(5000), "{a." * 2000 + "=1", "{" + ".".join("a" * 3000) + " = 1}", "-1", "-0.0"),
]


def leaves(table: dict[str, Any], path: str = "") -> list[str]:
    inner = [(f"{path}{key}", value) for key, value in table.items()]
    return [name for key, value in inner for name in (leaves(value, f"{key}.") if isinstance(value, dict) else [key])]


RECIPES = {name: recipe_text(name) for name in list_recipes()}
KEYS = sorted({key for name in RECIPES for key in leaves(read_recipe(name))})
WHOLE = recipe_to_toml(recipe_from_dict(with_changes(read_recipe("demo-digits"), ["data.source=x"]), 10))
KEYS += [key for key in leaves(config.parse_toml(WHOLE, "")) if key not in KEYS]


def odd_value(draw: Draw) -> str:
    if draw.random() < 0.4:
        return draw.choice(ODD_TOML)
    if draw.random() < 0.3:
        return str(draw.choice((1, 2, 3, 5, 0.1, 0.5, 16, 1e-3)) * 10 ** draw.randrange(-20, 40))
    return json.dumps(draw.choice(ODD))


def make(draw: Draw) -> Files:
    name = draw.choice(list(RECIPES))
    text = RECIPES[name] if draw.random() < 0.7 else WHOLE
    match draw.randrange(4):
        case 0:
            text = damaged(text.encode(), draw, WORDS).decode("utf-8", "surrogateescape")
        case 1:
            lines = text.split("\n")
            at = draw.randrange(len(lines))
            key, equals, _ = lines[at].partition(" = ")
            lines[at] = f"{key}{equals}{odd_value(draw)}" if equals else lines[draw.randrange(len(lines))]
            text = "\n".join(lines)
        case _:
            pass
    sets = [f"{draw.choice(KEYS)}={odd_value(draw)}" for _ in range(draw.choice((0, 1, 1, 2)))]
    if draw.random() < 0.05:
        sets.append(damaged(b"optim.lr=3e-4", draw, WORDS).decode("utf-8", "replace"))
    if draw.random() < 0.05:
        sets.append(".".join(draw.choices("ab", k=draw.choice((3, 20, 5000)))) + "=1")
    files = {"own.toml": text.encode("utf-8", "surrogateescape"), "sets.json": json.dumps(sets).encode()}
    return {**files, "sweep": f"{draw.choice(KEYS)}={odd_value(draw)},{odd_value(draw)}".encode("utf-8", "replace")}


def plan(folder: Path) -> None:
    """What a run, `recipes show` and `plan` do with a recipe before there is any data."""
    try:
        sets = json.loads((folder / "sets.json").read_bytes())
        table = with_changes(read_recipe(str(folder / "own.toml")), sets)
        table.setdefault("data", {}) if "data" not in table else None
        if isinstance(table["data"], dict):
            table["data"].setdefault("source", "x")
        recipe = recipe_from_dict(table, 10)
        recipe_to_toml(recipe)
        format_name(recipe.model)
        count_macs(recipe.model)
        training_exaflops(recipe.model, 1.0, 1000)
        recipe.train.in_steps(1000, recipe.train.batch_size)
        estimate_memory(recipe).largest_micro_batch(2**30)
        require_room(recipe, torch.device("cpu"), 1)
        if getattr(recipe.model, "depth", 0) <= FEW_BLOCKS:
            allocate(recipe.model)
        read_grid((folder / "sweep").read_text(), table)
    except VitlabError as error:
        shown = printable(str(error))
        assert all(sign == "\n" or (ord(sign) >= 32 and sign not in "\x7f\x9b\u202e") for sign in shown)
        raise


COUNTS = slow_after(1, [("recipe", 150)] if SOAK else [("recipe", 150), ("recipe", 500)])  # soaking has its own


@limits_only
@pytest.mark.parametrize(("_reader", "count"), COUNTS)
def test_any_recipe_is_planned_or_refused(_reader: str, count: int) -> None:
    hold(Reader("recipe", make, plan), count)
