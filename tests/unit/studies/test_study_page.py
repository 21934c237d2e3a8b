"""The report of a study: from records alone, the same bytes every time, and labels as text."""

import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_after
from study_records import HOSTILE, TINY, records_of, tiny_study, write_records, written_study

from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.report.page import Table, Verdicts
from vitlab.report.plot import NO_RUNS, Plot
from vitlab.studies.cell_records import CellRecord, read_cells
from vitlab.studies.claims import ClaimsReport
from vitlab.studies.grid import Cell, list_cells, list_runs
from vitlab.studies.outcome import Outcome, find_outcome
from vitlab.studies.printed import printed_plot
from vitlab.studies.repeat import repeat_commands
from vitlab.studies.reporting import StudyReport, report_study
from vitlab.studies.study import Scale, Study, first_seeds
from vitlab.studies.study_file import list_study_names, read_study
from vitlab.studies.study_report import build_page, outcome_lines, outcome_to_dict, to_markdown, write_study

AGAIN = """
import sys
from pathlib import Path
from vitlab.studies.cell_records import read_cells
from vitlab.studies.outcome import find_outcome
from vitlab.studies.study_file import read_study
from vitlab.studies.study_report import write_study
study = read_study(sys.argv[1])
outcome = find_outcome(study, study.at("laptop"), read_cells(Path(sys.argv[2])))
write_study(outcome, Path(sys.argv[3]), "vitlab study run tiny")
"""


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("another_process", slow_after(1, [False, True]))
def test_same_records_give_the_same_bytes_also_under_another_hash_seed(tmp_path: Path, another_process: bool) -> None:
    path = written_study(tmp_path)
    study = read_study(str(path))
    records = records_of(study.at("laptop"))
    write_records(tmp_path / "made", records)
    backwards = dict(reversed(records.items()))
    write_study(find_outcome(study, study.at("laptop"), records), tmp_path / "first", "vitlab study run tiny")
    if another_process:
        env = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Antarctica/Troll", "LC_ALL": "C"}
        arguments = [sys.executable, "-c", AGAIN, path, tmp_path / "made", tmp_path / "second"]
        subprocess.run([str(word) for word in arguments], env=env, check=True)
    else:
        write_study(find_outcome(study, study.at("laptop"), backwards), tmp_path / "second", "vitlab study run tiny")
    first = files(tmp_path / "first")
    assert {"tiny-laptop/report.html", "tiny-laptop/results.md", "tiny-laptop/results.json"} < set(first)
    assert any(name.startswith("tiny-laptop/plots/") for name in first)
    assert files(tmp_path / "second") == first


def test_page_has_the_answer_the_plot_and_every_condition(tmp_path: Path) -> None:
    study = tiny_study(tmp_path)
    page = write_study(find_outcome(study, study.at("laptop"), records_of(study.at("laptop"))), tmp_path, "vitlab x")
    text = page.read_text(encoding="utf-8")
    for expected in ("Does it?", "A is better than B", "does not hold here", "Every condition", "18 of 18", "some CPU"):
        assert expected in text, expected
    assert text.count('class="point') >= 6 and "vitlab train digits --seed 0" in text
    markdown = (page.parent / "results.md").read_text(encoding="utf-8")
    assert "| A | 4 | 42.30 %" in markdown and "`vitlab x`" in markdown
    numbers = json.loads((page.parent / "results.json").read_text())
    assert numbers["measured"] == numbers["cells"] == 18 and numbers["claims"][0]["verdict"] == "does not hold here"
    assert numbers["conditions"][2]["by_seed"] == {"0": 0.42, "1": pytest.approx(0.423), "2": pytest.approx(0.426)}


def test_nothing_measured_still_makes_a_page(tmp_path: Path) -> None:
    study = tiny_study(tmp_path)
    page = write_study(find_outcome(study, study.at("laptop"), {}), tmp_path, "vitlab x")
    text = page.read_text(encoding="utf-8")
    assert NO_RUNS in text and "18 cells have no record yet" in text and "not measured yet" in text


@pytest.mark.parametrize("name", list_study_names())
def test_every_shipped_study_has_a_page_with_and_without_records(tmp_path: Path, name: str) -> None:
    study = read_study(name)
    scale = study.at("laptop")
    for records in ({}, records_of(scale)):
        page = write_study(find_outcome(study, scale, records), tmp_path, "vitlab x").read_text(encoding="utf-8")
        assert study.title in page
        assert ("have no record yet" in page) == (not records)


def test_labels_are_text_on_the_page_and_in_markdown(tmp_path: Path) -> None:
    label = json.dumps(HOSTILE, ensure_ascii=False)
    hostile = TINY.replace("A = {}", f"{label} = {{}}").replace('{ kind = "A" }', f"{{ kind = {label} }}")
    for key in ("Tiny", "Does it?", "Figure 0", "A is better than B", "section 0", "Nothing to speak of."):
        hostile = hostile.replace(f'"{key}"', label)
    study = tiny_study(tmp_path, hostile)
    records = {
        key: dataclasses.replace(record, hardware={"name": HOSTILE}, model=HOSTILE, command=HOSTILE)
        for key, record in records_of(study.at("laptop")).items()
    }
    page = write_study(find_outcome(study, study.at("laptop"), records), tmp_path, HOSTILE)
    text = page.read_text(encoding="utf-8")
    assert "<img src=x" not in text and "&lt;img src=x onerror=alert(1)&gt;" in text
    assert all("<img src=x" not in path.read_text(encoding="utf-8") for path in page.parent.rglob("*.svg"))
    markdown = (page.parent / "results.md").read_text(encoding="utf-8")
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert table and all("<img" not in line for line in table)
    assert {line.replace("\\|", "").count("|") for line in table[-7:]} == {5}, "a bar in a label is no column"


# --- the paper's numbers beside ours ----------------------------------------------------------------------------------


def printed(name: str) -> Plot:
    plot = printed_plot(read_study(name))
    assert plot is not None
    return plot


def places(plot: Plot) -> dict[str, list[tuple[float, float]]]:
    return {one.name: [(point.x, point.y) for point in one.points] for one in plot.series}


def test_table_6_is_drawn_as_figure_5_with_a_line_for_each_family() -> None:
    plot = printed("compute")
    found = places(plot)
    assert {name: len(points) for name, points in found.items()} == {"ViT": 6, "hybrid": 5, "ResNet": 7}
    assert found["ViT"][0] == (55.0, pytest.approx(0.8073)) and found["ResNet"][-1] == (3306.0, pytest.approx(0.8722))
    assert dict(plot.cards[0].facts)["exaFLOPs"] == "55" and plot.cards[0].name == "ViT-B/32"
    assert all(one.hollow and not one.joined for one in plot.series) and plot.percent and not plot.categories


def test_rows_are_places_on_a_numeric_axis_or_categories() -> None:
    sizes = printed("data-size")
    assert places(sizes)["ViT-H/14"] == [(1.42e7, pytest.approx(0.8513)), (3.03e8, pytest.approx(0.8804))]
    assert all(one.joined for one in sizes.series) and not sizes.categories
    positions = printed("positions")
    assert list(positions.categories) == ["no positions", "1-D", "2-D", "relative"]
    assert {name: len(points) for name, points in places(positions).items()} == {"stem": 4, "every": 2, "shared": 2}
    assert places(positions)["stem"][1] == (1, 0.64206), "a fraction stays one"
    assert [x for x, _ in places(positions)["shared"]] == [1, 2]


@pytest.mark.parametrize("name", [name for name in list_study_names() if read_study(name).table])
def test_what_has_a_published_table_has_its_plot_beside_ours(tmp_path: Path, name: str) -> None:
    study = read_study(name)
    report = build_page(find_outcome(study, study.at("laptop"), records_of(study.at("laptop"))), "vitlab x")
    ours, theirs = report.sections[:2]
    assert isinstance(ours, Plot) and isinstance(theirs, Plot)
    assert not ours.wide and not theirs.wide and theirs.title.startswith("The paper: ")
    assert sum(len(one.points) for one in theirs.series) >= 4
    assert isinstance(report.sections[2], Verdicts)


def test_seconds_are_drawn_with_how_many_runs_shared_the_machine() -> None:
    study = read_study("compute")
    scale = study.at("laptop")
    records = records_of(scale)
    shared = {key: dataclasses.replace(record, workers=3) for key, record in records.items()}
    for these, said, last in (
        (records, "", "Pareto front"),
        (shared, "Up to 3 runs at once shared a machine", "ResNet"),
    ):
        report = build_page(find_outcome(study, scale, these), "vitlab x")
        (plot,) = [one for one in report.sections if isinstance(one, Plot) and one.title == "The same against time"]
        assert said in plot.caption and plot.series[-1].name == last, "no front of seconds that others took part in"
        assert plot.series[0].points[0].x == 4.0, "both stages count"


def test_seconds_of_a_resumed_run_are_at_least_those_of_its_updates() -> None:
    """Its record has the time of the last try alone."""
    study = read_study("compute")
    scale = study.at("laptop")
    records = {
        key: dataclasses.replace(one, numbers={**one.numbers, "images_seen": 9000.0, "images_per_second": 1000.0})
        for key, one in records_of(scale).items()
    }
    report = build_page(find_outcome(study, scale, records), "vitlab x")
    (plot,) = [one for one in report.sections if isinstance(one, Plot) and one.title == "The same against time"]
    assert plot.series[0].points[0].x == 18.0, "9 seconds for each of two stages"


def test_formula_of_attention_stands_beside_its_time() -> None:
    study = read_study("attention-cost")
    scale = study.at("laptop")
    records = records_of(scale, flops=lambda _: 0.0)
    report = build_page(find_outcome(study, scale, records), "vitlab study run attention-cost")
    plots = [one for one in report.sections if isinstance(one, Plot)]
    assert [one.y_label for one in plots] == ["milliseconds for an image", "multiply-adds for an image"]
    assert {card.command for card in plots[0].cards} == {"vitlab study run attention-cost"}, "what measures it again"
    table = next(one for one in report.sections if isinstance(one, Table) and one.title == "Every condition")
    assert "FLOPs of training" not in table.header, "no column for training where nothing was trained"


# --- vitlab.report_study ----------------------------------------------------------------------------------------------


def reported(name: str, **options: Any) -> StudyReport:
    found = report_study(name, **options)
    assert isinstance(found, StudyReport)
    return found


def test_report_of_a_study_is_of_its_largest_measured_scale(tmp_path: Path) -> None:
    study = read_study("optimiser")
    (tmp_path / "none").mkdir()
    assert reported("optimiser", records=tmp_path / "none").outcome.scale.name == "laptop"
    write_records(tmp_path / "few", records_of(study.at("laptop")))
    assert reported("optimiser", records=tmp_path / "few").outcome.scale.name == "laptop"
    write_records(tmp_path / "few", records_of(study.at("gpu")))
    assert reported("optimiser", records=tmp_path / "few").outcome.scale.name == "gpu"
    laptop = reported("optimiser", records=tmp_path / "few", scale="laptop")
    assert laptop.measured() == "6 of 6 cells measured" and "Adam or SGD" in laptop.text()


def test_report_looks_in_the_folder_of_the_last_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "runs" / "studies", records_of(read_study("optimiser").at("laptop")))
    assert reported("optimiser").outcome.measured == 6


@pytest.mark.parametrize("suffix", ["md", "html"])
def test_report_is_written_once_and_repeats_to_the_byte(tmp_path: Path, suffix: str) -> None:
    path = written_study(tmp_path)
    made = write_records(tmp_path / "made", records_of(read_study(str(path)).at("laptop")))
    for name in ("one", "two"):
        assert reported(str(path), records=made, out=tmp_path / name / f"report.{suffix}").out is not None
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two and b"A is better than B" in one[f"report.{suffix}"]
    shown = re.findall(r"!\[.*?\]\((.+?)\)", one[f"report.{suffix}"].decode()) if suffix == "md" else []
    assert {*shown} == {*one} - {f"report.{suffix}"}, "every picture is shown, and no other is there"
    with pytest.raises(UsageError, match="exists"):
        report_study(str(path), records=made, out=tmp_path / "one" / f"report.{suffix}")


def test_report_in_markdown_does_not_overwrite_a_picture(tmp_path: Path) -> None:
    path = written_study(tmp_path)
    made = write_records(tmp_path / "made", records_of(read_study(str(path)).at("laptop")))
    reported(str(path), records=made, out=tmp_path / "one" / "report.md")
    (tmp_path / "one" / "report.md").unlink()
    with pytest.raises(UsageError, match="exists"):
        report_study(str(path), records=made, out=tmp_path / "one" / "report.md")
    assert not (tmp_path / "one" / "report.md").exists()


@pytest.mark.slow
def test_claims_are_reported_from_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    empty = report_study("claims", records=tmp_path / "made")
    assert isinstance(empty, ClaimsReport)
    count = sum(len(read_study(name).claims) for name in list_study_names())
    assert len(empty.rows) == count and empty.measured().endswith(f", {count} are not measured yet")
    write_records(tmp_path / "made", records_of(read_study("optimiser").at("laptop")))
    some = report_study("claims", records=tmp_path / "made", out=tmp_path / "one" / "claims.md")
    assert isinstance(some, ClaimsReport) and f"0 of {count} claims hold here, 1 does not, " in some.measured()
    row = next(row for row in some.to_json()["claims"] if row["claim"] == "adam-for-resnets")
    assert row["scale"] == "laptop" and len(row["records"]) == 6
    assert row["command"] == "vitlab study run optimiser --scale laptop"
    again = report_study("claims", records=tmp_path / "made", out=tmp_path / "two" / "claims.md")
    assert again.text() == some.text()
    for name in ("claims.md", "claims.svg"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    written = (tmp_path / "one" / "claims.md").read_text()
    (line,) = [line for line in written.splitlines() if line.startswith("| does not hold here |")]
    assert line.endswith("| `vitlab study run optimiser --scale laptop` |") and "(claims.svg)" in written
    links = re.findall(r"\]\((\S+\.json)\)", written)
    assert len(links) == 6 and all((tmp_path / "one" / link).is_file() for link in links)
    drawn = (tmp_path / "one" / "claims.svg").read_text()
    assert drawn.count('class="zone"') == 1 and drawn.count('class="seed"') == 3
    assert drawn.count(">not measured yet<") >= 2 * (count - 1), "as verdict, and where the number would stand"
    report_study("claims", records=tmp_path / "made", out=tmp_path / "claims.html", scale="gpu")
    page = (tmp_path / "claims.html").read_text(encoding="utf-8")
    assert "not measured yet" in page and "--scale gpu" in page and "--scale laptop" not in page


def test_claims_are_reported_at_the_largest_scale_measured(tmp_path: Path) -> None:
    study = read_study("optimiser")
    for scale in ("gpu", "laptop"):
        write_records(tmp_path, records_of(study.at(scale)))
    rows = report_study("claims", records=tmp_path).to_json()["claims"]
    assert next(row for row in rows if row["study"] == "optimiser")["scale"] == "gpu"


@pytest.mark.parametrize("places", [("one/records/cells", "two/records/cells"), ("flat",)])
def test_claims_link_no_record_that_lies_elsewhere(tmp_path: Path, places: tuple[str, ...]) -> None:
    records = records_of(read_study("optimiser").at("laptop"))
    write_records(tmp_path / "made", records)
    for number, path in enumerate(sorted((tmp_path / "made").rglob("*.json"))):
        folder = tmp_path / "given" / places[number % len(places)] / ("" if len(places) > 1 else "cells")
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    report_study("claims", records=tmp_path / "given", out=tmp_path / "claims.md")
    text = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert "holds here" in text and ".json)" not in text and next(iter(records)) in text


def test_report_is_by_default_of_the_largest_scale_that_is_complete(tmp_path: Path) -> None:
    study = read_study("speed")
    write_records(tmp_path, records_of(study.at("gpu"), flops=lambda _: 0.0))
    found = report_study("speed", records=tmp_path)
    assert isinstance(found, StudyReport) and found.outcome.scale.name == "gpu", (
        "the paper's grid has the same runs, and more"
    )


def test_a_claim_says_that_a_larger_scale_is_not_finished(tmp_path: Path) -> None:
    study = read_study("self-supervised")
    write_records(tmp_path, records_of(study.at("laptop")))
    few = [run.key for cell in list_cells(study.at("gpu")) if cell.seed == 0 for run in cell.run.chain()]
    write_records(tmp_path, {key: one for key, one in records_of(study.at("gpu")).items() if key in few})
    rows = report_study("claims", records=tmp_path).to_json()["claims"]
    (row,) = [row for row in rows if row["claim"] == "masked-patches-help"]
    assert row["scale"] == "laptop" and row["measured"].endswith("the scale gpu is not finished")


def test_a_claim_is_told_at_the_largest_scale_with_three_seeds_and_by_the_fewest_runs(tmp_path: Path) -> None:
    """More seeds at a smaller scale count no more than three; and who would repeat a claim needs its runs alone."""
    study = read_study("positions")
    assert len(study.at("gpu").seeds) > len(study.at("paper").seeds)
    for scale in ("gpu", "paper"):
        write_records(tmp_path / "more", records_of(study.at(scale)))

    def scale_of(claim: str, folder: str) -> str:
        rows = report_study("claims", records=tmp_path / folder).to_json()["claims"]
        return next(row["scale"] for row in rows if row["claim"] == claim)

    assert scale_of("positions-none-worse", "more") == "paper"
    speed = read_study("speed")
    write_records(tmp_path / "shared", records_of(speed.at("gpu"), flops=lambda _: 0.0))
    assert scale_of("as-fast-as-resnets", "shared") == "gpu", "the paper's grid has the same runs, and more"


def test_a_card_has_the_commands_of_its_run_and_of_those_before_for_any_folder() -> None:
    study = read_study("fine-tuning")
    scale, folder = study.at("gpu"), "/tmp/my runs/runs"
    records = {
        run.key: dataclasses.replace(
            records_of(scale)[run.key],
            command=f"vitlab train cifar10 --out '{folder}/{run.key}-2' --recipe r"
            + (f" --init '{folder}/{run.start.key}' --set 'a=\"b\"'" if run.start else ""),
        )
        for run in list_runs([(study, scale)])
    }
    plot = next(one for one in build_page(find_outcome(study, scale, records), "x").sections if isinstance(one, Plot))
    (run,) = [cell.run for cell in list_cells(scale) if cell.seed == 0 and cell.name == "interpolated, 48"]
    (card,) = [card for card in plot.cards if dict(card.facts)["run"] == run.key]
    assert run.start is not None
    assert card.command.splitlines() == [
        f"vitlab train cifar10 --out runs/{run.start.key} --recipe r",
        f"vitlab train cifar10 --out runs/{run.key} --recipe r --init runs/{run.start.key} --set 'a=\"b\"'",
    ]


def test_commands_of_the_records_keep_their_options() -> None:
    """Folders alone change: what is pasted trains the same."""
    folder = Path(__file__).parents[3] / "docs" / "results" / "records"
    if not folder.is_dir():
        pytest.skip("needs docs/results/records of a checkout")
    records, checked = read_cells(folder), 0
    for study in map(read_study, list_study_names()):
        scales = study.scales.values()
        for condition in (one for scale in scales for one in find_outcome(study, scale, records).conditions):
            for one in condition.seeds:
                stages = (*one.before, one.record)
                for stage, line in zip(stages, repeat_commands(stages).splitlines(), strict=True):
                    was, now = (shlex.split(text) for text in (stage.command, line))
                    assert len(was) == len(now)
                    changed = [(old, new) for old, new in zip(was, now, strict=True) if old != new]
                    assert all(new.startswith("runs/") and old.startswith(("/", "runs/")) for old, new in changed)
                    assert not any(word.startswith("/") for word in now), line
                    checked += 1
    assert checked > 300


@pytest.mark.parametrize(("folder", "known"), [("", True), ("-2", True), ("-13", True), ("-x", False), ("0", False)])
def test_a_start_is_known_by_its_folder_also_of_a_second_try(tmp_path: Path, folder: str, known: bool) -> None:
    """`vitlab inspect` takes the run before as its argument, wherever that was finished."""
    study = tiny_study(tmp_path)
    first, second, *_ = records_of(study.at("laptop")).values()
    place = f"/elsewhere/runs/{first.key}{folder}"
    stages = [first, dataclasses.replace(second, command=f"vitlab inspect {place} photos --out /elsewhere/x")]
    start = f"runs/{first.key}" if known else place
    assert repeat_commands(stages).splitlines()[1] == f"vitlab inspect {start} photos --out runs/{second.key}"


@pytest.mark.parametrize(("exponent", "trend"), [(-0.5, True), (0.0, False)])
def test_power_law_of_an_accuracy_is_that_of_its_error(tmp_path: Path, exponent: float, trend: bool) -> None:
    study = tiny_study(tmp_path)
    scale = study.at("laptop")
    wave = {"1": 1.1, "2": 0.8, "4": 1.1}

    def level(cell: Cell) -> float:
        noise = 1.0 if trend else wave[cell.labels["size"]]
        return 1 - 0.5 * noise * (cell.values["size"].x or 0) ** exponent

    outcome = find_outcome(study, scale, records_of(scale, level))
    (drawing,) = outcome_to_dict(outcome)["drawings"]
    assert [fit["line"] for fit in drawing["fits"]] == ["A", "B"] and set(drawing["lines"]) == {"A", "B"}
    assert drawing["fits"][0]["of"] == "error" and drawing["fits"][0]["exponent"] == pytest.approx(exponent, abs=1e-9)
    plot = next(one for one in build_page(outcome, "x").sections if isinstance(one, Plot))
    said = f"A: error ∝ x^{exponent:.2f} (" if trend else "A: power law of the error inconclusive, x^"
    curves = [one.name for one in plot.series if one.kind == "fit"]
    assert len(curves) == (2 if trend else 0), "no curve where the fit says nothing"
    assert curves[0].startswith(said) if trend else plot.series[0].label.startswith(said)
    assert any(line.startswith(said) for line in outcome_lines(outcome))
    assert f"- {said}" in to_markdown(outcome, build_page(outcome, "x"), "x", "").replace("\\", "")


def test_front_is_told_in_words_and_numbers() -> None:
    study = read_study("compute")
    scale = study.at("laptop")
    outcome = find_outcome(study, scale, records_of(scale))
    front = outcome_to_dict(outcome)["drawings"][0]["front"]
    assert front and any(line == f"Pareto front over flops: {'; '.join(front)}" for line in outcome_lines(outcome))


def test_every_measure_that_is_drawn_or_tested_is_in_the_table() -> None:
    study = read_study("inside")
    scale = study.at("laptop")
    outcome = find_outcome(study, scale, records_of(scale))
    (table,) = [one for one in build_page(outcome, "x").sections if isinstance(one, Table)]
    for word in ("slope of the attention", "one row or column", "low frequencies", "most local", "most global"):
        assert any(word in cell for cell in table.header), word
    assert set(outcome_to_dict(outcome)["conditions"][0]["also"]) == {
        "distance_growth",
        "second_half_wide_heads",
        "row_column_excess",
        "position_nearness",
        "filter_low_frequency",
        "low_layers_nearest_head",
        "low_layers_farthest_head",
    }


def test_front_of_a_measure_that_is_better_when_lower(tmp_path: Path) -> None:
    text = TINY.replace('x = "size"', 'x = "flops"\nmeasure = "loss"\nfront = true').replace("fit = true\n", "")
    study = read_study(str(written_study(tmp_path, text)))
    at = study.at("laptop")
    outcome = find_outcome(study, at, records_of(at, lambda cell: 0.1 * (cell.values["size"].x or 0)))
    (plot,) = [one for one in build_page(outcome, "vitlab x").sections if isinstance(one, Plot)]
    front = [point.y for point in plot.series[-1].points]
    assert plot.series[-1].name == "Pareto front" and front == sorted(front, reverse=True) and len(set(front)) == 3


def plots_of(study: Study, scale: str, records: dict[str, CellRecord]) -> list[Plot]:
    report = build_page(find_outcome(study, study.at(scale), records), "vitlab x")
    return [one for one in report.sections if isinstance(one, Plot)]


def test_power_law_is_drawn_only_where_its_exponent_has_a_sign(tmp_path: Path) -> None:
    study = read_study(str(written_study(tmp_path)))
    levels = {"A": {1: 0.4, 2: 0.5, 4: 0.6}, "B": {1: 0.4, 2: 0.6, 4: 0.4}}
    records = records_of(
        study.at("laptop"),
        lambda cell: levels[cell.labels["kind"]][int(cell.values["size"].x or 0)] + 0.001 * cell.seed,
    )
    (plot,) = plots_of(study, "laptop", records)
    assert [one.name.split(" ∝")[0] for one in plot.series] == ["A", "A: error", "B"]
    a, fit, b = plot.series
    assert fit.kind == "fit" and not a.note
    assert re.fullmatch(r"power law of the error inconclusive, x\^\S+ \(-\S+ to \d\S+ by the fit\)", b.note)


def test_a_line_has_the_same_colour_at_every_scale() -> None:
    study = read_study("speed")
    colours = [
        {one.name: one.css for one in plots_of(study, name, records_of(study.scales[name]))[0].series}
        for name in study.scales
    ]
    assert len(colours) > 1 and all(len(set(one.values())) == len(one) for one in colours), "none looks like another"
    for one, other in itertools.combinations(colours, 2):
        assert {name: one[name] for name in one if name in other} == {
            name: other[name] for name in other if name in one
        }


def test_margin_is_in_points_and_the_base_of_several_lines_is_shared() -> None:
    for name, unit in (("noisy-student", "points"), ("optimiser", "%")):
        study = read_study(name)
        plot = plots_of(study, "gpu", records_of(study.at("gpu")))[0]
        assert plot.cards[0].value.split(" ")[1] == unit and dict(plot.cards[0].facts)["each seed"].endswith(unit)
    study = read_study("shape")
    (plot,) = plots_of(study, "gpu", records_of(study.at("gpu")))
    assert list(plot.shared.values()) == [["depth", "width", "MLP", "patch", "all"]]


def test_bad_reports(tmp_path: Path) -> None:
    for name in ("posits", "claim"):
        with pytest.raises(UnknownName, match=f"unknown study '{name}'"):
            report_study(name)
    with pytest.raises(UsageError, match=r"\.md or \.html"):
        report_study("positions", out=tmp_path / "x.pdf")
    with pytest.raises(FileProblem, match="not a folder of records"):
        report_study("positions", records=tmp_path / "nowhere")
    for name in ("positions", "claims"):
        with pytest.raises(UsageError, match="huge"):
            report_study(name, scale="huge", records=tmp_path)


def without_heads(at: Scale) -> dict[str, CellRecord]:
    """Records as they were before heads had numbers of their own."""
    return {
        key: dataclasses.replace(
            record, numbers={name: value for name, value in record.numbers.items() if not re.search(r"layer\d", name)}
        )
        for key, record in records_of(at).items()
    }


def test_every_head_is_a_point_by_depth_in_order_within_its_layer() -> None:
    study = read_study("inside")
    at = study.at("laptop")
    shares = {"distance_layer1_head1": 0.9, "distance_layer1_head2": 0.2, "distance_layer2_head1": 0.5}
    records = {
        key: dataclasses.replace(
            record, numbers={**record.numbers, **{k: v + record.seed / 10 for k, v in shares.items()}}
        )
        for key, record in without_heads(at).items()
    }
    page = build_page(find_outcome(study, at, records), "vitlab study run inside")
    (plot,) = [one for one in page.sections if isinstance(one, Plot) and "Figure 7" in one.title]
    assert places(plot) == {
        "ViT": [(pytest.approx(x), pytest.approx(y)) for x, y in ((0, 0.3), (0, 1.0), (1, 0.6))],
        "hybrid": [(pytest.approx(x), pytest.approx(y)) for x, y in ((0, 0.3), (0, 1.0), (1, 0.6))],
    }
    assert plot.categories == ["1", "2"]
    card = plot.cards[1]
    assert "layer 1, head 2 of 2" in card.name and card.command.startswith("vitlab ")


def test_records_without_heads_leave_their_plot_out_and_say_so() -> None:
    study = read_study("inside")
    at = study.at("laptop")
    page = build_page(find_outcome(study, at, without_heads(at)), "vitlab study run inside")
    titles = [one.title for one in page.sections if isinstance(one, Plot)]
    assert len(titles) == 3 and not any("Figure 7" in title for title in titles)
    assert "Figure 7, right" in dict(page.facts)["not drawn"]


def test_a_table_says_how_often_was_measured(tmp_path: Path) -> None:
    study = tiny_study(tmp_path)
    records = records_of(study.at("laptop"))
    one = first_seeds(study.at("laptop"), 1)

    def text(outcome: Outcome) -> str:
        return to_markdown(outcome, build_page(outcome, "x"), "x", "")

    assert "One seed of each.\n" in text(find_outcome(study, one, records))
    assert "95 % interval over 3 seeds.\n" in text(find_outcome(study, study.at("laptop"), records))
    speed = read_study("speed")
    timed = find_outcome(speed, speed.at("laptop"), records_of(speed.at("laptop"), flops=lambda _: 0.0))
    assert "95 % interval over 3 measurements.\n" in text(timed)


def test_a_claim_that_is_post_hoc_is_marked_on_the_page_once_it_is_measured(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, TINY.replace('where = "section 0"', 'where = "section 0"\npost_hoc = "the bound"'))
    scale = study.at("laptop")
    for records, said in ((records_of(scale), "the bound"), ({}, "")):
        (verdicts,) = [
            one for one in build_page(find_outcome(study, scale, records), "x").sections if isinstance(one, Verdicts)
        ]
        assert [row.post_hoc for row in verdicts.rows] == [said]
