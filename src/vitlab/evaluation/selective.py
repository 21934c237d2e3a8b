"""What a model is worth that may say "I do not know": the share of mistakes among the answers it is surest of.

Letters: B images.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class RiskCoverage:
    """`risk_B[i]`: the share of mistakes among the i + 1 surest answers, which cover (i + 1) / B of the images."""

    risk_B: Tensor

    @property
    def area(self) -> float:
        """The mean risk over all coverages (AURC); smaller is better."""
        return float(self.risk_B.mean())

    def coverage_at(self, risk: float) -> float:
        """The largest share of the images that can be answered with at most this share of mistakes."""
        within = (self.risk_B <= risk).nonzero()
        return 0.0 if not len(within) else (int(within[-1, 0]) + 1) / len(self.risk_B)


def risk_coverage(confidence_B: Tensor, right_B: Tensor) -> RiskCoverage:
    """Answers of equal confidence cannot be ordered: each counts with the mean mistakes of them all, in any order."""
    levels, place_B = (-confidence_B.double()).unique(return_inverse=True)
    size_L = torch.bincount(place_B, minlength=len(levels))
    share_L = torch.bincount(place_B, weights=(~right_B).double(), minlength=len(levels)) / size_L
    mistakes_B = share_L.repeat_interleave(size_L)
    return RiskCoverage(mistakes_B.cumsum(0) / torch.arange(1, len(mistakes_B) + 1))
