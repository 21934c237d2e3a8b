"""Where the weights of a run come from, and on what terms: what its card has to say of those it started from."""

from pathlib import Path
from typing import NamedTuple

from vitlab.core.download import shown
from vitlab.core.errors import VitlabError
from vitlab.core.reading import read_text
from vitlab.engines.classifier import bundle_folders, open_weights
from vitlab.weights.bundle import CARD
from vitlab.weights.card import LICENCE, START, card_row, card_title
from vitlab.weights.catalogue import find, is_name
from vitlab.weights.foreign import Reading

_NONE = "none: trained from scratch"
_DATA = "that of the data; vitlab adds none"
_CARD_BYTES = 2**20


class Provenance(NamedTuple):
    start: str  # what the run started from, back to the first weights
    licence: str


def provenance_of(init: str | None, changed: str = "") -> Provenance:
    """What a card says of the start weights `init`, a path, a published name or none, and of what was `changed` in them."""
    if init is None:
        return Provenance(_NONE, _DATA)
    found = _unchanged(init)
    return found._replace(start=f"{found.start}; {changed}") if changed else found


def _unchanged(init: str) -> Provenance:
    path = Path(init)
    if not path.exists():
        return _published(init)
    for folder in bundle_folders(path):
        if (folder / CARD).is_file():
            return _from_card(init, read_text(folder / CARD, _CARD_BYTES))
    return _foreign(path)


def _published(init: str) -> Provenance:
    if not is_name(init):  # a file that has gone since the run began
        return Provenance(init, _unknown(init))
    entry = find(init)
    address = f", {shown(entry.address)}" if entry.address else ""
    return Provenance(f"{entry.name} ({entry.title}{address})", _also(entry.licence, entry.name))


def _from_card(init: str, card: str) -> Provenance:
    """Of a bundle or a run: its own origin goes along, so that no link of the chain is lost."""
    before = card_row(card, START)
    start = f"{init} ({card_title(card)})" + (f", which started from {before}" if before and before != _NONE else "")
    licence = card_row(card, LICENCE)
    if licence is None:
        return Provenance(start, _unknown(init))
    return Provenance(start, licence if before else _also(licence, init))  # a run's own says already whose it is


def _foreign(path: Path) -> Provenance:
    try:
        origin = f"{open_weights(path, Reading())[0].origin['format']} weights"
    except (VitlabError, LookupError):  # the run is done all the same: it may have been read with other words
        origin = "weights of another format"
    return Provenance(f"{path.name} ({origin})", _unknown(path.name))


def _also(licence: str, name: str) -> str:
    return f"{licence} (start weights {name}); the data's besides; vitlab adds none"


def _unknown(name: str) -> str:
    return f"that of the start weights {name}, which do not state it, and of the data; vitlab adds none"
