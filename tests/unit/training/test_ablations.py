"""The paper's ablations as switches of a recipe: each builds, trains, and says what it did."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import vitlab
from vitlab.core.errors import UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.evaluation.published import find_table
from vitlab.models.build import build
from vitlab.models.spec import BiTSpec, ViTSpec
from vitlab.training.optim import make_optimizer
from vitlab.training.recipe import Recipe, list_recipes, read_recipe, recipe_from_dict, with_changes
from vitlab.training.recipe_book import show_recipe
from vitlab.training.schedule import rate_at
from vitlab.weights.bundle import Bundle, save_bundle

CELLS = [("none", "stem"), ("relative", "stem")]
CELLS += [(pos, pos_at) for pos in ("learned", "learned2d") for pos_at in ("stem", "every", "shared")]
NARROW = "model.name=ViT-w16d2m32h2/2"  # where nothing depends on what is learnt
QUIETLY: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True}


def switched(name: str, *switches: str) -> Recipe:
    return recipe_from_dict(with_changes(read_recipe(name), switches), num_classes=10)


def require_trainable(recipe: Recipe) -> None:
    """One update moves every weight that it can reach; the head starts at zero and hides the others in the first."""
    model = build(recipe.model, seed=0).train()
    optimizer = make_optimizer(model, recipe.optim)
    spec = recipe.model
    x = torch.randn(4, spec.in_channels, *spec.image_size, generator=torch.Generator().manual_seed(0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(4)).backward()
        optimizer.step()
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert not still, still


# --- the switches -----------------------------------------------------------------------------------------------------


def test_cells_are_those_of_table_8() -> None:
    table = find_table("table8")[0]
    places = [column.about["pos_at"] for column in table.columns]
    published = {
        (row.about["pos"], place)
        for row in table.rows
        for place, cell in zip(places, row.cells, strict=True)
        if cell.values
    }
    assert published == set(CELLS) and len(CELLS) == 8


@pytest.mark.parametrize(("pos", "pos_at"), CELLS)
def test_every_cell_of_table_8_is_two_switches(pos: str, pos_at: str) -> None:
    switches = (f"model.pos={pos}", f"model.pos_at={pos_at}")
    require_trainable(switched("ablation-laptop-vit", *switches))
    large = switched("ablation-vit", *switches).model
    assert isinstance(large, ViTSpec) and (large.pos, large.pos_at) == (pos, pos_at)


@pytest.mark.parametrize("switch", ["model.pool=gap", "model.head=linear", "model.attention=axial"])
def test_pooling_head_and_attention_are_switches(switch: str) -> None:
    more = ("model.pool=gap",) if "axial" in switch else ()
    require_trainable(switched("ablation-laptop-vit", switch, *more))


def test_figure_9_has_both_rates_within_reach() -> None:
    """8e-4 for the class token is Table 3's; the mean of patches has 3e-4 and, by D.3, a linear classifier."""
    assert show_recipe("paper-vit-b16-jft").recipe.optim.lr == 8e-4
    mean = switched("paper-vit-b16-jft", "model.pool=gap", "model.head=linear", "optim.lr=3e-4")
    assert isinstance(mean.model, ViTSpec) and (mean.model.pool, mean.model.head) == ("gap", "linear")
    assert mean.optim.lr == 3e-4
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "run-the-ablations.md").read_text()
    commands = [line for line in page.splitlines() if line.startswith("vitlab ") and "model.pool=gap" in line]
    assert len(commands) == 2 and all("--set model.head=linear" in line for line in commands)


def test_table_7_has_adam_in_one_column_and_bits_sgd_in_the_other() -> None:
    """Source: BiT section 3.3, and Table 7 for what comes out."""
    adam, sgd = (show_recipe(name).recipe for name in ("paper-bit-r50x1-jft", "ablation-resnet"))
    assert adam.model == sgd.model and adam.data == sgd.data and adam.train == sgd.train
    assert (adam.optim.name, adam.optim.lr) == ("adam-paper", 1e-3)
    assert (sgd.optim.name, sgd.optim.momentum, sgd.optim.weight_decay) == ("sgd", 0.9, 1e-4)
    assert sgd.optim.lr == pytest.approx(0.03 * sgd.train.batch_size / 256)
    total = 40_000
    rates = [
        rate_at(sgd.schedule, step, base=1.0, total_steps=total) for step in (9_999, 10_000, 23_000, 30_000, 37_000)
    ]
    assert rates == pytest.approx([1, 0.1, 0.01, 0.001, 0.0001]) and sgd.schedule.warmup == 5_000
    assert adam.expect is not None and sgd.expect is not None
    assert (adam.expect.test_top1, sgd.expect.test_top1) == (0.7754, 0.7824)


@pytest.mark.parametrize(
    "switches",
    [(), ("optim.name=sgd", "optim.lr=0.03", "optim.weight_decay=1e-4")],
    ids=str,
)
@pytest.mark.slow
def test_a_small_resnet_trains_with_either(switches: tuple[str, ...]) -> None:
    recipe = switched("ablation-laptop-resnet", *switches)
    assert isinstance(recipe.model, BiTSpec)
    require_trainable(recipe)


def test_laptop_twins_need_no_download() -> None:
    laptop = list_recipes("ablation-laptop-*")
    assert len(laptop) == 3 and all(read_recipe(name)["data"]["source"] == "digits" for name in laptop)


# --- positions of start weights ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "run"
    vitlab.train(recipe="ablation-laptop-vit", overrides=["train.steps=2", NARROW], out=folder, **QUIETLY)
    return folder


@pytest.mark.slow
def test_a_sweep_tries_every_start_of_the_positions_and_says_which_it_was(start: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    vitlab.train(
        recipe="ablation-laptop-transfer",
        init=start,
        sweep="init_positions=interpolate,sequence,fresh",
        overrides=["train.steps=1", "schedule.warmup=0", NARROW],
        out=out,
        **QUIETLY,
    )
    tried = [row["value"] for row in json.loads((out / "sweep.json").read_text())]
    assert tried == ["interpolate", "sequence", "fresh"]
    notes = {
        "interpolate": "grid 8x8 -> 12x12, corner-bilinear",
        "sequence": "positions in sequence, not interpolated",
        "fresh": "positions drawn anew",
    }
    for number, (value, note) in enumerate(notes.items(), start=1):
        run = out / f"try-{number}"
        log = (run / "log.txt").read_text()
        assert f"Start from {start}: " in log and note in log
        began = json.loads((run / "run.json").read_text())["start"]["start"]
        assert began.endswith(f"; {note}") == (value != "interpolate")


@pytest.mark.slow
def test_report_and_card_name_it_beside_the_start_weights(start: Path, tmp_path: Path) -> None:
    out, switches = tmp_path / "run", ["init_positions=sequence", "train.steps=1", "schedule.warmup=0", NARROW]
    vitlab.train(recipe="ablation-laptop-transfer", init=start, overrides=switches, out=out, **QUIETLY)
    for page in (out / "report.html", out / "bundle" / "card.md"):  # the start, what it was, and what became of it
        assert re.search(rf"{start} \([^)<|]+\).*; positions in sequence, not interpolated", page.read_text()), page
    assert 'init_positions = "sequence"' in (out / "config.toml").read_text()


def test_positions_without_start_weights_or_with_adapters_are_refused() -> None:
    with pytest.raises(UsageError, match="init_positions=fresh is about start weights"):
        switched("ablation-laptop-vit", "init_positions=fresh")
    with pytest.raises(UsageError, match=r"does not go with optim\.train=lora"):
        switched("ablation-laptop-transfer", "init_positions=fresh", "optim.train=lora")
    with pytest.raises(UsageError, match="init_positions"):
        switched("ablation-laptop-transfer", "init_positions=bicubic")


@pytest.mark.parametrize("start_of", ["fresh", "sequence"])
@pytest.mark.parametrize("switches", [("optim.train=head",), ("optim.train=last:1",), ("train.method=probe",)], ids=str)
def test_positions_that_would_never_be_trained_are_refused(start_of: str, switches: tuple[str, ...]) -> None:
    printed = rf"init_positions={start_of} does not go with {re.escape(switches[0])}: positions are not trained"
    with pytest.raises(UsageError, match=printed):
        switched("ablation-laptop-transfer", f"init_positions={start_of}", *switches)
    switched("ablation-laptop-transfer", "init_positions=interpolate", *switches)


def untrained(folder: Path, *switches: str) -> Path:
    spec = switched("ablation-laptop-vit", NARROW, *switches).model
    rule = Preprocess(mode="L", image_size=spec.image_size, mean=(0.5,), std=(0.5,))
    save_bundle(folder, Bundle(build(spec), rule, tuple("0123456789"), "", {}))
    return folder


def test_start_weights_without_tables_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is for learned position tables"):
        vitlab.train(
            recipe="ablation-laptop-transfer",
            init=untrained(tmp_path / "start", "model.pos=sincos2d"),
            overrides=["init_positions=fresh", NARROW],
            out=tmp_path / "x",
            dry_run=True,
            **QUIETLY,
        )


def test_resolution_of_fine_tuning_can_be_swept(tmp_path: Path) -> None:
    found = vitlab.train(
        recipe="ablation-laptop-transfer",
        init=untrained(tmp_path / "start"),
        sweep="data.image_size=16,24,32",
        overrides=[NARROW],
        out=tmp_path / "sizes",
        dry_run=True,
        **QUIETLY,
    )
    assert "3 runs" in str(found)


@pytest.mark.slow
def test_a_plain_bit_starts_one_with_non_local_blocks(tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "run"
    short = ["train.steps=1", "model.trunk.stages=[1, 2]", "schedule.warmup=0"]
    vitlab.train(recipe="ablation-laptop-resnet", overrides=short, out=plain, **QUIETLY)
    switches = ["train.steps=1", "schedule.warmup=0", "model.trunk.non_local=[1]"]
    vitlab.train(recipe="ablation-laptop-resnet", init=plain, overrides=switches, out=out, **QUIETLY)
    assert "13 tensors of parts that are new in the model start fresh" in (out / "log.txt").read_text()
    assert vitlab.load(out, device="cpu").model.spec.trunk.non_local == (1,)  # pyright: ignore
