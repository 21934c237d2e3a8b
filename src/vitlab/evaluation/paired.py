"""Two models on the same images, as numbers: how often each is right, and what chance makes of the difference."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitlab.evaluation.answers import Answers
from vitlab.evaluation.intervals import bootstrap, mcnemar, mean_of
from vitlab.evaluation.result import NOT_KEPT, PAGE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `vitlab compare --json` prints. `difference` is B minus A; `p` of McNemar's exact test, `p_mid` of its mid-p."""

    a: str
    b: str
    data: str
    part: str
    n: int  # images that both could read
    top1_a: float
    top1_b: float
    difference: float
    interval: tuple[float, float]  # 95 %, paired bootstrap
    both_right: int
    only_a: int  # right by A alone
    only_b: int  # right by B alone
    both_wrong: int
    same_answer: int  # images, right or wrong
    p: float  # of McNemar's exact test
    p_mid: float  # of its mid-p variant
    per_class: list[dict[str, Any]]
    notes: list[str]
    out: str | None = None  # the folder of the results
    seconds: float = 0.0

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        low, high = self.interval
        lines = [f"note       {note}" for note in self.notes]
        lines += [
            f"A          {self.top1_a:.2%}  {self.a}",
            f"B          {self.top1_b:.2%}  {self.b}",
            f"B - A      {100 * self.difference:+.2f} points ({100 * low:+.2f} to {100 * high:+.2f}), "
            f"{self.n:,} images ({self.part})",
            f"only A     {self.only_a:,} right; only B {self.only_b:,}; both {self.both_right:,}; "
            f"neither {self.both_wrong:,}",
            f"McNemar    p = {self.p:.4g} (exact), {self.p_mid:.4g} (mid-p)",
        ]
        return [*lines, NOT_KEPT if self.out is None else f"page       {Path(self.out) / PAGE}"]


def compare_answers(
    first: Answers, second: Answers, classes: Sequence[str], *, resamples: int, seed: int
) -> dict[str, Any]:
    """The numbers of a `Comparison` by their names; row i of both is about the same image."""
    a_B, b_B = first.right, second.right
    test = mcnemar(a_B, b_B)
    difference_B = b_B.double() - a_B.double()
    interval = bootstrap({"difference": mean_of(difference_B)}, len(a_B), resamples=resamples, seed=seed)
    rows: list[dict[str, Any]] = []
    for k, name in enumerate(classes):
        members_B = first.truth_B == k
        if bool(members_B.any()):
            of_a, of_b = (float(right_B[members_B].double().mean()) for right_B in (a_B, b_B))
            rows.append({"label": name, "n": int(members_B.sum()), "a": of_a, "b": of_b, "difference": of_b - of_a})
    return {
        "n": len(a_B),
        "top1_a": float(a_B.double().mean()),
        "top1_b": float(b_B.double().mean()),
        "difference": float(difference_B.mean()),
        "interval": interval["difference"],
        "both_right": int((a_B & b_B).sum()),
        "only_a": test.only_first,
        "only_b": test.only_second,
        "both_wrong": int((~a_B & ~b_B).sum()),
        "same_answer": int((first.answer_B == second.answer_B).sum()),
        "p": test.exact,
        "p_mid": test.mid,
        "per_class": rows,
    }
