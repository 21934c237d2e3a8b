"""The search by sorting finds what comparing all with all would find, and does not slow down on heaps of look-alikes."""

import time

import numpy as np
import pytest
from PIL import Image, ImageOps

from vitlab.data.auditing.duplicates import _near_pairs, find_duplicates
from vitlab.data.auditing.scan import FACTS, MIRROR, Facts, _fill_thumbnail_and_hash


def hash_of(picture: Image.Image) -> np.ndarray:
    record = np.zeros(1, FACTS)[0]
    _fill_thumbnail_and_hash(np.asarray(picture), record)
    return record["hash"].copy()


def bits_apart(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.unpackbits(a ^ b).sum())


def with_content(facts: Facts) -> Facts:
    facts["content"] = [i.to_bytes(4, "big") + b"x" for i in range(len(facts))]
    return facts


def test_every_pair_within_five_bits_is_found_and_no_other() -> None:
    draw = np.random.default_rng(0)
    hashes = draw.integers(0, 256, (1500, 8), dtype=np.uint8)
    for i in range(300):  # near copies of the first 300, zero to seven bits away
        flips = np.zeros(64, np.uint8)
        flips[draw.choice(64, i % 8, replace=False)] = 1
        hashes[1000 + i] = hashes[i] ^ np.packbits(flips)
    found = {pair for a, b in _near_pairs(hashes) for pair in zip(a.tolist(), b.tolist(), strict=True)}
    apart = np.unpackbits(hashes[:, None] ^ hashes[None], axis=2).sum(axis=2)
    expected = {(i, j) for i, j in np.argwhere(apart <= 5).tolist() if i < j}
    assert found == expected
    assert len(expected) >= 225


def test_mirroring_flips_the_bits_of_the_mask_and_no_others() -> None:
    picture = Image.fromarray(np.random.default_rng(3).integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize((96, 64))
    assert bits_apart(hash_of(ImageOps.mirror(picture)), hash_of(picture) ^ MIRROR) <= 1
    assert bits_apart(hash_of(picture), hash_of(picture) ^ MIRROR) > 20


@pytest.mark.parametrize("size", [(24, 24), (48, 32), (400, 300)])
def test_hash_bears_another_size(size: tuple[int, int]) -> None:
    picture = Image.fromarray(np.random.default_rng(4).integers(0, 256, (7, 7, 3), dtype=np.uint8)).resize((128, 128))
    assert bits_apart(hash_of(picture), hash_of(picture.resize(size))) <= 5


@pytest.mark.slow
def test_a_heap_of_look_alikes_is_one_group_in_little_time() -> None:
    facts = with_content(np.zeros(20_000, FACTS))
    facts["thumb"][:, :6], facts["contrast"], facts["hash"] = 200, 100.0, np.arange(8, dtype=np.uint8)
    started = time.process_time()
    (group,) = find_duplicates(facts, np.ones(len(facts), bool))
    assert len(group.members) == len(facts)
    assert time.process_time() - started < 30  # some seconds; comparing all with all would be 200 million pairs


def test_groups_are_the_same_in_any_order_of_the_images() -> None:
    draw = np.random.default_rng(5)
    facts = with_content(np.zeros(60, FACTS))
    facts["hash"], facts["contrast"] = draw.integers(0, 256, (60, 8), dtype=np.uint8), 50.0
    facts["thumb"] = draw.integers(0, 256, facts["thumb"].shape, dtype=np.uint8)
    for i, j in ((1, 40), (40, 59), (7, 8)):
        facts["hash"][j], facts["thumb"][j] = facts["hash"][i], facts["thumb"][i]
    order = draw.permutation(60)
    plain, shuffled = (find_duplicates(f, np.ones(60, bool)) for f in (facts, facts[order]))
    assert [group.members for group in plain] == [(1, 40, 59), (7, 8)]
    assert {frozenset(order[list(group.members)].tolist()) for group in shuffled} == {
        frozenset(group.members) for group in plain
    }
    assert {group.how for group in plain} == {"near"}
