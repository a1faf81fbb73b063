"""Describe a synthetic set for others: a card in Hugging Face's form (README.md) and Croissant metadata.

Both repeat what the certificate states and what is in the folder; nothing depends on the private images otherwise.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.certificate import Certificate
from sfumato.certificate.issue import file_digest
from sfumato.data import ImageSet
from sfumato.data.atomic import replacing, write_json
from sfumato.evaluate.measure_descriptions import chance_of
from sfumato.report.guarantee import attack_success, epsilon_curve, not_protected, public_facts

SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (10**7, "1M<n<10M"))
CROISSANT = "http://mlcommons.org/croissant/"
CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": CROISSANT,
    "rai": f"{CROISSANT}RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "equivalentProperty": "cr:equivalentProperty",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}


def write_card(
    folder: Path, certificate: Certificate, images: ImageSet, metrics: dict[str, Any], licence: str | None = None
) -> None:
    """Write README.md and croissant.json to a folder with `images/` and `images.npz`."""
    with replacing(folder / "README.md", overwrite=True) as temporary:
        temporary.write_text(card(certificate, images, metrics, licence), "utf-8")
    write_json(folder / "croissant.json", croissant(folder, certificate, images, licence))


def card(certificate: Certificate, images: ImageSet, metrics: dict[str, Any], licence: str | None = None) -> str:
    """Return the text of the data-set card; the guarantee is in its metadata, too."""
    size = next((name for limit, name in SIZES if len(images) < limit), "n>10M")
    metadata = {
        "pretty_name": _title(certificate),
        "license": licence or "unknown",
        "tags": ["synthetic", "differential-privacy", "sfumato"],
        "task_categories": ["image-classification" if images.labelled else "unconditional-image-generation"],
        "size_categories": [size],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "images/**"}]}],
    }
    header = "\n".join([*_yaml(metadata), "privacy:", *(f"  {line}" for line in _yaml(_privacy(certificate)))])
    classes = ", ".join(f"`{_inline(name)}`" for name in images.classes[:30]) + (
        ", …" if len(images.classes) > 30 else ""
    )
    channels, height, width = images.shape
    what = f"{len(images):,} synthetic images of {width} × {height} pixels, {'grey' if channels == 1 else 'RGB'}"
    kind = f", in {len(images.classes)} classes: {classes}." if images.labelled else ", without labels."
    soft = ", with soft labels" if images.soft_labels is not None else ""
    lost = not_protected(certificate, tested=bool(metrics))
    parts = [
        f"---\n{header}\n---",
        f"# {_inline(_title(certificate))}",
        what + kind,
        "All were drawn from a model that learned from private images "
        f"(method `{certificate.method}`, sfumato {certificate.software.get('sfumato', '')}).",
        "## Guarantee",
        _guarantee_text(certificate),
        "Not protected:\n\n" + "\n".join(f"- {_inline(text)}" for text in lost),
        "Taken as public:\n\n" + "\n".join(f"- {name}: {_inline(text)}" for name, text in public_facts(certificate)),
        "## Check it",
        "```bash\npip install sfumato\nsfumato verify .\n```",
        "## Use it",
        '```python\nfrom datasets import load_dataset\n\nimages = load_dataset("this/folder", split="train")\n```',
        f"`images.npz` holds the same images as arrays{soft}. `report.html` explains guarantee and figures.",
        "## Quality",
        _quality_text(metrics),
        "The images keep what many of the private images have in common. Rare cases are lost on purpose. Do not use "
        "them for decisions about persons without testing on real images.",
    ]
    return "\n\n".join(parts) + "\n"


def croissant(folder: Path, certificate: Certificate, images: ImageSet, licence: str | None = None) -> dict[str, Any]:
    """Return Croissant 1.0 metadata with one record for each PNG file."""
    pattern = "images/*/*.png" if images.labelled else "images/*.png"
    fields = [
        {
            "@type": "cr:Field",
            "@id": "images/image",
            "name": "image",
            "dataType": "sc:ImageObject",
            "source": {"fileSet": {"@id": "png-files"}, "extract": {"fileProperty": "content"}},
        }
    ]
    if images.labelled:
        source = {"fileSet": {"@id": "png-files"}, "extract": {"fileProperty": "fullpath"}}
        label = {"@type": "cr:Field", "@id": "images/label", "name": "label", "dataType": "sc:Text"}
        fields.append({**label, "source": {**source, "transform": {"regex": r".*images/([^/]+)/[^/]+\.png$"}}})
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": re.sub(r"\W+", "-", _title(certificate)).strip("-") or "synthetic-images",
        "description": f"{len(images)} synthetic images. {_guarantee_text(certificate)}",
        "conformsTo": [f"{CROISSANT}1.0", f"{CROISSANT}RAI/1.0"],
        "version": "1.0.0",
        "datePublished": certificate.issued[:10],
        "license": licence or "not stated",
        "citeAs": f"{_title(certificate)}, {certificate.issued[:4]}, made with sfumato",
        "creator": {"@type": "sc:Organization", "name": certificate.issuer or "not stated"},
        "keywords": ["synthetic", "differential privacy"],
        "isLiveDataset": False,
        "rai:dataCollection": f"Drawn from a model ({certificate.method}) that learned from private images.",
        "rai:personalSensitiveInformation": _guarantee_text(certificate),
        "rai:dataLimitations": not_protected(certificate, tested=False),
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": "images.npz",
                "name": "images.npz",
                "contentUrl": "images.npz",
                "encodingFormat": "application/zip",
                "sha256": file_digest(folder / "images.npz"),
            },
            {
                "@type": "cr:FileSet",
                "@id": "png-files",
                "name": "png-files",
                "encodingFormat": "image/png",
                "includes": pattern,
            },
        ],
        "recordSet": [{"@type": "cr:RecordSet", "@id": "images", "name": "images", "field": fields}],
    }


def _title(certificate: Certificate) -> str:
    return f"Synthetic images of {certificate.subject}" if certificate.subject else "Synthetic images"


def _privacy(certificate: Certificate) -> dict[str, Any]:
    names = ("guarantee", "epsilon", "delta", "unit", "adjacency", "method", "issuer", "subject", "issued", "ledger")
    return {**{name: getattr(certificate, name) for name in names}, "certificate": "certificate.json"}


def _yaml(values: dict[str, Any]) -> list[str]:
    """Return one line for each value. JSON is valid YAML, except for numbers such as 1e-05."""
    return [
        f"{name}: {np.format_float_positional(value, trim='0') if isinstance(value, float) else _json(value)}"
        for name, value in values.items()
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _guarantee_text(certificate: Certificate) -> str:
    if certificate.epsilon is None:
        return f"**No privacy guarantee: nothing is protected.** Reason: {_inline(str(certificate.void))}."
    success = attack_success(epsilon_curve(certificate))
    return (
        f"Differential privacy for one {certificate.unit}: epsilon {certificate.epsilon:g}, delta "
        f"{certificate.delta:g}, relation {certificate.adjacency}. An attacker who guesses whether one "
        f"{certificate.unit} was in the private set, with a fair coin as the truth, is right at most "
        f"{100 * success:.1f} % of the time (50 % is blind guessing)."
    )


def _quality_text(metrics: dict[str, Any]) -> str:
    rows = [(name, entry) for name, entry in metrics.get("utility", {}).items() if "mean" in entry]
    if not rows:
        return "Not measured: no public test images were given."
    chance = chance_of(metrics)
    lines = [f"- {name}: {entry['mean']:.1f} %" for name, entry in rows]
    level = "" if chance is None else f" Always guessing the most frequent class gives {chance:.1f} %."
    head = f"Accuracy of classifiers that were trained on these images only, on public real test images.{level}"
    return head + "\n\n" + "\n".join(lines)


def _inline(text: str) -> str:
    """Return text for one line of Markdown, without markup."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return re.sub(r"([\\`*_<>\[\]#|])", r"\\\1", plain)
