"""Procedural colour images for the prior `random-process`: nobody's data, so there is nothing to declare.

Four processes, after "Learning to See by Looking at Noise" (Baradad et al., NeurIPS 2021):

- `objects`: few large shapes with texture and shading in front of a background, often mirror-symmetric;
- `leaves`: the dead-leaves model, many overlapping shapes whose radii follow a power law;
- `spectrum`: noise with a power-law spectrum and a preferred orientation;
- `network`: images of an untrained, randomly initialised convolutional generator with oriented filters.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from sfumato.data import ImageSet
from sfumato.data.pixels import to_bytes
from sfumato.progress import track

PROCESSES = ("objects", "leaves", "spectrum", "network")
SHARES = (0.4, 0.3, 0.1, 0.2)  # of the processes in a set
FEW_SHAPES, MANY_SHAPES = 6, 30  # at most, in an image of `objects` and of `leaves`
BLOCK = 500  # images drawn at once; those of one untrained network
FILTERS = 32  # channels of the untrained network


def random_process(count: int, size: int, *, seed: int = 0, device: str | torch.device = "cpu") -> ImageSet:
    """Draw procedural colour images of `size` pixels a side, labelled by their process."""
    generator = torch.Generator(device).manual_seed(seed)
    images, labels = [], []
    for number in track(math.ceil(count / BLOCK), "drawing"):
        block = min(BLOCK, count - number * BLOCK)
        shares = torch.tensor(SHARES, device=device)
        label = torch.multinomial(shares, block, replacement=True, generator=generator).sort().values
        sizes = torch.bincount(label, minlength=len(PROCESSES)).tolist()
        drawn = [draw(each, size, generator) for draw, each in zip(_DRAW, sizes, strict=True) if each]
        images.append(to_bytes(_contrast(torch.cat(drawn), generator)).cpu())
        labels.append(label.cpu())
    return ImageSet(torch.cat(images), torch.cat(labels), PROCESSES)


def _objects(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return _shapes(count, size, FEW_SHAPES, (0.15, 0.5), generator)


def _leaves(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return _shapes(count, size, MANY_SHAPES, (0.03, 0.35), generator)


def _shapes(count: int, size: int, most: int, radii: tuple[float, float], generator: torch.Generator) -> torch.Tensor:
    """Draw up to `most` shapes over a background; each has its own colour, texture, shading and outline."""
    field = _spectrum(count, size, generator)
    canvas = _colours(count, generator) + _uniform(count, 0.0, 0.35, generator) * field
    canvas = canvas + _shading(count, size, generator)
    number = torch.randint(1, most + 1, (count, 1, 1, 1), generator=generator, device=generator.device)
    mirrored = _uniform(count, 0, 1, generator) < (0.5 if most == FEW_SHAPES else 0.1)
    for layer in range(most):
        mask = _shape_mask(count, size, radii, generator)
        both = torch.maximum(mask, mask.flip(3))
        mask = torch.where(mirrored, both, mask) * (layer < number)
        shift = int(torch.randint(size, (), generator=generator, device=generator.device))
        texture = field.roll((shift, -shift), (2, 3)) * _uniform(count, -0.5, 0.5, generator)
        leaf = _colours(count, generator) + texture + _shading(count, size, generator)
        canvas = torch.lerp(canvas, leaf, mask)
    return canvas


def _shape_mask(count: int, size: int, radii: tuple[float, float], generator: torch.Generator) -> torch.Tensor:
    """Draw masks [count, 1, size, size]: rotated superellipses with a wavy outline and a soft edge.

    The density of a radius r is proportional to r^-2 between the two radii, in image sides.
    """
    across, down = _grid(size, generator.device)
    low, high = (1 / radius for radius in radii)
    radius = 1 / _uniform(count, high, low, generator)
    x, y = across - _uniform(count, 0.0, 1.0, generator), down - _uniform(count, 0.0, 1.0, generator)
    angle = _uniform(count, 0.0, math.pi, generator)
    u = (x * angle.cos() + y * angle.sin()) / radius
    v = (y * angle.cos() - x * angle.sin()) / (radius * _uniform(count, 0.2, 1.0, generator))
    power = _uniform(count, math.log(1.0), math.log(8.0), generator).exp()
    distance = (u.abs() ** power + v.abs() ** power + 1e-6) ** (1 / power)
    waves = torch.randint(2, 7, (count, 1, 1, 1), generator=generator, device=generator.device)
    phase = _uniform(count, 0.0, 2 * math.pi, generator)
    wavy = torch.atan2(v, u + 1e-6)
    distance = distance * (1 + _uniform(count, -0.3, 0.3, generator) * torch.cos(waves * wavy + phase))
    edge = _uniform(count, 0.5, 1.5, generator) / (size * radius)
    mask: torch.Tensor = torch.sigmoid((1 - distance) / edge * 2)
    return mask


def _spectrum(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Draw colour noise of unit variance whose spectrum falls as a power of the frequency, in one direction faster."""
    device = generator.device
    white = torch.randn(count, 3, size, size, generator=generator, device=device)
    chroma = _uniform(count, 0.0, 0.6, generator)  # channels share most of their brightness
    white = white.mean(1, keepdim=True) * math.sqrt(3) + chroma * (white - white.mean(1, keepdim=True))
    down, across = torch.fft.fftfreq(size, device=device)[:, None], torch.fft.rfftfreq(size, device=device)
    angle, stretch = _uniform(count, 0.0, math.pi, generator), _uniform(count, 1.0, 4.0, generator)
    along = down * angle.cos() + across * angle.sin()
    beside = (across * angle.cos() - down * angle.sin()) * stretch
    frequency = (along.square() + beside.square()).sqrt().clamp_min(1 / size)
    fields = torch.fft.irfft2(
        torch.fft.rfft2(white) * frequency ** -_uniform(count, 0.5, 2.5, generator), s=(size, size)
    )
    fields = fields - fields.mean((1, 2, 3), keepdim=True)
    scaled: torch.Tensor = fields / fields.std((1, 2, 3), keepdim=True).clamp_min(1e-6)
    return scaled


def _plain_spectrum(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return _colours(count, generator) + _uniform(count, 0.1, 0.6, generator) * _spectrum(count, size, generator)


def _network(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Draw images of an untrained generator: upsampling, oriented filters, random styles of each image, leaky ReLU."""
    device = generator.device
    maps = torch.randn(count, FILTERS, 4, 4, generator=generator, device=device)
    while maps.shape[2] < size:
        maps = functional.interpolate(maps, scale_factor=2, mode="bilinear")
        filters = _oriented_filters(generator)
        mixing = torch.randn(FILTERS, FILTERS, 1, 1, generator=generator, device=device) / math.sqrt(FILTERS)
        padded = functional.pad(functional.conv2d(maps, mixing), (2, 2, 2, 2), mode="reflect")
        maps = functional.conv2d(padded, filters, groups=FILTERS)
        style = torch.randn(count, FILTERS, 1, 1, generator=generator, device=device)
        noise = torch.randn(count, 1, *maps.shape[2:], generator=generator, device=device)
        maps = functional.leaky_relu(functional.instance_norm(maps) * (1 + 0.7 * style) + 0.1 * noise + style / 2, 0.2)
    colour = torch.randn(3, FILTERS, 1, 1, generator=generator, device=device) / math.sqrt(FILTERS)
    images = functional.conv2d(functional.interpolate(maps, (size, size), mode="bilinear"), colour)
    coloured: torch.Tensor = 0.5 * images + _colours(count, generator) / 2
    return coloured


def _oriented_filters(generator: torch.Generator) -> torch.Tensor:
    """Draw one 5 × 5 filter for each channel: a Gabor function of random orientation, frequency and phase."""
    device = generator.device
    axis = torch.arange(-2.0, 3.0, device=device)
    angle, phase = (2 * math.pi * torch.rand(FILTERS, 1, 1, generator=generator, device=device) for _ in range(2))
    frequency = math.pi * torch.rand(FILTERS, 1, 1, generator=generator, device=device)
    wave = torch.cos(frequency * (axis[:, None] * angle.cos() + axis * angle.sin()) + phase)
    filters = wave * torch.exp(-(axis[:, None].square() + axis.square()) / 4)
    scaled: torch.Tensor = filters / filters.flatten(1).norm(dim=1)[:, None, None].clamp_min(0.1)
    return scaled[:, None]


_DRAW = (_objects, _leaves, _plain_spectrum, _network)  # in the order of `PROCESSES`


def _contrast(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Compress the range smoothly to [-1, 1], and blur half of the images a little."""
    blurred = functional.avg_pool2d(functional.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)
    amount = _uniform(len(images), -0.6, 0.6, generator).clamp_min(0)
    return torch.tanh(1.2 * torch.lerp(images, blurred, amount))


def _colours(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw colours [count, 3, 1, 1]: any brightness, mostly little saturation."""
    grey = _uniform(count, -1.0, 1.0, generator)
    chroma = torch.randn(count, 3, 1, 1, generator=generator, device=generator.device)
    return grey + _uniform(count, 0.0, 1.0, generator).square() * 0.5 * (chroma - chroma.mean(1, keepdim=True))


def _shading(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Draw linear changes of brightness across the image, [count, 1, size, size]."""
    across, down = _grid(size, generator.device)
    slopes = [torch.randn(count, 1, 1, 1, generator=generator, device=generator.device) * 0.3 for _ in range(2)]
    return slopes[0] * (across - 0.5) + slopes[1] * (down - 0.5)


def _grid(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    axis = (torch.arange(size, device=device) + 0.5) / size
    return axis.view(1, 1, 1, size), axis.view(1, 1, size, 1)


def _uniform(count: int, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(count, 1, 1, 1, generator=generator, device=generator.device)
