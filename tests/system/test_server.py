"""A real server on loopback: its answers are those of the model itself, and no request can harm it."""

import concurrent.futures
import http.client
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
import torch
from forked_command import Command
from PIL import Image
from server_models import EXIT, HANG, NAN, SIDE, SLOW, STUCK, build
from slow_cases import slow_after

import vitlab
from vitlab.serving.client import Client, ServerRefusal
from vitlab.serving.errors import PROBLEMS

HERE = Path(__file__).parent
HOSTILE = runpy.run_path(str(HERE.parent / "unit" / "data" / "test_hostile_images.py"))
SAME = runpy.run_path(str(HERE.parent / "unit" / "engines" / "test_same_pixels.py"))
START_SECONDS = 240.0  # on a machine that is busy with other tests
LEAK = re.compile(r"0x[0-9a-f]{4,}|/home|/root|/tmp|/usr|Traceback|File \"|site-packages|Pillow|\d+\.\d+\.\d+")
BODY_MB = 0.5
SCHEMATHESIS_EXAMPLES = 50  # of each operation and kind


class Server:
    """A process that serves, and requests to it."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        env = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file, cwd=HERE, env=env)
        self.port = int(self._wait_for(r"at http://127\.0\.0\.1:(\d+)"))
        self.url = f"http://127.0.0.1:{self.port}"

    def _wait_for(self, pattern: str) -> str:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(pattern, self.log.read_text()):
                return found[1]
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the server did not start: {self.log.read_text()}")

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {"Content-Type": "image/png"} | (headers or {}))
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return found

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        status, _, found = self.ask("POST", path, body)
        return status, json.loads(found)

    def metric(self, name: str) -> float:
        text = self.ask("GET", "/metrics")[2].decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line))

    def is_ready(self) -> bool:
        return self.ask("GET", "/readyz")[0] == 200

    def wait_until_ready(self) -> None:
        wait_for(self.is_ready)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)


def wait_for(true: Any) -> None:
    end = time.monotonic() + START_SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def png_of(grey: int) -> bytes:
    return HOSTILE["encode"](Image.new("RGB", (SIDE, SIDE), (grey, grey, grey)), "PNG")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two small models of different sizes and labels."""
    root = tmp_path_factory.mktemp("bundles")
    for name, labels, size in (("pets", ("cat", "<b>dog</b>", "Käfer"), 32), ("digits", tuple("0123456"), 16)):
        model = vitlab.create_model("ViT-w32d2m64h2/8", num_classes=len(labels), image_size=size, seed=0)
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
        vitlab.save(model, root / name, labels=labels, card=f"# {name}\n")
    return root / "pets", root / "digits"


@pytest.fixture(scope="module")
def server(bundles: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    command = [sys.executable, "-m", "vitlab", "serve", str(bundles[0]), f"numbers={bundles[1]}", "--port", "0"]
    more = ["--device", "cpu", "--threads", "1", "--max-body-mb", str(BODY_MB), "--allow-host", "photos.example"]
    running = Server([*command, *more], tmp_path_factory.mktemp("server") / "log.txt")
    yield running
    assert running.stop() == 0
    assert "error" not in running.log.read_text()


@pytest.fixture(scope="module")
def photos() -> list[bytes]:
    draw = np.random.default_rng(0)
    sizes = [(40, 30), (64, 64), (9, 100), (33, 65)]
    return [HOSTILE["encode"](draw.integers(0, 256, (*size, 3), dtype=np.uint8), "JPEG") for size in sizes]


# --- answers ----------------------------------------------------------------------------------------------------------


def probabilities(answers: Any) -> dict[str, float]:
    return {each["label"]: each["p"] for each in answers}


def test_answers_are_those_of_the_model_itself(server: Server, bundles: tuple[Path, Path], photos: list[bytes]) -> None:
    with Client(server.url) as client:
        for name, path in (("pets", bundles[0]), ("numbers", bundles[1])):
            offline = vitlab.load(path, device="cpu", quiet=True)
            for found, expected in zip(client.predict(photos, top=2, model=name), offline(photos, top=2), strict=True):
                assert [each["label"] for each in found] == [each.label for each in expected]
                assert [each["p"] for each in found] == pytest.approx([each.p for each in expected], abs=1e-5)
            vectors = torch.tensor(client.embed(photos, model=name))
            assert torch.allclose(vectors, offline.embed(photos), atol=1e-5)
        alone, together = client.predict(photos[0]), client.predict(photos)[0]
    assert probabilities(alone) == pytest.approx(probabilities(together), abs=1e-5)


def test_explanation_is_a_picture_or_numbers(server: Server, photos: list[bytes]) -> None:
    with Client(server.url) as client:
        picture, expected = client.explain(photos[0], method="attention", label="cat"), client.predict(photos[0])
    assert Image.open(io.BytesIO(picture)).format == "PNG"
    status, found = server.post("/v1/explain?detail=map&label=cat&method=grad-cam", photos[0])
    assert (status, found["model"], found["map"]["label"]) == (200, "pets", "cat")
    assert probabilities(found["top"]) == pytest.approx(probabilities(expected), abs=1e-5)


def test_models_describe_themselves(server: Server) -> None:
    with Client(server.url) as client:
        first, second = client.models()
    assert (first["name"], second["name"]) == ("pets", "numbers")
    assert first["labels"] == ["cat", "<b>dog</b>", "Käfer"] and first["card"].startswith("# pets")
    assert second["image_size"] == [16, 16] and second["parameters"] > 1000
    assert json.loads(server.ask("GET", "/v1/model?model=numbers")[2]) == second


def test_bad_image_among_good_ones_has_an_error_of_its_own(server: Server, photos: list[bytes]) -> None:
    parts = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="%d"\r\n\r\n%s\r\n' % (number, data)
        for number, data in enumerate([photos[0], b"no image", photos[1]])
    )
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    status, _, body = server.ask("POST", "/v1/predict", parts + b"--x--\r\n", form)
    results = json.loads(body)["results"]
    assert status == 200 and [each["name"] for each in results] == ["0", "1", "2"]
    assert results[1]["error"]["code"] == "bad_image" and "top" in results[0] and "top" in results[2]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("GET", "/nothing", {}, 404, "not_found"),
        ("GET", "/assets/../app.py", {}, 404, "not_found"),
        ("GET", "/assets/%2e%2e/app.py", {}, 404, "not_found"),
        ("GET", "/v1/predict", {}, 405, "bad_method"),
        ("DELETE", "/v1/model", {}, 405, "bad_method"),
        ("POST", "/v1/predict?model=nope", {}, 404, "unknown_model"),
        ("POST", "/v1/predict?top=0", {}, 422, "bad_parameter"),
        ("POST", "/v1/predict?url=http://127.0.0.1/", {}, 422, "bad_parameter"),
        ("POST", "/v1/explain?method=magic", {}, 422, "bad_parameter"),
        ("POST", "/v1/explain?label=cow", {}, 422, "unknown_label"),
        ("POST", "/v1/predict", {"Content-Type": "text/plain"}, 415, "bad_media_type"),
        ("POST", "/v1/predict", {"Content-Encoding": "gzip"}, 415, "bad_media_type"),
        ("POST", "/v1/predict", {"Content-Type": "multipart/form-data"}, 400, "bad_multipart"),
        ("POST", "/v1/predict", {"Host": "evil.example"}, 403, "bad_host"),
        ("POST", "/v1/predict", {"Origin": "http://evil.example"}, 403, "bad_origin"),
        ("POST", "/v1/predict", {"Origin": "null"}, 403, "bad_origin"),
        ("POST", "/v1/predict", {"X-Long": "x" * 20_000}, 431, "headers_too_large"),
    ],
)
def test_wrong_request_is_answered_from_the_table(
    server: Server, method: str, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    found, answer_headers, body = server.ask(method, path, png_of(9) if method == "POST" else None, headers)
    error = json.loads(body)["error"]
    assert (found, error) == (status, {"code": code, "message": PROBLEMS[code].message})
    assert answer_headers["x-content-type-options"] == "nosniff" and "server" not in answer_headers


def test_name_of_the_server_and_its_own_page_are_let_in(server: Server) -> None:
    for headers in (
        {"Host": "photos.example", "Origin": "https://photos.example"},
        {"Host": "localhost:8000", "Origin": "http://localhost:8000"},
        {"Host": "10.1.2.3:80"},
    ):
        assert server.ask("POST", "/v1/predict", png_of(9), headers)[0] == 200
    assert server.ask("GET", "/healthz", headers={"Host": "evil.example"})[0] == 200, "a probe has no name"


def raw(server: Server, *pieces: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return b"".join(iter(lambda: connection.recv(65536), b""))


HEAD = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: image/png\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n", 411),
        (HEAD + b"Content-Length: 99999999999\r\n\r\n", 413),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"Content-Length: 0\r\n\r\n", 422),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, 431),
        (b"GET /" + b"a" * 40_000, 431),
    ],
)
def test_lies_about_lengths_and_endless_headers(server: Server, request_bytes: bytes, status: int) -> None:
    answer = raw(server, request_bytes)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] in PROBLEMS


def test_too_many_parts_and_parts_of_other_names(server: Server) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    part = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    many = part % (b"image", b"x") * 3000
    for body, code in (
        (many + b"--x--\r\n", "too_many_images"),
        (part % (b"file", b"x") + b"--x--\r\n", "bad_multipart"),
        (part % (b"image", b"x"), "bad_multipart"),
        (b"--x\r\nContent-Disposition: " + b"a" * 100_000, "bad_multipart"),
        (b"--x--\r\n", "no_image"),
    ):
        assert json.loads(server.ask("POST", "/v1/predict", body, form)[2])["error"]["code"] == code


def corpus() -> Iterator[bytes]:
    """What an image must not be, and what is strange but right."""
    jpeg, png, encode = HOSTILE["JPEG"], HOSTILE["PNG"], HOSTILE["encode"]
    yield from (jpeg[:length] for length in range(0, len(jpeg) - 2, len(jpeg) // 12))
    yield from (b"", b"\0", b"<svg></svg>", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"8BPS\0\1" + bytes(40), b"%PDF-1.7\n")
    yield from (encode(HOSTILE["PHOTO"], kind) for kind in ("PPM", "ICO"))
    for width, height in ((8000, 6250), (30_000, 30_000), (2**31 - 1, 1)):
        yield HOSTILE["png"](width, height, 1, 0, zlib.compress(bytes(1000)))
    yield from (encode(Image.new("RGB", size, "red"), "PNG") for size in ((1, 1), (1, 10_000), (10_000, 1)))
    yield HOSTILE["_with_exif"](jpeg, b"Exif\0\0MM\0*\xff\xff\xff\xff")
    yield b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
    yield b"GIF89a" + bytes(30)
    yield png[:60] + bytes(40) + png[100:]
    yield b"II*\0" + b"\xff" * 200


def test_hostile_images_get_fixed_texts(server: Server) -> None:
    texts = {problem.message for problem in PROBLEMS.values()}
    for path in ("/v1/predict", "/v1/explain?detail=map"):
        for data in corpus():
            status, headers, body = server.ask("POST", path, data)
            found = json.loads(body)
            assert status in (200, 422), (data[:20], found)
            assert status == 200 or found["error"]["message"] in texts
            assert not LEAK.search(json.dumps(headers) + (body.decode() if status != 200 else ""))
    assert server.metric("vitlab_model_restarts_total") == 0


def test_random_paths_make_no_new_metrics(server: Server) -> None:
    def series() -> set[str]:
        return {line.rpartition(" ")[0] for line in server.ask("GET", "/metrics")[2].decode().splitlines()}

    server.ask("GET", "/random"), server.ask("GET", "/assets/random")
    before = series()
    for number in range(50):
        server.ask("GET", f"/random/{number}"), server.ask("GET", f"/assets/{number}")
    assert series() == before


def test_client_reports_what_was_refused(server: Server, tmp_path: Path) -> None:
    with Client(server.url) as client:
        with pytest.raises(ServerRefusal, match="bad_image"):
            client.predict(b"no image")
        with pytest.raises(ServerRefusal, match="unknown_model") as caught:
            client.embed(png_of(1), model="nope")
        assert caught.value.status == 404
        with pytest.raises(vitlab.VitlabError, match="cannot be read"):
            client.predict(tmp_path / "missing.png")
    with pytest.raises(vitlab.VitlabError, match="cannot be reached"):
        Client("http://127.0.0.1:9", retries=0).models()


MODES = slow_after(1, [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])


@pytest.mark.parametrize("mode", MODES)
def test_schemathesis_finds_no_server_error_and_no_undocumented_answer(server: Server, mode: Any) -> None:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.specs.openapi.checks.status_code_conformance,
        schemathesis.specs.openapi.checks.content_type_conformance,
        schemathesis.specs.openapi.checks.response_schema_conformance,
    ]
    tried = 0
    for result in api.get_all_operations():
        operation = result.ok()
        given_to_it = operation.definition.raw.get("parameters") or operation.definition.raw.get("requestBody")
        if mode is schemathesis.GenerationMode.NEGATIVE and not given_to_it:
            continue  # nothing of it could be wrong

        @seed(0)
        @settings(
            max_examples=SCHEMATHESIS_EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            nonlocal tried
            tried += 1
            case.call_and_validate(checks=checks)

        check()
    assert tried > 150


# --- faults and stops -------------------------------------------------------------------------------------------------

FAULTY_LIMITS = {"max_batch": 1, "max_queue": 6, "deadline": 5.0, "model_seconds": 8.0, "receive_seconds": 2.0} | {
    "grace": 1.0
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    command = [sys.executable, "server_models.py", json.dumps(FAULTY_LIMITS)]
    running = Server(command, tmp_path_factory.mktemp("faulty") / "log.txt")
    yield running
    if running.process.poll() is None:
        running.stop()


def several(server: Server, greys: list[int]) -> list[tuple[int, Any]]:
    with concurrent.futures.ThreadPoolExecutor(len(greys)) as threads:
        return list(threads.map(lambda grey: server.post("/v1/predict", png_of(grey)), greys))


def test_non_finite_numbers_are_not_an_answer(faulty: Server) -> None:
    status, found = faulty.post("/v1/predict", png_of(NAN))
    assert (status, found["error"]["code"]) == (500, "not_finite")
    assert faulty.post("/v1/predict", png_of(9))[0] == 200


def test_model_that_dies_is_back_and_what_it_worked_on_is_refused(faulty: Server) -> None:
    before = faulty.metric("vitlab_model_restarts_total")
    status, headers, body = faulty.ask("POST", "/v1/predict", png_of(EXIT))
    assert (status, json.loads(body)["error"]["code"]) == (503, "model_lost") and "retry-after" in headers
    faulty.wait_until_ready()
    assert faulty.post("/v1/predict", png_of(9))[0] == 200
    assert faulty.metric("vitlab_model_restarts_total") == before + 1


def test_model_that_hangs_is_replaced(faulty: Server) -> None:
    before = faulty.metric("vitlab_model_restarts_total")
    assert faulty.post("/v1/predict", png_of(HANG))[0] == 504, "the deadline of the request comes first"
    wait_for(lambda: faulty.metric("vitlab_model_restarts_total") == before + 1)
    faulty.wait_until_ready()
    assert faulty.post("/v1/predict", png_of(9))[0] == 200


@pytest.mark.slow
def test_model_whose_loading_hangs_is_killed_tried_again_and_reported_by_healthz(tmp_path: Path) -> None:
    stuck = tmp_path / "stuck"
    command = [sys.executable, "server_models.py", json.dumps(FAULTY_LIMITS), "6"]
    server = Server(command, tmp_path / "log.txt", {STUCK: str(stuck)})
    assert server.ask("GET", "/healthz")[0] == 200
    stuck.touch()
    assert server.post("/v1/predict", png_of(EXIT))[0] == 503
    began = time.monotonic()
    wait_for(lambda: server.ask("GET", "/healthz")[0] == 503)
    assert time.monotonic() - began > 2, "a model that loads is not sick yet"
    assert json.loads(server.ask("GET", "/healthz")[2])["error"]["code"] == "model_failed"
    assert server.post("/v1/predict", png_of(9))[1]["error"]["code"] == "not_ready"
    stuck.unlink()
    server.wait_until_ready()
    assert server.ask("GET", "/healthz")[0] == 200 and server.post("/v1/predict", png_of(9))[0] == 200
    assert server.stop() == 0 and "not loaded within 6 s" in server.log.read_text()


@pytest.mark.slow
def test_model_whose_first_loading_hangs_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "stuck").touch()
    command = [sys.executable, "server_models.py", json.dumps({"load_seconds": 4.0})]
    environment = os.environ | {STUCK: str(tmp_path / "stuck")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=environment, timeout=120, check=False)
    assert done.returncode == 1 and "were not loaded within 4 s" in done.stderr


def test_beyond_the_queue_requests_are_refused_and_asked_to_come_again(faulty: Server) -> None:
    found = several(faulty, [SLOW] * 20)
    statuses = {status for status, _ in found}
    assert statuses <= {200, 503, 504} and {200, 503} <= statuses
    assert {body["error"]["code"] for status, body in found if status == 503} == {"queue_full"}


def test_late_work_is_not_computed(faulty: Server) -> None:
    """Six seconds of work, and more, where requests may take five."""
    assert faulty.post("/v1/predict", png_of(9))[0] == 200  # behind all that was asked before
    images = faulty.metric("vitlab_batch_images_count")
    found = several(faulty, [SLOW] * 6)
    late = sum(status == 504 for status, _ in found)
    assert late and all(status in (200, 504) for status, _ in found)
    assert faulty.post("/v1/predict", png_of(9))[0] == 200
    assert faulty.metric("vitlab_batch_images_count") - images <= 6 + 1 - late + 2, "at most two were at work already"


def test_who_has_gone_away_is_not_worked_for(faulty: Server) -> None:
    before = faulty.metric("vitlab_cancelled_total")
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(png_of(SLOW))
    connections = [socket.create_connection(("127.0.0.1", faulty.port)) for _ in range(5)]
    for connection in connections:
        connection.sendall(head + png_of(SLOW))
    wait_for(lambda: faulty.metric("vitlab_queue_images") >= 2)
    for connection in connections:
        connection.close()
    wait_for(lambda: faulty.metric("vitlab_admitted_images") == 0)
    assert faulty.post("/v1/predict", png_of(9))[0] == 200
    assert faulty.metric("vitlab_cancelled_total") >= before + 2


@pytest.mark.parametrize("start", [b"GET /healthz HT", HEAD + b"Content-Length: 100\r\n\r\nabc", b""])
def test_slow_client_is_let_go(faulty: Server, start: bytes) -> None:
    begun = time.monotonic()
    answer = raw(faulty, start)
    assert time.monotonic() - begun >= 1.5
    assert answer.startswith(b"HTTP/1.1 408 ") if start else answer == b""


def test_client_that_sent_much_and_stalls_is_let_go(faulty: Server) -> None:
    """What came quickly buys no time: at 32 KB a second, 640 KB would have bought twenty seconds."""
    begun = time.monotonic()
    answer = raw(faulty, HEAD + b"Content-Length: 1000000\r\n\r\n" + b"x" * 640 * 1024)
    assert answer.startswith(b"HTTP/1.1 408 ") and time.monotonic() - begun < 15


@pytest.mark.parametrize("refused", [b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Length: 99999999\r\n\r\n"])
def test_body_that_goes_on_after_its_refusal_is_cut_off(faulty: Server, refused: bytes) -> None:
    head = HEAD.replace(b"Connection: close\r\n", b"")
    with socket.create_connection(("127.0.0.1", faulty.port), timeout=120) as connection:
        connection.sendall(head + refused)
        assert connection.recv(65536).startswith(b"HTTP/1.1 41")
        piece = b"1\r\nx\r\n" if b"chunked" in refused else b"x"
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(piece)
                time.sleep(0.05)


def test_every_orientation_and_colour_mode_gives_the_tensors_of_training(faulty: Server, tmp_path: Path) -> None:
    for mode in SAME["MODES"]:
        for orientation in SAME["STORED"]:
            SAME["store"](tmp_path / "data", mode, orientation)
    files = sorted((tmp_path / "data").rglob("*.*"))
    assert len(files) == 96
    with Client(faulty.url) as client:
        parts = [client.embed(files[start : start + 16], model="pixels") for start in range(0, 96, 16)]
    assert torch.equal(
        torch.tensor([vector for part in parts for vector in part]), build("pixels", "cpu").pixels(files).flatten(1)
    )


def test_file_that_is_not_a_model_is_reported_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = Command(["serve", str(tmp_path / "empty"), "--port", "0"], tmp_path).end()
    assert code in (1, 2) and "holds no bundle" in err and "Traceback" not in err


def test_stop_answers_what_was_admitted_and_is_not_ready_first(faulty: Server) -> None:
    """The last test of this server."""
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(faulty.post, "/v1/predict", png_of(SLOW)) for _ in range(3)]
        wait_for(lambda: faulty.metric("vitlab_admitted_images") == 3)
        idle = http.client.HTTPConnection("127.0.0.1", faulty.port, timeout=60)
        idle.request("GET", "/healthz")
        idle.getresponse().read()
        faulty.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not faulty.is_ready())  # still listening: it answers
        assert [future.result()[0] for future in asked] == [200] * 3
    assert faulty.process.wait(timeout=60) == 0
    idle.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", faulty.port), timeout=5)
