"""The evaluation protocol on real images and on images of DP-MERF: five classifiers and distances."""

from benchmarks.runner import jobs

SETS = ["mnist", "fashion-mnist"]
MEASURES = {"measures": ("mlp", "small_cnn", "convnet", "resnet18"), "first": ("logistic", "fidelity")}
JOBS = [*jobs("real images", None, SETS, [None], **MEASURES), *jobs("default", "dp-merf", SETS, [1.0], **MEASURES)]
