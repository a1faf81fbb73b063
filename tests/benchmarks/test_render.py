"""Tables and plots in README and docs are those that the result files give."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.layouts import LAYOUTS, systems
from benchmarks.render import pages, render, rendered
from benchmarks.store import HEAD, RESULTS, ROOT, load, summary


def test_docs_are_up_to_date() -> None:
    stale = [str(path.relative_to(ROOT)) for path in render(check=True)]
    assert not stale, f"out of date: {', '.join(stale)}; run `python -m benchmarks render`"


def test_the_renderer_needs_no_torch() -> None:
    code = "import sys, benchmarks.render; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


NOT_MEASURED = {
    "dpdc-kept",
    "dp-mepf-encoders",
    "peers",
    "photographs",
    "private-evolution",
}  # these may still be empty


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_table_has_figures(name: str) -> None:
    text = LAYOUTS[name]()
    if name in NOT_MEASURED and text.startswith("Not measured yet: `python -m benchmarks "):
        return
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) >= 3
    assert any(character.isdigit() for character in lines[-1])


def test_a_page_out_of_date_is_found_and_written(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- BEGIN TABLE dp-merf -->\nold\n<!-- END TABLE dp-merf -->\nafter\n")
    assert page in render(tmp_path, check=True)
    assert "old" in page.read_text()
    assert page in render(tmp_path)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "95.2 ± 0.5" in text
    assert "](benchmarks/results/dp-merf.json)" in text
    assert render(tmp_path, check=True) == []


def test_wrong_markers_are_errors() -> None:
    with pytest.raises(KeyError, match="no table nothing"):
        rendered("<!-- BEGIN TABLE nothing -->\n<!-- END TABLE nothing -->")
    with pytest.raises(ValueError, match="no END TABLE"):
        rendered("<!-- BEGIN TABLE dp-merf -->\n")


def test_a_cell_is_a_mean_with_its_number_of_seeds() -> None:
    assert summary([]) == ""
    assert summary([84.35]) == "84.4 (1)"
    assert summary([1.0, 3.0]) == "2.0 ± 1.4 (2)"
    assert summary([1.0, 2.0, 3.0]) == "2.0 ± 1.0"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("[a-z-]*.json")), ids=lambda path: path.stem)
def test_result_files_have_the_form(path: Path) -> None:
    if "_" in path.stem:
        pytest.skip("a record of trials")
    content = load(path.stem)
    assert content.keys() >= {*HEAD, "rows"}
    commits = [content["commit"]] if content["commit"] else content["added_by"]
    assert commits
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits)
    assert all({"job", "measured"} <= row.keys() for row in content["rows"])
    assert str(Path.home()) not in json.dumps(content)


def test_published_figures_say_whether_they_are_valid() -> None:
    for system in systems():
        assert system["valid"] in ("yes", "in part", "no")
        assert system["source"]
        assert bool(system["reason"]) == (system["valid"] != "yes")


def test_plots_are_small() -> None:
    for path in (ROOT / "docs" / "results").glob("*.png"):
        assert path.stat().st_size < 200_000


def test_all_pages_are_looked_at() -> None:
    assert ROOT / "docs" / "results.md" in pages()
