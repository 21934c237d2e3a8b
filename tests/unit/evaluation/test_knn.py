"""Nearest neighbours: what brute force says, in whatever pieces."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from vitlab.core.errors import UsageError
from vitlab.evaluation.knn import NEIGHBOURS, TEMPERATURE, knn_votes, nearest

CLASSES = 5


def clouds(count: int, seed: int, width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(CLASSES, width))
    labels = draw.integers(0, CLASSES, count)
    x = centres[labels] + 1.5 * draw.normal(size=(count, width))
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(labels)


def brute_force(x: torch.Tensor, y: torch.Tensor, query: torch.Tensor, k: int, weighted: bool) -> list[int]:
    unit = (x / x.norm(dim=1, keepdim=True)).numpy()
    other = (query / query.norm(dim=1, keepdim=True)).numpy()
    answers = []
    for row in other @ unit.T:
        order = np.argsort(-row, kind="stable")[:k]
        votes = np.zeros(CLASSES)
        for i in order:
            votes[int(y[i])] += np.exp(float(row[i]) / 0.07) if weighted else 1.0
        answers.append(int(votes.argmax()))
    return answers


def test_constants_are_dinos() -> None:
    assert (NEIGHBOURS, TEMPERATURE) == (20, 0.07)


@pytest.mark.parametrize("k", [1, 7, 20, 200])
def test_votes_equal_brute_force(k: int) -> None:
    (x, y), (query, truth) = clouds(300, 0), clouds(150, 1)
    votes = knn_votes(x.split(64), y, query.split(40), truth, CLASSES, ks=(k,))
    for weighted, counts in ((False, votes.plain), (True, votes.weighted)):
        answers = np.array(brute_force(x, y, query, k, weighted))
        assert counts[k] == int((answers == truth.numpy()).sum())
        assert 0 < counts[k] < len(truth)


@pytest.mark.parametrize("k", [1, 10, 50])
def test_plain_votes_equal_scikit_learn(k: int) -> None:
    (x, y), (query, truth) = clouds(300, 2), clouds(200, 3)
    peer = KNeighborsClassifier(k, weights="uniform", metric="cosine", algorithm="brute").fit(x.numpy(), y.numpy())
    right = int((peer.predict(query.numpy()) == truth.numpy()).sum())
    assert knn_votes([x], y, [query], truth, CLASSES, ks=(k,)).plain[k] == right


def test_chunks_change_nothing() -> None:
    x, query = clouds(257, 4)[0], clouds(33, 5)[0]
    whole = nearest(query, [x], 20)
    for size in (1, 19, 64):
        value, index = nearest(query, x.split(size), 20)
        torch.testing.assert_close(value, whole[0], rtol=0, atol=1e-6)
        assert torch.equal(index, whole[1])


@pytest.mark.parametrize("size", [3, 10, 100])
def test_of_equally_near_images_the_earlier_is_taken(size: int) -> None:
    x = torch.eye(4).repeat(25, 1)  # each direction 25 times
    _, index = nearest(torch.eye(4), x.split(size), 6)
    assert index.tolist() == [[row + 4 * i for i in range(6)] for row in range(4)]


def test_several_numbers_at_once_are_each_alone() -> None:
    (x, y), (query, truth) = clouds(120, 6), clouds(60, 7)
    together = knn_votes([x], y, [query], truth, CLASSES, ks=(1, 5, 60))
    for k in (1, 5, 60):
        alone = knn_votes([x], y, [query], truth, CLASSES, ks=(k,))
        assert (together.plain[k], together.weighted[k]) == (alone.plain[k], alone.weighted[k])


def test_the_whole_table_of_similarities_never_stands_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = torch.Tensor.topk

    def noting(self: torch.Tensor, k: int, dim: int) -> object:
        sizes.append(self.numel())
        return plain(self, k, dim=dim)

    monkeypatch.setattr(torch.Tensor, "topk", noting)
    (x, y), (query, truth) = clouds(4096, 8), clouds(1500, 9)
    knn_votes(x.split(1024), y, [query], truth, CLASSES, ks=(20,))
    assert max(sizes) <= 1024 * (1024 + 20)
    assert len(sizes) == 2 * 4


def test_more_neighbours_than_images_are_refused() -> None:
    x, y = clouds(10, 0)
    with pytest.raises(UsageError, match=r"k = 20 neighbours .* 10 training images"):
        knn_votes([x], y, [x], y, CLASSES, ks=(20,))


def test_no_neighbours_are_refused() -> None:
    x, y = clouds(10, 0)
    with pytest.raises(UsageError, match="at least 1 neighbour"):
        knn_votes([x], y, [x], y, CLASSES, ks=(0,))
