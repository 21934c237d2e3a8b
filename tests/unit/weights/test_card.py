"""The card tells everything a reader needs before using the weights."""

from vitlab.models.cost import count_params
from vitlab.models.names import parse_name
from vitlab.weights.card import with_measurements, write_card


def test_card_has_task_origin_and_accuracy() -> None:
    spec = parse_name("ViT-Ti/16")
    card = write_card(
        title="My model",
        spec=spec,
        data="digits: 10 images",
        command="vitlab demo --seed 3",
        seed=3,
        metrics={"test top-1": "0.9800 (0.96 to 0.99)", "n": "359"},
        licence="Apache-2.0",
    )
    lines = card.splitlines()
    assert lines[0] == "# My model"
    for row in (
        "| data | digits: 10 images |",
        "| command | `vitlab demo --seed 3` |",
        "| seed | 3 |",
        "| test top-1 | 0.9800 (0.96 to 0.99) |",
        "| n | 359 |",
        "| licence | Apache-2.0 |",
        "| image | 224x224 pixels, 3 channels |",
    ):
        assert row in lines
    assert any(f"ViT-Ti/16, {count_params(spec):,} parameters" in line for line in lines)
    assert card.endswith("\n")


def test_what_was_measured_since_is_added_as_a_table_that_names_cannot_break() -> None:
    card = with_measurements("# Card\n", [("top1", "0.9 on a|b,\nn = 3", "vitlab evaluate 'x y' z")])
    assert card == (
        "# Card\n\n## Measured\n\n| what | value | command |\n|---|---|---|\n"
        "| top1 | 0.9 on a\\|b, n = 3 | `vitlab evaluate 'x y' z` |\n"
    )
    assert with_measurements("# Card\n", []) == "# Card\n"
