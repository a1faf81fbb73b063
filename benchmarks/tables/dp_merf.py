"""DP-MERF at several budgets: accuracy of a small CNN. Class sizes are not declared public."""

from math import inf

from benchmarks.runner import jobs

JOBS = jobs("default", "dp-merf", ["mnist", "fashion-mnist"], [1.0, 0.2, 10.0, inf])
