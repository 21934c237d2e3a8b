"""The CSV tables of an evaluation. Letters: B images, K classes, A answers."""

import csv
import io
from collections.abc import Sequence

from torch import Tensor

from vitlab.evaluation.answers import Answers


def answers_table(keys: Sequence[str], answers: Answers, names: Sequence[str]) -> str:
    """`path,truth,answer,confidence,right`, in the order of the images."""
    columns = (answers.truth_B, answers.answer_B, answers.confidence_B, answers.right)
    rows = zip(keys, *(column.tolist() for column in columns), strict=True)
    return _text(
        ["path", "truth", "answer", "confidence", "right"],
        [[key, names[truth], names[answer], f"{p:.6f}", int(right)] for key, truth, answer, p, right in rows],
    )


def both_answers_table(keys: Sequence[str], first: Answers, second: Answers, names: Sequence[str]) -> str:
    """`path,truth` and the answer of each of two models with its confidence."""
    columns = (first.truth_B, first.answer_B, first.confidence_B, second.answer_B, second.confidence_B)
    rows = zip(keys, *(column.tolist() for column in columns), strict=True)
    return _text(
        ["path", "truth", "a", "a_confidence", "b", "b_confidence"],
        [[key, names[k], names[a], f"{of_a:.6f}", names[b], f"{of_b:.6f}"] for key, k, a, of_a, b, of_b in rows],
    )


def several_table(keys: Sequence[str], p_BK: Tensor, targets_BK: Tensor, classes: Sequence[str]) -> str:
    """`path,labels` and the probability of every class."""
    rows = zip(keys, p_BK.tolist(), (targets_BK > 0).tolist(), strict=True)
    return _text(
        ["path", "labels", *classes],
        [
            [
                key,
                ";".join(name for name, is_true in zip(classes, truth, strict=True) if is_true),
                *(f"{p:.6f}" for p in row),
            ]
            for key, row, truth in rows
        ],
    )


def confusion_table(confusion_KA: Tensor, names: Sequence[str]) -> str:
    """A row for every truth, a column for every answer."""
    rows = [[name, *counts] for name, counts in zip(names, confusion_KA.tolist(), strict=False)]
    return _text(["truth \\ answer", *names], rows)


def _text(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
