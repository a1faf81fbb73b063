"""Runs the code cells of the notebook, without Jupyter. As a program: `python tests/examples/test_notebook.py`.

As a program it runs the notebook as it is and writes the outputs into the file, so that readers see the pictures.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
STEPS = "STEPS = 1000"
MAX_BYTES = 100_000


def read() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text("utf-8"))
    return notebook


def run(cells: list[dict[str, Any]]) -> None:
    """Execute the code cells in one namespace and replace their outputs, as Jupyter does."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, NOTEBOOK.name, "exec"), names)
            value = None if last is None else eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
        cell["execution_count"], cell["outputs"] = number, []
        if printed.getvalue():
            lines = printed.getvalue().splitlines(keepends=True)
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": lines})
        if value is not None:
            result = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
            cell["outputs"].append({**result, "data": shown(value)})


def shown(value: Any) -> dict[str, Any]:
    """Return the forms in which Jupyter shows a value: a picture, or text."""
    if hasattr(value, "_repr_png_"):
        return {"image/png": base64.b64encode(value._repr_png_()).decode(), "text/plain": ["<PIL.Image>"]}
    return {"text/plain": repr(value).splitlines(keepends=True)}


def outputs(cells: list[dict[str, Any]]) -> list[list[str]]:
    """List what each code cell shows: streams by name, values by the types of their data."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return [[each.get("name") or "+".join(sorted(each["data"])) for each in cell["outputs"]] for cell in code]


def test_the_notebook_runs_and_shows_what_is_stored_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notebook = read()
    stored = outputs(notebook["cells"])
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert STEPS in "".join(first["source"])
    first["source"] = "".join(first["source"]).replace(STEPS, "STEPS = 50")
    run(notebook["cells"])
    assert outputs(notebook["cells"]) == stored
    printed = [line for cell in notebook["cells"] for each in cell.get("outputs", ()) for line in each.get("text", ())]
    assert any(line.startswith("valid: True; epsilon") for line in printed)


def test_the_notebook_is_small() -> None:
    """Outputs are stored in the file: one picture, a few lines, and no folder of the machine that made them."""
    cells = read()["cells"]
    assert NOTEBOOK.stat().st_size < MAX_BYTES
    assert sum("image/png" in each for cell in outputs(cells) for each in cell) == 1
    texts = [each.get("text") or each["data"]["text/plain"] for cell in cells for each in cell.get("outputs", ())]
    assert not [line for lines in texts for line in lines if re.search(r"[\s'\"]/\w+/", line)]


def test_a_cell_that_fails_is_found() -> None:
    broken = {"cell_type": "code", "source": ["assert 1 == 2"]}
    with pytest.raises(AssertionError):
        run([broken])


if __name__ == "__main__":
    content = read()
    run(content["cells"])
    NOTEBOOK.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
