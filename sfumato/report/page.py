"""Fill the page of a report. Everything on it is public: synthetic images, the certificate, measured public figures.

Run times, memory and paths are left out on purpose: they depend on the number of private images, or name their folder.
"""

from __future__ import annotations

import base64
import io
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from sfumato.certificate import Certificate, Verification, verify
from sfumato.certificate.statement import rounded_up
from sfumato.data import DataError, ImageSet, load_images
from sfumato.data.atomic import replacing
from sfumato.data.decode import to_pil_image
from sfumato.evaluate.measure_descriptions import CLASSIFIER_NAMES, chance_level, description_of, judge_accuracy
from sfumato.report.charts import Series, axis, line_chart
from sfumato.report.guarantee import attack_success, epsilon_curve, not_protected, public_facts, stages

MAX_CLASSES, PER_CLASS, MAX_SIDE = 20, 8, 96
HEADLINE = ("convolutional", "small_cnn", "convnet")  # the accuracy that stands for a run, in order of preference
TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class ReportRun:
    """What a report shows of one run.

    - name: name of the folder.
    - certificate: its certificate.
    - images: its synthetic images.
    - metrics: content of `metrics.json`.
    - verification: result of `verify`, if it was checked.
    - test: public real images to show beside the synthetic ones.
    """

    name: str
    certificate: Certificate
    images: ImageSet | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    verification: Verification | None = None
    test: ImageSet | None = None

    @property
    def accuracy(self) -> dict[str, Any] | None:
        """The accuracy that stands for the run, as `Accuracy.to_dict`; None if none was measured."""
        utility = self.metrics.get("utility", {})
        return next((utility[name] for name in (*HEADLINE, *utility) if name in utility), None)


def read_run(folder: Path, test: ImageSet | None = None) -> ReportRun:
    """Read a folder that `synth` or `fit` wrote, and verify its certificate."""
    path = folder / "certificate.json"
    if not path.is_file():
        raise DataError(f"{folder} has no certificate.json; pass a folder that synth or fit wrote")
    result = verify(path, allow_none=True)
    try:
        certificate = Certificate.load(path)
        metrics = json.loads((folder / "metrics.json").read_text("utf-8")) if (folder / "metrics.json").exists() else {}
        archive = folder / "images.npz"
        labelled = bool(certificate.public_facts.get("labelled"))
        images = load_images(archive, labels=labelled, split="test") if archive.exists() else None
        name = folder.resolve().name
        return ReportRun(name, certificate, images, metrics, result, test)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder} cannot be shown: {error}; check it with: sfumato verify {folder}") from error


def write_report(runs: Sequence[ReportRun], target: Path, *, overwrite: bool = False) -> Path:
    """Write the report of one run, or of several with their privacy–utility curves."""
    text = render(runs)
    with replacing(target, overwrite=overwrite) as temporary:
        temporary.write_text(text, "utf-8")
    return target


def render(runs: Sequence[ReportRun]) -> str:
    """Return the page as HTML."""
    if not runs:
        raise DataError("there is no run to report on")
    try:
        content = {"runs": [_run(run) for run in runs], "comparison": comparison(runs) if len(runs) > 1 else None}
        return _environment().get_template(TEMPLATE).render(**content)
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise DataError(f"the certificate or the metrics have an unknown form: {error!r}") from error


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sfumato.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = lambda value: f"{value:.4g}"
    environment.filters["percent"] = lambda value: f"{100 * value:.1f} %"
    environment.filters["up"] = lambda value: f"{rounded_up(value, 4):,g}"  # what is promised is never understated
    environment.filters["up_percent"] = lambda value: f"{math.ceil(1000 * value - 1e-9) / 10:.1f} %"
    environment.filters["one_in"] = lambda value: f"1 in {1 / value:,.0f}"
    return environment


def _run(run: ReportRun) -> dict[str, Any]:
    certificate = run.certificate
    private = certificate.epsilon is not None
    curve = epsilon_curve(certificate) if private else []
    return {
        "name": run.name,
        "title": certificate.subject or run.name,
        "certificate": certificate,
        "private": private,
        "verification": run.verification,
        "success": attack_success(curve) if private else None,
        "odds": math.exp(min(certificate.epsilon, 50)) if certificate.epsilon is not None else None,
        "stages": stages(certificate) if private else [],
        "curve": _curve_chart(certificate, curve) if private else None,
        "public_facts": public_facts(certificate),
        "not_protected": not_protected(certificate, tested=bool(run.metrics.get("utility"))),
        "images": [] if run.images is None else _strips(run.images, run.test),
        "count": None if run.images is None else len(run.images),
        "quality": _quality(run),
        "confusion": _confusion(run),
        "settings": {name: value for name, value in certificate.parameters.items() if name != "device"},
        "command": _command(certificate),
    }


def _curve_chart(certificate: Certificate, curve: list[tuple[float, float]]) -> str:
    points = [(delta, epsilon, 0.0) for delta, epsilon in curve if delta <= 1e-2]
    stated = (certificate.delta, certificate.epsilon or 0.0, 0.0)
    x = axis("δ", [*(delta for delta, _, _ in points), certificate.delta], log=True)
    y = axis("ε", [*(epsilon for _, epsilon, _ in points), stated[1]], zero=True)
    title = f"Epsilon for other deltas; the certificate states epsilon {stated[1]:.4g} at delta {stated[0]:g}"
    lines = [Series("the same releases at other deltas", points), Series("as the certificate states it", [stated])]
    return line_chart(lines, x, y, title=title, points=False)


def _strips(images: ImageSet, test: ImageSet | None) -> list[dict[str, Any]]:
    """Return one row of images for each class, as data URIs."""
    count = len(images.classes)
    chosen = [int(label) for label in np.linspace(0, count - 1, min(count, MAX_CLASSES)).round()]
    rows = []
    for label in chosen:
        row = {"name": images.classes[label] if images.labelled else "all images", "synthetic": _strip(images, label)}
        rows.append({**row, "real": None if test is None else _strip(test, label)})
    return rows


def _strip(images: ImageSet, label: int) -> dict[str, Any] | None:
    index = torch.arange(len(images)) if images.labels is None else (images.labels == label).nonzero()[:, 0]
    shown = images.images[index[:PER_CLASS]]
    if not len(shown):
        return None
    pictures = [to_pil_image(pixels) for pixels in shown.numpy()]
    width, height = pictures[0].size
    scale = min(1.0, MAX_SIDE / max(width, height))
    width, height = max(1, round(width * scale)), max(1, round(height * scale))
    gap = max(1, width // 24)
    strip = Image.new(f"{pictures[0].mode}A", (len(pictures) * (width + gap) - gap, height))  # gaps are transparent
    for number, picture in enumerate(pictures):
        small = picture if scale == 1 else picture.resize((width, height), Image.Resampling.BOX)
        strip.paste(small.convert(strip.mode), (number * (width + gap), 0))
    buffer = io.BytesIO()
    strip.save(buffer, "png", optimize=True)
    uri = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"uri": uri, "number": len(pictures), "width": strip.width, "height": strip.height}


def _quality(run: ReportRun) -> list[dict[str, Any]]:
    """Return one row for each measure: value, chance level, the same for real images, and what it means."""
    rows = []
    reference = run.metrics.get("reference", {})
    for name, entry in run.metrics.get("utility", {}).items():
        chance = chance_level(entry["confusion"]) if "confusion" in entry else None
        real = reference.get("utility", {}).get(name, {}).get("mean")
        rows.append(
            {
                "name": f"accuracy of a {CLASSIFIER_NAMES.get(name, name)}",
                "value": _accuracy_text(entry),
                "chance": None if chance is None else f"{chance:.1f} %",
                "real": None if real is None else f"{real:.1f} %",
                "text": description_of(name).text,
                "good": description_of(name).good,
                "word": None if chance is None else judge_accuracy(entry["mean"], chance, real),
            }
        )
    for name, value in run.metrics.get("fidelity", {}).items():
        if name.endswith("_sd"):
            continue
        real, description = reference.get("fidelity", {}).get(name), description_of(name)
        own = {
            "name": f"{description.title} ({name})",
            "value": f"{value:.4g}",
            "text": description.text,
            "good": description.good,
        }
        rows.append({**own, "chance": None, "real": None if real is None else f"{real:.4g}", "word": None})
    return rows


def _accuracy_text(entry: dict[str, Any]) -> str:
    spread = f" ± {entry['sd']:.1f}" if len(entry["values"]) > 1 else ""
    return f"{entry['mean']:.1f}{spread} %"


def _confusion(run: ReportRun) -> dict[str, Any] | None:
    entry = run.accuracy
    classes = [str(name) for name in run.certificate.public_facts.get("classes", [])]
    if entry is None or "confusion" not in entry or len(classes) > MAX_CLASSES:
        return None
    shares = [[cell / max(sum(row), 1) for cell in row] for row in entry["confusion"]]
    return {"classes": classes, "rows": list(zip(classes, shares, strict=True))}


def _command(certificate: Certificate) -> str:
    """Return a command that makes such a set. Paths are left out: they may name private folders."""
    parts = ["sfumato synth DATA --method", str(certificate.method)]
    for name in ("epsilon", "delta", "adjacency", "prior", "seed"):
        if certificate.parameters.get(name) not in (None, ""):
            parts.append(f"--{name} {certificate.parameters[name]}")
    return " ".join(parts)


def comparison(runs: Sequence[ReportRun]) -> dict[str, Any]:
    """Return the curves of accuracy against epsilon, one for each method, with the spread over runs."""
    groups: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    chance = []
    for run in runs:
        if run.accuracy is not None and run.certificate.epsilon is not None:
            asked = run.certificate.parameters.get("epsilon", run.certificate.epsilon)
            groups[str(run.certificate.method)][float(asked)].append(float(run.accuracy["mean"]))
            chance += [chance_level(run.accuracy["confusion"])] if "confusion" in run.accuracy else []
    series = [
        Series(method, [(epsilon, statistics.fmean(found), _sd(found)) for epsilon, found in sorted(values.items())])
        for method, values in groups.items()
    ]
    points = [point for each in series for point in each.points]
    chart = None
    if points:
        marks = [(max(chance), "chance")] if chance else []
        heights = [value + sign * error for _, value, error in points for sign in (-1, 1)]
        x = axis("ε", [epsilon for epsilon, _, _ in points], log=True)
        y = axis("accuracy in %", [*heights, *(value for value, _ in marks)])
        chart = line_chart(series, x, y, title="Accuracy on real test images against epsilon", marks=marks)
    rows = [
        {
            "method": each.name,
            "epsilon": epsilon,
            "accuracy": f"{value:.1f} ± {error:.1f}" if len(groups[each.name][epsilon]) > 1 else f"{value:.1f}",
            "runs": len(groups[each.name][epsilon]),
        }
        for each in series
        for epsilon, value, error in each.points
    ]
    return {"chart": chart, "rows": rows, "methods": [each.name for each in series]}


def _sd(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
