"""Verify an uploaded certificate or zip file in a process of its own, which may use little memory, time and disk."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from sfumato.data import DataError

MAX_UPLOAD = 512 << 20  # bytes of a request
MAX_UNPACKED = 2 << 30  # bytes of all members of a zip file
MAX_MEMBERS = 250_000
MAX_CERTIFICATES = 10  # of a zip file that are checked
MAX_MEMORY = 6 << 30  # bytes of address space of the process; PyTorch alone maps more than two
MAX_SECONDS = 180
BLOCK = 1 << 20
UPLOAD, KEY, UNPACKED = "upload", "issuer.pub", "content"


def check_upload(
    upload: BinaryIO, key: BinaryIO | None = None, limits: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the verification of each certificate in an upload: a certificate, or a zip file.

    - key: public key that must have signed.
    - limits: `max_epsilon` and `max_delta`.

    Raise `DataError` if it holds no certificate, or cannot be unpacked within the limits.
    """
    with tempfile.TemporaryDirectory(prefix="sfumato-verify-") as name:
        folder = Path(name)
        for source, target in ((upload, UPLOAD), (key, KEY)):
            if source is not None:
                with (folder / target).open("wb") as file:
                    shutil.copyfileobj(source, file, BLOCK)
        command = [sys.executable, "-P", "-m", __name__, name, json.dumps(limits or {})]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=MAX_SECONDS,
                check=False,
            )
            answer = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            raise DataError("the file could not be checked within the limits of time and memory") from None
    if "error" in answer:
        raise DataError(answer["error"])
    found: list[dict[str, Any]] = answer["certificates"]
    return found


def unpack(archive: Path, target: Path) -> None:
    """Unpack a zip file into a new folder. Raise `DataError` for names, kinds and sizes that are not allowed."""
    target.mkdir()
    left = MAX_UNPACKED
    with zipfile.ZipFile(archive) as source:
        members = source.infolist()
        if len(members) > MAX_MEMBERS:
            raise DataError(f"the zip file has more than {MAX_MEMBERS:,} members")
        for member in members:
            path = _safe_path(member)
            if member.is_dir():
                (target / path).mkdir(parents=True, exist_ok=True)
                continue
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            with source.open(member) as packed, (target / path).open("xb") as file:
                while block := packed.read(BLOCK):  # the size in the header may be wrong
                    left -= len(block)
                    if left < 0:
                        raise DataError(f"the zip file holds more than {MAX_UNPACKED >> 30} GiB")
                    file.write(block)


def _safe_path(member: zipfile.ZipInfo) -> PurePosixPath:
    """Return the path of a member. Raise `DataError` if it leaves the folder, or is a link or encrypted."""
    path, kind = PurePosixPath(member.filename), stat.S_IFMT(member.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or not path.parts or set(member.filename) & set("\\\0:"):
        raise DataError(f"the zip file has a member with the name {member.filename[:100]!r}, which is not allowed")
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or member.flag_bits & 1:
        raise DataError(f"{member.filename[:100]!r} in the zip file is a link, encrypted, or not a regular file")
    return path


def _certificates(folder: Path) -> list[Path]:
    """Return the certificates below a folder, the outermost first."""
    found = [*folder.rglob("certificate.json"), *folder.rglob("*.certificate.json")]
    return sorted(found, key=lambda path: (len(path.parts), path))[:MAX_CERTIFICATES]


def check_folder(folder: Path, limits: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the verification of each certificate in the upload of a folder, in this process. See `check_upload`."""
    from sfumato.certificate import verify

    upload = folder / UPLOAD
    if zipfile.is_zipfile(upload):
        unpack(upload, folder / UNPACKED)
        paths = _certificates(folder / UNPACKED)
        if not paths:
            raise DataError("the zip file holds no certificate.json")
    else:
        (folder / UNPACKED).mkdir()
        paths = [upload.rename(folder / UNPACKED / "certificate.json")]
    key = folder / KEY if (folder / KEY).exists() else None
    found = []
    for path in paths:
        result = verify(path, signed_by=key, **limits)
        name = path.relative_to(folder / UNPACKED).as_posix()
        texts = {"problems": [text.replace(f"{folder}/", "") for text in result.problems]}
        found.append({"name": name, "ok": result.ok, **vars(result), **texts})
    return found


def _main() -> None:
    """Check the upload in the folder that is the first argument. Print JSON."""
    import resource

    for limit, value in (
        (resource.RLIMIT_AS, MAX_MEMORY),
        (resource.RLIMIT_CPU, MAX_SECONDS),
        (resource.RLIMIT_FSIZE, MAX_UNPACKED),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    try:
        answer: dict[str, Any] = {"certificates": check_folder(Path(sys.argv[1]), json.loads(sys.argv[2]))}
    except DataError as error:
        answer = {"error": str(error)}
    except Exception:  # what a damaged file raises is not foreseeable, and says nothing to people
        answer = {"error": "the file is damaged, or not a certificate or zip file that can be read"}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
