"""The commands `sfumato evaluate` and `sfumato ood`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from sfumato.cli_options import (
    AfterFit,
    Classes,
    Cluster,
    Device,
    Json,
    OnError,
    Seed,
    Split,
    Unlabelled,
    Workers,
    parse_assignments,
    read_images,
    read_like,
    read_synthetic,
    size_and_mode,
    with_default,
)

NO_NETWORK = ". Or pass --network none, to measure utility only"


def evaluate(
    sets: Annotated[list[str], typer.Argument(help="Synthetic sets: folders that synth wrote, or any image sets.")],
    test: Annotated[str, typer.Option(help="Compare with these real images. This declares them public.")],
    train: Annotated[
        str | None,
        typer.Option(
            help="Find nearest neighbours among these private images. Results go to the folder private/ only."
        ),
    ] = None,
    profile: Annotated[str, typer.Option(help="Choose the profile: quick, full or condensed.")] = "quick",
    reference: Annotated[
        str | None, typer.Option(help="Measure these public real images, too, for comparison.")
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            help=with_default(
                "Choose a feature network for fidelity: effnet_lite0, inception (FID) or none; repeatable.",
                "effnet_lite0",
            ),
        ),
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write all results to this JSON file, and a preview of each set.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Crop and resize the synthetic images to this many pixels.")] = None,
    mode: Annotated[str | None, typer.Option(help="Convert the synthetic images to grey or rgb.")] = None,
    unlabelled: Unlabelled = False,
    classes: Classes = None,
    device: Device = "auto",
    cluster: Cluster = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Measure utility and fidelity of synthetic sets against public test images."""
    networks = [] if network == ["none"] else network or ["effnet_lite0"]
    if "none" in networks:
        raise typer.BadParameter("none leaves out fidelity; give no other network with it", param_hint="--network")
    from sfumato import console
    from sfumato.data import DataError, contact_sheet
    from sfumato.data.atomic import write_json
    from sfumato.evaluate import compare, measure_private
    from sfumato.methods.parameters import usable_device
    from sfumato.synthesize import check_disjoint, check_sources

    computing = usable_device(device)
    if train is not None:
        check_sources(train, "train", test)
    options = {"size": size, "mode": mode, "unlabelled": unlabelled, "classes": classes}
    loaded = {name: read_synthetic(name, **options) for name in sets}
    first = next(iter(loaded.values()))
    held_out = read_like(test, first, "test")
    private = None if train is None else read_like(train, first, "train")
    if reference is not None:
        loaded[f"{reference} (real)"] = read_like(reference, first, "train")
    if private is not None:
        for public in (held_out, *list(loaded.values())[len(sets) :]):
            check_disjoint(private, public)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            settings: dict[str, Any] = {"test": held_out, "profile": profile, "network": networks, "device": computing}
            found = compare(loaded, **settings) if cluster is None else _on_cluster(loaded, settings, cluster, workers)
        except DataError as error:
            hint = "" if not networks or "pip install" not in str(error) else NO_NETWORK
            raise DataError(f"{error}{hint}") from error
        if private is not None:
            measure_private(first, private, (target.parent if target is not None else Path()) / "private")
    console.print_warnings(caught)
    if target is not None:
        write_json(target, found)
        for number, images in enumerate(loaded.values(), 1):
            contact_sheet(images, target.with_name(f"{target.stem}_{number}.png"))
    console.print_json(found) if as_json else console.print_comparison(found)


def _on_cluster(
    sets: dict[str, Any], settings: dict[str, Any], cluster: str, workers: int | None
) -> dict[str, dict[str, Any]]:
    """Evaluate each set on a worker of a cluster."""
    from functools import partial

    from sfumato.cluster import connect

    executor = connect(cluster, **({} if workers is None else {"workers": workers}))
    try:
        calls = [({name: images},) for name, images in sets.items()]
        parts = list(executor.compute(partial(_compare, **settings), calls))
    finally:
        executor.close()
    for message in {str(message): message for _, messages in parts for message in messages}.values():
        warnings.warn(message, stacklevel=2)
    return {name: result for found, _ in parts for name, result in found.items()}


def _compare(sets: dict[str, Any], **settings: Any) -> tuple[dict[str, dict[str, Any]], list[Warning | str]]:
    """Return the results of `compare` and its warnings, which a worker does not show."""
    from sfumato.evaluate import compare

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        return compare(sets, **settings), [each.message for each in caught if issubclass(each.category, UserWarning)]


def ood(
    run: Annotated[Path, typer.Argument(help="Folder that fit or synth wrote, with a method that scores (dp-lflow).")],
    data: Annotated[str, typer.Argument(help="Images to score. They are resized to the shape of the model.")],
    label: Annotated[
        str | None, typer.Option(help="Score as images of this class.", show_default="mixture of all classes")
    ] = None,
    inliers: Annotated[
        list[str] | None,
        typer.Option(
            help="Declare a class of the images as inliers; repeatable. All other classes are outliers.",
            show_default="class of --label, if the images have it",
        ),
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="Test each class of the model against all others, and print the average.")
    ] = False,
    false_alarms: Annotated[
        float, typer.Option(help="Set the threshold so that this share of synthetic images lies below it.")
    ] = 0.05,
    samples: Annotated[int, typer.Option(min=20, help="Draw this many synthetic images for the threshold.")] = 2000,
    target: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write scores.json, scores.png and least_likely.png to this folder."),
    ] = None,
    params: AfterFit = None,
    split: Split = "test",
    unlabelled: Unlabelled = False,
    on_error: OnError = "raise",
    classes: Classes = None,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Detect images that differ from the training images, by their log-likelihood.

    The threshold comes from synthetic images, so the certificate of the model covers it.
    Scores describe the scored images: protect them if these images are private.
    """
    from sfumato import console
    from sfumato.evaluate import detect, detect_each, write_detections
    from sfumato.methods.registry import load

    if each and (label or inliers):
        raise typer.BadParameter("--each tests all classes; leave out --label and --inliers")
    model = load(run, device=device)
    size, mode = size_and_mode(model.public_.shape)
    images = read_images(
        data, size=size, mode=mode, split=split, unlabelled=unlabelled, classes=classes, on_error=on_error
    )
    options = {"false_alarms": false_alarms, "samples": samples, "seed": seed, **parse_assignments(params)}
    if each:
        found = detect_each(model, images, **options)
    else:
        found = {label or "all classes": detect(model, images, label=label, inliers=inliers or (), **options)}
    if target is not None:
        write_detections(images, found, target)
    if as_json:
        return console.print_json({name: detection.to_dict() for name, detection in found.items()})
    console.print_detections(found, false_alarms)
    if target is not None:
        console.out.print(f"scores, histograms and least likely images: {escape(str(target))}")
