"""Compare methods: fit three of them with the same budget, print one table of accuracies, write one picture.

Accuracy is that of classifiers trained on synthetic images only and tested on real ones.
Run: `python examples/compare_methods.py`. It takes about one minute on one core; with `--quick`, a few seconds.
"""

import sys
import tempfile
from pathlib import Path

import torch

import sfumato as sf
from sfumato.data import contact_sheet
from sfumato.evaluate import compare, summary

QUICK = "--quick" in sys.argv
METHODS = {
    "dp-merf": {"steps": 50 if QUICK else 1000},
    "dp-mepf": {"encoder": "scattering", "steps": 2 if QUICK else 500},
    "dp-kernel": {"paths": 1, "steps": 5 if QUICK else 300},
}
out = Path(tempfile.mkdtemp(prefix="sfumato-compare-"))
private = sf.load_images("digits")
test = sf.load_images("digits", split="test")  # public: whatever is measured on it may be shared

# 1. Fit and sample, with the same budget. In practice three such runs on the same images spend it three times.
synthetic = {}
for key, params in METHODS.items():
    synthetic[key] = sf.create(key, epsilon=4.0, delta=1e-5, **params).fit(private).sample(100 if QUICK else 2000)

# 2. Evaluate on public images only. `network=None` leaves out the distances in a feature network.
metrics = compare(synthetic, test=test, network=None)

# 3. One table.
rows = {name: summary(measured) for name, measured in metrics.items()}
columns = list(rows["dp-merf"])
print(f"{'test accuracy, %':20}" + "".join(f"{column:>12}" for column in columns))
for name, row in rows.items():
    print(f"{name:20}" + "".join(f"{row[column]:>12}" for column in columns))

# 4. One picture: a row per method, two images of each class; real images from the public test split.
pictures, labels = [], []
for row, images in enumerate([*synthetic.values(), test]):
    for label in range(len(images.classes)):
        pictures.append(images.images[images.labels == label][:2])
        labels.append(torch.full((len(pictures[-1]),), row))
names = [*synthetic, "real (test)"]
picture = contact_sheet(sf.ImageSet(torch.cat(pictures), torch.cat(labels), names), out / "methods.png", per_class=20)
print(f"picture: {picture}")
