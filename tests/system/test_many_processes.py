"""Several processes train as one does, whether each has all weights or its part of them; they grow out of one, stop together,
and refuse together."""

import json
import os
from pathlib import Path
from typing import Any

import batch_norm_worlds
import exact_worlds
import pytest
import torch
from forked_runs import do_work, some_of_spread
from forked_work import in_child
from slow_cases import slow_after

from vitlab.weights.containers import read_arrays

SOAK = os.environ.get("VITLAB_SOAK") == "1"
FILES = {
    "config.toml",
    "env.json",
    "run.json",
    "split.csv",
    "metrics.jsonl",
    "metrics.csv",
    "checkpoints",
    "bundle",
    "log.txt",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def worlds(place: Path) -> dict[str, Any]:
    return in_child(lambda: do_work("worlds", place), place)


@pytest.fixture(scope="module")
def more_worlds(place: Path) -> dict[str, Any]:
    return in_child(lambda: do_work("more-worlds", place / "more"), place)


@pytest.mark.parametrize("name", ["2", "sharded"])
def test_loss_and_weights_are_those_of_one_process(worlds: dict[str, Any], name: str) -> None:
    require_equal(worlds["1"], worlds[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4", "pieces", "grown", "grown, sharded", "sharded pieces"])
def test_however_they_share_it_loss_and_weights_are_those_of_one(more_worlds: dict[str, Any], name: str) -> None:
    require_equal(more_worlds["1"], more_worlds[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["taught 2", "taught, sharded"])
def test_features_of_a_teacher_are_learnt_as_by_one_process(more_worlds: dict[str, Any], name: str) -> None:
    require_equal(more_worlds["taught 1"], more_worlds[name])


def require_equal(one: dict[str, Any], many: dict[str, Any]) -> None:
    assert set(many["codes"]) == {0}
    assert len(many["losses"]) == 6
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-6)
    theirs = read_arrays(Path(many["weights"])).arrays
    for key, value in read_arrays(Path(one["weights"])).arrays.items():
        torch.testing.assert_close(theirs[key], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=key)


def test_one_process_writes_for_all(worlds: dict[str, Any]) -> None:
    for name in ("1", "2", "sharded"):
        assert set(worlds[name]["files"]) == FILES | {".lock"}, name


@pytest.mark.slow
def test_one_of_four_and_of_those_that_go_on_writes_for_all(more_worlds: dict[str, Any]) -> None:
    for name in ("4", "grown"):
        assert set(more_worlds[name]["files"]) == FILES | {".lock"}, name


def test_each_process_writes_its_own_part_of_a_sharded_checkpoint(worlds: dict[str, Any], place: Path) -> None:
    assert worlds["sharded"]["codes"] == [0] * 4
    newest = place / "sharded" / "checkpoints" / "step-000000006"
    parts = {f"{kind}-{i}-of-4.safetensors" for kind in ("model", "optimizer", "ema") for i in (1, 2, 3, 4)}
    assert {path.name for path in newest.iterdir()} == {*parts, "progress.json", "manifest.json"}
    sizes = [(newest / f"optimizer-{i}-of-4.safetensors").stat().st_size for i in (1, 2, 3, 4)]
    assert max(sizes) < sum(sizes) / 2, "no process writes for the others"


def test_batch_that_cannot_be_shared_is_refused_by_all_before_anything_is_made(worlds: dict[str, Any]) -> None:
    assert (worlds["uneven"]["codes"], worlds["uneven"]["files"]) == ([2, 2, 2], [])


def test_numbers_that_are_none_stop_all_and_the_images_of_all_are_named(worlds: dict[str, Any], place: Path) -> None:
    assert worlds["nan"]["codes"] == [1, 1]
    assert "bundle" not in worlds["nan"]["files"]
    noted = json.loads((place / "nan" / "bad_batch.json").read_text())
    assert len(noted["images"]) == 8, "four of each process"


@pytest.mark.parametrize("kind", slow_after(1, ["false", "true", "slow disk"]))
def test_signal_to_one_stops_all_with_one_checkpoint(request: pytest.FixtureRequest, kind: str) -> None:
    found = request.getfixturevalue("worlds" if kind == "false" else "more_worlds")[f"signal, {kind}"]
    assert found["codes"] == [143, 143]
    assert found["saved"] == [f"step-{found['steps']:09d}"]
    assert 3 <= found["steps"] < 200


@pytest.fixture(scope="module")
def spread(place: Path) -> dict[str, Any]:
    return in_child(lambda: do_work("spread", place / "spread"), place)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(some_of_spread()))
def test_sharding_weights_makes_no_difference(spread: dict[str, Any], name: str) -> None:
    whole, parts = spread[name]["whole"], spread[name]["spread"]
    assert whole["codes"] == parts["codes"] == [0, 0]
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert [row["step"] for row in parts["tuned"]] == [2, 4]
    for mine, theirs in zip(parts["tuned"], whole["tuned"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    theirs = read_arrays(Path(whole["weights"])).arrays
    mine = read_arrays(Path(parts["weights"])).arrays
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        other = mine[key]
        if key.endswith("attn.qkv.bias"):  # that of the keys has no gradient but rounding noise, which Adam scales up
            (q, _, v), (own_q, _, own_v) = value.chunk(3), other.chunk(3)
            value, other = torch.cat([q, v]), torch.cat([own_q, own_v])
        torch.testing.assert_close(other, value, rtol=1e-3, atol=1e-3 * float(value.abs().max()), msg=key)


@pytest.mark.slow
def test_disk_that_is_full_for_one_process_stops_all_and_leaves_the_checkpoint_before(spread: dict[str, Any]) -> None:
    assert spread["full"]["codes"] == [1, 1]
    assert spread["full"]["saved"] == ["step-000000002"], "and nothing half written"
    assert "model-2-of-2.safetensors" in spread["full"]["whole"]


# --- exactly the same training, whoever does it -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact(place: Path) -> dict[str, Any]:
    """One process and two."""
    return in_child(lambda: exact_worlds.main(place / "exact", ["1", "2"]), place)


@pytest.fixture(scope="module")
def all_exact(place: Path, exact: dict[str, Any]) -> dict[str, Any]:
    """All ways to share the work."""
    others = [name for name in exact_worlds.WAYS if name not in exact["float64"]]
    found = in_child(lambda: exact_worlds.main(place / "more-exact", others), place)
    return {kind: {**exact[kind], **found[kind]} for kind in exact}


@pytest.mark.parametrize("name", slow_after(1, ["2", "2 sharded"]))
def test_float64_losses_are_those_of_one_process_to_1e9_over_50_steps(
    request: pytest.FixtureRequest, name: str
) -> None:
    exact = request.getfixturevalue("exact" if name == "2" else "all_exact")
    one, many = exact["float64"]["1"]["losses"], exact["float64"][name]["losses"]
    assert len(one) == len(many) == 50
    assert one[-1] < one[0] - 0.1, "it learns, so that a difference would show"
    assert many == pytest.approx(one, rel=0, abs=1e-9)


@pytest.mark.parametrize("name", slow_after(1, ["2", "2 sharded"]))
def test_float32_losses_are_those_of_one_process_to_1e5_over_10_steps(
    request: pytest.FixtureRequest, name: str
) -> None:
    exact = request.getfixturevalue("exact" if name == "2" else "all_exact")
    one, many = exact["float32"]["1"]["losses"], exact["float32"][name]["losses"]
    assert len(one) == len(many) == 10
    assert many == pytest.approx(one, rel=0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["2 1 2", "sharded 3, plain 2, sharded 2, sharded 4", *(["2 1 2 sharded"] if SOAK else [])]
)
def test_changing_the_number_of_processes_keeps_the_order_of_images_and_the_curve(
    all_exact: dict[str, Any], name: str
) -> None:
    one, many = all_exact["float64"]["1"], all_exact["float64"][name]
    assert len(many["ids"]) == 20
    assert many["ids"] == one["ids"][:20]
    assert many["losses"] == pytest.approx(one["losses"][:20], rel=0, abs=1e-9)


def test_running_statistics_are_the_mean_over_processes_in_all_of_them(place: Path) -> None:
    """Each sees its half of the batch; weights, evaluation and the checkpoint of the first must mean the same."""
    (place / "batch-norm").mkdir()
    found = in_child(lambda: batch_norm_worlds.main(place / "batch-norm"), place)
    one, first, second = found["1-0"], found["2-0"], found["2-1"]
    assert (first["statistics"], first["average"]) == (second["statistics"], second["average"])
    assert first["first"] == pytest.approx(one["first"], rel=1e-4), "the mean of halves is that of the whole"
