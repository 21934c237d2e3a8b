"""What each kind of heat map is, and what it is not: the words that stand beside it wherever it is drawn."""

import dataclasses
from collections.abc import Mapping

from vitlab.inspection.scales import Unit


@dataclasses.dataclass(frozen=True)
class Meaning:
    """`title` stands above a map; `what` it is and what it `is_not` make its caption; `unit` is that of its legend."""

    title: str
    what: str
    is_not: str
    unit: Unit = "mean"
    of_score: bool = False  # of a class, where the model has classes; else it is the same for all of them

    @property
    def caption(self) -> str:
        return f"{self.what} {self.is_not}"

    def caption_for(self, label: str | None) -> str:
        """With the class that the map is about; None for a model without classes."""
        if not self.of_score:
            return self.caption
        score = f"The score is that of {label}." if label is not None else f"{_OWN_SCORE}."
        return f"{self.what} {score} {self.is_not}"


_OWN_SCORE = "The model has no classes: the score is how far the image's own representation is reached"
_NOT_A_CAUSE = (
    "It shows where information was collected, and does not prove what the answer depends on: "
    "patches of the background can collect attention too."
)

# By the names of `saliency.METHODS`, and "head" for the weights of a single head.
MEANINGS: Mapping[str, Meaning] = {
    "head": Meaning(
        "Attention of one head",
        "One head of one layer: how the attention of a chosen token is divided among the patches.",
        "Other heads and later layers may use what this one collects, or not: by itself, it explains no answer.",
    ),
    "attention": Meaning(
        "Attention",
        "The last layer's attention from the output to the patches, averaged over its heads.",
        "It leaves out all layers before, in which patches have exchanged what they hold. " + _NOT_A_CAUSE,
    ),
    "rollout": Meaning(
        "Attention rollout",
        "Attention rollout (appendix D.8 of the paper): attention, averaged over the heads and multiplied through the"
        " layers, from the output back to the patches. It is the same for every class.",
        _NOT_A_CAUSE,
    ),
    "gradient-rollout": Meaning(
        "Gradient rollout",
        "Gradient rollout: as attention rollout, with each weight multiplied by the gradient of a score; weights that lower"
        " the score are left out.",
        "Gradients say what a small change would do, not what the answer would be without a patch.",
        of_score=True,
    ),
    "grad-cam": Meaning(
        "Grad-CAM",
        "Grad-CAM: the features of the patches that enter the last layer, weighted by how much each feature raises a score.",
        "By then patches have exchanged what they hold: a feature may come from elsewhere in the image.",
        "strongest",
        of_score=True,
    ),
    "integrated-gradients": Meaning(
        "Integrated gradients",
        "Integrated gradients: how much a patch changes a score, up or down, on the way from a blurred copy of the image to"
        " this one.",
        "It depends on the image that one starts from: what is left in the blurred copy, such as colour, counts for nothing.",
        of_score=True,
    ),
}

# The same of a model without tokens.
_OF_FEATURE_MAPS: Mapping[str, Meaning] = {
    **MEANINGS,
    "head": dataclasses.replace(
        MEANINGS["head"],
        what="One head of one layer: how the attention of a chosen place is divided among the places that it can see.",
    ),
    "grad-cam": dataclasses.replace(
        MEANINGS["grad-cam"],
        what="Grad-CAM: the last feature map, its channels weighted by how much each raises a score.",
        is_not="A place of that map has seen far more of the image than lies below it.",
    ),
    "unit": Meaning(
        "Attention of one unit",
        "One unit: how the attention of a chosen place is divided among all others, mean of its heads. Where it attends along"
        " columns and then along rows, both are multiplied.",
        _NOT_A_CAUSE,
    ),
}


def meanings_of(*, has_tokens: bool) -> Mapping[str, Meaning]:
    """The words for the maps of a ViT, or for those of a model without a sequence of tokens."""
    return MEANINGS if has_tokens else _OF_FEATURE_MAPS
