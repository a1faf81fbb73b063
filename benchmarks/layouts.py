"""Layouts of the rendered tables, from result files only: `LAYOUTS` maps a name to a function that returns Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from typing import Any

from benchmarks import audit_layouts
from benchmarks.markdown import CAPTION, markdown, source, table, wrapped
from benchmarks.store import CONVOLUTIONAL, ROOT, summary, values

Query = Mapping[str, Any]  # the table and fields of rows that match; "measure" may be several

DATA = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
FACES = {"celeba": "CelebA by gender, 32 px", "celeba64": "CelebA, 64 px", "celeba256": "CelebA, 256 px"}
SCANS = {"mednist": "MedNIST, 32 px", "brain_mri64": "Brain MRI, 64 px", "brain_mri256": "Brain MRI, 256 px"}
BEFORE = " after "  # in names of jobs: with a prior after fewer images of training
EVERY = {**DATA, **FACES, **SCANS}
EPSILONS = (0.2, 1.0, 10.0)
METHODS = ("atelier", "dp-kernel", "dp-lflow", "pge", "dp-mepf", "dp-merf", "ndpdc", "ldpdc")
CONDENSERS = ("ndpdc", "ldpdc")
CLASSIFIERS = {"logistic": "logistic regression", "mlp": "MLP", "small_cnn": "small CNN", "convnet": "ConvNet"}
CLASSIFIERS |= {"resnet18": "ResNet-18", "resnet9": "ResNet-9", "resnet9, annealed": "ResNet-9 as the authors train it"}
CLASSIFIERS |= {"lenet": "LeNet", "alexnet": "AlexNet", "vgg11": "VGG-11"}
DISTANCE, PRECISION, RECALL = (f"{name}_effnet_lite0" for name in ("fd", "precision", "recall"))
DIGITS = {"auroc": 3, PRECISION: 2, RECALL: 2, "images_per_s": 0}
CNN = "Accuracy in % of a small CNN trained on synthetic images, on the real test split."


def cell(query: Query) -> str:
    """Return one cell; several measures are joined by slashes."""
    wanted = dict(query)
    rows, measures = table(wanted.pop("table"))["rows"], wanted.pop("measure")
    several = [measures] if isinstance(measures, str) else measures
    parts = [summary(values(rows, name, **wanted), DIGITS.get(name, 1)) for name in several]
    return " / ".join(part or "–" for part in parts) if any(parts) else ""


def grid(corner: str, rows: Mapping[str, Query], columns: Mapping[str, Query], **common: Any) -> str:
    """Return a table of cells, without rows and columns that have none."""
    cells = {row: [cell({**common, **query, **column}) for column in columns.values()] for row, query in rows.items()}
    kept = [place for place in range(len(columns)) if any(line[place] for line in cells.values())]
    body = [[row, *(line[place] or "–" for place in kept)] for row, line in cells.items() if any(line)]
    return markdown([corner, *(list(columns)[place] for place in kept)], body)


def simple(note: str, rows: Mapping[str, Query], columns: Mapping[str, Query], corner: str = "", **common: Any) -> str:
    """Return a grid of one result file with the lines below it; a sentence while nothing is measured."""
    text, name = grid(corner, rows, columns, **common), common["table"]
    if text.count("\n") < 2:
        return f"Not measured yet: `python -m benchmarks {name}`."
    return f"{text}\n\n{source(note, name)}"


def by_epsilon(epsilons: Iterable[float | str] = EPSILONS, **common: Any) -> dict[str, Query]:
    return {"no noise" if e == "inf" else f"ε = {e:g}": {"epsilon": e, **common} for e in epsilons}


def by_data(names: Mapping[str, str] = DATA, **common: Any) -> dict[str, Query]:
    return {title: {"data": name, **common} for name, title in names.items()}


def by_job(*jobs: str, **common: Any) -> dict[str, Query]:
    return {job: {"job": job, **common} for job in jobs}


def by_measure(names: Mapping[str, str] | Iterable[str]) -> dict[str, Query]:
    titles = names if isinstance(names, Mapping) else {CLASSIFIERS[name]: name for name in names}
    return {title: {"measure": name} for title, name in titles.items()}


def crossed(first: Mapping[str, Query], second: Mapping[str, Query]) -> dict[str, Query]:
    return {f"{a}, {b}": {**x, **y} for a, x in first.items() for b, y in second.items()}


def main_query(method: str) -> Query:
    """Return where a method's main figure is: the small CNN, or a ConvNet on the condensed images."""
    condensed = {"table": "dpdc", "method": method, "job": "default", "measure": "convnet"}
    return condensed if method in CONDENSERS else {"table": method, "job": "default", "measure": "small_cnn"}


def title_of(method: str) -> str:
    return f"`{method}` ¹" if method in CONDENSERS else f"`{method}`"


def readme() -> str:
    text = grid("", {title_of(m): main_query(m) for m in METHODS[:-1]}, crossed(by_data(), by_epsilon()))
    note = (
        f"{CNN} Only `dp-mepf` uses public data, photographs. Class sizes are declared public, except for `dp-merf`. "
        "¹ ConvNet on 50 images per class."
    )
    return f"{text}\n\n{source(note, *METHODS[:6], 'dpdc')}"


def atelier() -> str:
    rows: dict[str, Query] = {}
    for name, title in EVERY.items():
        rows |= {title: {"data": name, "measure": "three"}, f"{title}: teacher": {"data": name, "measure": "teacher"}}
    note = (
        "Accuracy in %, mean of small CNN, ConvNet and ResNet-18, hard labels. Teacher: its accuracy on real images. "
        "Class sizes are declared public."
    )
    return simple(note, rows, by_epsilon(), table="atelier", job="default")


def atelier_parts() -> str:
    rows: dict[str, Query] = {}
    for epsilon, parts in {
        1.0: {
            "soft labels": ("default", "soft labels"),
            "no variety": ("default", "no variety"),
            "teacher with 20 % of the budget": ("teacher share 0.2", None),
            "teacher with 60 % of the budget": ("teacher share 0.6", None),
            "no scattering features": ("no scattering", None),
            "public encoder": ("public encoder", None),
            **{f"{n:,} images": ("number of images", f"{n} images") for n in (1000, 5000, 20_000, 200_000)},
        },
        0.2: {
            "soft labels": ("default", "soft labels"),
            "no variety": ("default", "no variety"),
            "no sums over all classes": ("no common sums", None),
            "no variety, no `high-noise` preset": ("no high-noise preset", "no variety"),
        },
        10.0: {"soft labels": ("default", "soft labels")},
    }.items():
        for title, (job, sample) in {"default": ("default", None), **parts}.items():
            rows[f"ε = {epsilon:g}, {title}"] = {"epsilon": epsilon, "job": job, "sample": sample}
    note = "Accuracy in %, mean of small CNN, ConvNet and ResNet-18."
    return simple(note, rows, by_data(), table="atelier", measure="three")


def dp_lflow() -> str:
    rows: dict[str, Query] = {}
    for name, title in EVERY.items():
        rows[title] = {"job": "256 pixels" if "256" in name else "default", "data": name, "measure": "small_cnn"}
        rows[f"{title}, sharpened"] = {**rows[title], "sample": "sharpened"}
        rows[f"{title}: AUROC"] = {**rows[title], "measure": "auroc"}
        for job in PROCEDURAL:
            rows[f"{title}, {job}"] = {**rows[title], "job": job}
    note = f"{CNN} Sharpened: the paper's smoothing and sharpening. AUROC of codes: one class against the others, mean."
    return simple(note, rows, by_epsilon(), table="dp-lflow")


PROCEDURAL = [f"procedural autoencoder{rest}" for rest in ("", ", no gradients", ", no warm start")]


def pge() -> str:
    rows = by_epsilon(job="default")
    rows |= {f"ε = 10, {job}": {"job": job, "epsilon": 10.0} for job in PGE_PARTS}
    rows |= {f"ε = {e:g}, prior": {"job": "prior", "epsilon": e} for e in EPSILONS[1:]}
    rows["ε = 10, prior, probability flow"] = {"job": "prior", "epsilon": 10.0, "sample": "ode"}
    rows |= {f"ε = 1, {job}": {"job": job, "epsilon": 1.0} for job in PGE_PRIOR_PARTS}
    rows["as published, no guarantee"] = {"job": "as published", "epsilon": 10.0}
    return simple(CNN, rows, by_data(EVERY), table="pge", measure="small_cnn")


PGE_PRIOR_PARTS = ("prior alone", "prior, warm start", "prior, warm start, no gradients")
PGE_PARTS = ("warm start alone", "no warm start", "residual enhancement", "256 pixels")


def dpdc(columns: Mapping[str, Query], note: str, **common: Any) -> str:
    tables = [
        grid(f"`{m}`", by_data(EVERY), columns, table="dpdc", job="default", method=m, **common) for m in CONDENSERS
    ]
    return "\n\n".join([*tables, source(note, "dpdc")])


def persons() -> str:
    rows = [row for row in table("persons")["rows"] if "small_cnn" in row["measured"]]
    [facts] = [row["measured"] for row in table("persons")["rows"] if "persons" in row["measured"]]
    cells = {row["job"]: [row["job"], f"{row['epsilon']:.2g}"] for row in rows}
    lines = [[*line, cell({"table": "persons", "job": job, "measure": "small_cnn"})] for job, line in cells.items()]
    note = f"MNIST, {facts['persons']:,} simulated persons with 1 to {facts['largest_count']} images; `dp-merf`. {CNN}"
    return f"{markdown(['', 'ε', 'accuracy'], lines)}\n\n{source(note, 'persons')}"


def priors(*, earlier: bool = False) -> str:
    """Return the table of methods with a prior, beside atelier without one.

    - earlier: the rows of priors before the one that is part of the package. The others have them only where there is
      nothing newer.
    """
    titles = {**by_measure(CONVOLUTIONAL), "teacher": {"measure": "teacher"}, "Fréchet distance": {"measure": DISTANCE}}
    titles |= {"precision / recall": {"measure": (PRECISION, RECALL)}, "FID": {"measure": "fid"}}
    found: dict[str, Query] = {}
    budgets = {**by_epsilon((*EPSILONS[1:], "inf")), "real images": {"epsilon": None}}
    for (name, title), (budget, query) in product(EVERY.items(), budgets.items()):
        at, where = {"data": name, **query}, f"{title}, {budget}"
        measured = [
            row for row in table("priors")["rows"] if row["data"] == name and row["epsilon"] == query["epsilon"]
        ]
        before, now = ([row for row in measured if (BEFORE in row["job"]) is wanted] for wanted in (True, False))
        own = before if earlier else now if any("sample" not in row and row["method"] for row in now) else measured
        if own and query["epsilon"] in EPSILONS:
            found[f"{where}: `atelier`, no prior"] = {"table": "atelier", "job": "default", "method": "atelier", **at}
        for row in own:
            if "sample" not in row:
                of_method = f"{where}: `{row['method']}`, {row['job']}"
                not_private = where if row["job"] == "real images" else f"{title}, not private: {row['job']}"
                label = of_method if row["method"] else not_private
                found[label] = {"table": "priors", "job": row["job"], "method": row["method"], **at}
    text = grid("", found, titles)
    return f"{text}\n\n{source('Accuracy in % on the real test split, hard labels.', 'priors', 'atelier')}"


def private_evolution() -> str:
    """Return votes alone, after an adaptation, and with other settings."""
    titles = {"small CNN": {"measure": "small_cnn"}, "ResNet-18": {"measure": "resnet18"}}
    titles |= {"Fréchet distance": {"measure": DISTANCE}, "FID": {"measure": "fid"}}
    rows = {
        f"{title}, ε = {epsilon:g}: {job}": {"data": name, "epsilon": epsilon, "job": job}
        for name, title in {"cifar10": DATA["cifar10"], "celeba": FACES["celeba"]}.items()
        for epsilon in EPSILONS[1:]
        for job in ("votes", "tune, then vote", "candidates = 500", "rounds = 4")
    }
    return simple("Accuracy in %. Prior: `tiny-imagenet`.", rows, titles, table="private-evolution")


def dp_mepf_encoders() -> str:
    """Return DP-MEPF with its paper's kind of encoder."""
    titles: dict[str, Query] = {"small CNN": {"measure": "small_cnn"}}
    titles |= {"ResNet-9 as the authors train it": {"measure": "resnet9, annealed"}}
    titles |= {"Fréchet distance": {"measure": DISTANCE}, "FID": {"measure": "fid"}}
    rows = {
        f"{title}, {job}, ε = {epsilon:g}": {"data": name, "job": job, "epsilon": epsilon}
        for name, title in {"cifar10": DATA["cifar10"], "celeba": FACES["celeba"]}.items()
        for job in ("vgg19 encoder", "vgg16 encoder")
        for epsilon in EPSILONS
    }
    return simple("Accuracy in %.", rows, titles, table="dp-mepf")


def peers() -> str:
    """Return other authors' programs beside our forms: the same images, classifiers and distances."""
    if not table("peers")["rows"]:
        return "Not measured yet: `python -m benchmarks peers`."
    measures = {"small_cnn": "small CNN", "three": "three classifiers", DISTANCE: "Fréchet distance", "fid": "FID"}
    columns = {
        f"{title}, ε = {epsilon:g}, {name}": {"data": data, "epsilon": epsilon, "measure": measure}
        for data, title in list(DATA.items())[:2]
        for epsilon in EPSILONS
        for measure, name in measures.items()
    }
    rows: dict[str, Query] = {
        job: {"table": "peers", "job": job} for job in dict.fromkeys(row["job"] for row in table("peers")["rows"])
    }
    rows |= {f"ours: `{method}`": {**main_query(method)} for method in ("dp-merf", "atelier")}
    return f"{grid('', rows, columns)}\n\n{source('Accuracy in %.', 'peers', 'dp-merf', 'atelier')}"


def dpdc_kept() -> str:
    """Return `ndpdc` with releases that are used once and ten times, and how the number was chosen."""
    rows: dict[str, Query] = {
        f"ε = {epsilon:g}: {title}": {"job": job, "epsilon": epsilon}
        for epsilon in EPSILONS
        for job, title in (("default", "used once"), ("kept releases", "used ten times"))
    }
    rows |= {f"ε = 1, held-out training images: {n}": {"job": f"held out, passes = {n}"} for n in (1, 3, 10, 40)}
    if not any(row["job"] == "kept releases" for row in table("dpdc")["rows"]):
        return "Not measured yet: `python -m benchmarks dpdc --job 'kept releases'`."
    note = "Accuracy in % of a ConvNet on 50 images per class."
    return simple(note, rows, by_data(), table="dpdc", method="ndpdc", measure="convnet")


def photographs() -> str:
    """Return what a default for colour images without a GPU is chosen from."""
    titles: dict[str, str] = {
        "dp-merf": "`dp-merf`",
        "atelier": "`atelier`",
        "random-process": "`atelier`, prior `random-process`",
        "tiny-imagenet": "`atelier`, prior `tiny-imagenet`",
    }
    body = []
    for row in table("without-gpu")["rows"]:
        if row["job"].startswith("photographs"):
            m, minutes = row["measured"], (row["fit_processor_s"] / 60, row["sample_processor_s"] / 60)
            figures = [f"{m[name]:.1f}" for name in ("small_cnn", "convnet", DISTANCE)]
            title = titles[row["params"].get("prior", row["method"])]
            body.append([title, *figures, *(f"{each:.1f}" for each in minutes)])
    if not body:
        return "Not measured yet: `python -m benchmarks without-gpu --job photographs`."
    header = [
        "",
        "small CNN",
        "ConvNet",
        "Fréchet distance",
        "fit, processor minutes",
        "3,000 images, processor minutes",
    ]
    note = (
        "CIFAR-10, ε = 1: 10,000 private images, 3,000 synthetic ones, 3,000 test images, one seed, presets for a CPU, "
        "one thread."
    )
    return f"{markdown(header, body)}\n\n{source(note, 'without-gpu', seeds=False)}"


def without_gpu() -> str:
    cells: dict[tuple[str, str], dict[str, str]] = {}
    rows = [row for row in table("without-gpu")["rows"] if row["job"] in ("two cores", "one core")]
    for row in sorted(rows, key=lambda row: (row["job"] != "two cores", METHODS.index(row["method"]))):
        seconds = row.get("fit_s", 0) + (row.get("sample_s", 0) if row["job"] == "two cores" else 0)
        text = f"{row['measured']['small_cnn']:.1f}" + (f", {max(seconds / 60, 0.1):.1f} min" if seconds else "")
        cells.setdefault((row["job"], row["method"]), {})[row["data"]] = text
    lines = [
        [job, f"`{method}`", *(line.get(name, "–") for name in list(DATA)[:2])] for (job, method), line in cells.items()
    ]
    note = (
        f"{CNN} ε = 1, one seed. Time: fit and 60,000 samples on two cores, or a fit on one core of two. "
        "`dp-kernel` on two cores has steps = 3000, `ndpdc` iterations = 200 and width = 32."
    )
    return f"{markdown(['', 'method', 'MNIST', 'Fashion-MNIST'], lines)}\n\n{source(note, 'without-gpu', seeds=False)}"


def speed_gradients() -> str:
    parts = []
    for run, corner in (("gpu", "one H200: ms (ratio)"), ("cpu", "one CPU core: ratio (peak MiB)")):
        rows = [row for row in table("speed-gradients")["rows"] if row["run"] == run and "ms" in row["measured"]]
        tasks = {row["task"]: f"{row['task']}, {row['images']:,} images" for row in rows}
        lines: dict[str, dict[str, str]] = {}
        for row in rows:
            form = "{ms:.1f} ({ratio:.2f})" if run == "gpu" else "{ratio:.2f} ({peak_mib})"
            lines.setdefault(row["job"], {})[row["task"]] = form.format(**row["measured"])
        body = [[job, *(line.get(task, "–") for task in tasks)] for job, line in lines.items()]
        parts.append(markdown([corner, *tasks.values()], body))
    note = (
        "One noised gradient sum, median of the repeats. Ratios are to the faster step without privacy of the same run."
    )
    command = "`python -m benchmarks speed-gradients` → [`speed-gradients.json`](results:speed-gradients.json)."
    return "\n\n".join([*parts, wrapped(f"{note} {command}")])


def speed_methods() -> str:
    rows, names = [], [f"speed-{name}" for name in ("dp-kernel", "dp-lflow", "dp-mepf", "dpdc")]
    for row in [row for name in names for row in table(name)["rows"] if "ratio" in row["measured"]]:
        m, count = row["measured"], "" if row["repeats"] == 3 else f" ({row['repeats']})"
        sd = f" ± {m['sd']:.2g}" if m["sd"] else ""
        rows.append([f"`{row['method']}`", row["job"], f"{m['per_second']:.3g}{sd}{count}", f"{m['ratio']:.1f}"])
    note = "Our program and the authors' on one H200, alternating; in brackets the number of runs where it is not 3. "
    note += "A step of `dp-lflow` trains one class in theirs, ten in ours. `python -m benchmarks NAME --authors "
    files = ", ".join(f"[`{name}.json`](results:{name}.json)" for name in names)
    body = markdown(["method", "program", "steps per second", "ratio"], rows)
    return f"{body}\n\n{wrapped(f'{note}FOLDER` → {files}.')}"


def speed_parts() -> str:
    rows = []
    for name, part in (
        ("scattering", "scattering transform"),
        ("accounting", "noise calibration"),
        ("decoding", "decoding"),
    ):
        for row in table(f"speed-{name}")["rows"]:
            if row["measured"]["ratio"] != 1:
                device = row.get("device", table(f"speed-{name}")["device"])
                rows.append([f"{part}: {row['job']}", device, f"{row['measured']['ratio']:.1f}"])
    for row in table("speed-fidelity")["rows"]:
        ours, theirs = list(row["measured"].values())[:2]
        ratio = ours / theirs if "per second" in row["job"] else theirs / ours
        rows.append([row["job"].partition(", ")[0], table("speed-fidelity")["device"], f"{ratio:.1f}"])
    note = "Beside Kymatio, `dp_accounting`, a Pillow loop, efficientnet_lite_pytorch and torchmetrics. "
    caption = wrapped(f"{note}`python -m benchmarks speed-scattering`, …")
    return f"{markdown(['part', 'device', 'times as fast'], rows)}\n\n{caption}"


CLUSTER_AIMS = {  # by job, of the ratio
    "one worker": "≥ 0.87",
    "start, and two workers beside one": "≥ 1.7",
    "memory, 1000000 images": "≤ 1.1, below 2 GB",
    "beside a busy program": "sfumato ≤ 1.5",
    "quota of one core": "sfumato ≤ 1.5",
    "features on a GPU: EfficientNet-Lite0 at 128 pixels": "near 1",
}


def cluster() -> str:
    names = [f"speed-{name}" for name in ("cluster", "streaming", "neighbour", "gpu-features")]
    tables, rows = {name: found for name in names if (found := table(name))["rows"]}, []
    for found in tables.values():
        for row in found["rows"]:
            device = row.get("device", found["device"])
            words = ", ".join(f"{what.replace('_', ' ')} {value:g}" for what, value in row["measured"].items())
            words += f", slower: {row['slower']}" if "slower" in row else ""
            rows.append([row["job"], device, CLUSTER_AIMS.get(row["job"], ""), words])
    note = "Times are in seconds, on a shared machine: upper bounds. Ratios are within one run: speed relative to this "
    note += "process (`start, …`: two workers to one); memory relative to 100,000 images; a query from the shards "
    note += "relative to one from kept rows; time relative to one thread beside a busy program. "
    files = ", ".join(f"`python -m benchmarks {name}` → [`{name}.json`](results:{name}.json)" for name in tables)
    return f"{markdown(['', 'device', 'aim', 'measured'], rows)}\n\n{wrapped(f'{note}{files}.')}"


def speed_versions() -> str:
    found, versions, body = table("speed-versions"), ("before", "after"), []
    plain: dict[tuple[str, str | None], dict[str, float]] = {}  # the fastest step without privacy, where it has a row
    for row in sorted(found["rows"], key=lambda row: not row["job"].startswith("not private")):
        job, m, place = row["job"], row["measured"], (row["device"], row.get("task"))
        if job.startswith("not private"):
            plain[place] = {each: min(m[each], plain.get(place, m)[each]) for each in versions}
            continue
        ratios = [m[each] / plain[place][each] for each in versions] if place in plain else []
        ratios = ratios or [m[f"{each}_to_not_private"] for each in versions if f"{each}_to_not_private" in m]
        unit = "" if "ms of" in job else ", s"
        title = f"gradient, {row['task']}{job.removeprefix('vault')}, ms" if "task" in row else f"{job}{unit}"
        times = [f"{m['before']:.3g}", f"{m['after']:.3g}", f"{m['ratio']:.2f}"]
        beside = " → ".join(f"{ratio:.2f}" for ratio in ratios) or "–"
        body.append([row["device"].removeprefix("NVIDIA "), title, *times, beside])
    header = ["", "", "0.1.0", "after", "after / 0.1.0", "ratio to a step without privacy"]
    note = (
        f"After: commit `{found['commit'][:7]}`; `pge` and `dp-kernel` on the H200: an earlier one of that day. CPU: "
        "one run on a shared machine. Steps without privacy vary: 8.4 and 10.4 ms on the H200 for one class. "
        "0.1.0 has no `python -m benchmarks speed-versions`: each version ran its own program"
    )
    caption = wrapped(f"{note} → [`speed-versions.json`](results:speed-versions.json).")
    return f"{markdown(header, body)}\n\n{caption}"


def systems() -> list[dict[str, Any]]:
    """Return the systems with published figures."""
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "published.json").read_text())["systems"]
    return found


def joined(parts: Iterable[str]) -> str:
    parts = [part or "–" for part in parts]
    return "–" if set(parts) == {"–"} else " / ".join(parts)


def results(data: str) -> str:
    """Return all methods on one data set, with the published figures."""
    body, compared = [], {system["method"]: system for system in systems()}

    def published(system: Mapping[str, Any]) -> list[str]:
        figures = system.get("accuracy", {}).get(data, {})
        means = system.get("accuracy_mean", {}).get(data, {})
        keys = [f"{e:g}" for e in EPSILONS]
        text = joined(
            (f"{figures[key]:.1f}" + (f" ({means[key]:.1f})" if key in means else "") if key in figures else "")
            for key in keys
        )
        text += " ³" if figures and system["classifier"] == "best of three" else ""
        valid = f"{system['valid']}: {system['reason']}".removesuffix(": ") if figures else ""
        return [text, valid]

    for method in METHODS:
        query = {**main_query(method), "data": data}
        figures = [cell({**query, "epsilon": e}) or "–" for e in EPSILONS]
        more = []
        for measure in ("three", DISTANCE):
            cells = [
                "" if method in CONDENSERS else cell({**query, "epsilon": e, "measure": measure}) for e in EPSILONS
            ]
            if method == "dp-merf":  # measured at epsilon 1 by the evaluation protocol
                cells[1] = cell({**query, "table": "evaluation", "epsilon": 1.0, "measure": measure})
            more.append(joined(cells))
        if set(figures) != {"–"}:
            body.append([title_of(method), *figures, *more, *published(compared.get(method, {}))])
    for system in systems():
        if system["method"] is None and data in system["accuracy"]:
            body.append([f"{system['system']}{' ²' if system['public_data'] else ''}", *["–"] * 5, *published(system)])
    return markdown(["", *by_epsilon(), "three classifiers", "Fréchet distance", "published", "valid"], body)


FIELD = {"fid", "dpimagebench"}  # measures of other papers


def field_rows() -> list[dict[str, Any]]:
    """Return the rows of all tables that have a measure of other papers, but for real images and trials."""
    tables = ("field", "priors", "private-evolution", "dp-mepf")
    rows = (row for name in tables for row in table(name)["rows"])
    return [row for row in rows if row["method"] and "sample" not in row and FIELD & row["measured"].keys()]


def field_fid() -> str:
    """Return FID of our methods and of published systems, and our accuracy by DPImageBench's classifiers."""
    names, columns = {**DATA, "celeba": EVERY["celeba"]}, (1.0, 10.0)
    rows, body = field_rows(), []
    for method, job in sorted({(row["method"], row["job"]) for row in rows}):
        line, deep = [], []
        for data in names:
            query = {"method": method, "job": job, "data": data}

            def at(epsilon: float, measure: str, query: Query = query) -> str:
                return summary(values(rows, measure, epsilon=epsilon, **query))

            line.append(joined(at(epsilon, "fid") for epsilon in columns))
            both = [(at(epsilon, "dpimagebench_best"), at(epsilon, "dpimagebench")) for epsilon in columns]
            deep.append(joined(f"{best}, mean {mean}" if best else "" for best, mean in both))
        body.append([f"`{method}`" if job == "default" else f"`{method}`, {job}", *line, "; ".join(deep[:3])])
    for system in systems():
        figures = [system.get("fid", {}).get(data, {}) for data in names]
        if any(figures):
            line = [joined(f"{each[key]:g}" if key in each else "" for key in ("1", "10")) for each in figures]
            title = f"{system['system']}, published{' ²' if system['public_data'] else ''}"
            body.append([title, *line, "–"])
    header = ["", *(f"FID, {title}" for title in names.values()), "deep classifiers: MNIST; Fashion-MNIST; CIFAR-10"]
    note = (
        "ε = 1 / 10. FID: 2015 Inception, all synthetic against all training images; published ones under their own "
        "protocols. Deep classifiers: best and mean of DPImageBench's three networks. `python -m benchmarks NAME` with "
        "`field`, `priors`, `private-evolution` or `dp-mepf`."
    )
    return f"{markdown(header, body)}\n\n{wrapped(note)}"


def faces_and_scans() -> str:
    rows = {}
    for name, title in {**FACES, **SCANS}.items():
        job = {"job": "256 pixels"} if "256" in name else {}
        rows |= {f"{title}: {title_of(m)}": {**main_query(m), "data": name, **job} for m in METHODS}
    return grid("", rows, by_epsilon())


WITHOUT_NOISE = by_epsilon((*EPSILONS, "inf"))
STOPPING = {"nearest to the release": "fd_nearest", "last": "fd_last", "best of ten (not private)": "fd_best"}
SAMPLERS = ("hamiltonian", "hamiltonian, half steps", "rayleigh momenta", "uniform momenta", "langevin", "ode")
SAMPLED = {"accuracy": "small_cnn", "of the requested class": "agreement", "images per second": "images_per_s"}
VARIANTS = ("default", "one generator per class", "pixels only", "scattering only", "one path")
VARIANTS += ("frequencies of whole images", "residual generator", "generator of the paper", "as published")
BASELINES: dict[str, Query] = {
    "`dpmix`, ε = 1": {"method": "dpmix", "job": "default"},
    "`dm`, no guarantee": {"method": "dm", "job": "default"},
    "NDPDC, settings of the paper (ε 5.0 to 6.2)": {"method": "ndpdc", "job": "settings of the paper"},
    "LDPDC, settings of the paper (ε 0.5 to 0.9)": {"method": "ldpdc", "job": "settings of the paper"},
}
ANCHORS: dict[str, Query] = {
    f"{title}, {what}": {"data": name, "job": job}
    for name, title in DATA.items()
    for what, job in (("real images", "real images"), ("`dp-merf`, ε = 1", "default"))
}
FREE = crossed(
    by_data({"cifar10": "CIFAR-10", "digits": "digits"}), by_measure({"loss": "loss", "accuracy": "convnet"})
)
FREE_NOTE = "Matching loss: mean ± sd of 20 random networks. Accuracy in % of a ConvNet."
ENCODERS = crossed(by_job("default", "resnet18 encoder"), by_epsilon((1.0, 10.0)))


def remeasured() -> str:
    """Return the figures of one fit after the last large change of the code, beside those of the tables."""
    lines = ["| method | data | classifier | table | one fit, remeasured |", "|---|---|---|---|---|"]
    for row in table("remeasured")["rows"]:
        name = "dpdc" if row["method"] == "ndpdc" else row["method"]
        for measure, value in row["measured"].items():
            query = {"table": name, "job": "default", "measure": measure, "epsilon": 1.0, "data": row["data"]}
            known = cell({**query, "method": row["method"]})
            if known:
                label = CLASSIFIERS.get(measure, measure)
                lines.append(f"| `{row['method']}` | {EVERY[row['data']]} | {label} | {known} | {value:.1f} |")
    return "\n".join([f"Accuracy in % at ε = 1. {CAPTION}", "", *lines])


LAYOUTS: dict[str, Callable[[], str]] = {
    **audit_layouts.LAYOUTS,
    "remeasured": remeasured,
    "readme": readme,
    "atelier": atelier,
    "atelier-parts": atelier_parts,
    "atelier-fidelity": partial(
        simple,
        "Fréchet distance in EfficientNet-Lite0 features.",
        by_data(EVERY),
        by_epsilon() | {f"ε = {e:g}, no variety": {"epsilon": e, "sample": "no variety"} for e in EPSILONS},
        table="atelier",
        job="default",
        measure=DISTANCE,
    ),
    "dp-kernel": partial(
        simple, CNN, by_epsilon(job="default"), by_data(EVERY), table="dp-kernel", measure="small_cnn"
    ),
    "dp-kernel-variants": partial(
        simple, CNN, by_job(*VARIANTS, epsilon=1.0), by_data(), corner="ε = 1", table="dp-kernel", measure="small_cnn"
    ),
    "dp-lflow": dp_lflow,
    "dp-lflow-parts": partial(
        simple,
        f"{CNN} After the slash: average AUROC of codes.",
        by_job("default", "warm start alone", "no warm start", "one conditional model"),
        crossed(by_data(), by_epsilon()),
        table="dp-lflow",
        measure=("small_cnn", "auroc"),
    ),
    "dp-mepf": partial(
        simple,
        "Accuracy in % of logistic regression / MLP / small CNN.",
        by_data(EVERY, job="default") | {"CIFAR-10, ResNet-18 encoder": {"data": "cifar10", "job": "resnet18 encoder"}},
        WITHOUT_NOISE,
        table="dp-mepf",
        measure=("logistic", "mlp", "small_cnn"),
    ),
    "dp-mepf-classifiers": partial(
        simple,
        "Accuracy in % on CIFAR-10.",
        ENCODERS,
        by_measure((*CONVOLUTIONAL, "resnet9", "resnet9, annealed")),
        table="dp-mepf",
        data="cifar10",
    ),
    "dp-mepf-stopping": partial(
        simple,
        "Fréchet distance in EfficientNet-Lite0 features, 5,000 images.",
        crossed(by_data(EVERY), by_epsilon()),
        by_measure(STOPPING),
        corner="snapshot",
        table="dp-mepf",
        job="early stopping",
    ),
    "dp-merf": partial(simple, CNN, by_data(job="default"), WITHOUT_NOISE, table="dp-merf", measure="small_cnn"),
    "dpdc": partial(
        dpdc,
        by_epsilon((0.2, 1.0, 2.0, 10.0)),
        "Accuracy in % of a ConvNet trained on 50 images per class: 1,000 epochs at ε = 1, 300 elsewhere.",
        measure="convnet",
    ),
    "dpdc-baselines": partial(
        simple, "Accuracy in % of a ConvNet, 300 epochs.", by_data(EVERY), BASELINES, table="dpdc", measure="convnet"
    ),
    "dpdc-classifiers": partial(
        dpdc,
        by_measure(("mlp", "lenet", "alexnet", "vgg11", "resnet18")),
        "Accuracy in % at ε = 1, 300 epochs.",
        epsilon=1.0,
    ),
    "evaluation": partial(
        simple,
        "Accuracy in %; Fréchet distance, precision and recall in EfficientNet-Lite0 features, 10,000 images.",
        by_measure(("logistic", "mlp", *CONVOLUTIONAL))
        | {"Fréchet distance": {"measure": DISTANCE}, "precision / recall": {"measure": (PRECISION, RECALL)}},
        ANCHORS,
        table="evaluation",
    ),
    "dpdc-kept": dpdc_kept,
    "dp-mepf-encoders": dp_mepf_encoders,
    "peers": peers,
    "persons": persons,
    "photographs": photographs,
    "priors": priors,
    "priors-earlier": partial(priors, earlier=True),
    "private-evolution": private_evolution,
    "pge": pge,
    "pge-samplers": partial(
        simple,
        "One network, MNIST, ε = 10, 10,000 images of each sampler; accuracies in %.",
        {name: {"sample": name} for name in SAMPLERS},
        by_measure(SAMPLED),
        corner="sampler",
        table="pge",
        job="samplers",
    ),
    "privacy-for-free": partial(
        simple,
        FREE_NOTE,
        by_job("initial noise", "Eq. 8", "Eq. 8, clamped", "dm", "real images"),
        FREE,
        table="privacy-for-free",
    ),
    "results-cifar10": partial(results, "cifar10"),
    "results-faces-and-scans": faces_and_scans,
    "results-fid": field_fid,
    "results-fashion-mnist": partial(results, "fashion-mnist"),
    "results-mnist": partial(results, "mnist"),
    "cluster": cluster,
    "speed-gradients": speed_gradients,
    "speed-methods": speed_methods,
    "speed-parts": speed_parts,
    "speed-versions": speed_versions,
    "without-gpu": without_gpu,
}
