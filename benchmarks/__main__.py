"""The front of the benchmarks.

    python -m benchmarks list                  list the tables, and how much of each is done
    python -m benchmarks TABLE [options]       run what is missing of a table, or a speed benchmark (speed-NAME)
    python -m benchmarks all [options]         run what is missing of all tables; no speed benchmarks
    python -m benchmarks render [--check]      write tables and plots into README.md and docs/
    python -m benchmarks merge FOLDER          add the rows of result files that were made on another machine
    python -m benchmarks make-data SOURCES     make the data files of the tables from published sets
    python -m benchmarks train-encoder NAME    train an encoder of the package on public images
    python -m benchmarks vgg-weights FILE      convert VGG weights of other packages to an encoder file
    python -m benchmarks train-prior NAME      train a prior of the package on public or procedural images

Results are in `benchmarks/results/TABLE.json`. DATA is a folder with NAME.npz for data sets that have no name in
`sfumato data list`: celeba, celeba64, celeba256 (10,000 faces by gender), mednist, brain_mri64, brain_mri256.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from benchmarks.store import RESULTS, ROOT, load, merge

FOLDERS = {"tables": "", "speed": "speed-"}
COMMANDS = ("make-data", "train-encoder", "vgg-weights", "train-prior")  # modules with a `main` of their own
NEEDS_MORE = ("smoke",)  # not part of `all`


def tables() -> list[str]:
    """Return the names of all tables and speed benchmarks."""
    found = []
    for folder, prefix in FOLDERS.items():
        names = sorted(path.stem for path in (ROOT / "benchmarks" / folder).glob("[a-z]*.py"))
        found += [prefix + name.replace("_", "-") for name in names if name != "authors"]
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("table", choices=["list", "all", "render", *tables()], metavar="TABLE")
    made.add_argument("--folder", type=Path, default=Path(), metavar="DATA", help="where NAME.npz files are")
    made.add_argument("--results", type=Path, default=RESULTS, help="where result files are")
    made.add_argument("--seeds", type=int, default=3, help="run seeds below this number, as far as the table has them")
    made.add_argument("--workers", type=int, default=1, help="jobs at a time; they share the device")
    made.add_argument("--threads", type=int, default=1, help="of each worker")
    made.add_argument("--seconds", type=float, default=float("inf"), help="start no job after this time")
    made.add_argument("--data", nargs="+", default=[], help="only these data sets")
    made.add_argument("--epsilon", type=float, nargs="+", default=[], help="only these budgets")
    made.add_argument("--job", nargs="+", default=[], help="only jobs with these names")
    made.add_argument("--method", nargs="+", default=[], help="only jobs of these methods")
    made.add_argument("--measure", nargs="+", default=[], help="only these measures, as the table names them")
    made.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    made.add_argument("--pictures", type=Path, help="write contact sheets of the first seed there")
    made.add_argument("--check", action="store_true", help="render: write nothing; status 1 if a file is out of date")
    made.add_argument("--repeats", type=int, default=3, help="speed: alternating runs")
    made.add_argument("--images", type=int, help="speed-gpu-features: images of the pass")
    made.add_argument("--authors", type=Path, help="speed: a clone of the authors' program; peers: a folder of clones")
    made.add_argument("--before", type=Path, help="speed-versions: a checkout of the version to compare with")
    return made


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        command = importlib.import_module(f"benchmarks.{sys.argv[1].replace('-', '_')}")
        return int(command.main(sys.argv[2:]))
    if sys.argv[1:2] == ["merge"] and len(sys.argv) == 3:
        print("rows added to:", ", ".join(merge(Path(sys.argv[2]))) or "nothing")
        return 0
    options = parser().parse_args()
    if options.table == "render":
        from benchmarks.render import render

        stale = render(check=options.check)
        for path in stale:
            print(f"{'out of date' if options.check else 'written'}: {path.relative_to(ROOT)}")
        return int(options.check and bool(stale))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers inherit it; two workers must not share threads
    from benchmarks import runner, timing

    if options.table == "list":
        for name in tables():
            print(f"{name:24}{_progress(name, options):>12}  {(runner.module_of(name).__doc__ or '').splitlines()[0]}")
        return 0
    if options.table.startswith("speed-"):
        return timing.run(options.table, options)
    every = [name for name in tables() if not name.startswith("speed-") and name not in NEEDS_MORE]
    fine = [runner.run(name, options) for name in (every if options.table == "all" else [options.table])]
    return int(not all(fine))


def _progress(name: str, options: argparse.Namespace) -> str:
    from benchmarks import runner

    rows = load(name, options.results)["rows"]
    if name.startswith("speed-"):
        return f"{len(rows)} rows"
    declared = runner.module_of(name).JOBS
    total, left = (len(runner.missing(declared, some, options.seeds)) for some in ([], rows))
    return f"{total - left} of {total}"


if __name__ == "__main__":
    sys.exit(main())
