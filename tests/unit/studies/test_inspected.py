"""Figures as numbers: attention distances, rows and columns of positions, and how low the frequencies of filters are."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.data.preprocess import Preprocess
from vitlab.models.build import build
from vitlab.models.spec import ViTSpec
from vitlab.studies.cell_run import execute_run
from vitlab.studies.grid import StudyRun
from vitlab.studies.inspected import (
    heads_measure,
    low_frequency_share,
    numbers_of,
    position_nearness,
    read_heads,
    row_column_excess,
)
from vitlab.studies.study import Stage
from vitlab.studies.study_file import read_study
from vitlab.weights.bundle import Bundle, save_bundle


def test_distances_are_shares_of_uniform_attention() -> None:
    distance_LH = np.array([[2.0, 9.0], [4.0, 8.0], [6.0, 10.0]])
    found = numbers_of({"attention_distance": distance_LH}, uniform_px=10.0)
    assert found == {
        "distance_first_layer": pytest.approx(0.55),
        "distance_last_layer": pytest.approx(0.8),
        "distance_by_depth": pytest.approx(0.25),
        "low_layers_nearest_head": pytest.approx(0.2),
        "low_layers_farthest_head": pytest.approx(0.9),
        "low_layers_local_heads": 0.5,
        "low_layers_global_heads": 0.5,
        **{"distance_layer1_head1": 0.2, "distance_layer1_head2": 0.9},
        **{"distance_layer2_head1": 0.4, "distance_layer2_head2": 0.8},
        **{"distance_layer3_head1": 0.6, "distance_layer3_head2": 1.0},
    }
    assert read_heads(found, "distance") == {1: [0.2, 0.9], 2: [0.4, 0.8], 3: [0.6, 1.0]}
    assert numbers_of({"attention_distance": distance_LH}, uniform_px=None) == {}
    alone = numbers_of({"attention_distance": distance_LH[:1]}, uniform_px=10.0)
    assert alone["distance_by_depth"] == 0.0, "one layer has no slope"


def test_low_layers_are_the_lowest_third() -> None:
    share_LH = np.array([[0.6, 0.9], [0.4, 1.1], [0.1, 1.9], [0.8, 0.8], [0.8, 0.8], [0.8, 0.8]])
    found = numbers_of({"attention_distance": 10 * share_LH}, 10.0)
    assert (found["low_layers_nearest_head"], found["low_layers_farthest_head"]) == (0.4, pytest.approx(1.1))
    assert (found["low_layers_local_heads"], found["low_layers_global_heads"]) == (0.25, 0.5)


def test_rows_and_columns_of_a_grid_that_is_not_square() -> None:
    rows, cols = np.divmod(np.arange(6), 3)
    same = (rows[:, None] == rows) | (cols[:, None] == cols)
    similarity_NN = np.where(same, 0.5, 0.1) + 10 * np.eye(6)
    assert row_column_excess(similarity_NN.reshape(2, 3, 2, 3)) == pytest.approx(0.4)
    assert row_column_excess(np.ones((2, 3, 2, 3))) == pytest.approx(0)
    assert row_column_excess(np.ones((1, 4, 1, 4))) == 0, "a single row has nothing to compare with"


def test_nearness_alone_is_not_similarity_of_rows_and_columns() -> None:
    rows, cols = np.divmod(np.arange(64), 8)
    distance_NN = np.hypot(rows[:, None] - rows, cols[:, None] - cols)
    assert abs(row_column_excess(np.exp(-distance_NN / 4).reshape(8, 8, 8, 8))) < 0.01


def test_nearness_of_positions_is_a_correlation() -> None:
    rows, cols = np.divmod(np.arange(12), 4)
    distance_NN = np.hypot(rows[:, None] - rows, cols[:, None] - cols)
    assert position_nearness(-distance_NN.reshape(3, 4, 3, 4)) == pytest.approx(1)
    assert position_nearness(distance_NN.reshape(3, 4, 3, 4)) == pytest.approx(-1)
    noise = np.random.default_rng(0).normal(size=(400, 400))
    assert abs(position_nearness((noise + noise.T).reshape(20, 20, 20, 20))) < 0.02, (
        "400 positions know nothing of a grid"
    )
    assert position_nearness(np.ones((3, 4, 3, 4))) == position_nearness(np.ones((1, 1, 1, 1))) == 0


def test_measures_of_heads_are_made_of_what_records_have() -> None:
    share_LH = np.array([[0.9, 0.9], [0.9, 0.9], [0.1, 0.8], [0.7, 0.9]])
    found = numbers_of({"attention_distance": 10 * share_LH}, 10.0)
    assert heads_measure(found, "distance_growth") == pytest.approx(-0.1)
    assert heads_measure(found, "second_half_wide_heads") == 0.5
    odd = numbers_of({"attention_distance": 10 * share_LH[:3]}, 10.0)
    assert heads_measure(odd, "second_half_wide_heads") == 0.75, "of three layers the last two"
    assert heads_measure({}, "distance_growth") is heads_measure({}, "second_half_wide_heads") is None
    assert heads_measure(found, "distance_last_layer") is None


def test_low_frequencies_by_the_variance_that_a_filter_explains() -> None:
    flat, checkers = np.ones((8, 8)), np.indices((8, 8)).sum(axis=0) % 2 * 2.0 - 1
    filters_KCPP = np.stack([flat, checkers])[:, None]
    assert low_frequency_share(filters_KCPP, np.array([3.0, 1.0])) == pytest.approx(0.75)
    assert low_frequency_share(filters_KCPP, np.array([0.0, 1.0])) == pytest.approx(0)
    assert low_frequency_share(np.zeros((2, 1, 8, 8)), np.ones(2)) == 0


PATCHES = {"laptop": 14, "paper": 16}  # of the model that is inspected there


@pytest.mark.parametrize("scale", PATCHES)
def test_published_filters_must_be_five_points_above_white_noise(scale: str) -> None:
    patch = PATCHES[scale]
    noise = low_frequency_share(np.eye(patch**2).reshape(-1, 1, patch, patch), np.ones(patch**2))
    claims = {claim.name: claim for claim in read_study("inside-published").claims}
    (test,) = (test for test in claims["published-filters-like-cnn"].tests if scale in test.scales)
    assert test.above == pytest.approx(noise + 0.05, abs=0.0005)


def test_positions_may_be_finer_than_the_inspected_image(tmp_path: Path) -> None:
    """As those of DINOv2 are, of 518 pixels, for images of 224. The seed of published weights chooses photos."""
    spec = ViTSpec(width=8, depth=1, mlp_dim=8, heads=2, patch=4, image_size=(24, 24), num_classes=0)
    save_bundle(tmp_path / "model", Bundle(build(spec, seed=0), Preprocess(image_size=(16, 16)), (), "card", {}))
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "photos" / "black.png")
    stage = Stage(verb="inspect", init=str(tmp_path / "model"), data=str(tmp_path / "photos"))
    records = [
        execute_run(StudyRun("key", stage, seed, None), tmp_path / str(seed), None, device="cpu", threads=1)
        for seed in (0, 1)
    ]
    assert -1 < records[0].numbers["row_column_excess"] < 1
    assert "--seed" not in records[0].command and records[1].command.endswith(" --seed 1")
