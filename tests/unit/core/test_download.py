"""Downloads against a real server on this machine that breaks, lies and stalls on demand."""

import dataclasses
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vitlab.core import download, fsio
from vitlab.core.console import Console
from vitlab.core.download import fetch
from vitlab.core.errors import FileProblem, UsageError, VitlabError

DATA = bytes(range(256)) * 40  # 10,240 bytes in which every place is told from its neighbours
DIGEST = hashlib.sha256(DATA).hexdigest()
QUIET = Console(quiet=True)


@dataclasses.dataclass
class Site:
    """One remote file and the ways in which its server misbehaves. `requests` holds the Range of each request."""

    data: bytes = DATA
    cut_at: list[int] = dataclasses.field(default_factory=list)  # bytes of the file after which each answer breaks off
    knows_range: bool = True
    shift: int = 0  # of the start in Content-Range
    errors: list[int] = dataclasses.field(default_factory=list)
    location: str | None = None
    etag: str = ""
    length: bool = True
    stall: float = 0.0
    piece: int = 2**20
    pause: float = 0.0  # between pieces
    requests: list[str | None] = dataclasses.field(default_factory=list)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site = self.site
        wanted = self.headers.get("Range")
        site.requests.append(wanted)
        time.sleep(site.stall)
        if site.errors:
            code = site.errors.pop(0)
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if site.location and (self.path == "/file" or "loop" in site.location):
            self.send_response(302)
            self.send_header("Location", site.location)
            self.end_headers()
            return
        start = 0
        if wanted and site.knows_range and self.headers.get("If-Range", site.etag) == site.etag:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(site.data):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            first = start + site.shift
            self.send_header("Content-Range", f"bytes {first}-{len(site.data) - 1}/{len(site.data)}")
        else:
            self.send_response(200)
        if site.etag:
            self.send_header("ETag", site.etag)
        if site.length:
            self.send_header("Content-Length", str(len(site.data) - start))
        self.end_headers()
        end = site.cut_at.pop(0) if site.cut_at else len(site.data)
        for at in range(start, end, site.piece):
            self.wfile.write(site.data[at : min(at + site.piece, end)])
            time.sleep(site.pause)
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Generator[Site]:
    monkeypatch.setattr(download, "_PAUSE", 0.0)
    state = Site()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"site": state})) as server:
        server.handle_error = lambda *_: None  # clients that leave are part of the tests
        state.url = f"http://127.0.0.1:{server.server_port}/file"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield state
        server.shutdown()
        thread.join()


def only_file(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


# --- the whole file ---------------------------------------------------------------------------------------------------


def test_file_arrives_whole_with_nothing_beside_it(site: Site, tmp_path: Path) -> None:
    fetch(site.url, tmp_path / "deep" / "file.bin", size=len(DATA), sha256=DIGEST, console=QUIET)
    assert only_file(tmp_path / "deep").read_bytes() == DATA
    assert site.requests == [None]


@pytest.mark.parametrize("length", [True, False])
def test_empty_and_unmeasured_files_arrive_too(site: Site, tmp_path: Path, length: bool) -> None:
    site.length = length
    fetch(site.url, tmp_path / "full", console=QUIET)
    site.data = b""
    fetch(site.url, tmp_path / "empty", console=QUIET)
    assert ((tmp_path / "full").read_bytes(), (tmp_path / "empty").read_bytes()) == (DATA, b"")


def test_file_that_is_there_is_not_fetched_again_but_checked(site: Site, tmp_path: Path) -> None:
    target = tmp_path / "file.bin"
    target.write_bytes(b"mine")
    fetch(site.url, target, console=QUIET)
    with pytest.raises(FileProblem, match=r"4 bytes.*10,240.*expected"):
        fetch(site.url, target, size=len(DATA), console=QUIET)
    assert (site.requests, only_file(tmp_path).read_bytes()) == ([], b"mine")


def test_local_file_is_copied(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(DATA)
    fetch((tmp_path / "source").as_uri(), tmp_path / "new" / "copy", sha256=DIGEST, console=QUIET)
    assert only_file(tmp_path / "new").read_bytes() == DATA
    with pytest.raises(FileProblem, match=r"nothing-here.*not exist"):
        fetch((tmp_path / "nothing-here").as_uri(), tmp_path / "new" / "other", console=QUIET)


def test_progress_shows_bytes_speed_and_time(site: Site, tmp_path: Path) -> None:
    site.data = bytes(3 * 10**6)
    console = Console(quiet=True)
    fetch(site.url, tmp_path / "file.bin", console=console)
    assert len(console.lines) >= 2
    assert all(re.fullmatch(r"download   \d/3 MB, [\d.]+ MB/s, \d+:\d\d left", line) for line in console.lines)


# --- breaks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 5000, len(DATA) - 1])
def test_transfer_cut_anywhere_goes_on_from_there(site: Site, tmp_path: Path, place: int) -> None:
    site.cut_at = [place]
    fetch(site.url, tmp_path / "file.bin", sha256=DIGEST, console=QUIET)
    assert only_file(tmp_path).read_bytes() == DATA
    assert site.requests == [None, f"bytes={place}-" if place else None]


def test_many_cuts_are_mended_as_long_as_each_brings_something(site: Site, tmp_path: Path) -> None:
    site.cut_at = list(range(500, len(DATA), 500))
    fetch(site.url, tmp_path / "file.bin", sha256=DIGEST, console=QUIET)
    assert only_file(tmp_path).read_bytes() == DATA
    assert len(site.requests) > 5 * download._ATTEMPTS


def test_file_of_unknown_size_and_hash_is_resumed_by_its_version_within_one_call(site: Site, tmp_path: Path) -> None:
    site.etag, site.cut_at = '"one"', list(range(500, len(DATA), 500))
    fetch(site.url, tmp_path / "file.bin", console=QUIET)
    assert only_file(tmp_path).read_bytes() == DATA
    assert site.requests[1] == "bytes=500-"


@pytest.mark.parametrize("code", [403, 404])
def test_refusal_keeps_what_has_arrived_of_a_known_file(site: Site, tmp_path: Path, code: int) -> None:
    site.cut_at = [4000] * download._ATTEMPTS
    with pytest.raises(FileProblem, match="are kept"):
        fetch(site.url, tmp_path / "file.bin", size=len(DATA), console=QUIET)
    site.errors, site.cut_at = [code], []
    with pytest.raises(FileProblem, match=str(code)):
        fetch(site.url, tmp_path / "file.bin", size=len(DATA), console=QUIET)
    site.requests.clear()
    fetch(site.url, tmp_path / "file.bin", size=len(DATA), console=QUIET)
    assert (only_file(tmp_path).read_bytes(), site.requests) == (DATA, ["bytes=4000-"])


def test_next_call_resumes_where_the_last_one_gave_up(site: Site, tmp_path: Path) -> None:
    site.cut_at = [4000] * download._ATTEMPTS
    with pytest.raises(FileProblem, match=r"broke.*4,000 of 10,240 bytes.*4,000 bytes.*kept"):
        fetch(site.url, tmp_path / "file.bin", size=len(DATA), console=QUIET)
    assert not (tmp_path / "file.bin").exists()
    site.requests.clear()
    site.cut_at.clear()
    fetch(site.url, tmp_path / "file.bin", size=len(DATA), console=QUIET)
    assert (only_file(tmp_path).read_bytes(), site.requests) == (DATA, ["bytes=4000-"])


def test_chunked_transfer_without_length_is_refused_when_too_short_or_too_long(site: Site, tmp_path: Path) -> None:
    site.length = False
    for size in (len(DATA) - 1, len(DATA) + 1):
        with pytest.raises(FileProblem, match="expected"):
            fetch(site.url, tmp_path / "file.bin", size=size, console=QUIET)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trouble", ["no range", "wrong range", "neither size nor hash", "complete", "longer"])
def test_file_that_cannot_be_resumed_starts_again(site: Site, tmp_path: Path, trouble: str) -> None:
    known = None if trouble == "neither size nor hash" else DIGEST
    length = {"complete": len(DATA), "longer": len(DATA) + 1}.get(trouble, 4000)
    (tmp_path / ".file.bin.partial").write_bytes(DATA[::-1][:length] if not known else (DATA + b"x")[:length])
    site.knows_range, site.shift = trouble != "no range", int(trouble == "wrong range")
    fetch(site.url, tmp_path / "file.bin", sha256=known, console=QUIET)
    assert only_file(tmp_path).read_bytes() == DATA
    assert site.requests[-1] is None or trouble == "no range"  # which answers with all of it


def test_parts_of_two_files_are_never_joined(site: Site, tmp_path: Path) -> None:
    (tmp_path / ".file.bin.partial").write_bytes(DATA[::-1][:4000])
    with pytest.raises(FileProblem, match="SHA-256"):
        fetch(site.url, tmp_path / "file.bin", sha256=DIGEST, console=QUIET)
    fetch(site.url, tmp_path / "file.bin", sha256=DIGEST, console=QUIET)
    assert only_file(tmp_path).read_bytes() == DATA


def test_complete_part_of_known_size_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    (tmp_path / ".file.bin.partial").write_bytes(DATA)
    fetch(site.url, tmp_path / "file.bin", size=len(DATA), console=QUIET)
    assert (only_file(tmp_path).read_bytes(), site.requests) == (DATA, [])


def test_server_that_always_breaks_and_never_resumes_is_given_up(site: Site, tmp_path: Path) -> None:
    site.knows_range, site.cut_at = False, [4000] * 100
    with pytest.raises(FileProblem, match="connection broke"):
        fetch(site.url, tmp_path / "file.bin", console=QUIET)
    assert len(site.requests) == download._ATTEMPTS


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "attempts"), [(404, 1), (403, 1), (500, download._ATTEMPTS), (429, download._ATTEMPTS)]
)
def test_http_errors_are_reported_and_only_transient_ones_retried(
    site: Site, tmp_path: Path, code: int, attempts: int
) -> None:
    site.errors = [code] * 10
    with pytest.raises(FileProblem, match=rf"/file.*answers {code} \w+"):
        fetch(site.url, tmp_path / "file.bin", console=QUIET)
    assert (len(site.requests), list(tmp_path.iterdir())) == (attempts, [])


def test_passing_error_is_survived(site: Site, tmp_path: Path) -> None:
    site.errors = [503, 500]
    fetch(site.url, tmp_path / "file.bin", sha256=DIGEST, console=QUIET)
    assert only_file(tmp_path).read_bytes() == DATA


def test_one_redirect_is_followed_and_a_loop_is_not(site: Site, tmp_path: Path) -> None:
    site.location = site.url.replace("/file", "/moved")
    fetch(site.url, tmp_path / "file.bin", sha256=DIGEST, console=QUIET)
    site.location = site.url.replace("/file", "/loop")
    with pytest.raises(FileProblem, match="answers 302"):
        fetch(site.url, tmp_path / "other.bin", console=QUIET)
    assert only_file(tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_redirect_to_something_else_is_not_followed(site: Site, tmp_path: Path, location: str) -> None:
    site.location = location
    with pytest.raises(VitlabError):
        fetch(site.url, tmp_path / "file.bin", console=QUIET)
    assert list(tmp_path.iterdir()) == []


def test_silence_ends_in_an_error(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_TIMEOUT", 0.05)
    site.stall = 0.2
    with pytest.raises(FileProblem, match="timed out"):
        fetch(site.url, tmp_path / "file.bin", console=QUIET)


def test_nobody_there_is_one_sentence(site: Site, tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"http://127\.0\.0\.1:1/x.*Connection refused") as caught:
        fetch("http://127.0.0.1:1/x?token=secret", tmp_path / "file.bin", console=QUIET)
    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["ftp://host/x", "data:,x", "/etc/passwd", "https://me:secret@host/x", "javascript:1"])
def test_other_addresses_and_passwords_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match="not an address") as caught:
        fetch(url, tmp_path / "file.bin", console=QUIET)
    assert "secret" not in str(caught.value)


def test_wrong_hash_and_wrong_size_leave_nothing_and_name_both_values(site: Site, tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=rf"/file.*SHA-256 {DIGEST}.*{'0' * 64}"):
        fetch(site.url, tmp_path / "file.bin", sha256="0" * 64, console=QUIET)
    with pytest.raises(FileProblem, match=r"/file.*10,240 bytes.*\b5\b"):
        fetch(site.url, tmp_path / "file.bin", size=5, console=QUIET)
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_space_is_reported_before_the_transfer(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "free_bytes", lambda _: 100)
    with pytest.raises(FileProblem, match=r"0 MB free.*0 MB.*needed"):
        fetch(site.url, tmp_path / "file.bin", console=QUIET)
    assert list(tmp_path.iterdir()) == []


def test_disk_operation_that_fails_leaves_a_state_to_resume_from(
    site: Site,
    tmp_path: Path,
    operations: Callable[..., list[tuple[str, Path]]],
    fail_at: Callable[..., None],
) -> None:
    count = len(operations(lambda: fetch(site.url, tmp_path / "all" / "file.bin", console=QUIET)))
    assert count >= 8
    for k in range(count):
        target = tmp_path / str(k) / "file.bin"
        with pytest.raises(FileProblem, match="No space left"):
            fail_at(k, OSError(28, "No space left on device"), lambda to=target: fetch(site.url, to, console=QUIET))
        fetch(site.url, target, sha256=DIGEST, console=QUIET)
        assert target.read_bytes() == DATA


# --- several processes ------------------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from vitlab.core.console import Console
from vitlab.core.download import fetch
fetch(sys.argv[1], Path(sys.argv[2]), sha256=sys.argv[3], console=Console())
"""


def child(site: Site, target: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, site.url, str(target), DIGEST]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_two_processes_bring_one_file_once(site: Site, tmp_path: Path) -> None:
    site.piece, site.pause = 200, 0.02  # a second in all, longer than the other takes to start
    first = child(site, tmp_path / "file.bin")
    wait_for(lambda: site.requests != [])
    second = child(site, tmp_path / "file.bin")
    printed = [process.communicate(timeout=100)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), printed
    assert (only_file(tmp_path).read_bytes(), site.requests) == (DATA, [None])


def test_killed_process_is_gone_on_from(site: Site, tmp_path: Path) -> None:
    partial = tmp_path / ".file.bin.partial"
    site.data, site.piece, site.pause = DATA * 500, 2**18, 0.02
    killed = child(site, tmp_path / "file.bin")
    wait_for(lambda: partial.exists() and partial.stat().st_size > 0)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    killed.communicate()
    got = partial.stat().st_size
    site.pause = 0.0
    fetch(site.url, tmp_path / "file.bin", sha256=hashlib.sha256(site.data).hexdigest(), console=QUIET)
    assert 0 < got < len(site.data)
    assert (only_file(tmp_path).read_bytes(), site.requests) == (site.data, [None, f"bytes={got}-"])


def test_waiting_process_reports_that_it_waits(site: Site, tmp_path: Path) -> None:
    target, console = tmp_path / "file.bin", Console(quiet=True)
    waiter = threading.Thread(target=lambda: fetch(site.url, target, console=console))
    with fsio.partial_file(target, lambda: None):
        waiter.start()
        wait_for(lambda: console.lines != [])
    waiter.join(timeout=100)
    assert console.lines == ["Another process is downloading file.bin; waiting for it."]
    assert only_file(tmp_path).read_bytes() == DATA
