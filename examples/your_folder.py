"""Your own folder: class folders of PNG files, persons as the unit of privacy, one budget file for several runs.

The script first writes such a folder from scikit-learn's digits, with invented persons. With your own data, start at
step 2. Run: `python examples/your_folder.py`. It takes about one minute on one core; with `--quick`, a few seconds.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

import sfumato as sf
from sfumato.certificate.dataset_budget import DatasetBudget

STEPS = 50 if "--quick" in sys.argv else 1000
PERSONS = 300
out = Path(tempfile.mkdtemp(prefix="sfumato-folder-"))

# 1. Write scans/<class>/<person>/<number>.png. One person has about four images, in several classes.
digits = sf.load_images("digits")
for number, (pixels, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
    folder = out / "scans" / f"digit-{label}" / f"person-{number % PERSONS:03}"
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels[0].numpy()).save(folder / f"{number}.png")

# 2. Load it. Level 1 of the path is the class, level 2 the person: folders of one name are one person.
images = sf.load_images(out / "scans", size=8, mode="grey", person="folder:2")

# 3. Open the budget of the data set, once: all runs together may spend epsilon 10 on each person.
account = DatasetBudget.open(out / "scans.budget", epsilon=10.0, delta=1e-5, unit="person", note="the example's scans")

# 4. Each run reserves its plan in that file before it reads an image.
for seed in (0, 1):
    model = sf.create("dp-merf", epsilon=5.0, delta=1e-5, steps=STEPS, seed=seed)
    model.fit(images, run_dir=out / f"run-{seed}", budget=out / "scans.budget", max_per_person=10)
    result = sf.verify(out / f"run-{seed}" / "certificate.json")
    print(f"run {seed}: epsilon {result.epsilon} for each {result.unit}; left for one more run: {account.left:.2f}")
    assert result.ok

# 5. A run that would exceed the budget is refused before anything is spent.
try:
    sf.create("dp-merf", epsilon=5.0, delta=1e-5, steps=STEPS).fit(images, budget=out / "scans.budget")
except sf.BudgetExceeded as refusal:
    print(f"third run refused: {refusal}")
else:
    raise AssertionError("the third run must be refused")
print(f"results: {out}")
