"""Old names of recipes and options work, and warn once with the new one; what was never a name does not."""

import warnings
from pathlib import Path

import pytest
from forked_command import Command

import vitlab
from vitlab.core import renamed
from vitlab.core.errors import UnknownName
from vitlab.options.data_options import CheckOptions, ShardOptions, SplitOptions
from vitlab.options.evaluation_options import CompareOptions, EmbedOptions, EvaluateOptions, PredictOptions
from vitlab.options.option import declared
from vitlab.options.training_options import DemoOptions, TrainOptions
from vitlab.options.weights_options import ConvertOptions, LoadOptions

DATA = "fractals:categories=2,instances=4,image_size=16"
OF_TRAINING = (TrainOptions, DemoOptions)
OF_MODELS = (EvaluateOptions, CompareOptions, PredictOptions, EmbedOptions, ConvertOptions, LoadOptions)
ALL = (*OF_TRAINING, *OF_MODELS, CheckOptions, SplitOptions, ShardOptions)


@pytest.fixture(autouse=True)
def old_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "RECIPES", {"mnist-letters": "demo-digits", "demo-fractals": "demo-digits"})
    monkeypatch.setattr(renamed, "OPTIONS", {"per_tar": "per_shard"})
    monkeypatch.setattr(renamed, "_warned", set())


def test_an_old_recipe_is_the_new_one_and_warns_once() -> None:
    with pytest.warns(renamed.RenamedWarning, match="the recipe mnist-letters is called demo-digits now"):
        found = vitlab.show_recipe("mnist-letters")
    assert found.recipe == vitlab.show_recipe("demo-digits").recipe
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vitlab.show_recipe("mnist-letters")


def test_a_name_that_is_in_use_means_itself_and_one_that_never_was_is_unknown() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert vitlab.show_recipe("demo-fractals").recipe.title != vitlab.show_recipe("demo-digits").recipe.title
        with pytest.raises(UnknownName):
            vitlab.show_recipe("mnist-numbers")


def test_an_old_option_works_in_python(tmp_path: Path) -> None:
    with pytest.warns(renamed.RenamedWarning, match="the option per_tar is called per_shard now"):
        done = vitlab.shard_data(DATA, tmp_path, per_tar=1, workers=1, quiet=True)  # pyright: ignore
    assert done.shards == done.images > 2


@pytest.mark.parametrize("flag", [("--per-tar", "1"), ("--per-tar=1",)])
def test_an_old_option_works_in_a_shell(flag: tuple[str, ...], tmp_path: Path) -> None:
    words = ["data", "shard", DATA, "out", *flag, "--workers", "1", "-q"]
    code, _, err = Command(words, tmp_path, lambda: setattr(renamed, "OPTIONS", {"per_tar": "per_shard"})).end()
    assert code == 0, err
    assert err == "vitlab: warning: the option --per-tar is called --per-shard now; the old name will go\n"
    assert len(list((tmp_path / "out").glob("*.tar"))) > 2


def test_every_retired_name_leads_to_one_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    options = {each.name for options in ALL for each in declared(options)}
    assert set(renamed.OPTIONS.values()) <= options
    assert set(renamed.RECIPES.values()) <= set(vitlab.list_recipes())
    assert not set(renamed.RECIPES) & set(vitlab.list_recipes())
