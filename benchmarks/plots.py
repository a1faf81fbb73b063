"""Plots of the docs. A PNG carries a hash of the figures that it shows, so that a check needs no drawing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.audit_layouts import EPSILONS as AUDITED_AT
from benchmarks.audit_layouts import METHODS as AUDITED
from benchmarks.audit_layouts import PUBLISHED, bound_of, measured
from benchmarks.layouts import DATA, EPSILONS, METHODS, field_rows, main_query, systems, table
from benchmarks.store import values

KEY = "sfumato-figures"
MARKS = "sDv^<>pPX*hd"  # of published systems
STYLES: dict[str, dict[str, Any]] = {
    "own": {"color": "black", "markerfacecolor": "none", "linestyle": "none", "markersize": 6},
    "public": {"color": "0.45", "markerfacecolor": "0.7", "linestyle": "none", "markersize": 6},
    "void": {"color": "C3", "markerfacecolor": "none", "linestyle": "none", "markersize": 6},
}
VARIED = {"noise_multiplier": "σ", "group_size": "L", "iterations": "I", "images_per_class": "M"}


def fingerprint(path: Path) -> str | None:
    """Return the hash that a PNG carries."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as picture:
        return picture.info.get(KEY)


def _mark(figures: Any) -> str:
    return hashlib.sha256(json.dumps(figures).encode()).hexdigest()


def _save(figure: Any, path: Path, mark: str) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={KEY: mark})


def curves() -> dict[str, dict[str, list[tuple[float, float, float, float]]]]:
    """Return for each data set and method (epsilon, mean, lowest, highest) over seeds."""
    found: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {}
    for data in DATA:
        for method in METHODS:
            query = dict(main_query(method))
            rows, measure = table(query.pop("table"))["rows"], query.pop("measure")
            points = []
            for epsilon in EPSILONS:
                if some := values(rows, measure, data=data, epsilon=epsilon, **query):
                    points.append((epsilon, sum(some) / len(some), min(some), max(some)))
            if points:
                found.setdefault(data, {})[method] = points
    return found


def leaders() -> dict[str, list[tuple[str, float, float, str]]]:
    """Return for each data set (system, epsilon, published accuracy, style of `style_of`) of others' systems."""
    found: dict[str, list[tuple[str, float, float, str]]] = {data: [] for data in DATA}
    for system in systems():
        for data in DATA if system["method"] is None else ():
            for epsilon, accuracy in system["accuracy"].get(data, {}).items():
                found[data].append((system["system"], float(epsilon), accuracy, style_of(system)))
    return found


def style_of(system: dict[str, Any]) -> str:
    """Return how a published figure is drawn: `void` if it has no guarantee, else by its use of public images."""
    return "void" if system["valid"] == "no" else "public" if system["public_data"] else "own"


def draw_curves(path: Path, mark: str) -> None:
    """Accuracy against epsilon, one panel for each data set; bars go from the lowest to the highest seed."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(DATA), figsize=(13, 4.4))
    found, others = curves(), leaders()
    marks = dict(zip(sorted({leader[0] for some in others.values() for leader in some}), MARKS, strict=False))
    for axis, (data, title) in zip(axes, DATA.items(), strict=True):
        for method, points in found.get(data, {}).items():
            epsilon, mean, low, high = (list(part) for part in zip(*points, strict=True))
            bars = [[m - v for m, v in zip(mean, low, strict=True)], [v - m for m, v in zip(mean, high, strict=True)]]
            style = {"color": f"C{METHODS.index(method)}", "label": method, "capsize": 2}
            axis.errorbar(epsilon, mean, bars, marker="o", ms=4, linestyle="--" if "pdc" in method else "-", **style)
        low, high = axis.get_ylim()
        for system, at, accuracy, kind in others[data]:
            if accuracy < low:
                continue  # below our worst method
            high = max(high, accuracy + 0.03 * (high - low))
            axis.plot(at * 1.18, accuracy, marker=marks[system], label=system, **STYLES[kind])
        axis.set(title=title, xlabel="ε", xscale="log", xlim=(0.15, 16), ylim=(low, high))
        axis.set(xticks=EPSILONS, xticklabels=[f"{e:g}" for e in EPSILONS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy, %")
    _legend(axes)
    _save(figure, path, mark)
    pyplot.close(figure)


def times() -> dict[str, list[tuple[str, float, float]]]:
    """Return for each data set (method, seconds of a fit on a GPU, accuracy) at epsilon 1, means over seeds."""
    found: dict[str, list[tuple[str, float, float]]] = {data: [] for data in DATA}
    for method in METHODS:
        query = dict(main_query(method))
        content, measure = table(query.pop("table")), query.pop("measure")
        for data in DATA:
            rows = [
                row
                for row in content["rows"]
                if all(row.get(key) == value for key, value in {**query, "data": data, "epsilon": 1.0}.items())
                and measure in row["measured"]
                and row.get("fit_s")
                and "NVIDIA" in row.get("device", content["device"])
                and not row.get("sample")
            ]
            if rows:
                seconds, accuracies = ([row["fit_s"] for row in rows], [row["measured"][measure] for row in rows])
                found[data].append((method, sum(seconds) / len(rows), sum(accuracies) / len(rows)))
    return found


def draw_times(path: Path, mark: str) -> None:
    """Accuracy at epsilon 1 against the seconds of a fit."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(DATA), figsize=(13, 3.8))
    found = times()
    for axis, (data, title) in zip(axes, DATA.items(), strict=True):
        for method, seconds, accuracy in found[data]:
            axis.plot(seconds, accuracy, "o", color=f"C{METHODS.index(method)}", label=method)
        axis.set(title=title, xlabel="seconds of a fit, one GPU", xscale="log", xlim=(1, 1000))
        axis.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy, %")
    _legend(axes)
    _save(figure, path, mark)
    pyplot.close(figure)


def qualities() -> dict[str, list[tuple[str, float, float, float, bool]]]:
    """Return for each data set (name, epsilon, FID, accuracy, whether it is ours)."""
    found: dict[str, list[tuple[str, float, float, float, bool]]] = {data: [] for data in DATA}
    for system in systems():
        for data in DATA:
            for epsilon, fid in system.get("fid", {}).get(data, {}).items():
                if (accuracy := system["accuracy"].get(data, {}).get(epsilon)) is not None:
                    found[data].append((system["system"], float(epsilon), fid, accuracy, False))
    rows = field_rows()
    for job, method in sorted({(row["job"], row["method"]) for row in rows}):
        name = method if job == "default" else f"{method}, {job}"
        for data in DATA:
            for epsilon in EPSILONS:
                query = {"job": job, "method": method, "data": data, "epsilon": epsilon}
                fids, accuracies = (values(rows, measure, **query) for measure in ("fid", "small_cnn"))
                if fids and accuracies:
                    means = sum(fids) / len(fids), sum(accuracies) / len(accuracies)
                    found[data].append((name, epsilon, *means, True))
    return found


def draw_qualities(path: Path, mark: str) -> None:
    """Accuracy against FID; a filled mark is at epsilon 10, an open one at 1 or less. Grey: published."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(DATA), figsize=(13, 4.2))
    found = qualities()
    names = [
        sorted({point[0] for some in found.values() for point in some if point[4] is own}) for own in (True, False)
    ]
    colours = {name: f"C{number}" for number, name in enumerate(names[0])}
    marks = dict(zip(names[1], MARKS, strict=False))
    for axis, (data, title) in zip(axes, DATA.items(), strict=True):
        for name, epsilon, fid, accuracy, ours in found[data]:
            colour = colours[name] if ours else "0.35"
            filled = {"markerfacecolor": colour if epsilon >= 10 else "white", "label": name, "linestyle": "none"}
            axis.plot(fid, accuracy, marker="o" if ours else marks[name], color=colour, markersize=7, **filled)
        axis.set(title=title, xlabel="FID", xscale="log", xlim=(1.5, 400))
        axis.set_xticks([2, 5, 10, 20, 50, 100, 200], ["2", "5", "10", "20", "50", "100", "200"], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy, %")
    _legend(axes, "filled: ε = 10\nopen: ε = 1")
    _save(figure, path, mark)
    pyplot.close(figure)


def settings() -> dict[str, list[tuple[str, float, float, float]]]:
    """Return for each varied setting of `ndpdc` (data, value, accuracy, epsilon)."""
    found: dict[str, list[tuple[str, float, float, float]]] = {name: [] for name in VARIED}
    for row in table("dpdc")["rows"]:
        name, _, value = row["job"].partition(" = ")
        if name in found:
            found[name].append((row["data"], float(value), row["measured"]["convnet"], row["certified"]))
    return found


def draw_settings(path: Path, mark: str) -> None:
    """Accuracy and epsilon of `ndpdc` along each setting."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(2, len(VARIED), figsize=(12, 5), sharex="col")
    for (name, points), (upper, lower) in zip(settings().items(), axes.T, strict=True):
        for data, title in DATA.items():
            some = sorted(point[1:] for point in points if point[0] == data)
            places, accuracies, epsilons = zip(*some, strict=True)
            upper.plot(places, accuracies, marker="o", label=title)
            lower.plot(places, epsilons, marker="o")
        ticks = [tick for tick in sorted({point[1] for point in points}) if tick not in (1.25, 1.5)]
        upper.set(ylim=(40, 100))
        lower.set(xlabel=VARIED[name], xscale="log", yscale="log", ylim=(0.3, 8))
        lower.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        lower.set_yticks([0.5, 1, 2, 5], ["0.5", "1", "2", "5"], minor=False)
        lower.minorticks_off()
    axes[0, 0].set_ylabel("accuracy, %")
    axes[1, 0].set_ylabel("ε at δ = 1e-5")
    axes[0, 0].legend(frameon=False)
    _save(figure, path, mark)
    pyplot.close(figure)


def audits() -> dict[str, list[tuple[str, float | None, float, float]]]:
    """Return for each epsilon (method, certified epsilon, white-box bound, black-box bound)."""
    found: dict[str, list[tuple[str, float | None, float, float]]] = {}
    for epsilon in AUDITED_AT:
        for method in (*AUDITED, *PUBLISHED):
            white, black = (measured(job, method, epsilon) for job in ("white box", "black box"))
            if white:
                point = method, white.get("certified"), bound_of(white), bound_of(black)
                found.setdefault(f"{epsilon:g}", []).append(point)
    return found


def draw_audits(path: Path, mark: str) -> None:
    """White-box and black-box lower bounds as bars, the claimed epsilon as a line."""
    pyplot = _pyplot()
    panels = audits()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(11, 4.4), sharey=True)
    for axis, (epsilon, points) in zip(axes, panels.items(), strict=True):
        for place, (_, certified, white, black) in enumerate(points):
            colour = "C0" if certified is not None else "C3"
            axis.barh(place - 0.2, white, 0.4, color=colour)
            axis.barh(place + 0.2, black, 0.4, color=colour, alpha=0.4)
        axis.axvline(float(epsilon), color="black", linestyle="--", label="claim")
        axis.barh(0, 0, color="C0", label="white box, at least")
        axis.barh(0, 0, color="C0", alpha=0.4, label="black box, at least")
        axis.barh(0, 0, color="C3", label="published form, not private")
        axis.set(xlabel="lower bound on ε, 95 % confidence", title=f"ε = {epsilon}")
        axis.grid(axis="x", alpha=0.3)
    names = [point[0] for point in panels[f"{AUDITED_AT[0]:g}"]]
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    _save(figure, path, mark)
    pyplot.close(figure)


def _legend(axes: Any, title: str | None = None) -> None:
    """Put one legend of all panels to the right of the last one."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    found = {name: found[name] for name in sorted(found, key=lambda name: name not in METHODS)}  # ours first
    place = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "frameon": False}
    axes[-1].legend(found.values(), found.keys(), fontsize=8, title=title, title_fontsize=8, **place)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


PLOTS: dict[str, tuple[Callable[[], str], Callable[[Path, str], None]]] = {
    "accuracy.png": (lambda: _mark([curves(), leaders()]), draw_curves),
    "time.png": (lambda: _mark(times()), draw_times),
    "fid.png": (lambda: _mark(qualities()), draw_qualities),
    "audit.png": (lambda: _mark(audits()), draw_audits),
    "ndpdc_settings.png": (lambda: _mark(settings()), draw_settings),
}
