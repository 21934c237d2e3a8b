"""CLEVR and KITTI in tiny copies, and the questions that VTAB asks of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from vitlab.core.errors import FileProblem
from vitlab.data.sources.raw import scenes as raw_scenes
from vitlab.data.sources.raw.files import RawFiles, scan


def clevr(root: Path, depths: dict[str, list[list[float]]]) -> RawFiles:
    for part, scenes in depths.items():
        (root / "CLEVR_v1.0/scenes").mkdir(parents=True, exist_ok=True)
        (root / "CLEVR_v1.0/images" / part).mkdir(parents=True, exist_ok=True)
        table: dict[str, Any] = {"scenes": []}
        for i, values in enumerate(scenes):
            name = f"CLEVR_{part}_{i:06d}.png"
            (root / "CLEVR_v1.0/images" / part / name).write_bytes(name.encode())
            objects = [{"pixel_coords": [1.0, 2.0, value], "shape": "cube"} for value in values]
            table["scenes"].append({"image_filename": name, "objects": objects})
        (root / f"CLEVR_v1.0/scenes/CLEVR_{part}_scenes.json").write_text(json.dumps(table))
    return scan(root, root / ".cache")


def test_clevr_counts_from_three_and_bins_the_nearest(tmp_path: Path) -> None:
    files = clevr(tmp_path, {"train": [[9.1, 8.2, 11.0], [12.0] * 10], "val": [[7.0, 9.0, 9.9, 10.0]]})
    counts = raw_scenes.clevr_count(files)
    assert counts.part("train").labels.single().tolist() == [0, 7]
    assert [counts.classes[i] for i in counts.part("val").labels.single().tolist()] == ["4"]
    nearest = raw_scenes.clevr_distance(files)
    assert nearest.part("train").labels.single().tolist() == [1, 5]
    assert nearest.part("val").read(0) == b"CLEVR_val_000000.png"
    assert (len(counts.classes), len(nearest.classes)) == (8, 6)


@pytest.mark.parametrize(
    ("value", "label"),
    [(0.1, 0), (8.0, 0), (8.000001, 1), (8.5, 1), (8.6, 2), (9.0, 2), (9.5, 3), (10.0, 4), (10.1, 5), (99.0, 5)],
)
def test_a_bin_is_the_last_edge_below(value: float, label: int) -> None:
    assert raw_scenes.last_edge_below(value, raw_scenes.CLEVR_EDGES) == label


def test_clevr_scenes_that_cannot_be_read(tmp_path: Path) -> None:
    files = clevr(tmp_path, {"train": [[9.0] * 3], "val": [[9.0] * 3]})
    for wrong in ("[", "{}", '{"scenes": [{}]}', '{"scenes": [{"image_filename": "x", "objects": []}]}'):
        (tmp_path / "CLEVR_v1.0/scenes/CLEVR_val_scenes.json").write_text(wrong)
        with pytest.raises(FileProblem, match="CLEVR_val_scenes"):
            raw_scenes.clevr_distance(files)


def line(kind: str, z: float) -> str:
    return f"{kind} 0.00 0 -1.57 10.0 20.0 30.0 40.0 1.5 1.6 3.9 -2.0 1.7 {z} -1.6"


@pytest.mark.parametrize(
    ("lines", "label"),
    [
        ([], 3),
        ([line("Pedestrian", 2.0), line("DontCare", -1000.0)], 3),
        ([line("Car", 30.0), line("Van", 7.9)], 0),
        ([line("Truck", 8.0)], 0),
        ([line("Truck", 8.1)], 1),
        ([line("Car", 20.0)], 1),
        ([line("Car", 20.5), line("Cyclist", 1.0)], 2),
    ],
)
def test_the_nearest_vehicle(lines: list[str], label: int) -> None:
    assert raw_scenes.nearest_vehicle(lines) == label


def kitti(root: Path, videos: int, per_video: int) -> RawFiles:
    count = videos * per_video
    for folder in ("training/image_2", "training/label_2", "mapping"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    order = [(i * 7) % count for i in range(count)]  # 7 shares no factor with the counts used here
    (root / "mapping/train_rand.txt").write_text(",".join(str(i + 1) for i in order))
    rows = [f"2011_09_26 drive_{i // per_video:04d} {i:010d}" for i in range(count)]
    (root / "mapping/train_mapping.txt").write_text("\n".join(rows) + "\n")
    for i in range(count):
        (root / f"training/image_2/{i:06d}.png").write_bytes(b"%d" % i)
        (root / f"training/label_2/{i:06d}.txt").write_text(line("Car", i) + "\n")
    return scan(root, root / ".cache")


def test_kitti_keeps_videos_together(tmp_path: Path) -> None:
    opened = raw_scenes.kitti_distance(kitti(tmp_path, 20, 3))
    assert {part: len(of) for part, of in opened.parts.items()} == {"train": 48, "val": 6, "test": 6}
    groups = [set(of.groups or ()) for of in opened.parts.values()]
    assert [len(of) for of in groups] == [2, 2, 16] and len(set.union(*groups)) == 20
    train = opened.part("train")
    assert train.read(0) == str(int(train.keys[0][:6])).encode()


def test_kitti_with_lists_that_do_not_fit(tmp_path: Path) -> None:
    files = kitti(tmp_path, 10, 1)
    for wrong in ("1,2,99", "0,1", "x", ""):
        (tmp_path / "mapping/train_rand.txt").write_text(wrong)
        with pytest.raises(FileProblem, match="lists in mapping/ do not fit"):
            raw_scenes.kitti_distance(files)
    kitti(tmp_path, 10, 1)
    (tmp_path / "training/label_2/000003.txt").write_text("Car 1 2")
    with pytest.raises(FileProblem, match="label_2 cannot be read"):
        raw_scenes.kitti_distance(files)
