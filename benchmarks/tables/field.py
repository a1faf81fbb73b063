"""Our methods in the measures of the field: FID against the training images, and DPImageBench's three classifiers.

Images are drawn anew: one fit for each seed. Published figures are in `benchmarks/published.json`.
"""

from benchmarks.runner import jobs

SIZES = {"public_size": True, "secure": False}
GREY, COLOUR, FACES = ["mnist", "fashion-mnist"], ["cifar10"], ["celeba"]
FULL = {"measures": ("small_cnn", "fidelity", "fid"), "first": ("dpimagebench",)}
SHORT = {"measures": ("small_cnn", "fidelity", "fid"), "first": ("dpimagebench@20",)}  # 200 epochs would take hours
FID = {"measures": ("small_cnn", "fidelity", "fid")}
PRIOR = {**SIZES, "prior": "tiny-imagenet"}

JOBS = [
    *jobs("default", "atelier", GREY, [1.0, 10.0], params=SIZES, **FULL),
    *jobs("default", "atelier", COLOUR, [1.0, 10.0], params=SIZES, **SHORT),
    *jobs("tiny-imagenet", "atelier", COLOUR, [1.0, 10.0], params=PRIOR, **SHORT),
    *jobs("tiny-imagenet", "atelier", FACES, [1.0, 10.0], params=PRIOR, **FID),
    *jobs("default", "atelier", FACES, [1.0, 10.0], params=SIZES, **FID),
    *jobs("default", "dp-kernel", [*GREY, *COLOUR, *FACES], [1.0, 10.0], params=SIZES, seeds=1, **FID),
    *jobs("default", "dp-lflow", [*GREY, *FACES], [1.0, 10.0], params=SIZES, seeds=1, **FID),
    *jobs("default", "pge", [*GREY, *FACES], [1.0, 10.0], params=SIZES, seeds=1, **FID),
    *jobs("default", "dp-mepf", [*GREY, *COLOUR, *FACES], [1.0, 10.0], params=SIZES, seeds=1, **FID),
    *jobs("default", "dp-merf", GREY, [1.0, 10.0], params=SIZES, seeds=1, **FID),
    *jobs("real images", None, [*GREY, *COLOUR, *FACES], [None], seeds=1, **FID),
]
