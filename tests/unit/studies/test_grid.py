"""The cells of a study, and the names of their runs: alike for what is alike, and different for whatever decides a weight."""

from pathlib import Path

import pytest
from study_records import HEAD, TINY, tiny_study

from vitlab.core.errors import VitlabError
from vitlab.studies.grid import list_cells, list_runs
from vitlab.studies.study_file import read_study

RECIPE = """
title = "Mine"
[data]
source = "digits"
image_size = [8, 8]
[model]
name = "ViT-w8d1m8h1/4"
[train]
steps = 2
batch_size = 8
[optim]
lr = 1e-3
[expect]
test_top1 = 0.5
"""
CHAIN = """
[scales.laptop]
about = "Two stages."
seeds = [0]
[scales.laptop.stages.first]
recipe = "RECIPE"
[scales.laptop.stages.second]
recipe = "study-laptop-vit"
[scales.laptop.axes.kind]
A = {}
B = { second = { "optim.lr" = 1e-4 } }
C = { first = { "optim.lr" = 1e-4 } }
scratch = { second = { init = "scratch" } }
[scales.laptop.axes.size]
"1" = { x = 1 }
"""


def keys(folder: Path, text: str = TINY, name: str = "tiny") -> list[str]:
    study = tiny_study(folder, text, name)
    return [cell.run.key for cell in list_cells(study.at("laptop"))]


def chain(folder: Path, recipe: str = RECIPE) -> dict[str, list[str]]:
    """The keys that lead to each cell."""
    (folder / "mine.toml").write_text(recipe)
    study = tiny_study(folder, HEAD + CHAIN.replace("RECIPE", str(folder / "mine.toml")))
    return {cell.labels["kind"]: [run.key for run in cell.run.chain()] for cell in list_cells(study.at("laptop"))}


def test_cells_are_every_combination_seed_by_seed_without_what_is_skipped(tmp_path: Path) -> None:
    scale = tiny_study(tmp_path, TINY + '[[scales.laptop.skip]]\nkind = "A"\nsize = "1"\n').at("laptop")
    cells = list_cells(scale)
    assert [cell.name for cell in cells[:5]] == ["A, 2", "A, 4", "B, 1", "B, 2", "B, 4"]
    assert [cell.seed for cell in cells] == [0] * 5 + [1] * 5 + [2] * 5
    assert len({cell.run.key for cell in cells}) == 15


def test_key_is_of_what_decides_the_run_and_of_nothing_else(tmp_path: Path) -> None:
    before = keys(tmp_path)
    retold = TINY.replace("Tiny", "Other").replace("Does it?", "Why?").replace("above = 0.0", "above = 0.5")
    assert keys(tmp_path, retold, "another-study") == before
    for old, new in (
        ('recipe = "study-laptop-vit"', 'recipe = "study-laptop-resnet"'),
        ('recipe = "study-laptop-vit"', 'recipe = "study-laptop-vit"\ndata = "cifar10"'),
        ('recipe = "study-laptop-vit"', 'recipe = "study-laptop-vit"\ninit = "somewhere"'),
        ('recipe = "study-laptop-vit"', 'recipe = "study-laptop-vit"\nset = { "train.epochs" = 3 }'),
        ('recipe = "study-laptop-vit"', 'recipe = "study-laptop-vit"\nverb = "noisy-student"'),
        ("[scales.laptop]", "[scales.laptop]\nseeds = [3, 4, 5]"),
    ):
        assert old in TINY
        assert not set(keys(tmp_path, TINY.replace(old, new, 1))) & set(before), new


def test_order_of_overrides_does_not_matter(tmp_path: Path) -> None:
    first, second = (
        TINY.replace('"study-laptop-vit"', f'"study-laptop-vit"\nset = {{ {pair} }}')
        for pair in ('"optim.lr" = 1e-2, "train.epochs" = 3', '"train.epochs" = 3, "optim.lr" = 0.01')
    )
    assert keys(tmp_path, first) == keys(tmp_path, second) != keys(tmp_path)


def test_what_a_recipe_says_about_itself_is_not_in_the_key(tmp_path: Path) -> None:
    before = chain(tmp_path)
    assert chain(tmp_path, RECIPE.replace("Mine", "Yours").replace("0.5", "0.7")) == before
    assert chain(tmp_path, f"# a comment\n{RECIPE}") == before
    for old, new in (("1e-3", "2e-3"), ("[8, 8]", "[16, 16]"), ("digits", "cifar10"), ("steps = 2", "steps = 3")):
        after = chain(tmp_path, RECIPE.replace(old, new))
        assert after["A"][0] != before["A"][0] and after["A"][1] != before["A"][1], (
            "the start is in the key of what follows"
        )
        assert after["scratch"] == before["scratch"]


def test_cells_share_the_runs_they_start_from(tmp_path: Path) -> None:
    found = chain(tmp_path)
    assert found["A"][0] == found["B"][0] != found["C"][0]
    assert len({found[kind][1] for kind in "ABC"}) == 3, "another change or another start"
    assert len(found["scratch"]) == 1, "with start weights of its own it does not begin with the stage before"


def test_runs_of_several_studies_are_listed_once_and_starts_come_first(tmp_path: Path) -> None:
    first, second = (tiny_study(tmp_path, TINY, name) for name in ("one", "two"))
    one, two = first.at("laptop"), second.at("laptop")
    assert len(list_runs([(first, one)])) == len(list_runs([(first, one), (second, two)])) == 18
    studies = [(read_study(name), read_study(name).at("gpu")) for name in ("compute", "data-size", "fine-tuning")]
    runs = list_runs(studies)
    apart = sum(len(list_runs([study])) for study in studies)
    assert len(runs) == len({run.key for run in runs}) < apart, "they have runs in common"
    places = {run.key: i for i, run in enumerate(runs)}
    assert all(run.start is None or places[run.start.key] < places[run.key] for run in runs)


def test_recipe_that_is_not_there_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(VitlabError, match="unknown recipe 'no-such'"):
        keys(tmp_path, TINY.replace("study-laptop-vit", "no-such"))
