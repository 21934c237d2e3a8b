"""A machine on paper: chips that are not here, and how long an update takes on them. Arithmetic, not measurement."""

import dataclasses
import math

from vitlab.core.errors import UsageError
from vitlab.models.cost import count_params, training_exaflops
from vitlab.training.memory import spread_params
from vitlab.training.recipe import Recipe

_GIGA = 1e9  # networks are sold in powers of ten
_WIDE = 4  # bytes of a float32
_AGAIN = 4 / 3  # forward and backward are three forward passes, and recomputing is one more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chips:
    """`gb` and `gbps` are None where nothing is said of them, and then nothing is made up."""

    count: int
    tflops: float  # of one, at its peak
    utilisation: float  # the share of that which is reached
    gb: float | None  # memory of one
    gbps: float | None  # gigabytes per second between one and the others


@dataclasses.dataclass(frozen=True)
class UpdateOnPaper:
    """One update, on each chip. Computing and sending go on at the same time, so the longer one decides."""

    compute_s: float
    sent_gb: float
    network_s: float | None  # None where the network is not described

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.network_s or 0.0)


def described_chips(
    count: int | None, tflops: float | None, utilisation: float | None, gb: float | None, gbps: float | None
) -> Chips | None:
    """None where no chip is described, and an error where only a part is."""
    given = [value for value in (count, tflops, utilisation, gb, gbps) if value is not None]
    if not given:
        return None
    if count is None or tflops is None or utilisation is None or not all(0 < value < math.inf for value in given):
        raise UsageError(
            "a machine on paper needs --chips, --chip-tflops and --utilisation, and takes --chip-gb and --chip-gbps, "
            "all positive"
        )
    if utilisation > 1:
        raise UsageError(f"--utilisation is a share of the peak, at most 1, not {utilisation}")
    return Chips(count=count, tflops=tflops, utilisation=utilisation, gb=gb, gbps=gbps)


def update_on(chips: Chips, recipe: Recipe, parts: int) -> UpdateOnPaper:
    """What an update takes there, its share of the batch cut into `parts`."""
    flops = 1e18 * training_exaflops(recipe.model, 1, recipe.train.batch_size)
    if recipe.train.recompute:
        flops *= _AGAIN
    sent = sent_bytes(recipe, chips.count, parts) / _GIGA
    return UpdateOnPaper(
        compute_s=flops / (chips.count * chips.tflops * 1e12 * chips.utilisation),
        sent_gb=sent,
        network_s=None if chips.gbps is None else sent / chips.gbps,
    )


def sent_bytes(recipe: Recipe, processes: int, parts: int) -> float:
    """What each process sends in an update. It receives as much, at the same time."""
    to_others = (processes - 1) / processes
    if recipe.train.sharded:  # every part gathers the weights anew, and hands its gradients out
        return parts * spread_params(recipe, processes).sent_bytes() * to_others
    # DDP: gradients are added up on a tour through all, and the sums go round again.
    return 2 * _WIDE * count_params(recipe.model) * to_others
