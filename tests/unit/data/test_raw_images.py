"""Tiny copies of the published sets of image files, made here: which image is in which part under which label."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.sources.raw import images as raw_images
from vitlab.data.sources.raw.files import RawFiles, scan
from vitlab.data.sources.synsets import ilsvrc_synsets


def lay(root: Path, files: Mapping[str, str | bytes]) -> RawFiles:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return scan(root, root / ".cache")


def images(*names: str) -> dict[str, str]:
    """Files that hold their own names."""
    return {name: name for name in names}


def reported(dataset: Dataset) -> list[tuple[str, str, bytes]]:
    """(key, class, content) of every image."""
    labels = dataset.labels.single().tolist()
    return [(key, dataset.classes[labels[i]], bytes(dataset.read(i))) for i, key in enumerate(dataset.keys)]


def sizes(opened: Opened) -> dict[str, int]:
    return {part: len(dataset) for part, dataset in opened.parts.items()}


PETS = {
    **images(*(f"images/{name}.jpg" for name in ("Bengal_1", "Bengal_2", "pug_1", "pug_3"))),
    "annotations/trainval.txt": "#comment\nBengal_1 1 1 1\npug_1 2 2 1\n",
    "annotations/test.txt": "Bengal_2 1 1 1\npug_3 2 2 1\n",
}


def test_pets(tmp_path: Path) -> None:
    opened = raw_images.oxford_pets(lay(tmp_path, PETS))
    assert opened.classes == ("Bengal", "pug")
    assert reported(opened.part("train")) == [
        ("Bengal_1.jpg", "Bengal", b"images/Bengal_1.jpg"),
        ("pug_1.jpg", "pug", b"images/pug_1.jpg"),
    ]
    assert [key for key, _, _ in reported(opened.part("test"))] == ["Bengal_2.jpg", "pug_3.jpg"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("../../secret_1 1 1 1", "cannot be read"),
        ("pug_9 2 2 1", "has no images/pug_9.jpg"),
        ("pug_1 9 2 1", "gaps"),
        ("pug_1 -2 2 1", "cannot be read"),
        ("pug_1", "cannot be read"),
    ],
)
def test_pets_with_lists_that_lie(tmp_path: Path, line: str, reason: str) -> None:
    files = lay(tmp_path, PETS | {"annotations/test.txt": f"Bengal_2 1 1 1\n{line}\n"})
    with pytest.raises(FileProblem, match=reason) as caught:
        raw_images.oxford_pets(files)
    assert "\n" not in caught.value.what


def flowers(root: Path, labels: Any = (1, 2, 2, 1), test: Any = (2, 1)) -> RawFiles:
    root.mkdir(exist_ok=True)
    scipy.io.savemat(root / "imagelabels.mat", {"labels": np.array([labels], np.uint8)})
    parts = {"trnid": [[4]], "valid": [[3]], "tstid": [test]}
    scipy.io.savemat(root / "setid.mat", {name: np.array(ids, np.uint16) for name, ids in parts.items()})
    return lay(root, images(*(f"jpg/image_{i:05d}.jpg" for i in range(1, 5))))


def test_flowers_count_images_and_classes_from_one(tmp_path: Path) -> None:
    opened = raw_images.flowers102(flowers(tmp_path))
    assert [reported(opened.part(part))[0][:2] for part in ("train", "val")] == [
        ("image_00004.jpg", "1"),
        ("image_00003.jpg", "2"),
    ]
    assert opened.part("test").labels.single().tolist() == [1, 0]
    assert opened.part("test").read(0) == b"jpg/image_00002.jpg"
    with pytest.raises(FileProblem, match="names images that have no label"):
        raw_images.flowers102(flowers(tmp_path, test=(2, 5)))
    with pytest.raises((FileProblem, UsageError), match="outside"):
        raw_images.flowers102(flowers(tmp_path, labels=(0, 2, 2, 1)))


def test_textures_and_scenes_come_with_lists(tmp_path: Path) -> None:
    lists = {
        f"dtd/labels/{part}1.txt": f"{kind}/{kind}_1.jpg\n"
        for part, kind in (("train", "b"), ("val", "a"), ("test", "b"))
    }
    opened = raw_images.dtd(lay(tmp_path / "dtd", lists | images("dtd/images/a/a_1.jpg", "dtd/images/b/b_1.jpg")))
    assert reported(opened.part("train")) == [("b/b_1.jpg", "b", b"dtd/images/b/b_1.jpg")]
    assert sizes(opened) == {"train": 1, "val": 1, "test": 1}
    names = {"tr": "/c/car/back/sun_x.jpg", "va": "/a/abbey/sun_y.jpg", "te": "/c/car/back/sun_z.jpg"}
    files = {f"sun397_tfds_{part}.txt": f"{name}\n" for part, name in names.items()}
    opened = raw_images.sun397(lay(tmp_path / "sun", files | images(*(f"SUN397{name}" for name in names.values()))))
    assert opened.classes == ("/a/abbey", "/c/car/back")
    assert reported(opened.part("test"))[0] == ("/c/car/back/sun_z.jpg", "/c/car/back", b"SUN397/c/car/back/sun_z.jpg")


def test_retinopathy_splits_the_test_set_by_board(tmp_path: Path) -> None:
    files = {
        "trainLabels.csv": "image,level\n10_left,0\n10_right,4\n",
        "retinopathy_solution.csv": "image,level,Usage\n1_left,2,Public\n1_right,1,Private\n2_left,3,Private\n",
        **images(
            "train/10_left.jpeg", "train/10_right.jpeg", "test/1_left.jpeg", "test/1_right.jpeg", "test/2_left.jpeg"
        ),
    }
    opened = raw_images.retinopathy(lay(tmp_path, files))
    assert sizes(opened) == {"train": 2, "val": 1, "test": 2}
    assert reported(opened.part("train"))[1] == ("10_right", "proliferative", b"train/10_right.jpeg")
    assert reported(opened.part("test"))[0] == ("1_right", "mild", b"test/1_right.jpeg")
    with pytest.raises(FileProblem, match="not 0 to 4"):
        raw_images.retinopathy(lay(tmp_path, {"trainLabels.csv": "image,level\n10_left,5\n"}))
    with pytest.raises(FileProblem, match="needs the columns"):
        raw_images.retinopathy(lay(tmp_path, {"trainLabels.csv": "picture,level\n10_left,1\n"}))


def test_tiny_imagenet(tmp_path: Path) -> None:
    files = {
        "tiny/wnids.txt": "n02\nn01\n",
        "tiny/words.txt": "n01\tfish, wet\nn09\tother\n",
        "tiny/val/val_annotations.txt": "val_0.JPEG\tn02\t0\t1\t2\t3\nval_1.JPEG\tn01\t0\t1\t2\t3\n",
        **images("tiny/train/n01/images/n01_0.JPEG", "tiny/train/n02/images/n02_5.JPEG"),
        **images("tiny/val/images/val_0.JPEG", "tiny/val/images/val_1.JPEG", "tiny/test/images/test_0.JPEG"),
    }
    opened = raw_images.tiny_imagenet(lay(tmp_path, files))
    assert opened.classes == ("n01|fish, wet", "n02")
    assert reported(opened.part("train")) == [
        ("n01/images/n01_0.JPEG", "n01|fish, wet", b"tiny/train/n01/images/n01_0.JPEG"),
        ("n02/images/n02_5.JPEG", "n02", b"tiny/train/n02/images/n02_5.JPEG"),
    ]
    assert [row[:2] for row in reported(opened.part("val"))] == [("val_0.JPEG", "n02"), ("val_1.JPEG", "n01|fish, wet")]
    with pytest.raises(FileProblem, match="names a class"):
        raw_images.tiny_imagenet(lay(tmp_path, {"tiny/val/val_annotations.txt": "val_0.JPEG\tn77\n"}))


def test_class_folders_as_satellite_sets_have_them(tmp_path: Path) -> None:
    files = lay(tmp_path, images("2750/River/River_1.jpg", "2750/Forest/Forest_2.jpg", "2750/Forest/Forest_10.jpg"))
    opened = raw_images.class_folders(files)
    assert [row[:2] for row in reported(opened.part("all"))] == [
        ("Forest/Forest_10.jpg", "Forest"),
        ("Forest/Forest_2.jpg", "Forest"),
        ("River/River_1.jpg", "River"),
    ]


def test_caltech_trains_on_thirty_of_each_class(tmp_path: Path) -> None:
    names = [f"101_ObjectCategories/{kind}/image_{i:04d}.jpg" for kind in ("Faces", "ant", "bass") for i in range(33)]
    opened = raw_images.caltech101(lay(tmp_path, images(*names)))
    assert opened.classes == ("ant", "bass", "Faces"), "whatever their case"
    assert opened.part("train").labels.counts(3).tolist() == [30, 30, 30]
    assert sorted([*opened.part("train").keys, *opened.part("test").keys]) == sorted(name[21:] for name in names)
    again = raw_images.caltech101(scan(tmp_path, tmp_path / ".cache"))
    assert list(again.part("train").keys) == list(opened.part("train").keys)
    (tmp_path / "101_ObjectCategories/rare").mkdir()
    (tmp_path / "101_ObjectCategories/rare/image_0001.jpg").touch()
    with pytest.raises(FileProblem, match="class rare has only 1 image"):
        raw_images.caltech101(scan(tmp_path, tmp_path / ".cache"))


TRAIN = images("train/n01440764/n01440764_1.JPEG", "train/n01443537/n01443537_2.JPEG")
VAL = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in (1, 2, 3)]
WNIDS = ["n01443537", "n01440764", "n01443537"]


@pytest.mark.parametrize(
    "val",
    [
        images(*(f"val/{wnid}/{name}" for wnid, name in zip(WNIDS, VAL, strict=True))),
        {
            **images(*(f"val/{name}" for name in VAL)),
            "imagenet_2012_validation_synset_labels.txt": "\n".join(WNIDS) + "\n",
        },
        {
            **images(*(f"val/{name}" for name in VAL)),
            "LOC_val_solution.csv": "ImageId,PredictionString\n"
            + "".join(f"{name[:-5]},{wnid} 1 2 3 4 \n" for wnid, name in reversed(list(zip(WNIDS, VAL, strict=True)))),
        },
    ],
    ids=["folders", "synset list", "Kaggle's table"],
)
def test_imagenet_and_its_validation_labels_in_three_forms(tmp_path: Path, val: dict[str, str]) -> None:
    opened = raw_images.imagenet(lay(tmp_path, TRAIN | val))
    assert opened.classes == ("n01440764", "n01443537")
    assert [row[:2] for row in reported(opened.part("val"))] == list(zip(VAL, WNIDS, strict=True))
    assert [row[0] for row in reported(opened.part("train"))] == [
        "n01440764/n01440764_1.JPEG",
        "n01443537/n01443537_2.JPEG",
    ]


def test_imagenet_to_be_tested_on_needs_no_training_images(tmp_path: Path) -> None:
    val = images(*(f"val/{wnid}/{name}" for wnid, name in zip(WNIDS, VAL, strict=True)))
    opened = raw_images.imagenet(lay(tmp_path, val))
    assert sizes(opened) == {"val": 3}
    assert opened.part("val").labels.single().tolist() == [1, 0, 1]


def test_imagenet_without_validation_labels_says_what_to_put_there(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"(?s)nothing says what they show.*LOC_val_solution\.csv"):
        raw_images.imagenet(lay(tmp_path, TRAIN | images(*(f"val/{name}" for name in VAL))))
    with pytest.raises(FileProblem, match=r"nothing says which class ILSVRC2012_val_00000002\.JPEG"):
        raw_images.imagenet(lay(tmp_path, {"imagenet_2012_validation_synset_labels.txt": "n01440764\n"}))


def test_real_labels_go_by_file_number_and_leave_empty_images_out(tmp_path: Path) -> None:
    val = images(*(f"val/{wnid}/{name}" for wnid, name in zip(WNIDS, VAL, strict=True)))
    opened = raw_images.imagenet_real(lay(tmp_path, TRAIN | val | {"real.json": json.dumps([[1, 0], [], [1]])}))
    test = opened.part("test")
    assert list(test.keys) == [VAL[0], VAL[2]]
    assert (test.labels[0], test.labels[1], test.labels.multi) == ((1, 0), (1,), True)
    assert opened.notes == ("left out 1 image without any correct label",)
    for wrong, reason in (
        ("{}", "has 0 rows"),
        ("[[1], 2]", "not a list of lists"),
        ("[[1]]", "has 1 row,"),
        ("[", "not a list"),
    ):
        with pytest.raises(FileProblem, match=reason):
            raw_images.imagenet_real(lay(tmp_path, {"real.json": wrong}))


def test_imagenet21k_in_folders(tmp_path: Path) -> None:
    opened = raw_images.imagenet21k(lay(tmp_path, images("n00004475/n00004475_1.JPEG", "n01440764/n01440764_7.JPEG")))
    assert opened.classes == ("n00004475", "n01440764")
    assert sizes(opened) == {"train": 2}
    with pytest.raises(FileProblem, match="called after synsets"):
        raw_images.imagenet21k(scan(tmp_path / "n00004475", tmp_path / ".cache"))


def test_imagenet_v2_counts_its_folders_as_models_count_classes(tmp_path: Path) -> None:
    top = "imagenetv2-matched-frequency-format-val"
    opened = raw_images.imagenet_v2(lay(tmp_path, images(f"{top}/10/b.jpeg", f"{top}/2/a.jpeg", f"{top}/999/c.jpeg")))
    assert opened.classes == tuple(ilsvrc_synsets())
    assert [(key, name) for key, name, _ in reported(opened.part("test"))] == [
        ("2/a.jpeg", "n01484850"),  # great white shark
        ("10/b.jpeg", "n01530575"),  # brambling
        ("999/c.jpeg", "n15075141"),  # toilet tissue
    ]
    with pytest.raises(FileProblem, match="called 0 to 999"):
        raw_images.imagenet_v2(lay(tmp_path / "other", images("n01440764/a.jpeg")))


def test_sets_of_some_synsets_and_of_all(tmp_path: Path) -> None:
    files = lay(
        tmp_path, images("imagenet-a/n01498041/0.01_a.jpg", "imagenet-a/n01531178/b.jpg", "imagenet-a/README.txt")
    )
    some = raw_images.some_synsets(files)
    assert reported(some.part("test")) == [
        ("n01498041/0.01_a.jpg", "n01498041", b"imagenet-a/n01498041/0.01_a.jpg"),
        ("n01531178/b.jpg", "n01531178", b"imagenet-a/n01531178/b.jpg"),
    ]
    assert "2 classes alone" in some.notes[0] and "--restrict" in some.notes[0]
    sketches = raw_images.imagenet_sketch(lay(tmp_path / "s", images("sketch/n01443537/sketch_0.JPEG")))
    assert len(sketches.classes) == 1000
    assert [(key, name) for key, name, _ in reported(sketches.part("test"))] == [
        ("n01443537/sketch_0.JPEG", "n01443537")
    ]
    with pytest.raises(FileProblem, match=r"n99999999/a\.jpg .*folder.*ImageNet"):
        raw_images.some_synsets(lay(tmp_path / "t", images("n99999999/a.jpg")))


def test_corrupted_images_keep_kind_and_severity_in_their_keys(tmp_path: Path) -> None:
    name = "ILSVRC2012_val_00000293.JPEG"
    opened = raw_images.imagenet_c(
        lay(tmp_path, images(f"fog/1/n01440764/{name}", f"noise/shot_noise/5/n01443537/{name}"))
    )
    assert [(key, name) for key, name, _ in reported(opened.part("test"))] == [
        (f"fog/1/n01440764/{name}", "n01440764"),
        (f"shot_noise/5/n01443537/{name}", "n01443537"),
    ]
    with pytest.raises(FileProblem, match="gaussian_noise/1/n01440764"):
        raw_images.imagenet_c(lay(tmp_path / "other", images("n01440764/a.JPEG")))
