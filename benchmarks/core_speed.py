"""Two versions of the package side by side: seconds of private gradients, of whole fits and of one pass over images.

    git worktree add /tmp/before 6ee6445
    python benchmarks/core_speed.py --before /tmp/before --json benchmarks/results/core_speed.json

Each version runs in processes of its own, in turns (before, after, before, after); the median of all timings counts. A
ratio is after / before: below 1 is faster. Gradients are those of `gradient_speed.py` (milliseconds of one noised sum);
fits are of the whole method with noise from the fast generator, after a first one that is not counted; in seconds, on a
CPU those that the process worked. On a CPU: `--quick --records 3000 --rounds 1`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS = ("not private", "not private, side by side", "vault, recorded", "vault, recorded, bf16", "vault")
FITS: dict[str, dict[str, Any]] = {
    "ndpdc": {"iterations": 300},
    "dp-lflow": {"warm": "none", "lessons": 50, "steps": 60},
    "pge": {"warm": "none", "steps": 60},
    "dp-mepf": {"steps": 20},
    "dp-kernel": {"steps": 200},
    "atelier": {"steps": 200},
}
QUICK: dict[str, dict[str, Any]] = {  # for a CPU, with --records 3000 or so
    "ndpdc": {"iterations": 20},
    "dp-lflow": {"warm": "none", "lessons": 5, "steps": 6},
    "pge": {"warm": "none", "steps": 6},
    "dp-mepf": {"steps": 3},
    "atelier": {"steps": 10},
}


def fits(records: int, quick: bool) -> dict[str, float]:
    """Seconds of fits, and of `vault.sum` in dp-mepf."""
    import torch

    import sfumato as sf
    from sfumato.privacy import Vault

    images = sf.load_images("mnist")
    images = images.subset(torch.arange(min(records, len(images))))
    found: dict[str, float] = {}
    plain, spent = Vault.sum, [0.0]
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time  # a CPU may be shared

    def timed(self: Any, *args: Any, **options: Any) -> Any:
        started = clock()
        answer = plain(self, *args, **options)
        float(answer.sum())  # waits for a device
        spent[0] += clock() - started
        return answer

    for key, params in (QUICK if quick else FITS).items():
        for _ in range(2):  # the first one compiles and warms up
            model = sf.create(key, epsilon=1.0, public_size=True, secure=False, **params)
            spent[0] = 0.0
            Vault.sum = timed if key == "dp-mepf" else plain  # type: ignore[method-assign]
            started = clock()
            model.fit(images)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            found[f"{key}, fit"] = clock() - started
            if key == "dp-mepf":
                found["dp-mepf, one pass"] = spent[0]
        print(json.dumps({key: found[f"{key}, fit"]}), file=sys.stderr, flush=True)
    return found


def one_version(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """All timings of the version in `folder`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    records = ["--records", str(options.records)]
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / "gradients.json"
        speed = [sys.executable, str(folder / "benchmarks" / "gradient_speed.py"), "--quick", "--opacus", *records]
        speed += ["--json", str(target), *(["--repeats", "3"] if options.quick else [])]
        subprocess.run(speed, env=environment, check=True, stdout=subprocess.DEVNULL)
        tasks = json.loads(target.read_text())["tasks"]
    found: dict[str, float] = {}
    for task, content in tasks.items():
        found |= {f"{task}: {row}": content["rows"][row]["ms"] for row in ROWS if row in content["rows"]}
    whole = [sys.executable, __file__, "--fits", *records, *(["--quick"] if options.quick else [])]
    output = subprocess.run(whole, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return found | json.loads(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--quick", action="store_true", help="smaller fits, for a CPU")
    parser.add_argument("--fits", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.fits:
        print(json.dumps(fits(options.records, options.quick)))
        return
    here = Path(__file__).resolve().parents[1]
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for version, folder in (("before", options.before.resolve()), ("after", here)):
            for name, value in one_version(folder, options).items():
                times.setdefault(name, {"before": [], "after": []})[version].append(value)
            print(json.dumps({version: {name: both[version] for name, both in times.items()}}), flush=True)
            rows = {
                name: {
                    **{which: round(statistics.median(some), 4) for which, some in both.items()},
                    "ratio": round(statistics.median(both["after"]) / statistics.median(both["before"]), 3),
                }
                for name, both in times.items()
                if both["before"] and both["after"]
            }
            if options.json:
                content = {"command": "python benchmarks/core_speed.py --before (0.1.0)", "rows": rows}
                options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
