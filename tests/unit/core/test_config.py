"""Configs are strict in both directions: what is not in the schema is refused, what is in it survives storage."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
from config_reads import leaf_paths, watch

from vitlab.core import config
from vitlab.core.errors import FileProblem, UnknownName, UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float
    kind: Literal["cosine", "linear"] = "cosine"
    pair: tuple[int, int] = (1, 2)
    many: tuple[float, ...] = ()
    ceiling: float | None = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    title: str
    flag: bool = False
    count: int = 3
    inner: Inner
    extra: Inner | None = None


GOOD: dict[str, Any] = {"title": "t", "inner": {"rate": 0.1}}


def read(**changes: Any) -> Outer:
    return config.from_dict(Outer, {**GOOD, **changes})


def read_inner(**changes: Any) -> Inner:
    return read(inner={"rate": 0.1, **changes}).inner


# --- from_dict --------------------------------------------------------------------------------------------------------


def test_missing_keys_take_their_defaults() -> None:
    assert read() == Outer(title="t", inner=Inner(rate=0.1))


def test_unknown_key_is_refused_with_its_full_path_and_the_nearest_one() -> None:
    with pytest.raises(UnknownName) as caught:
        read_inner(rte=1.0)
    assert str(caught.value).splitlines()[0] == "unknown config key 'inner.rte'"
    assert caught.value.nearest[0] == "inner.rate"


def test_missing_required_key_is_named_with_its_full_path() -> None:
    with pytest.raises(UsageError, match=r"'inner\.rate' is missing"):
        read(inner={})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"title": 3}, "'title' must be text, not 3"),
        ({"flag": 1}, "'flag' must be true or false, not 1"),
        ({"flag": "yes"}, "'flag' must be true or false"),
        ({"count": 2.0}, "'count' must be a whole number, not 2.0"),
        ({"count": True}, "'count' must be a whole number, not True"),
        ({"count": "3"}, "'count' must be a whole number"),
        ({"inner": 5}, "'inner' must be a table of keys, not 5"),
        ({"inner": {"rate": "fast"}}, r"'inner\.rate' must be a number"),
        ({"inner": {"rate": True}}, r"'inner\.rate' must be a number"),
        ({"inner": {"rate": 1, "pair": [1]}}, r"'inner\.pair' must have 2 values, not 1"),
        ({"inner": {"rate": 1, "pair": [1, 2, 3]}}, r"'inner\.pair' must have 2 values, not 3"),
        ({"inner": {"rate": 1, "pair": 8}}, r"'inner\.pair' must be a list, not 8"),
        ({"inner": {"rate": 1, "pair": [1, "x"]}}, r"'inner\.pair\[1\]' must be a whole number"),
        ({"inner": {"rate": 1, "many": [1, None]}}, r"'inner\.many\[1\]' must be a number"),
    ],
)
def test_wrong_type_is_refused_with_the_key(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        read(**changes)


def test_whole_numbers_become_floats_where_a_number_is_wanted() -> None:
    inner = read_inner(rate=1, many=[1, 2.5])
    assert (inner.rate, inner.many) == (1.0, (1.0, 2.5))
    assert isinstance(inner.rate, float)
    assert isinstance(inner.many[0], float)


def test_value_outside_a_closed_set_is_refused_with_nearest_and_allowed() -> None:
    with pytest.raises(UnknownName) as caught:
        read_inner(kind="cosin")
    assert caught.value.nearest[0] == "cosine"
    assert "inner.kind" in str(caught.value)
    assert "Allowed: cosine, linear." in str(caught.value)


@pytest.mark.parametrize("absent", ["none", None])
def test_optional_key_can_be_switched_off(absent: Any) -> None:
    assert read_inner(ceiling=absent).ceiling is None


def test_optional_table_is_read_as_its_schema() -> None:
    assert read(extra={"rate": 2}).extra == Inner(rate=2.0)
    with pytest.raises(UnknownName, match=r"extra\.rat"):
        read(extra={"rat": 2})


def test_an_instance_is_accepted_where_an_optional_table_is_wanted() -> None:
    ready = Inner(rate=0.5)
    assert read(extra=ready).extra is ready


@pytest.mark.parametrize("huge", [10**400, -(10**400)])
def test_number_beyond_the_range_of_a_float_is_refused(huge: int) -> None:
    with pytest.raises(UsageError, match=r"inner\.rate"):
        read_inner(rate=huge)


@pytest.mark.parametrize("table", [[], ["title"], 5, None, "title"])
def test_something_else_than_a_table_is_refused(table: Any) -> None:
    with pytest.raises(UsageError, match="table of keys"):
        config.from_dict(Outer, table)


# --- overrides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("3e-4", 3e-4),
        ("true", True),
        ("[8, 8]", [8, 8]),
        ("gap", "gap"),
        ('"gap"', "gap"),
        ("ViT-B/16", "ViT-B/16"),
        ("", ""),
        ("a=b", "a=b"),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_override_value_is_read_as_toml_or_as_bare_text(text: str, value: Any) -> None:
    assert config.with_overrides({}, [f"a.b={text}"]) == {"a": {"b": value}}


def test_overrides_apply_in_order_and_leave_the_original_alone() -> None:
    table = {"a": {"b": 1, "c": 2}}
    assert config.with_overrides(table, ["a.b=5", "a.b=6", "d=7"]) == {"a": {"b": 6, "c": 2}, "d": 7}
    assert table == {"a": {"b": 1, "c": 2}}


@pytest.mark.parametrize("override", ["", "a", "a.b", "=3", ".a=3", "a.=3", "a..b=3"])
def test_malformed_override_is_refused_with_an_example(override: str) -> None:
    with pytest.raises(UsageError, match="--set path"):
        config.with_overrides({}, [override])


def test_sweep_is_a_key_and_each_different_value() -> None:
    assert config.split_sweep(" a . b = [8, 8],[16,16],[8,8]") == ("a.b", ("[8, 8]", "[16, 16]"))
    assert config.split_sweep("a=gap, cls,") == ("a", ("gap", "cls"))


@pytest.mark.parametrize("entry", ["", "a.b", "=1,2", "a..b=1,2", "a=", "a=1,,2"])
def test_malformed_sweep_is_refused_with_an_example(entry: str) -> None:
    with pytest.raises(UsageError, match="not a sweep") as refusal:
        config.split_sweep(entry)
    assert refusal.value.hint is not None and "--sweep optim.lr=0.003,0.01" in refusal.value.hint


def test_override_below_a_plain_value_is_refused() -> None:
    with pytest.raises(UsageError, match="'a' is a value"):
        config.with_overrides({"a": 1}, ["a.b=2"])


@pytest.mark.parametrize("value", ["[" * 5000, "1" * 5000], ids=["deep", "long"])
def test_override_that_breaks_the_toml_reader_is_bare_text(value: str) -> None:
    assert config.with_overrides({}, [f"a={value}"]) == {"a": value}


# --- TOML -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outer",
    [
        read(),
        read(title='quotes " and \\ and \n and \t and \x7f and ü', flag=True, count=-7),
        read(inner={"rate": 1e-12, "kind": "linear", "pair": [9, 9], "many": [1e300, 0.1]}),
        read(extra={"rate": 3}),
    ],
)
def test_toml_round_trip_gives_the_equal_config(outer: Outer) -> None:
    text = config.dump_toml(config.to_dict(outer))
    assert config.from_dict(Outer, config.parse_toml(text, "text")) == outer


@pytest.mark.parametrize(
    "table",
    [
        {"limit": float("inf")},
        {"limit": float("-inf")},
        {"empty": {}},
        {"two words": 1, "a.b": {'q"': 2}},
        {"rows": [{"a": 1}, {"a": 2}]},
    ],
    ids=["inf", "-inf", "empty table", "odd keys", "list of tables"],
)
def test_toml_round_trip_gives_the_equal_table(table: dict[str, Any]) -> None:
    assert config.parse_toml(config.dump_toml(table), "text") == table


def test_load_toml_says_which_file_is_wrong(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("a = ")
    with pytest.raises(FileProblem, match=r"bad\.toml.*TOML"):
        config.load_toml(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(FileProblem, match=r"bad\.toml"):
        config.load_toml(bad)
    with pytest.raises(FileProblem, match=r"absent\.toml.*not exist"):
        config.load_toml(tmp_path / "absent.toml")


def test_toml_nested_too_deeply_is_a_file_problem() -> None:
    with pytest.raises(FileProblem):
        config.parse_toml("a = " + "[" * 100_000, "text")


# --- fingerprint ------------------------------------------------------------------------------------------------------


def leaf_changes() -> list[Outer]:
    inner = Inner(rate=0.1)
    changes: list[dict[str, Any]] = [
        {"title": "u"},
        {"flag": True},
        {"count": 4},
        {"extra": inner},
        *(
            {"inner": dataclasses.replace(inner, **change)}
            for change in ({"rate": 0.2}, {"kind": "linear"}, {"pair": (2, 1)}, {"many": (1.0,)}, {"ceiling": None})
        ),
    ]
    return [dataclasses.replace(read(), **change) for change in changes]


def test_fingerprint_changes_with_every_single_value() -> None:
    prints = [config.fingerprint(config.to_dict(outer)) for outer in [read(), *leaf_changes()]]
    assert len(set(prints)) == len(prints) == 10


def test_fingerprint_stays_when_no_value_changes() -> None:
    first = config.fingerprint({"a": 1, "b": [1, 2]})
    assert config.fingerprint({"b": (1, 2), "a": 1}) == first
    assert len(first) == 12


# --- watch ------------------------------------------------------------------------------------------------------------


def test_watch_notes_exactly_the_leaves_that_are_read() -> None:
    seen: set[str] = set()
    twin = watch(read(), seen)
    assert seen == set()
    _ = twin.inner
    assert seen == set(), "stepping through a table is not reading a value"
    assert (twin.title, twin.inner.rate) == ("t", 0.1)
    assert seen == {"title", "inner.rate"}


def test_watched_twin_behaves_like_the_original() -> None:
    original = read(extra={"rate": 1})
    twin = watch(original, set())
    assert isinstance(twin, Outer)
    assert isinstance(twin.extra, Inner)
    assert config.to_dict(twin) == config.to_dict(original)


def test_storing_a_config_does_not_count_as_reading_it() -> None:
    seen: set[str] = set()
    config.dump_toml(config.to_dict(watch(read(), seen)))
    assert seen == set()


def test_leaf_paths_are_what_watch_can_report() -> None:
    assert leaf_paths(read()) == {
        *("title", "flag", "count", "extra"),
        *("inner.rate", "inner.kind", "inner.pair", "inner.many", "inner.ceiling"),
    }
    assert "extra.rate" in leaf_paths(read(extra={"rate": 1}))


def test_table_on_the_command_line_changes_the_keys_that_it_names() -> None:
    table = {"optim": {"lr": 0.1, "weight_decay": 0.3, "extra": {"a": 1, "b": 2}}}
    found = config.with_overrides(table, ['optim={lr=0.5, train="full", extra={a=7}}'])
    assert found == {"optim": {"lr": 0.5, "weight_decay": 0.3, "train": "full", "extra": {"a": 7, "b": 2}}}
    dotted = ["optim.lr=0.5", "optim.train=full", "optim.extra.a=7"]
    assert found == config.with_overrides(table, dotted)
    assert config.overridden(["optim={lr=0.5, extra={a=7}}"]) == {"optim.lr": 0.5, "optim.extra.a": 7}
