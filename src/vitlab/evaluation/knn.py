"""k nearest neighbours by cosine: what a representation knows with nothing trained on top.

A running best list over chunks of the training set, so that the table of all similarities never stands in memory.
Letters: N training images, B test images at a time, D features, k neighbours, K classes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core.errors import UsageError

NEIGHBOURS = 20  # DINO's
GRID = (1, 5, 10, 20, 50, 100, 200)
TEMPERATURE = 0.07  # DINO's: a neighbour counts exp(similarity / temperature)
_QUERIES = 1024  # test images at a time: with chunks of 1024, tables of 4 MB


@dataclasses.dataclass(frozen=True)
class CorrectCounts:
    """How many test images each way of voting classifies correctly, by the number of neighbours asked."""

    plain: Mapping[int, int]
    weighted: Mapping[int, int]


def knn_votes(
    train: Sequence[Tensor],
    train_labels_N: Tensor,
    test: Sequence[Tensor],
    test_labels: Tensor,
    num_classes: int,
    *,
    ks: Sequence[int] = (NEIGHBOURS,),
    device: torch.device | None = None,
) -> CorrectCounts:
    """Every image of `test`, chunks of [n, D], by its neighbours in `train`. Of classes with equal votes the first wins."""
    require_neighbours(ks, len(train_labels_N))
    where = device or torch.device("cpu")
    labels_N = train_labels_N.to(where)
    plain, weighted = dict.fromkeys(ks, 0), dict.fromkeys(ks, 0)
    first = 0
    for chunk in test:
        for query_BD in chunk.split(_QUERIES):
            wanted_B = test_labels[first : first + len(query_BD)].to(where)
            first += len(query_BD)
            similarity_Bk, index_Bk = nearest(query_BD.to(where), train, max(ks))
            near_Bk = labels_N[index_Bk]
            weight_Bk = (similarity_Bk.double() / TEMPERATURE).exp()
            for k in ks:
                plain[k] += _count_correct(near_Bk[:, :k], torch.ones_like(weight_Bk[:, :k]), num_classes, wanted_B)
                weighted[k] += _count_correct(near_Bk[:, :k], weight_Bk[:, :k], num_classes, wanted_B)
    return CorrectCounts(plain, weighted)


def require_neighbours(ks: Sequence[int], images: int) -> None:
    if not ks or min(ks) < 1:
        raise UsageError(f"k must be at least 1 neighbour, not {min(ks, default=0)}")
    if max(ks) > images:
        raise UsageError(f"k = {max(ks)} neighbours were asked for, and there are {images:,} training images")


def nearest(query_BD: Tensor, train: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Cosine and number of the `k` nearest, best first; of equally near ones the earlier. Both [B, k]."""
    query_BD = _unit(query_BD)
    best_Bk = query_BD.new_zeros(len(query_BD), 0)
    index_Bk = torch.zeros(len(query_BD), 0, dtype=torch.int64, device=query_BD.device)
    first = 0
    for chunk_ND in train:
        similarity_BN = query_BD @ _unit(chunk_ND.to(query_BD.device)).T
        numbers_N = torch.arange(first, first + len(chunk_ND), device=query_BD.device)
        first += len(chunk_ND)
        values = torch.cat([best_Bk, similarity_BN], dim=1)  # the earlier ones stand first
        numbers = torch.cat([index_Bk, numbers_N.expand(len(query_BD), -1)], dim=1)
        place_Bk = _best(values, k)
        best_Bk, index_Bk = values.gather(1, place_Bk), numbers.gather(1, place_Bk)
    return best_Bk, index_Bk


def _best(values_BN: Tensor, k: int) -> Tensor:
    """The places of the `k` largest of each row, largest first, of equal ones the first: what a stable sort would give."""
    k = min(k, values_BN.shape[1])
    largest_Bk, place_Bk = values_BN.topk(k, dim=1)
    # Where the last place is shared, topk takes any of those that share it.
    shared_B = (values_BN >= largest_Bk[:, -1:]).sum(dim=1) > k
    if shared_B.any():
        place_Bk[shared_B] = values_BN[shared_B].sort(dim=1, descending=True, stable=True).indices[:, :k]
    place_Bk = place_Bk.sort(dim=1).values
    order_Bk = values_BN.gather(1, place_Bk).sort(dim=1, descending=True, stable=True).indices
    return place_Bk.gather(1, order_Bk)


def _unit(x_ND: Tensor) -> Tensor:
    return F.normalize(x_ND.float(), dim=1)


def _count_correct(near_Bk: Tensor, weight_Bk: Tensor, num_classes: int, wanted_B: Tensor) -> int:
    votes_BK = weight_Bk.new_zeros(len(near_Bk), num_classes)
    rows_Bk = torch.arange(len(near_Bk), device=near_Bk.device)[:, None].expand_as(near_Bk)
    votes_BK.index_put_((rows_Bk, near_Bk), weight_Bk, accumulate=True)
    return int((votes_BK.argmax(dim=1) == wanted_B).sum())
