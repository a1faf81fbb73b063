"""Result files: one JSON file per table, in `benchmarks/results/`.

A file has `command`, `commit`, `device`, `versions`, `seeds`, and `rows`. A row says what was run (`job`, `method`,
`data`, `epsilon`, `params`, `sample`, `seed`) and what was measured. Rows have their own `device` where it differs.

Files of 0.1.0 have no `commit`: programs did not record it. Their `added_by` lists the commits that brought figures of
the file into the repository, oldest first, older names of the file included. Measurements are of the code of such a
commit or of one shortly before it.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONVOLUTIONAL = ("small_cnn", "convnet", "resnet18")
HEAD = ("command", "commit", "device", "versions", "seeds")

Row = dict[str, Any]


def load(table: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return the content of a table's file; without rows if there is no file."""
    path = folder / f"{table}.json"
    return json.loads(path.read_text()) if path.exists() else {**dict.fromkeys(HEAD), "rows": []}


def save(table: str, content: Mapping[str, Any], folder: Path = RESULTS) -> None:
    """Write a table's file atomically, one line per row."""
    lines = [f" {json.dumps(key)}: {json.dumps(content[key], ensure_ascii=False)}," for key in content if key != "rows"]
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in content["rows"])
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{table}.{os.getpid()}.partial"
    partial.write_text("\n".join(["{", *lines, ' "rows": [']) + f"\n{rows}\n ]\n}}\n")
    partial.replace(folder / f"{table}.json")


def append(table: str, rows: list[Row], head: Mapping[str, Any], folder: Path = RESULTS) -> None:
    """Add rows to a table's file, which other processes may do at the same time.

    The head of a file with rows stays; new rows carry commit, device and versions of their own where they differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = load(table, folder)
        if not content["rows"]:
            content |= head
        own = {key: head[key] for key in ("commit", "device", "versions") if head[key] != content[key]}
        merged = [*content["rows"], *({**row, **own} for row in rows)]
        content["seeds"] = sorted({row["seed"] for row in merged if row.get("seed") is not None}) or None
        save(table, {**content, "rows": merged}, folder)
    finally:
        os.close(lock)


def merge(source: Path, folder: Path = RESULTS) -> list[str]:
    """Add the rows of the files in `source` that were measured elsewhere; return the names of the tables.

    A row is left out where the table has the same row, or one of the same job and seed with a measure that it has.
    """
    tables = []
    for path in sorted(source.rglob("*.json")):
        found, have = json.loads(path.read_text()), load(path.stem, folder)["rows"]
        known: dict[tuple[Any, ...], set[str]] = {}
        for row in have:
            known.setdefault(_identity(row), set()).update(_measures(row))
        there = [row in have or bool(known.get(_identity(row), set()) & _measures(row)) for row in found["rows"]]
        fresh = [row for row, known_already in zip(found["rows"], there, strict=True) if not known_already]
        if fresh:
            append(path.stem, fresh, {key: found[key] for key in HEAD}, folder)
            tables.append(path.stem)
    return tables


def _measures(row: Row) -> set[str]:
    """Return the names of what was measured; rows of the audit have none."""
    return set(row.get("measured", ()))


def _identity(row: Row) -> tuple[Any, ...]:
    names = ("job", "method", "data", "epsilon", "sample", "seed", "device" if row.get("seed") is None else "seed")
    return tuple(row.get(name) for name in names)


def number(epsilon: Any) -> Any:
    """Return epsilon as JSON holds it: infinity is the string "inf"."""
    return "inf" if epsilon == float("inf") else epsilon


def values(rows: Iterable[Row], measure: str, **wanted: Any) -> list[Any]:
    """Return what was measured in the rows that match, by seed.

    `three` is the mean of the three convolutional classifiers of a seed. A row without `sample` has the default one.
    """
    found: dict[int, dict[str, Any]] = {}
    params = wanted.pop("params", {})
    wanted = {"sample": None, **wanted}
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()) and params.items() <= row["params"].items():
            measured = found.setdefault(row["seed"], {})
            if twice := measured.keys() & row["measured"].keys():
                raise ValueError(f"two rows of one seed have {sorted(twice)}: {wanted}")
            measured |= row["measured"]
    if measure == "three":
        complete = [one for one in found.values() if one.keys() >= set(CONVOLUTIONAL)]
        return [statistics.fmean(one[name] for name in CONVOLUTIONAL) for one in complete]
    return [found[seed][measure] for seed in sorted(found) if measure in found[seed]]


def summary(found: list[Any], digits: int = 1, seeds: int = 3) -> str:
    """Return "mean ± sd", and in brackets the number of seeds if it is not `seeds`; empty without values."""
    if not found:
        return ""
    if isinstance(found[0], dict):  # summarised by the job itself
        return f"{found[0]['mean']:.{digits}f} ± {found[0]['sd']:.{digits}f}"
    text = f"{statistics.fmean(found) + 1e-9:.{digits}f}"  # 84.35 is 84.4
    text += f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
    return text if len(found) == seeds else f"{text} ({len(found)})"
