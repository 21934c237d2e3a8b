"""From the options of `vitlab serve` to names, token and limits."""

from pathlib import Path

import pytest

import vitlab
from vitlab.core.errors import MissingExtra, UsageError
from vitlab.core.planned import Planned
from vitlab.serving import serve_run
from vitlab.serving.serve_run import _sources, _token


def test_models_are_named_by_hand_or_by_their_folder(tmp_path: Path) -> None:
    (tmp_path / "pets" / "bundle").mkdir(parents=True)
    (tmp_path / "odd = name").mkdir()
    given = [tmp_path / "pets" / "bundle", tmp_path / "odd = name", f"mine={tmp_path}", "ViT-B/16@augreg-i21k"]
    assert [source.name for source in _sources(given)] == ["pets", "odd-name", "mine", "ViT-B-16@augreg-i21k"]
    assert _sources(given)[2].path == str(tmp_path)


@pytest.mark.parametrize("given", [["a=x", "a=y"], ["a b=x"], ['"=x'], ["a="], []])
def test_names_that_cannot_be_are_refused(given: list[str]) -> None:
    with pytest.raises(UsageError):
        _sources(given)


def test_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITLAB_TOKEN", raising=False)
    assert _token(None) is None
    monkeypatch.setenv("VITLAB_TOKEN", "from-the-environment")
    assert _token(None) == "from-the-environment"
    (tmp_path / "token").write_text("from-a-file\n")
    assert _token(tmp_path / "token") == "from-a-file"
    for text in ("", "short", "two\nlines of it", "ümläute und so"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(UsageError, match="token"):
            _token(tmp_path / "token")
    with pytest.raises(vitlab.VitlabError, match="missing"):
        _token(tmp_path / "missing")


def test_dry_run_says_what_would_be_served(tmp_path: Path) -> None:
    vitlab.save(vitlab.create_model("ViT-mu/16", num_classes=3, image_size=32), tmp_path / "cats")
    planned = vitlab.serve([tmp_path / "cats", f"dogs={tmp_path / 'cats'}"], port=0, dry_run=True, device="cpu")
    assert isinstance(planned, Planned)
    assert [row.partition(",")[0] for row in planned.would["models"]] == ["cats: ViT-mu/16", "dogs: ViT-mu/16"]
    assert planned.would["token"] == "none"
    with pytest.raises(vitlab.VitlabError, match="does not exist"):
        vitlab.serve(tmp_path / "none", dry_run=True)


@pytest.mark.parametrize(
    "wrong",
    [{"port": 70_000}, {"max_batch": 0}, {"max_queue": 0}, {"deadline": 0}, {"max_wait_ms": -1}, {"max_body_mb": -1}],
    ids=str,
)
def test_wrong_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        vitlab.serve("model", dry_run=True, **wrong)


def test_missing_extra_is_answered_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    with pytest.raises(MissingExtra, match=r"vitlab\[serve\]"):
        serve_run._require_extra()
