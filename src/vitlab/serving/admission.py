"""Who may ask, and whether there is room: decided by the header of a request, before its body is read."""

import dataclasses
import hmac
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from vitlab.serving.errors import Refusal

PROBES = ("/healthz", "/readyz")  # for orchestrators, which have no token and call by address
_OPEN = ("/", "/openapi.json", *PROBES)  # and the files of the page, which asks for the token itself
_ASSETS = "/assets/"


@dataclasses.dataclass(frozen=True)
class Visitors:
    """Whose requests are answered."""

    hosts: frozenset[str]  # names under which the server is reached, beside localhost and addresses
    token: str | None = None
    bound: str = ""  # the name that it listens on, if it is one

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Raise unless the request may be answered."""
        if path not in PROBES:
            self._check_host(headers)
        if method == "POST":
            self._check_origin(headers)
        if self.token is not None and path not in _OPEN and not path.startswith(_ASSETS):
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                raise Refusal("bad_token")

    def _check_host(self, headers: Headers) -> None:
        """A page of elsewhere whose name was made to point here, by DNS rebinding, still says its own name."""
        if not self._is_ours(headers.get("host", "")):
            raise Refusal("bad_host")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None:  # no browser, or one that speaks to its own site
            return
        there = _authority(origin)
        if not there or (there != headers.get("host", "").lower() and _name(there) not in self.hosts):
            raise Refusal("bad_origin")

    def _is_ours(self, authority: str) -> bool:
        name = _name(authority)
        if name and (name == "localhost" or name.endswith(".localhost") or name in (*self.hosts, self.bound)):
            return True
        try:  # an address cannot be made to point elsewhere
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _name(authority: str) -> str:
    """Without port and brackets."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


class Room:
    """Places for images that are admitted and not yet answered."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self.limit = limit
        self.taken = 0

    def require(self) -> None:
        if self.taken >= self.limit():
            raise Refusal("queue_full")

    def take(self, wanted: int) -> int:
        """At least one place and at most `wanted`: with one, a request of several images still gets on."""
        self.require()
        found = min(wanted, self.limit() - self.taken)
        self.taken += found
        return found

    def give_back(self, places: int) -> None:
        self.taken -= places
