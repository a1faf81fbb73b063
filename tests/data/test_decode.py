"""Decoding: image modes, orientation, bit depth, resizing and broken files."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, features

from sfumato.data import DataError, DataWarning, ImageSet, decode, load_images, save_images

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 100:sfumato.data.DataWarning")

RAMP = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
RED = np.zeros((8, 8, 3), np.uint8) + np.array([200, 30, 60], np.uint8)


def read_two(tmp_path, image, name="x.png", **options):
    """Save an image twice (a single one is refused), read the folder, and return the first as [C, H, W]."""
    for number in (1, 2):
        image.save(tmp_path / f"{number}{name}")
    return load_images(tmp_path, labels=False, **options).images[0].numpy()


@pytest.mark.parametrize(
    ("mode", "suffix", "channels"),
    [
        ("1", ".png", 1), ("L", ".png", 1), ("LA", ".png", 1), ("P", ".png", 3), ("RGB", ".png", 3),
        ("RGBA", ".png", 3), ("CMYK", ".tif", 3), ("YCbCr", ".tif", 3), ("L", ".webp", 3), ("RGB", ".jpg", 3),
        ("L", ".jpg", 1), ("CMYK", ".jpg", 3), ("RGB", ".bmp", 3), ("RGB", ".ppm", 3), ("L", ".pgm", 1),
    ],
)  # fmt: skip
def test_every_mode_matches_pillow(tmp_path, mode, suffix, channels):
    image = Image.fromarray(np.stack([RAMP, RAMP[::-1], RAMP.T], -1)).convert(mode)
    got = read_two(tmp_path, image, f"x{suffix}")
    with Image.open(tmp_path / f"1x{suffix}") as again:
        expected = np.asarray(again.convert("L" if channels == 1 else "RGB"))
    assert got.shape == (channels, 8, 8)
    assert np.array_equal(got, expected[None] if channels == 1 else expected.transpose(2, 0, 1))


def test_lab_is_converted_to_srgb(tmp_path):
    lab = ImageCms.profileToProfile(
        Image.fromarray(RED), ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    got = read_two(tmp_path, lab, "x.tif")
    assert np.abs(got.astype(int) - RED.transpose(2, 0, 1)).max() <= 3


def test_transparency_is_composited_over_white(tmp_path):
    alpha = np.full((8, 8, 1), 51, np.uint8)
    got = read_two(tmp_path, Image.fromarray(np.concatenate([RED, alpha], -1)))
    assert np.abs(got.astype(int) - np.round(RED * 0.2 + 255 * 0.8).transpose(2, 0, 1)).max() <= 1


def test_grey_with_alpha_stays_grey_over_white(tmp_path):
    image = Image.merge("LA", [Image.new("L", (8, 8), 100), Image.new("L", (8, 8), 0)])
    got = read_two(tmp_path, image)
    assert got.shape == (1, 8, 8)
    assert (got == 255).all()


def test_transparent_palette_colour_becomes_white(tmp_path):
    image = Image.new("P", (8, 8), 1)
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((0, 0), 0)
    image.info["transparency"] = 0
    got = read_two(tmp_path, image)
    assert got[:, 0, 0].tolist() == [255, 255, 255]
    assert got[:, 1, 1].tolist() == [40, 50, 60]


def test_transparent_key_colour_becomes_white(tmp_path):
    for mode, key, rest in (("L", 10, 90), ("RGB", (10, 20, 30), (40, 50, 60))):
        folder = tmp_path / mode
        folder.mkdir()
        image = Image.new(mode, (8, 8), rest)
        image.putpixel((0, 0), key)
        for number in (1, 2):
            image.save(folder / f"{number}.png", transparency=key)
        got = load_images(folder, labels=False).images[0].numpy()
        assert (got[:, 0, 0] == 255).all()
        assert got[:, 1, 1].tolist() == list(rest if mode == "RGB" else [rest])


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bits_are_scaled_not_wrapped(tmp_path, suffix):
    values = np.array([[0, 257, 32767, 65535], [128, 129, 256, 65278]], np.uint16)
    got = read_two(tmp_path, Image.fromarray(values), f"x{suffix}")
    assert np.array_equal(got[0], np.round(values / 257).astype(np.uint8))


def test_thirty_two_bits_within_sixteen_are_scaled(tmp_path):
    values = np.array([[0, 65535], [257, 514]], np.int32)
    assert read_two(tmp_path, Image.fromarray(values), "x.tif")[0].tolist() == [[0, 255], [1, 2]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([[0, 70000]], np.int32), "0..65535"),
        (np.array([[0, -1]], np.int32), "0..65535"),
        (np.array([[0, 1.5]], np.float32), r"outside \[0, 1\]"),
        (np.array([[0, np.nan]], np.float32), "NaN"),
    ],
)
def test_high_bit_depth_values_out_of_range_are_refused(tmp_path, values, message):
    with pytest.raises(DataError, match=message) as caught:
        read_two(tmp_path, Image.fromarray(values), "x.tif")
    assert "1x.tif" in str(caught.value)


def test_a_declared_range_replaces_the_full_one(tmp_path):
    values = np.array([[0, 1000, 2047, 4095]], np.uint16)
    with pytest.warns(DataWarning, match=r"no value above 4095.*12-bit.*\(--range 0,4095\)"):
        assert read_two(tmp_path, Image.fromarray(values), "x.png")[0].max() == 16
    assert load_images(tmp_path, labels=False, value_range=(0, 4095)).images[0, 0].tolist() == [[0, 62, 127, 255]]
    with pytest.raises(DataError, match="two numbers, the lower one first"):
        load_images(tmp_path, labels=False, value_range=(9, 3))


def test_floats_outside_the_unit_range_are_read_with_a_declared_range(tmp_path):
    values = np.array([[-1000.0, 40, 400]], np.float32)
    assert read_two(tmp_path, Image.fromarray(values), "x.tif", value_range=(-160, 240))[0].tolist() == [[0, 128, 255]]


def test_heic_is_read(tmp_path):
    pillow_heif = pytest.importorskip("pillow_heif")
    for number in (1, 2):
        pillow_heif.from_pillow(Image.fromarray(RED).resize((64, 64))).save(tmp_path / f"{number}.heic", quality=90)
    got = load_images(tmp_path, labels=False)
    assert got.shape == (3, 64, 64)
    assert np.abs(got.images[0].float().mean((1, 2)).numpy() - RED[0, 0]).max() < 6


def test_floats_in_unit_range_are_read(tmp_path):
    values = np.array([[0, 0.5, 1]], np.float32)
    assert read_two(tmp_path, Image.fromarray(values), "x.tif")[0].tolist() == [[0, 128, 255]]


def test_exif_rotation_is_applied(tmp_path):
    wide = np.zeros((8, 16), np.uint8)
    wide[:, :8] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    for number in (1, 2):
        Image.fromarray(wide).save(tmp_path / f"{number}.png", exif=exif)
    got = load_images(tmp_path, labels=False)
    assert got.shape == (1, 16, 8)
    assert np.array_equal(got.images[0, 0].numpy(), np.rot90(wide, -1))


def test_only_the_first_frame_of_an_animation_is_read(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("#102030", "#405060")]
    for number in (1, 2):
        frames[0].save(tmp_path / f"{number}.webp", save_all=True, append_images=frames[1:], lossless=True)
    got = load_images(tmp_path, labels=False).images[0]
    assert got[:, 0, 0].tolist() == [0x10, 0x20, 0x30]


@pytest.mark.parametrize("place", [0, 5, 39])
def test_grey_and_colour_are_not_mixed_unless_the_mode_is_declared(tmp_path, place):
    """One colour file must not define the public shape of the set."""
    for number in range(40):
        picture = Image.fromarray(RED if number == place else RAMP)
        picture.save(tmp_path / f"{number:02}.png")
    with pytest.raises(DataError, match=r"mix grey and colour: .*pass mode='grey' or 'rgb' \(--mode grey\|rgb\)"):
        load_images(tmp_path, labels=False)
    got = load_images(tmp_path, labels=False, mode="rgb")
    assert np.array_equal(got.images[place].numpy(), RED.transpose(2, 0, 1))
    others = [number for number in range(40) if number != place]
    assert (got.images[others] == torch.from_numpy(RAMP)).all()
    assert load_images(tmp_path, labels=False, mode="grey").shape == (1, 8, 8)


def test_mode_converts_the_images(tmp_path):
    grey = read_two(tmp_path, Image.fromarray(RED), mode="grey")
    assert np.array_equal(grey[0], np.asarray(Image.fromarray(RED).convert("L")))
    rgb = read_two(tmp_path, Image.fromarray(RAMP), mode="rgb")
    assert rgb.shape == (3, 8, 8)
    assert all(np.array_equal(channel, RAMP) for channel in rgb)


@pytest.mark.parametrize("shape", [(20, 31), (31, 20), (16, 16), (5, 7)])
@pytest.mark.parametrize("size", [4, 6, 16])
def test_resizing_matches_plain_pillow_for_files_and_arrays(tmp_path, shape, size):
    generator = np.random.default_rng(0)
    values = generator.integers(0, 256, (*shape, 3), dtype=np.uint8)
    side = min(shape)
    top, left = (shape[0] - side) // 2, (shape[1] - side) // 2
    square = Image.fromarray(values[top : top + side, left : left + side])
    expected = square.resize((size, size), Image.Resampling.BOX if side >= size else Image.Resampling.BICUBIC)
    expected = np.asarray(expected).transpose(2, 0, 1)
    assert np.array_equal(read_two(tmp_path, Image.fromarray(values), size=size), expected)
    np.savez(tmp_path / "x.npz", images=np.stack([values, values]))
    array = load_images(tmp_path / "x.npz", labels=False, size=size)
    assert np.array_equal(array.images[1].numpy(), expected)
    grey = load_images(tmp_path / "x.npz", labels=False, size=size, mode="grey").images[0, 0].numpy()
    (tmp_path / "x.npz").unlink()
    assert np.array_equal(grey, load_images(tmp_path, labels=False, size=size, mode="grey").images[0, 0].numpy())


def test_downscaling_by_a_whole_number_is_the_mean(tmp_path):
    values = np.random.default_rng(1).integers(0, 256, (32, 32), dtype=np.uint8)
    means = values.reshape(8, 4, 8, 4).mean(axis=(1, 3))
    got = read_two(tmp_path, Image.fromarray(values), size=8)[0]
    assert np.abs(got - means).max() <= 1  # Pillow rounds after each of the two directions.


def test_large_jpeg_in_draft_mode_stays_close_to_a_full_decode(tmp_path):
    small = Image.fromarray(np.random.default_rng(2).integers(0, 256, (12, 16, 3), dtype=np.uint8))
    large = small.resize((1024, 768), Image.Resampling.BICUBIC)
    got = read_two(tmp_path, large, "x.jpg", size=32)
    with Image.open(tmp_path / "1x.jpg") as full:
        expected = full.crop((128, 0, 896, 768)).resize((32, 32), Image.Resampling.BOX)
    difference = np.abs(got.astype(int) - np.asarray(expected).transpose(2, 0, 1))
    assert difference.mean() < 2
    assert difference.max() < 16


def test_mixed_sizes_name_two_files(class_folder):
    Image.fromarray(RAMP[:4]).save(class_folder / "b" / "0.png")
    with pytest.raises(DataError, match=r"a/0\.png is 8×8, b/0\.png is 8×4; pass size"):
        load_images(class_folder)
    assert load_images(class_folder, size=4).shape == (1, 4, 4)


def png_header_only(width, height):
    """Return a PNG whose header claims a huge image."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def truncated_png():
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(3).integers(0, 256, (64, 64), dtype=np.uint8)).save(buffer, "png")
    return buffer.getvalue()[:2000]


def truncated_jpeg():
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(3).integers(0, 256, (64, 64), dtype=np.uint8)).save(buffer, "jpeg")
    return buffer.getvalue()[:1500]


BROKEN = {
    "empty": (b"", r"is empty \(0 bytes\)"),
    "text": (b"not an image at all", "not an image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "not an image"),
    "png": (truncated_png(), "cannot be read"),
    "jpeg": (truncated_jpeg(), "truncated"),
    "bomb": (png_header_only(20000, 20000), "decompression bomb"),
    "half bomb": (png_header_only(10000, 10000), "decompression bomb"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_named(class_folder, kind):
    content, message = BROKEN[kind]
    (class_folder / "a" / "broken.png").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_images(class_folder)
    assert "a/broken.png" in str(caught.value)


def test_bomb_is_refused_if_the_warning_is_not_an_error(class_folder):
    (class_folder / "a" / "broken.png").write_bytes(png_header_only(10000, 10000))
    with pytest.warns(Image.DecompressionBombWarning), pytest.raises(DataError, match=r"a/broken\.png .* bomb"):
        load_images(class_folder, workers=1)


def test_skip_omits_and_counts_broken_files(class_folder, pixels):
    for number, (content, _) in enumerate(BROKEN.values()):
        (class_folder / "a" / f"00{number}.png").write_bytes(content)
    with pytest.warns(Image.DecompressionBombWarning), pytest.warns(DataWarning) as caught:
        got = load_images(class_folder, on_error="skip")
    messages = [str(warning.message) for warning in caught if warning.category is DataWarning]
    assert messages[:1] == ["skipped 7 unreadable: a/000.png, a/001.png, a/002.png and 4 more"]
    assert np.array_equal(got.images[:, 0].numpy(), pixels[:4])
    assert got.labels.tolist() == [0, 0, 1, 1]


def test_nothing_readable_is_an_error_even_when_skipping(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"text")
    with pytest.warns(DataWarning), pytest.raises(DataError, match="no image could be read"):
        load_images(tmp_path, labels=False, on_error="skip")


def test_order_and_progress_do_not_depend_on_workers(tmp_path, digits):
    save_images(ImageSet(digits.images), tmp_path / "flat")
    steps = []
    many = load_images(tmp_path / "flat", labels=False, workers=7, progress=lambda *step: steps.append(step))
    one = load_images(tmp_path / "flat", labels=False, workers=1)
    assert torch.equal(many.images, digits.images)
    assert torch.equal(one.images, digits.images)
    assert steps == [(done, 60) for done in range(1, 61)]


def test_memory_mapped_buffer_equals_memory(class_folder, monkeypatch):
    kinds = []
    allocate = decode.allocate
    monkeypatch.setattr(decode, "allocate", lambda shape: kinds.append(allocate(shape)) or kinds[-1])
    in_memory = load_images(class_folder)
    monkeypatch.setattr("sfumato.data.storage.available_memory", lambda: 0)
    on_disk = load_images(class_folder)
    assert [isinstance(array, np.memmap) for array in kinds] == [False, True]
    assert torch.equal(in_memory.images, on_disk.images)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow cannot read AVIF")
def test_damaged_avif_is_named(class_folder):
    buffer = io.BytesIO()
    Image.fromarray(RED).save(buffer, "avif")
    content = buffer.getvalue()
    payload = content.index(b"mdat") + 4
    (class_folder / "a" / "broken.avif").write_bytes(content[:payload] + bytes(len(content) - payload))
    with pytest.raises(DataError, match=r"a/broken\.avif cannot be read: Failed to decode"):
        load_images(class_folder)


def test_pillow_warnings_as_errors_name_the_file(class_folder, monkeypatch):
    def warn(image):
        warnings.warn(f"odd metadata in {image.size}", UserWarning, stacklevel=1)

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", warn)
    with pytest.raises(DataError, match=r"a/0\.png cannot be read: odd metadata"):
        load_images(class_folder)
