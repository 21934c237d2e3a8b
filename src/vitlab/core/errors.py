"""The exceptions that a user can act on; printed without a traceback.

Owns wording and exit codes; knows nothing of what failed. The command line prints `str(error)` and exits with `exit_code`.
"""

import difflib
import re
from collections.abc import Iterable

_QUOTED = 200  # characters of somebody's text in a message
_CLOSE = 0.6  # of SequenceMatcher's ratio: the default of difflib.get_close_matches
_SHORT = 20  # names of a table that a message has room for
_WORD = re.compile("[a-z]{3,}|[0-9]{3,}")  # in a name: `vit`, `cifar` and `224`; shorter ones agree by chance
# C0 and C1 but the end of a line, marks of direction (Unicode's Bidi_Control), separators of lines, halves of characters.
_STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class VitlabError(Exception):
    """The base of all: `what` went wrong and in which file, a `hint` what to do, and the `exit_code` of the command line."""

    exit_code = 1

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        super().__init__(what if hint is None else f"{what}\n{hint}")
        self.what = what
        self.hint = hint


class UsageError(VitlabError, ValueError):
    """The call was wrong: a value, a name or a combination that can never work."""

    exit_code = 2


class UnknownName(UsageError, KeyError):
    """A name that is in no table; lists those that are near or, where none is or with `list_all`, all of a short table."""

    def __init__(
        self, kind: str, given: str, known: Iterable[str], *, hint: str | None = None, list_all: bool = False
    ) -> None:
        given, known = shortened(given), list(known)
        self.nearest = nearest_names(given, [name for name in known if _is_near(given, name)])
        in_full = list_all or (not self.nearest and len(known) <= _SHORT)
        label, shown = ("Allowed", known) if in_full else ("Nearest", self.nearest)
        names = f"{label}: {', '.join(shown)}." if shown else None
        super().__init__(f"unknown {kind} '{given}'", hint=" ".join(filter(None, (names, hint))) or None)

    __str__ = Exception.__str__  # KeyError would print the repr, quotes and \n included


class FileProblem(VitlabError):
    """A file or folder that cannot be read or written as asked."""


class Unreadable(FileProblem):
    """A file that cannot be read here but may be intact."""


class Unreachable(Unreadable):
    """A store that does not answer: nothing is known of the file, which must not count as a bad one."""


class MissingExtra(VitlabError, ImportError):
    """A part of vitlab that only some users need is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed",
            hint=f"Install it with:  pip install 'vitlab[{extra}]'",
        )


def printable(text: str) -> str:
    """Escape control and direction characters, which a terminal would obey.

    Messages quote names and contents of files, which are other people's. Whatever prints or logs them calls this.
    """
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(text: str) -> str:
    """A quotation that fits into a sentence."""
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}… ({len(text):,} characters)"


def require(condition: bool, what: str, hint: str | None = None) -> None:
    """Raise a UsageError that says `what`, unless the condition holds."""
    if not condition:
        raise UsageError(what, hint=hint)


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise UnknownName(f"value for {name}:", str(value), choices, list_all=True)


def amount(number: int, noun: str) -> str:
    """`1 image`, `2,000 images`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def with_article(noun: str) -> str:
    """`a ViT`, `an EfficientNet`: by the first letter."""
    return f"{'an' if noun[:1] in 'AEIOUaeiou' else 'a'} {noun}"


def _is_near(given: str, name: str) -> bool:
    """Whether a person would call two names similar: alike as a whole, as after a slip, or with a word in common."""
    ours, theirs = name.casefold(), given.casefold()
    alike = difflib.SequenceMatcher(a=ours, b=theirs).ratio() >= _CLOSE
    return alike or not set(_WORD.findall(ours)).isdisjoint(_WORD.findall(theirs))


def nearest_names(given: str, known: Iterable[str]) -> list[str]:
    """The three most similar known names, best first, case-insensitive."""
    matcher = difflib.SequenceMatcher(b=given.casefold())
    scored: list[tuple[float, str]] = []
    for name in known:
        matcher.set_seq1(name.casefold())
        scored.append((-matcher.ratio(), name))
    scored.sort(key=lambda pair: pair[0])  # stable: of equally similar names, the one listed first
    return [name for _, name in scored[:3]]
