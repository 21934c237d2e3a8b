"""ImageNet's thousand classes by synset (WordNet number), in the order in which models count them: sorted by synset."""

import functools
import importlib.resources
import re
from collections.abc import Mapping

_SYNSET = re.compile(r"(n\d{8})(?=$|[|_ ,])")  # alone, or before a name: n01440764_tench, n01440764|tench


@functools.cache
def ilsvrc_synsets() -> Mapping[str, str]:
    """Every synset of ILSVRC-2012 and a name for it, in order."""
    text = importlib.resources.files("vitlab.data.sources").joinpath("ilsvrc_synsets.txt").read_text(encoding="utf-8")
    return dict(line.split(" ", 1) for line in text.splitlines())


def synset_of(label: str) -> str | None:
    """The synset that a label is or begins with."""
    found = _SYNSET.match(label)
    return None if found is None else found[1]
