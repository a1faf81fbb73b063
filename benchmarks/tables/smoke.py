"""A job of seconds on scikit-learn's digits, to try the runner: `python -m benchmarks smoke --results build/smoke`."""

from benchmarks.runner import jobs

TINY = {"features": 100, "steps": 20, "batch_size": 50}
JOBS = jobs("default", "dp-merf", ["digits"], [1.0], params=TINY, seeds=2, images=500)
