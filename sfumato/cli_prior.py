"""The commands `sfumato prior list` and `sfumato prior train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from sfumato.cli_options import Classes, Cluster, Device, Json, OnError, Unlabelled, Workers, read_images

STORE_BYTES = 1 << 30  # object store of a local cluster: weights, and a gradient from each worker
STEPS, BATCH_SIZE, WIDTH, LEVELS = 20_000, 256, 128, 4  # of `PriorTraining`, which is not imported for a usage error
prior_app = typer.Typer(help="List priors, or train one on public images.", no_args_is_help=True)


@prior_app.command("list")
def prior_list(as_json: Json = False) -> None:
    """List the priors that are part of the package."""
    from sfumato import console
    from sfumato.priors import list_priors

    cards = list_priors()
    if as_json:
        return console.print_json([vars(card) for card in cards])
    table = Table(Column("name", no_wrap=True), "pixels", "trained on", "licence", box=None, pad_edge=False)
    for card in cards:
        table.add_row(card.name, str(card.size), escape(card.trained_on), escape(card.licence))
    console.out.print(table)


@prior_app.command(
    "train",
    epilog="Example: sfumato prior train public-scans/ --size 64 --mode grey --out my-prior/ ; "
    "then: sfumato synth scans/ --size 64 --mode grey --prior my-prior/ --out shared/",
)
def prior_train(
    data: Annotated[str, typer.Argument(help="Public images: a folder, file or named data set, as for fit.")],
    target: Annotated[Path, typer.Option("--out", "-o", help="Write the prior to this new folder.")],
    size: Annotated[
        int, typer.Option(help="Resize images to this many pixels, 16 to 64; with an autoencoder 64 to 256.")
    ],
    mode: Annotated[str, typer.Option(help="Convert images to grey or rgb.")] = "rgb",
    name: Annotated[str | None, typer.Option(help="Name the prior.", show_default="name of the folder")] = None,
    trained_on: Annotated[
        str | None,
        typer.Option(help="Describe the images for certificates.", show_default="name of the source and image count"),
    ] = None,
    licence: Annotated[str, typer.Option(help="State the licence of the weights.")] = "not stated",
    encoder: Annotated[
        str,
        typer.Option(
            help="Name the public encoder on whose embedding the prior is conditioned.",
            show_default="scattering coefficients",
        ),
    ] = "",
    autoencoder: Annotated[
        str,
        typer.Option(
            help="Learn the maps of this public autoencoder, taef2, for images above 64 pixels.", show_default="none"
        ),
    ] = "",
    start: Annotated[
        str | None,
        typer.Option(
            help="Continue the training of this prior, by name or path, with its encoder.", show_default="none"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Train for this many steps.")] = STEPS,
    batch_size: Annotated[int, typer.Option(min=1, help="Use this many images in a step.")] = BATCH_SIZE,
    width: Annotated[
        int, typer.Option(min=8, help="Set the channels of the network at full resolution, a multiple of 8.")
    ] = WIDTH,
    flip: Annotated[bool, typer.Option("--flip", help="Mirror images at random; not for text.")] = False,
    unlabelled: Unlabelled = False,
    classes: Classes = None,
    on_error: OnError = "raise",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted training in the same folder.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Set the seed of weights, order and noise.")] = 0,
    device: Device = "auto",
    cluster: Cluster = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Train a prior on public images. Certificates will state what it was trained on."""
    if width % 8:
        raise typer.BadParameter(f"--width must be a multiple of 8, got {width}")
    from sfumato import console, priors
    from sfumato.cluster import connect
    from sfumato.methods.parameters import chosen_device
    from sfumato.priors.denoising import PICTURE, PriorTraining

    began = priors.load_prior(start) if start else None
    shape: dict[str, Any] = {"widths": (width, *[2 * width] * (LEVELS - 1))}
    if began is not None:
        card, encoder, autoencoder = began.card, encoder or began.card.encoder, autoencoder or began.card.autoencoder
        shape = {"widths": tuple(card.widths), "context": card.context, "attention": card.attention}
    images = read_images(data, size=size, mode=mode, unlabelled=unlabelled, classes=classes, on_error=on_error)
    settings = PriorTraining(steps=steps, batch_size=batch_size, flip=flip, **shape)
    executor = None if cluster is None else connect(cluster, workers=workers, store=STORE_BYTES)
    try:
        prior = priors.train_prior(
            images,
            target,
            name=name or target.resolve().name,
            trained_on=trained_on or f"{Path(data).resolve().name}, {len(images):,} images",
            licence=licence,
            encoder=encoder,
            autoencoder=autoencoder,
            start=began,
            settings=settings,
            resume=resume,
            seed=seed,
            device=chosen_device(device),
            workers=executor,
        )
    except KeyboardInterrupt:
        console.err.print("interrupted; continue with the same command and --resume")
        raise typer.Exit(130) from None
    finally:
        if executor is not None:
            executor.close()
    loss = prior.card.notes["held_out_loss"]
    if as_json:
        return console.print_json({"prior": str(target), "sha256": prior.sha256, "held_out_loss": loss})
    console.out.print(
        f"prior: {escape(str(target))} (held-out loss {loss})\nsamples: {escape(str(target / PICTURE))}", soft_wrap=True
    )
