"""Any table survives TOML, any value an override, and a fingerprint moves exactly when a value does."""

import copy
import dataclasses
import string
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vitlab.core import config
from vitlab.core.errors import VitlabError
from vitlab.models.spec import ViTSpec

keys = st.text(string.ascii_lowercase + string.digits + "_-", min_size=1, max_size=8)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | texts
values = scalars | st.lists(scalars, max_size=3) | st.lists(st.lists(st.integers(), max_size=2), max_size=2)
tables = st.dictionaries(
    keys, values | st.dictionaries(keys, values | st.dictionaries(keys, values, min_size=1), min_size=1), max_size=5
)


@given(tables)
def test_toml_round_trip_gives_the_equal_table(table: dict[str, Any]) -> None:
    assert config.parse_toml(config.dump_toml(table), "text") == table


@given(keys, values)
def test_override_in_toml_spelling_gives_the_value_itself(key: str, value: Any) -> None:
    spelled = config.dump_toml({"x": value}).removeprefix("x = ").removesuffix("\n")
    assert config.with_overrides({}, [f"{key}={spelled}"]) == {key: value}


@given(st.dictionaries(keys, scalars, min_size=1, max_size=5), st.data())
def test_fingerprint_changes_when_one_value_does(table: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(table)))
    changed = copy.deepcopy(table)
    changed[key] = [table[key]]
    assert config.fingerprint(changed) != config.fingerprint(table)
    assert config.fingerprint(dict(reversed(table.items()))) == config.fingerprint(table)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


FREE = [field.name for field in dataclasses.fields(ViTSpec) if field.name not in ("width", "heads")]


@given(st.sampled_from(FREE), json_like)
def test_any_value_for_any_key_is_accepted_or_refused_with_one_error(key: str, value: Any) -> None:
    table = {"width": 8, "depth": 1, "mlp_dim": 8, "heads": 2, "patch": 4, key: value}
    try:
        spec = config.from_dict(ViTSpec, table, "model.")
    except VitlabError as error:
        assert str(error)
    else:
        assert isinstance(spec, ViTSpec)
