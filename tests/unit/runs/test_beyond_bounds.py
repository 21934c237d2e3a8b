"""Values that no machine can follow are refused in a sentence, before anything is read, begun or allocated for them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vitlab.core import config
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.memory import require_memory
from vitlab.core.runtime import require_threads
from vitlab.data import rules
from vitlab.data.processes import num_loaders, num_workers
from vitlab.models.build import create_model
from vitlab.models.facts import model_info
from vitlab.models.names import parse_name
from vitlab.models.spec import changed
from vitlab.training.memory import require_room
from vitlab.training.recipe import Recipe
from vitlab.training.sweep import read_grid

Tiny = Callable[..., Recipe]
CPU = torch.device("cpu")

DEEP = {
    "lists": "a = " + "[" * 10_000 + "]" * 10_000,
    "tables in a line": "a = " + "{a = " * 10_000 + "1" + "}" * 10_000,
    "a dotted key": ".".join("a" * 10_000) + " = 1",
    "a header": "[" + ".".join("a" * 10_000) + "]",
    "quoted keys": ".".join(['"="'] * 10_000) + " = 1",
    "just too deep": ".".join("a" * 20) + " = 1",
    "hexadecimal": "a = 0x" + "f" * 100_000,
    "decimal": "a = " + "9" * 100_000,
    "octal": "a = [0o" + "7" * 100_000 + "]",
    "a date": "a = 1979-05-27",
}


@pytest.mark.parametrize("kind", DEEP)
def test_toml_beyond_all_bounds_is_one_error_at_once(kind: str, least_seconds: Callable[..., float]) -> None:
    with pytest.raises(FileProblem, match=r"nested too deeply|not valid TOML"):
        config.parse_toml(DEEP[kind], "it")
    assert least_seconds(config.parse_toml, DEEP[kind], "it", tries=2) < 1


def test_recipe_of_megabytes_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("# " + "x" * 2**20)
    with pytest.raises(FileProblem, match=r"a\.toml.*1,048,578 bytes.*262,144"):
        config.load_toml(tmp_path / "a.toml")


@pytest.mark.parametrize("value", [text.partition("= ")[2] for text in DEEP.values() if text.startswith("a =")])
def test_override_that_is_not_a_plain_value_is_text(value: str) -> None:
    assert config.with_overrides({}, [f"a={value}"]) == {"a": value}
    assert read_grid(f"a={value},1", {}) is not None


def test_override_of_a_key_of_too_many_parts_is_refused() -> None:
    with pytest.raises(UsageError, match="not an override"):
        config.with_overrides({}, [".".join("a" * 10_000) + "=1"])


# --- models -----------------------------------------------------------------------------------------------------------

HUGE = [
    *({name: value} for name in ("width", "mlp_dim", "registers") for value in (10**9, 10**18, 10**400)),
    *({"depth": value} for value in (200_000, 10**400)),
    {"width": 2**20, "mlp_dim": 2**30},
    {"image_size": (2**16, 2**16), "width": 1024},
    {"image_size": (2**20, 2**20)},
    {"num_classes": 10**12},
    {"in_channels": 2**31},
]


@pytest.mark.parametrize(
    "changes", HUGE, ids=lambda changes: " ".join(f"{k}={str(v)[:12]}" for k, v in changes.items())
)
def test_model_beyond_memory_is_refused_before_it_is_made(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"must not be|at most|[\d,.]+ GB of memory"):
        create_model("ViT-w16d2m32h2/4", overrides={"heads": 1, **changes})


def test_trunk_of_a_million_units_is_refused() -> None:
    with pytest.raises(UsageError, match=r"stages.*at most"):
        changed(parse_name("BiT-R50x1"), {"trunk": {"stages": [1, 1_000_000]}})


def test_every_published_size_is_within_the_bounds() -> None:
    for name in ("ViT-H/14", "ViT-g/14", "BiT-R152x4", "ViT-w1664d48m8192h16/14"):
        with torch.device("meta"):
            create_model(name)


def test_info_of_the_largest_model_is_arithmetic(least_seconds: Callable[..., float]) -> None:
    assert least_seconds(model_info, "ViT-w1000000d1024m1000000h1/1", tries=1) < 1


def test_need_and_room_are_reported() -> None:
    with pytest.raises(UsageError, match=r"1,048,576\.0 GB.*[\d,]+\.\d GB.*free on cpu"):
        require_memory(2**50, CPU, "it")
    require_memory(1, CPU, "it")


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.width=200000"],
        ["model.mlp_dim=1000000000"],
        ["model.registers=100000000"],
        ["data.image_size=6000", "model.width=16384"],
        ["data.image_size=6000", "model.width=16384", "train.method=probe"],
        ["data.image_size=6000", "model.width=16384", "model.pos=none", "model.pool=gap"],
    ],
    ids=str,
)
def test_run_beyond_memory_is_refused_with_its_need(
    tiny: Tiny, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MAX_PIXELS", 10**10)  # else large images are refused for their pixels alone
    with pytest.raises(UsageError, match=r"[\d,.]+ GB of memory.*[\d,.]+ GB.*free"):
        require_room(tiny(*overrides), CPU, 1)


@pytest.mark.parametrize("key", ["optim.lr", "optim.weight_decay", "optim.eps"])
@pytest.mark.parametrize("value", ["1e38", "1e300", "nan", "inf"])
def test_rate_that_can_only_overflow_is_refused(tiny: Tiny, key: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{key} must"):
        tiny(f"{key}={value}")


def test_more_threads_than_a_process_can_have_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--threads.*1,024.*1000000"):
        require_threads(1_000_000)


def test_more_workers_than_a_machine_can_have_are_refused(tiny: Tiny) -> None:
    for ask in (num_workers, lambda number: num_loaders(1, number), lambda number: tiny(f"data.workers={number}")):
        with pytest.raises(UsageError, match="100,000 processes"):
            ask(100_000)
    assert num_workers() <= (os.cpu_count() or 1)


def test_no_more_workers_are_started_than_there_are_batches(
    tiny: Tiny, run: Callable[..., object], tmp_path: Path
) -> None:
    assert run(tiny("data.workers=400", "train.steps=1"), tmp_path / "run")


@pytest.mark.parametrize(
    "override",
    [
        "data.augment.shift_px=9000000000000000000",
        "data.repeats=1000000000000000000",
        "head_bias=1e300",
        "train.batch_size=1" + "0" * 300,
    ],
)
def test_number_that_torch_cannot_take_is_refused(tiny: Tiny, override: str) -> None:
    with pytest.raises(UsageError, match=r"must (be from|not be negative, or above|be at least 1 and at most)"):
        tiny(override)


@pytest.mark.parametrize("seed", ["-1", str(2**63), "1" + "0" * 300])
def test_seed_beyond_63_bits_is_refused(tiny: Tiny, seed: str) -> None:
    with pytest.raises(VitlabError, match="seed must be"):
        tiny(f"seed={seed}")
