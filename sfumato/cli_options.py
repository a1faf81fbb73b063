"""Options that commands share, the values that they parse to, warnings before a fit, and the handling of Ctrl-C.

This module and those of the commands import PyTorch only inside functions, so a usage error is printed at once.
"""

from __future__ import annotations

import ast
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.markup import escape
from typer.models import ArgumentInfo, OptionInfo

if TYPE_CHECKING:
    from sfumato.cluster import ShardedImages
    from sfumato.data import ImageSet
    from sfumato.methods.base import Synthesizer
    from sfumato.methods.registry import Choice

IMAGES = "Images"
METHOD = "Method and privacy"
RUN = "Run and certificate"
CLUSTER = "Shards and cluster"


def with_default(text: str, default: str) -> str:
    """Return a help text with a default value that Typer does not know, because the option's own default is None."""
    return rf"{text} [dim]\[default: {default}][/dim]"


Split = Annotated[
    str, typer.Option(help="Read the train or test split, if the source has both.", rich_help_panel=IMAGES)
]
Unlabelled = Annotated[
    bool, typer.Option("--unlabelled", help="Read the images without labels.", rich_help_panel=IMAGES)
]
Classes = Annotated[
    str | None,
    typer.Option(
        help="Declare the class names (separated by commas) or their number, if the source does not name its classes.",
        rich_help_panel=IMAGES,
    ),
]
OnError = Annotated[
    str, typer.Option(help="Stop at unreadable files (raise), or leave them out (skip).", rich_help_panel=IMAGES)
]
Delta = Annotated[float, typer.Option(help="Set delta. Choose it far below 1 / number of images.")]
AdjacencyOption = Annotated[
    str, typer.Option("--adjacency", help="Set the neighbouring relation: add-remove or replace-one.")
]
Count = Annotated[
    int | None,
    typer.Option("--number", "-n", min=1, help=with_default("Set the number of synthetic images.", "10,000")),
]
Seed = Annotated[int, typer.Option(help="Set the seed of the samples.")]
Device = Annotated[str, typer.Option(help="Compute on this device: auto, cpu or cuda.")]
Sign = Annotated[
    Path | None,
    typer.Option("--sign", help="Sign the certificate with this private key (sfumato key new).", rich_help_panel=RUN),
]
DatasetBudgetFile = Annotated[
    Path | None,
    typer.Option(
        "--budget",
        help="Charge the run to this budget of the data set (sfumato budget open); plan only checks that it fits.",
        rich_help_panel=RUN,
    ),
]
AfterFit = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set a parameter that may change after fit, NAME=VALUE; repeatable."),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        help="Compute on a Ray cluster: local, ray://HOST:10001, or auto.",
        show_default="this process",
        rich_help_panel=CLUSTER,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Start this many workers.", show_default="GPUs, or cores", rich_help_panel=CLUSTER),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class DataOptions:
    """Options that select and read the private images."""

    data: Annotated[
        str,
        typer.Argument(
            help="Folder, .npz, .parquet, .tar, IDX or CIFAR files, or a named data set (sfumato data list)."
        ),
    ]
    size: Annotated[
        int | None,
        typer.Option(help="Crop images to a square and resize them to this many pixels.", rich_help_panel=IMAGES),
    ] = None
    mode: Annotated[
        str | None,
        typer.Option(help="Convert images to grey or rgb.", show_default="mode of the images", rich_help_panel=IMAGES),
    ] = None
    split: Split = "train"
    unlabelled: Unlabelled = False
    classes: Classes = None
    on_error: OnError = "raise"
    person: Annotated[
        str | None,
        typer.Option(
            help="Protect persons instead of single images. Read the person of an image from this column, or from its "
            "file: folder, folder:K, regex:(…), file or dicom:PatientID.",
            rich_help_panel=IMAGES,
        ),
    ] = None
    max_per_person: Annotated[
        int, typer.Option(min=1, help="Use at most this many images of a person.", rich_help_panel=IMAGES)
    ] = 1000
    label_column: Annotated[
        str | None,
        typer.Option(
            help="Read labels from this column (or several: a,b), or from the file: folder:K, regex:(…) or "
            "dicom:KEYWORD.",
            show_default="label, or the class folders",
            rich_help_panel=IMAGES,
        ),
    ] = None
    several: Annotated[
        str,
        typer.Option(
            help="Treat several labels per image (a|b) as one class (combine), or take the first of --classes that the "
            "image has (first).",
            rich_help_panel=IMAGES,
        ),
    ] = "combine"
    frames: Annotated[
        str | None,
        typer.Option(
            help="Read the first, middle or all images of TIFF, DICOM and NIfTI files that hold several.",
            show_default="refuse such files",
            rich_help_panel=IMAGES,
        ),
    ] = None
    value_range: Annotated[
        str | None,
        typer.Option(
            "--range",
            metavar="LOW,HIGH",
            help="Declare which values become black and white in images of more than 8 bits.",
            show_default="full range, or the window in the file",
            rich_help_panel=IMAGES,
        ),
    ] = None

    def load(self) -> ImageSet:
        """Read the images."""
        return read_images(self.data, **self.reading())

    def outline(self) -> ImageSet:
        """Read everything but the pixels, which are blank. At most one image is decoded."""
        from sfumato.console import print_warnings
        from sfumato.data import DataWarning, read_outline

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DataWarning)
            images = read_outline(self.data, **load_options(**self.reading()))
        print_warnings(caught)
        return images

    def channels(self) -> int:
        """Return the number of channels of the images: as declared by the mode, or of the first image."""
        known = {"grey": 1, "rgb": 3}
        return known[self.mode] if self.mode in known else self.outline().shape[0]

    def reading(self) -> dict[str, Any]:
        """Return the options by their names, without the data."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:] if field.name != "max_per_person"}


@dataclass(frozen=True)
class MethodOptions:
    """Options that choose a method and its parameters. None keeps the default of the method."""

    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-m",
            help="Choose a method (sfumato methods). auto chooses one for these images and this machine.",
            rich_help_panel=METHOD,
        ),
    ] = "auto"
    prior: Annotated[
        str | None,
        typer.Option(
            help="Start from a model of public images (sfumato prior list), or from the folder of sfumato prior train.",
            show_default="none",
            rich_help_panel=METHOD,
        ),
    ] = None
    epsilon: Annotated[
        float | None,
        typer.Option(
            "--epsilon",
            "-e",
            help=with_default("Set epsilon; a smaller one is more private. inf adds no noise.", "1.0"),
            rich_help_panel=METHOD,
        ),
    ] = None
    delta: Annotated[
        float | None,
        typer.Option(
            help=with_default("Set delta. Choose it far below 1 / number of images.", "1e-5"), rich_help_panel=METHOD
        ),
    ] = None
    adjacency: Annotated[
        str | None,
        typer.Option(
            help=with_default("Set the neighbouring relation: add-remove or replace-one.", "add-remove"),
            rich_help_panel=METHOD,
        ),
    ] = None
    params: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set a parameter of the method, NAME=VALUE; repeatable.", rich_help_panel=METHOD),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            help=with_default("Set the seed of initial weights and samples. It never affects the privacy noise.", "0"),
            rich_help_panel=METHOD,
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(help=with_default("Compute on this device: auto, cpu or cuda.", "auto"), rich_help_panel=METHOD),
    ] = None

    def choice(self, source: DataOptions) -> Choice | None:
        """Return what auto chooses for these images, and why; None if a method was given."""
        from sfumato.methods.registry import DEFAULT, choose

        if self.method != DEFAULT:
            return None
        given = parse_assignments(self.params)
        device, prior = self.device or given.get("device", "auto"), self.prior or given.get("prior", "")
        first = choose(device, prior=prior)
        other = choose(device, prior=prior, channels=3)
        return first if first == other else choose(device, channels=source.channels())  # reads only if it matters

    def create_for(self, source: DataOptions) -> Synthesizer:
        """Create the method for these images, and say what auto chose."""
        from sfumato import console

        choice = self.choice(source)
        if choice is None:
            return self.create()
        console.err.print(f"method: {choice.method} ({escape(choice.reason)})", soft_wrap=True)
        return replace(self, method=choice.method).create()

    def create(self, channels: int | None = None) -> Synthesizer:
        """Create the method with the parameters that were given; `channels` of the images, if known, are for auto."""
        from sfumato.methods.registry import create

        names = ("prior", "epsilon", "delta", "adjacency", "seed", "device")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        params = parse_assignments(self.params)
        if twice := sorted(given.keys() & params.keys()):
            raise typer.BadParameter(f"--{twice[0]} and --set {twice[0]}=… were both given; pass only one of them")
        return create(self.method, channels=channels, **given, **params)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that spends privacy budget. The names are those of the arguments of `Synthesizer.fit`."""

    budget: DatasetBudgetFile = None
    sign: Sign = None
    issuer: Annotated[str | None, typer.Option(help="State the issuer in the certificate.", rich_help_panel=RUN)] = None
    subject: Annotated[
        str | None, typer.Option(help="State in the certificate which data it is about.", rich_help_panel=RUN)
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run in the same folder.", rich_help_panel=RUN)
    ] = False


@dataclass(frozen=True)
class ClusterOptions:
    """Options for images that are not loaded whole, and for a cluster."""

    stream: Annotated[
        bool,
        typer.Option("--stream", help="Read shards one by one, never all images at once.", rich_help_panel=CLUSTER),
    ] = False
    cluster: Cluster = None  # implies `stream`
    workers: Workers = None
    manifest: Annotated[
        Path | None,
        typer.Option(
            help="Check the shards against this file of hashes; write it if it does not exist. Implies --stream.",
            rich_help_panel=CLUSTER,
        ),
    ] = None

    @contextmanager
    def reading(self, source: DataOptions, target: Path) -> Iterator[ImageSet | ShardedImages]:
        """Read the images for a run in `target`, all of them or shard by shard; delete what was decoded at the end."""
        if not (self.stream or self.cluster or self.manifest):
            yield source.load()
            return
        from sfumato.cluster import check_apart, connect, open_shards
        from sfumato.console import print_warnings
        from sfumato.data import DataWarning
        from sfumato.progress import bar

        check_apart(self.manifest, target)
        with bar("reading shards") as advance, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DataWarning)
            where = connect(self.cluster, **({} if self.workers is None else {"workers": self.workers}))
            options = load_options(**source.reading())
            images = open_shards(source.data, cluster=where, manifest=self.manifest, **options, progress=advance)
        print_warnings(caught)
        with images:
            yield images


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter of a command by its fields, so that Typer sees them as options."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            parameters += _field_parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _field_parameters(group: type) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def to_arguments(options: DataOptions | MethodOptions | RunOptions) -> list[str]:
    """Return the command line arguments that give these options: `--name=value`, so that no value is taken as a name.

    The argument (the data) comes last, after `--`.
    """
    hints = get_type_hints(type(options), include_extras=True)
    found: list[str] = []
    last: list[str] = []
    for field in fields(options):
        value = getattr(options, field.name)
        info = next(each for each in hints[field.name].__metadata__ if isinstance(each, OptionInfo | ArgumentInfo))
        given = (info.default, *(info.param_decls or ()))  # Typer keeps the first name as the default
        names = [text for text in given if isinstance(text, str) and text.startswith("--")]
        name = names[0] if names else f"--{field.name.replace('_', '-')}"
        if isinstance(info, ArgumentInfo):
            last += ["--", str(value)]
        elif value is True:
            found.append(name)
        elif value is not None and value != field.default:
            found += [f"{name}={part}" for part in (value if isinstance(value, list) else [value])]
    return [*found, *last]


def parse_assignments(texts: list[str] | None) -> dict[str, Any]:
    """Parse the values of --set: Python literals, true, false, or text."""
    return dict(_parse_assignment(text) for text in texts or [])


def _parse_assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"--set takes NAME=VALUE, got {text!r}")
    if value in ("true", "false"):
        return name, value == "true"
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def parse_classes(text: str) -> int | list[str]:
    """Parse the value of --classes: a number, or names separated by commas."""
    return int(text) if text.isdecimal() else [name.strip() for name in text.split(",")]


def parse_range(text: str) -> tuple[float, float]:
    """Parse the value of --range: two numbers separated by a comma."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--range takes LOW,HIGH, got {text!r}") from None
    return low, high


def load_options(
    *,
    unlabelled: bool = False,
    classes: str | Sequence[str] | None = None,
    several: str = "combine",
    value_range: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments of `load_images` for options of the command line."""
    return {
        **options,
        "labels": not unlabelled,
        "classes": parse_classes(classes) if isinstance(classes, str) else classes,
        "several_labels": several,
        "value_range": None if value_range is None else parse_range(value_range),
    }


def read_images(source: str, **options: Any) -> ImageSet:
    """Read images with a progress bar, and print warnings. See `load_options` and `load_images` for the options."""
    from sfumato.console import print_warnings
    from sfumato.data import DataWarning, load_images
    from sfumato.progress import bar

    with bar("reading images") as advance, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        images = load_images(source, **load_options(**options), progress=advance)
    print_warnings(caught)
    return images


def read_like(source: str, images: ImageSet | ShardedImages, split: str, on_error: str = "raise") -> ImageSet:
    """Read images with the shape and the classes of other images."""
    size, mode = size_and_mode(images.shape)
    classes = images.classes if images.labelled else None
    unlabelled = not images.labelled
    return read_images(
        source, size=size, mode=mode, split=split, unlabelled=unlabelled, classes=classes, on_error=on_error
    )


def read_synthetic(source: str, **options: Any) -> ImageSet:
    """Read a synthetic set. In a folder that `synth` wrote, read images.npz."""
    archive = Path(source) / "images.npz"
    return read_images(str(archive) if archive.exists() else source, **options)


def size_and_mode(shape: tuple[int, int, int]) -> tuple[int | None, str]:
    """Return the size and mode that give images of this shape. Only square images are resized."""
    return (shape[1] if shape[1] == shape[2] else None), ("grey" if shape[0] == 1 else "rgb")


def check_before_fit(model: Synthesizer, images: ImageSet | ShardedImages, run: RunOptions) -> None:
    """Print warnings about weak settings, and refuse a run that the budget of the data set does not allow."""
    from sfumato import console
    from sfumato.advice import advice
    from sfumato.synthesize import check_budget

    outline: ImageSet = getattr(images, "outline", images)  # type: ignore[arg-type]
    console.print_warnings([text for kind in advice(model, outline) for text in kind])
    if not run.resume:  # a resumed run is already charged
        check_budget(model, model.public_facts(images), run.budget)


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Handle Ctrl-C: print how to continue the run, exit with status 130. Remove a folder that stayed empty."""
    from sfumato import console
    from sfumato.methods.checkpoints import started
    from sfumato.progress import show_spending

    try:
        if not started(folder):
            show_spending(lambda: "nothing spent yet")
        yield
    except KeyboardInterrupt:
        if started(folder):
            name, *rest = [part for part in sys.argv[1:] if part != "--resume"]
            command = shlex.join(["sfumato", name, "--resume", *rest])  # what follows -- is no option
            message = f"interrupted; the privacy budget that was charged stays charged. Continue with:\n  {command}"
        else:
            message = "interrupted; no privacy budget was spent"
        console.err.print(escape(message), soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        if not started(folder):
            _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that never started."""
    if folder.is_dir():
        for name in ("ledger.jsonl", "ledger.lock"):
            if (folder / name).is_file():
                (folder / name).unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
