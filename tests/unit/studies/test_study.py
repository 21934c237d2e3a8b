"""Studies as TOML: what is refused and how, and that every study that ships can be run, judged and resolved."""

import dataclasses
import re
from pathlib import Path

import pytest
from study_records import CLAIM, HEAD, SCALE, TINY, records_of, tiny_study

from vitlab.core import config
from vitlab.core.errors import FileProblem, UnknownName, UsageError, VitlabError
from vitlab.evaluation.published import find_table
from vitlab.models.names import parse_name
from vitlab.models.spec import changed
from vitlab.studies.grid import StudyRun, list_cells, list_runs
from vitlab.studies.inspected import read_heads
from vitlab.studies.outcome import find_outcome
from vitlab.studies.study import SCALES, SpeedRule, Study, first_seeds
from vitlab.studies.study_file import list_study_names, read_study
from vitlab.training.recipe import read_recipe, recipe_from_dict, with_changes

SHIPPED = list_study_names()


# --- what is refused --------------------------------------------------------------------------------------------------

ABOUT = 'about = "Nothing to speak of."'
WRONG = {
    'a = { kind = "A" }\n': ('measure = "top2"\na = { kind = "A" }\n', "unknown measure of claim a-above-b 'top2'"),
    "a = { kind": ("a = { kinds", "claim a-above-b names the axis kinds, which the scale laptop does not have"),
    'a = { kind = "A" }': ('a = { kind = "Q" }', "claim a-above-b names kind Q, which the scale laptop does not have"),
    "B = { train =": ("B = { trains =", r"unknown stage 'scales\.laptop\.axes\.kind\.B\.trains'"),
    'B = { train = { "optim.lr" = 1e-4 } }': (
        "B = { train = 3 }",
        r"scales\.laptop\.axes\.kind\.B\.train must be a table of keys, not 3",
    ),
    "A = {}": ("A = 3", r"scales\.laptop\.axes\.kind\.A must be a table of keys, not 3"),
    'title = "Tiny"': ('title = "Tiny"\nlength = 3', "unknown config key 'length'"),
    'question = "Does it?"': ("", "question"),
    ABOUT: (f"{ABOUT}\nminute = 3", r"unknown config key 'scales\.laptop\.minute'"),
    "above = 0.0": ("", "claim a-above-b: a test says above or below"),
    "above = 0.0\n": ("above = 1.0\nbelow = 0.5\n", r"claim a-above-b: no number is above 1\.0 and below 0\.5"),
    "statistic =": ("scales = ['desk']\nstatistic =", r"claims\[0\]\.tests\[0\]\.scales\[0\]: 'desk'"),
    '"difference"': ('"contrast"', r"claims\[0\]\.tests\[0\]\.statistic: 'contrast'"),
    'statistic = "difference"': ('statistic = "slope"', "claim a-above-b: a slope needs .*along"),
    '= "difference"': ('= "slope"\nalong = "kind"', "goes along kind, of which A has no x"),
    '"difference"\n': ('"slope"\nalong = "width"\n', "claim a-above-b names the axis width"),
    'b = { kind = "B" }': ('b = { kind = "A" }', "claim a-above-b: a difference needs two different sides"),
    "[scales.laptop]\n": (
        "[scales.desk]\nabout = 'x'\nstages = {}\n[scales.laptop]\n",
        "unknown scale in study tiny 'desk'",
    ),
    "[scales.laptop.stages.train]\nrecipe": ("[scales.laptop.stages]\n[other]\nx", "unknown config key 'other'"),
    'about = "Nothing': ('seeds = [0, 0]\nabout = "Nothing', r"scales\.laptop\.seeds must be different"),
    'about = "Nothing to': ('skip = [{ kind = "Q" }]\nabout = "Nothing to', r"scales\.laptop\.skip names kind Q"),
    'about = "Nothing to s': (
        'skip = [{ kin = "A" }]\nabout = "Nothing to s',
        r"scales\.laptop\.skip names the axis kin",
    ),
    "{ x = 1,": ("{ x = 'one',", r"scales\.laptop\.axes\.size\.1\.x must be a number, not 'one'"),
    "{ x = 2,": ("{ x = true,", r"scales\.laptop\.axes\.size\.2\.x must be a number, not True"),
    "{ x = 4": ("{ line = 3, x = 4", r"scales\.laptop\.axes\.size\.4\.line must be text or a list of texts, not 3"),
    '"data.train_images" = 200': ("data.train_images = 200", "keys of data in quotation marks"),
    'b = { kind = "B" }\n': ("", "claim a-above-b: a difference needs two different sides"),
    '{ "data.train_images" = 100 }': ("{ recipe = 3 }", r"scales\.laptop\.axes\.size\.1\.train\.recipe' must be text"),
    '{ "data.train_images" = 200 }': ("{ verb = 'fly' }", r"scales\.laptop\.axes\.size\.2\.train\.verb: 'fly'"),
    "{ x = 4,": ("{ x = inf,", r"scales\.laptop\.axes\.size\.4\.x must be a number, not inf"),
    "b = { kind": ("below = nan\nb = { kind", "claim a-above-b: above and below must be finite"),
    "[scales.laptop.axes.kind]\n": ("[scales.laptop.axes.width]\n[scales.laptop.axes.kind]\n", "width has no values"),
    'about = "Not': ('seeds = [0, -1]\nabout = "Not', r"scales\.laptop\.seeds must be .*from 0"),
    "[scales.laptop.axes.kind]": (
        "[scales.laptop.axes.flops]\na = {}\n[scales.laptop.axes.kind]",
        "meaning of their own",
    ),
    'line = "kind"': ('line = "kin"', "a drawing names the axis kin"),
    'x = "size"': ('x = "flop"', "a drawing names the axis flop"),
    'paper = "Figure 0"': (
        'paper = "Figure 0"\nprinted = { title = "", x_label = "", y_label = "" }',
        "printed needs .* published table",
    ),
}
PRINTED = """
table = "table6"
printed = { title = "", x_label = "", y_label = "", x = "exaFLOPs", y = "ImageNet", lines = { R = "ResNet" } }
"""
WRONG_PRINTED = {
    '"exaFLOPs"': ('"exaflops"', "unknown column of table6 'exaflops'"),
    ', y = "ImageNet"': ("", r"unknown column of table6 'R'"),
    ', y = "ImageNet", lines = { R = "ResNet" }': ("", "both columns, x and y, or neither"),
    'x = "exaFLOPs", y = "ImageNet", lines = { R = "ResNet" }': ("places = { B = 1 }", "unknown row of table6 'B'"),
    ', y = "ImageNet",': (', y = "ImageNet", places = { "ViT-B/16" = 1 },', "places for rows, or a column"),
    ', x = "exaFLOPs", y = "ImageNet", lines = { R = "ResNet" }': (", log_x = true", "neither places nor x"),
    "table6": ("table66", "unknown table 'table66'"),
}


@pytest.mark.parametrize("old", WRONG)
def test_wrong_key_is_named_in_one_sentence(tmp_path: Path, old: str) -> None:
    new, printed = WRONG[old]
    assert old in TINY
    with pytest.raises(UsageError, match=printed) as caught:
        tiny_study(tmp_path, TINY.replace(old, new, 1))
    assert caught.value.what.count("\n") == 0 and len(caught.value.what) < 200


@pytest.mark.parametrize("old", WRONG_PRINTED)
def test_printed_names_what_the_published_table_has(tmp_path: Path, old: str) -> None:
    new, said = WRONG_PRINTED[old]
    tiny_study(tmp_path, PRINTED + TINY)
    assert old in PRINTED
    with pytest.raises(UsageError, match=said):
        tiny_study(tmp_path, PRINTED.replace(old, new, 1) + TINY)


@pytest.mark.parametrize("key", ["log_x = true", "fit = true"])
def test_a_drawing_by_logarithm_needs_places_above_zero(tmp_path: Path, key: str) -> None:
    text = TINY.replace("log_x = true\nfit = true", key)
    assert key in text and text.count("= true") == 1
    said = f"a drawing with {key.split()[0]} goes along size, of which"
    with pytest.raises(UsageError, match=f"{said} an x is not above 0"):
        tiny_study(tmp_path, text.replace("x = 1,", "x = 0,"))
    with pytest.raises(UsageError, match=f"{said} 1 has no x"):
        tiny_study(tmp_path, text.replace("x = 1,", ""))
    tiny_study(tmp_path, text.replace("x = 1,", "x = 0,").replace(key, f'{key}\nonly = {{ size = "2" }}'))
    tiny_study(tmp_path, text.replace("x = 1,", "").replace(key, ""))
    tiny_study(tmp_path, text.replace('x = "size"', 'x = "flops"'))
    with pytest.raises(UsageError, match="cannot go along layer"):
        tiny_study(tmp_path, text.replace('x = "size"', 'x = "layer"'))


def test_a_front_needs_places_that_are_numbers(tmp_path: Path) -> None:
    text = TINY.replace("log_x = true\nfit = true", "front = true").replace("x = 1,", "x = 0,")
    tiny_study(tmp_path, text)
    with pytest.raises(UsageError, match="a drawing with front goes along size, of which 1 has no x"):
        tiny_study(tmp_path, text.replace("x = 0,", ""))


@pytest.mark.parametrize("statistic", ["ratio", "cost-ratio"])
@pytest.mark.parametrize("border", ["above = 0.0", "above = -1.0", "below = 0.0"])
def test_borders_of_a_ratio_are_above_zero(tmp_path: Path, statistic: str, border: str) -> None:
    text = TINY.replace('"difference"', f'"{statistic}"')
    tiny_study(tmp_path, text.replace("above = 0.0", "above = 0.5"))
    with pytest.raises(UsageError, match="claim a-above-b: above and below of a ratio must be above 0"):
        tiny_study(tmp_path, text.replace("above = 0.0", border))


def test_a_slope_needs_places_above_zero(tmp_path: Path) -> None:
    text = TINY.replace('"difference"', '"slope"\nalong = "size"').replace('b = { kind = "B" }\n', "")
    tiny_study(tmp_path, text)
    with pytest.raises(UsageError, match="by its logarithm"):
        tiny_study(tmp_path, text.replace("x = 1,", "x = 0,"))
    with pytest.raises(UsageError, match="goes along size, of which 1 has no x"):
        tiny_study(tmp_path, text.replace("x = 1,", ""))
    with pytest.raises(UsageError, match="fewer than 2 places"):
        tiny_study(tmp_path, text.replace('a = { kind = "A" }', 'a = { kind = "A", size = "1" }'))
    with pytest.raises(UsageError, match="fewer than 3 places"):
        tiny_study(tmp_path, re.sub(r'"4" = {.*\n', "", text.replace('"slope"', '"exponent"')))


def test_values_of_an_axis_do_not_share_a_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"axes\.size: 2 and 4 have the same x"):
        tiny_study(tmp_path, TINY.replace('"4" = { x = 4', '"4" = { x = 2'))


@pytest.mark.parametrize("label", ["first", "last", "best"])
def test_labels_that_tests_give_a_meaning_are_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(UsageError, match="first, last, best are no labels"):
        tiny_study(tmp_path, TINY.replace('"4" = {', f"{label} = {{"))


def test_sides_that_are_the_same_at_a_scale_are_refused(tmp_path: Path) -> None:
    text = TINY.replace('a = { kind = "A" }', 'a = { kind = "A", size = "first" }')
    tiny_study(tmp_path, text)
    with pytest.raises(UsageError, match="a and b are the same at the scale laptop"):
        tiny_study(tmp_path, text.replace('b = { kind = "B" }', 'b = { kind = "A", size = "1" }'))


def test_a_drawing_has_no_line_of_costs(tmp_path: Path) -> None:
    tiny_study(tmp_path, TINY.replace('x = "size"', 'x = "flops"'))
    with pytest.raises(UsageError, match="a drawing names the axis flops"):
        tiny_study(tmp_path, TINY.replace('line = "kind"', 'line = "flops"'))


def test_claims_have_tests_and_names_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two claims have the name a-above-b"):
        tiny_study(tmp_path, HEAD + CLAIM + CLAIM + SCALE)
    with pytest.raises(UsageError, match="claim a-above-b has no test at any scale"):
        tiny_study(tmp_path, HEAD + CLAIM.partition("[[claims.tests]]")[0] + "tests = []\n" + SCALE)


def test_a_table_that_is_not_published_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown table 'table88'"):
        tiny_study(tmp_path, f'table = "table88"\n{TINY}')


def test_wrong_scale_name_and_seeds_are_refused(tmp_path: Path) -> None:
    study = tiny_study(tmp_path)
    with pytest.raises(UnknownName, match="unknown scale 'huge'"):
        study.at("huge")
    with pytest.raises(UsageError, match="tiny has no scale gpu; it has laptop"):
        study.at("gpu")
    for count in (0, 4):
        with pytest.raises(UsageError, match=f"--seeds .*1 to 3, not {count}"):
            first_seeds(study.at("laptop"), count)
    assert first_seeds(study.at("laptop"), 2).seeds == (0, 1)
    with pytest.raises(UnknownName, match="unknown study 'posits'"):
        read_study("posits")


def test_file_that_is_not_toml_or_not_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VitlabError, match="not valid TOML"):
        tiny_study(tmp_path, "title = [}")
    with pytest.raises(UsageError, match="at least one of the scales laptop, gpu, paper"):
        tiny_study(tmp_path, TINY.replace(SCALE, "[scales]"))
    with pytest.raises(FileProblem):
        read_study(str(tmp_path / "missing.toml"))


# --- the studies that ship --------------------------------------------------------------------------------------------


UNTRAINED = "inside-published"  # a laptop will do, and there is no twin for a GPU
SHIPPED_SCALES = [(name, scale) for name in SHIPPED for scale in SCALES if (name, scale) != (UNTRAINED, "gpu")]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_study_has_every_scale_and_the_table_it_names(name: str) -> None:
    study = read_study(name)
    assert tuple(study.scales) == tuple(scale for scale in SCALES if (name, scale) in SHIPPED_SCALES)
    assert study.title and study.question.endswith("?") and study.paper and study.claims and study.drawings
    assert not study.table or find_table(study.table)
    assert all(claim.tests for claim in study.claims)


def test_all_twins_for_one_gpu_take_less_than_90_minutes() -> None:
    """What studies share is counted for each. Three and more take no longer than five minutes on a laptop."""
    twins = {name: read_study(name).scales["gpu"].minutes for name in SHIPPED if name != UNTRAINED}
    assert [name for name, minutes in twins.items() if minutes is None] == ["pretraining-set"], "not measured yet"
    assert sum(filter(None, twins.values())) <= 90
    laptop = [read_study(name).scales["laptop"].minutes for name in SHIPPED]
    assert sum(minutes is not None and minutes <= 5 for minutes in laptop) >= 3


def test_claims_have_names_of_their_own() -> None:
    names = [claim.name for name in SHIPPED for claim in read_study(name).claims]
    assert len(names) == len(set(names)) >= 20
    assert len(SHIPPED) == 16


@pytest.mark.parametrize(("name", "scale"), SHIPPED_SCALES)
def test_every_claim_can_be_judged_once_all_is_measured(name: str, scale: str) -> None:
    """With records of the numbers that each verb gives: a test that names another would never be measured."""
    study = read_study(name)
    at = dataclasses.replace(study.at(scale), seeds=(0, 1, 2))
    outcome = find_outcome(study, at, records_of(at))
    assert outcome.measured == outcome.cells == len(list_cells(at)) > 0
    for one in outcome.claims:
        tests = [test for test in one.claim.tests if scale in test.scales]
        assert [test.sentence == "not measured yet" for test in one.tests] == [False] * len(tests), one.claim.name
        assert all(len(test.by_seed) == 3 for test in one.tests)
    for drawing in (one for one in study.drawings if scale in one.scales):
        if drawing.x == "layer":
            heads = [
                read_heads(one.record.numbers, drawing.measure) for each in outcome.conditions for one in each.seeds
            ]
            assert heads and all(heads)
            continue
        assert all(condition.estimate(drawing.measure or at.measure) is not None for condition in outcome.conditions)


def test_only_claims_about_what_a_scale_lacks_are_left_out_of_it() -> None:
    """Of a laptop what it lacks: much data, memory of a GPU, some conditions; of a GPU what its grid cannot tell apart.

    On the paper's scale published weights are looked at, of which there is no "before".
    """
    left_out = {
        (claim.name, scale)
        for name, scale in SHIPPED_SCALES
        for claim in read_study(name).claims
        if not any(scale in test.scales for test in claim.tests)
    }
    assert left_out == {
        ("comparable-at-medium", "laptop"),
        ("larger-better-after-much", "laptop"),
        ("positions-know-nothing-at-first", "paper"),
        ("sizes-alike-after-medium", "laptop"),
        ("strong-regularisation-helps", "gpu"),
        ("vit-wins-large", "laptop"),
        ("vit-gains-more-from-data", "laptop"),
        ("scaling-all-helps", "laptop"),
        ("width-helps-least", "laptop"),
        ("old-positions-useless", "laptop"),
        ("relative-positions-alike", "laptop"),
        ("positions-anywhere-alike", "laptop"),
        ("filters-like-cnn", "paper"),
        ("vits-need-less-memory", "laptop"),
    }


def require_resolves(run: StudyRun) -> None:
    stage = run.stage
    if stage.verb == "speed":
        rule = config.from_dict(SpeedRule, stage.set)
        changed(parse_name(rule.model), {"image_size": (rule.image_size, rule.image_size)})
    elif stage.verb in ("few-shot", "inspect"):
        assert stage.init or run.start is not None
        assert not stage.recipe
    else:
        assert stage.recipe
        table = with_changes(read_recipe(stage.recipe), config.override_texts(stage.set))
        start = stage.init or ("weights" if run.start is not None else table.get("init", "scratch"))
        recipe_from_dict({**table, "init": start}, 10)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_recipe_exists_and_every_change_of_it_resolves(name: str) -> None:
    study: Study = read_study(name)
    runs = [run for scale in study.scales.values() for run in list_runs([(study, first_seeds(scale, 1))])]
    for run in runs:
        try:
            require_resolves(run)
        except VitlabError as error:
            pytest.fail(f"{run.stage}: {error}")


def test_what_skip_leaves_out_cannot_be_tested(tmp_path: Path) -> None:
    skipped = TINY.replace("[scales.laptop]\n", '[scales.laptop]\nskip = [{ kind = "B" }]\n')
    with pytest.raises(UsageError, match="names cells that skip leaves out at the scale laptop"):
        tiny_study(tmp_path, skipped)
    slope = TINY.replace('"difference"\n', '"slope"\nalong = "size"\n').replace('b = { kind = "B" }\n', "")
    one_place = '[scales.laptop]\nskip = [{ kind = "A", size = "1" }, { kind = "A", size = "2" }]\n'
    with pytest.raises(UsageError, match="fewer than 2 places"):
        tiny_study(tmp_path, slope.replace("[scales.laptop]\n", one_place))


def test_few_shot_of_named_weights_has_one_seed(tmp_path: Path) -> None:
    """The seed changes nothing there: three of them would be one number with an interval of nothing."""
    stage = '[scales.laptop.stages.train]\nverb = "few-shot"\ninit = "ViT-S/14@dinov2"\ndata = "digits"'
    text = TINY.replace('[scales.laptop.stages.train]\nrecipe = "study-laptop-vit"', stage)
    text = (
        text[: text.index("[scales.laptop.axes.kind]")]
        + '[scales.laptop.axes.kind]\nA = {}\nB = { train = { init = "x" } }\n'
    )
    text = re.sub(r"(?s)\[\[drawings\]\].*?\n\n", 'measure = "few_shot_5"\n[[drawings]]\nx = "kind"\n\n', text)
    with pytest.raises(UsageError, match="few-shot of named weights is the same for every seed"):
        tiny_study(tmp_path, text)
    tiny_study(tmp_path, text.replace("[scales.laptop.stages.train]", "seeds = [0]\n[scales.laptop.stages.train]"))
