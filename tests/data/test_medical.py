"""DICOM, NIfTI and TIFF files of several images, from the real test files of pydicom and nibabel."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato.data import DataError, DataWarning, load_images, medical, read_outline

pydicom = pytest.importorskip("pydicom")
nibabel_testing = pytest.importorskip("nibabel.testing")
pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 100:sfumato.data.DataWarning")
DICOM = Path(pydicom.__file__).parent / "data" / "test_files"
NIFTI = Path(nibabel_testing.data_path)


def write_dicom(path, values, **elements):
    """Write grey values [H, W] or [frames, H, W] as DICOM, from the header of a real CT image."""
    content = pydicom.dcmread(DICOM / "CT_small.dcm")
    frames = values if values.ndim == 3 else values[None]
    content.Rows, content.Columns = frames.shape[1:]
    content.PixelData = values.astype("<i2").tobytes()
    if len(frames) > 1:
        content.NumberOfFrames = len(frames)
    for name in ("RescaleSlope", "RescaleIntercept", "SmallestImagePixelValue", "LargestImagePixelValue"):
        if name in content:
            delattr(content, name)
    for name, value in elements.items():
        setattr(content, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    content.save_as(path)


def test_real_dicom_files_are_read_with_and_without_suffix(tmp_path):
    shutil.copy(DICOM / "MR_small.dcm", tmp_path / "IM000001")
    shutil.copy(DICOM / "MR_small_RLE.dcm", tmp_path / "1.2.840.10008")
    (tmp_path / "DICOMDIR").write_bytes(bytes(200))
    with pytest.warns(DataWarning, match=r"DICOMDIR \(1\)"):
        got = load_images(tmp_path, labels=False)
    assert got.shape == (1, 64, 64)
    assert bool((got.images[0] == got.images[1]).all())
    raw = pydicom.dcmread(DICOM / "MR_small.dcm").pixel_array.astype(float)
    # Window 600 / 1600: black at -200, white at 1399 (PS3.3, C.11.2.1.2).
    assert np.array_equal(got.images[0, 0].numpy(), np.round(((raw + 200) * 255 / 1599).clip(0, 255)))


def test_window_range_and_inverted_grey(tmp_path):
    values = np.array([[0, 100], [200, 400]])
    window = {"WindowCenter": 100.5, "WindowWidth": 201}
    for number, photometric in enumerate(("MONOCHROME2", "MONOCHROME1")):
        write_dicom(tmp_path / f"{number}.dcm", values, PhotometricInterpretation=photometric, **window)
    got = load_images(tmp_path, labels=False).images[:, 0]
    assert got[0].tolist() == [[0, 128], [255, 255]]
    assert got[1].tolist() == [[255, 127], [0, 0]]
    assert load_images(tmp_path, labels=False, value_range=(0, 400)).images[0, 0].tolist() == [[0, 64], [128, 255]]


def test_without_a_window_the_values_of_the_image_count(tmp_path):
    for number in (1, 2):
        write_dicom(tmp_path / f"{number}.dcm", number * np.array([[10, 20], [30, 60]]))
    assert load_images(tmp_path, labels=False).images[:, 0].tolist() == [[[0, 51], [102, 255]]] * 2


def test_several_frames_need_a_rule_and_count_as_one_person(tmp_path):
    for number, patient in enumerate(("ann", "bob", "ann")):
        values = np.arange(12).reshape(3, 2, 2) + 100 * number
        write_dicom(tmp_path / f"{number}.dcm", values, PatientID=patient, WindowCenter=128, WindowWidth=256)
    with pytest.raises(DataError, match=r"0\.dcm holds 3 images, probably of one person; pass frames= \(--frames\)"):
        load_images(tmp_path, labels=False)
    with pytest.raises(DataError, match=r"frames='all' .* several images of one person.*--person"):
        load_images(tmp_path, labels=False, frames="all")
    assert load_images(tmp_path, labels=False, frames="first").images[:, 0, 0, 0].tolist() == [0, 100, 200]
    assert load_images(tmp_path, labels=False, frames="middle").images[:, 0, 0, 0].tolist() == [4, 104, 204]
    by_file = load_images(tmp_path, labels=False, frames="all", person="file")
    assert by_file.images[:, 0, 0, 0].tolist() == [0, 4, 8, 100, 104, 108, 200, 204, 208]
    assert by_file.persons.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert by_file.public().unit == "person"
    by_patient = load_images(tmp_path, labels=False, frames="all", person="dicom:PatientID")
    assert by_patient.persons.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    outline = read_outline(tmp_path, labels=False, frames="all", person="dicom:PatientID")
    assert outline.public(declare_size=True) == by_patient.public(declare_size=True)


def test_labels_and_persons_from_the_header(tmp_path):
    for number, part in enumerate(("HEAD", "CHEST", "HEAD")):
        write_dicom(tmp_path / f"{number}.dcm", np.arange(4).reshape(2, 2), BodyPartExamined=part)
    got = load_images(tmp_path, label_column="dicom:BodyPartExamined", classes=["CHEST", "HEAD"])
    assert got.labels.tolist() == [1, 0, 1]
    with pytest.raises(DataError, match=r"0\.dcm has no DICOM element Nonsense"):
        load_images(tmp_path, labels=False, person="dicom:Nonsense")
    write_dicom(tmp_path / "anonymous.dcm", np.arange(4).reshape(2, 2), PatientID="", BodyPartExamined="HEAD")
    options = {"label_column": "dicom:BodyPartExamined", "classes": ["CHEST", "HEAD"], "person": "dicom:PatientID"}
    with pytest.raises(DataError, match=r"anonymous\.dcm has no DICOM element PatientID"):
        load_images(tmp_path, **options)
    with (
        pytest.warns(DataWarning, match=r"skipped 1 unreadable: anonymous\.dcm"),
        pytest.raises(DataError, match="a single person"),
    ):
        load_images(tmp_path, on_error="skip", **options)


@pytest.mark.filterwarnings("ignore:Expected implicit VR")
def test_dicom_files_without_an_image_are_named(tmp_path):
    for number in (1, 2):
        write_dicom(tmp_path / f"{number}.dcm", np.arange(4).reshape(2, 2))
    shutil.copy(DICOM / "rtplan.dcm", tmp_path / "plan.dcm")
    (tmp_path / "text.dcm").write_text("no DICOM at all")
    with pytest.raises(DataError, match=r"plan\.dcm is a DICOM file without an image"):
        load_images(tmp_path, labels=False)
    with pytest.warns(DataWarning, match=r"skipped 2 unreadable: plan\.dcm, text\.dcm"):
        assert len(load_images(tmp_path, labels=False, on_error="skip")) == 2


def test_nifti_slices(tmp_path):
    for number in (1, 2):
        shutil.copy(NIFTI / "example4d.nii.gz", tmp_path / f"{number}.nii.gz")
    with pytest.raises(DataError, match=r"1\.nii\.gz holds 48 images"):
        load_images(tmp_path, labels=False)
    middle = load_images(tmp_path, labels=False, frames="middle")
    assert middle.shape == (1, 96, 128)
    assert 20 < middle.images[0].float().mean() < 120
    every = load_images(tmp_path, labels=False, frames="all", person="file", size=32)
    assert len(every) == 96
    assert every.persons.bincount().tolist() == [48, 48]


def test_damaged_nifti_is_named(tmp_path):
    for name in ("a.nii", "b.nii.gz"):
        (tmp_path / name).write_bytes(b"no volume at all" * 40)
    with pytest.raises(DataError, match=r"a\.nii is not a readable NIfTI file"):
        load_images(tmp_path, labels=False, frames="first")


def test_pages_of_a_tiff(tmp_path, pixels):
    for number in (0, 3):
        pages = [Image.fromarray(page.astype(np.uint16) * 257) for page in pixels[number : number + 3]]
        pages[0].save(tmp_path / f"{number}.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(DataError, match=r"0\.tif holds 3 images"):
        load_images(tmp_path, labels=False)
    assert np.array_equal(load_images(tmp_path, labels=False, frames="middle").images[:, 0], pixels[[1, 4]])
    every = load_images(tmp_path, labels=False, frames="all", person="file")
    assert np.array_equal(every.images[:, 0], pixels[:6])
    assert every.persons.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("name", "library"), [("x.dcm", "pydicom"), ("x.nii", "nibabel")])
def test_missing_libraries_are_named(tmp_path, monkeypatch, name, library):
    (tmp_path / name).write_bytes(b"content")
    medical._library.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(DataError, match=rf"needs {library}: pip install 'sfumato\[medical\]'"):
        load_images(tmp_path, labels=False)
    medical._library.cache_clear()
