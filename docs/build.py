"""Builds the documentation as a site that needs no network: `make docs`, or

    python docs/build.py                    into site/
    python docs/build.py --site FOLDER

The pages are copied to a temporary folder first, because the builder runs no code of ours: fences lose their `no-run`, which
only docs/execute.py reads; the pages of the Python reference are made from docstrings by docs/api.py; studies get their
interactive pages; and patterns in the navigation become lists of pages, so that a new result or decision is found without a
second edit. A broken link or anchor fails the build.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # where the tests load this file by its path
import api

from vitlab.studies.reporting import report_study

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent


def stage(folder: Path) -> None:
    """Write what the builder reads: zensical.toml, and the pages under docs/."""
    docs = folder / "docs"
    shutil.copytree(DOCS, docs, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    add_interactive_pages(docs / "results")
    for page in docs.rglob("*.md"):
        page.write_text(without_marks(page.read_text(encoding="utf-8")), encoding="utf-8")
    (docs / "reference" / "api").mkdir()
    for name, text in api.pages().items():
        (docs / "reference" / "api" / name).write_text(text, encoding="utf-8")
    settings = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    (folder / "zensical.toml").write_text(with_pages(settings, docs), encoding="utf-8")


def add_interactive_pages(results: Path) -> None:
    """Beside each report of a study, and that of the claims, the same as a page with plots to point at."""
    for report in [results / "claims.md", *sorted((results / "studies").glob("*.md"))]:
        page = report.with_name(f"{report.stem}-interactive.html")
        report_study(report.stem, records=results / "records", out=page)
        title, _, text = report.read_text(encoding="utf-8").partition("\n")
        link = (
            f"[The same as an interactive page]({page.name}): point at a run for its seeds, its curve and its commands."
        )
        if report.stem == "claims":
            link = f"[The same as a page]({page.name}), study by study."
        report.write_text(f"{title}\n\n{link}\n{text}", encoding="utf-8")


def without_marks(markdown: str) -> str:
    """Markdown knows one word after the backticks."""
    return re.sub(r"(?m)^(```\w+) no-run$", r"\1", markdown)


def with_pages(settings: str, docs: Path) -> str:
    """Replace patterns such as "results/*.md" by the pages that match; their titles are those of the pages."""

    def pages(pattern: re.Match[str]) -> str:
        return ", ".join(f'"{path.relative_to(docs).as_posix()}"' for path in sorted(docs.glob(pattern[1])))

    return re.sub(r'"([\w/-]+/\*\.md)"', pages, settings)


def build(site: Path) -> "subprocess.CompletedProcess[str]":
    """What the builder says, and its exit status; the site only if that is 0."""
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        built = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)
        if built.returncode == 0:
            shutil.rmtree(site, ignore_errors=True)
            shutil.copytree(Path(folder, "site"), site)
    return built


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the documentation.")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="Where the site goes; replaced.")
    site = parser.parse_args().site
    built = build(site)
    print(built.stdout + built.stderr if built.returncode else f"Open {site / 'index.html'}")
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
