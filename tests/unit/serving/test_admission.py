"""Who is let in, and how much of it."""

import pytest
from starlette.datastructures import Headers

from vitlab.serving.admission import Room, Visitors
from vitlab.serving.errors import Refusal

LOCAL = {"host": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:80", "a.localhost:1", "127.0.0.1", "[::1]:8000", "192.168.0.9:8000", "My.Example"]
)
def test_own_names_and_addresses_are_answered(host: str) -> None:
    Visitors(frozenset({"my.example"})).check("GET", "/v1/models", Headers({"host": host}))


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::1", "localhost.evil"]
)
def test_other_names_are_not(host: str) -> None:
    with pytest.raises(Refusal, match="bad_host"):
        Visitors(frozenset()).check("GET", "/v1/models", Headers({"host": host}))


@pytest.mark.parametrize(
    "origin", ["null", "", "http://evil.example", "http://127.0.0.1:9999", "http://localhost:8000", "http://[::1"]
)
def test_page_of_another_site_cannot_send_images(origin: str) -> None:
    with pytest.raises(Refusal, match="bad_origin"):
        Visitors(frozenset()).check("POST", "/v1/predict", Headers({**LOCAL, "origin": origin}))


def test_own_page_and_that_behind_a_proxy_can() -> None:
    visitors = Visitors(frozenset({"photos.example"}))
    visitors.check("POST", "/v1/predict", Headers({**LOCAL, "origin": "http://127.0.0.1:8000"}))
    visitors.check("POST", "/v1/predict", Headers({**LOCAL, "origin": "https://photos.example"}))


def test_token_is_asked_for_everywhere_but_for_page_document_and_probes() -> None:
    visitors = Visitors(frozenset(), token="correct horse")
    for path in ("/", "/assets/page.js", "/healthz", "/readyz", "/openapi.json"):
        visitors.check("GET", path, Headers(LOCAL))
    for path in ("/v1/models", "/v1/predict", "/metrics", "/nothing"):
        for given in ({}, {"authorization": "Bearer correct horse "}, {"authorization": "correct horse"}):
            with pytest.raises(Refusal, match="bad_token"):
                visitors.check("GET", path, Headers(LOCAL | given))
        visitors.check("GET", path, Headers(LOCAL | {"authorization": "Bearer correct horse"}))


def test_room_is_bounded_and_a_request_of_several_images_takes_what_is_left() -> None:
    room = Room(lambda: 3)
    assert (room.take(2), room.take(5)) == (2, 1)
    with pytest.raises(Refusal, match="queue_full"):
        room.take(1)
    room.give_back(1)
    assert room.take(9) == 1
