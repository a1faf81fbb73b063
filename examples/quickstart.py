"""Quickstart: fit a method on private images, draw synthetic images, save them, and verify the certificate.

Run: `python examples/quickstart.py`. It takes about half a minute on one core; with `--quick`, a few seconds.
"""

import sys
import tempfile
from pathlib import Path

import sfumato as sf
from sfumato.data import contact_sheet

STEPS = 50 if "--quick" in sys.argv else 1000
out = Path(tempfile.mkdtemp(prefix="sfumato-quickstart-"))

# 1. Load the private images: here scikit-learn's 8x8 digits, in practice a folder (see your_folder.py).
images = sf.load_images("digits")

# 2. Choose a method and a budget. The plan lists every release and its noise. It spends nothing.
model = sf.create("dp-merf", epsilon=4.0, delta=1e-5, steps=STEPS)
for release in model.plan(model.public_facts(images)).releases:
    print(f"release {release.name!r}: {release.times} time(s), noise multiplier {release.noise:.2f}")

# 3. Fit. The run folder receives the ledger of charges, the model and the certificate.
model.fit(images, run_dir=out / "run")

# 4. Sample. Sampling is post-processing of the releases: draw as many images as you need, it costs no privacy.
synthetic = model.sample(1000)
sf.save_images(synthetic, out / "images.npz")
contact_sheet(synthetic, out / "samples.png")

# 5. Verify, without the private images: recompute epsilon from the certificate and compare the hash of every file.
result = sf.verify(out / "run" / "certificate.json", max_epsilon=4.0)
print(f"certificate {'valid' if result.ok else 'NOT valid'}: epsilon {result.epsilon}, delta {result.delta}")

# 6. A saved model can be loaded again, on another machine, and samples the same images for the same seed.
again = sf.load(out / "run").sample(1000)
assert result.ok
assert again.images.equal(synthetic.images)
print(f"results: {out}")
