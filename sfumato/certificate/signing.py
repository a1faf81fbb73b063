"""Ed25519 signatures of certificates, with the `cryptography` package (extra `sign`)."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

PREFIX = b"sfumato-certificate/2 "  # domain separation: the signature is valid for certificates only


def new_key(path: str | os.PathLike[str]) -> str:
    """Write a private key (mode 0600) and `path`.pub; return the public key. Guarantee: never overwrites a file."""
    s, key = _library("serialization"), _library("asymmetric.ed25519").Ed25519PrivateKey.generate()
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    public = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    files = ((os.fspath(path), private, 0o600), (f"{os.fspath(path)}.pub", public, 0o644))
    if existing := [name for name, _, _ in files if os.path.lexists(name)]:
        raise FileExistsError(f"{existing[0]} exists; keys are never overwritten, choose another name")
    for name, pem, mode in files:
        with os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(pem)
    return public_key_of(path)


def sign(digest_hex: str, path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the signature of a certificate's digest by the private key in the file."""
    public, pem = public_key_of(path), Path(path).read_bytes()
    if b"PRIVATE" not in pem:
        raise ValueError(f"{path} holds a public key; sign with the private key")
    value: bytes = _library("serialization").load_pem_private_key(pem, None).sign(PREFIX + digest_hex.encode())
    return {"algorithm": "ed25519", "public_key": public, "value": value.hex()}


def check(signature: dict[str, str], digest_hex: str) -> bool:
    """Return whether the signature is valid for its public key. Guarantee: False for malformed signatures."""
    library = _library("asymmetric.ed25519")
    try:
        key = library.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["public_key"]))
        key.verify(bytes.fromhex(signature["value"]), PREFIX + digest_hex.encode())
    except Exception:  # an invalid signature, or any error of the library for malformed text
        return False
    return signature.keys() == {"algorithm", "public_key", "value"} and signature["algorithm"] == "ed25519"


def public_key_of(path: str | os.PathLike[str]) -> str:
    """Return the public key, in hex, from a file with a private or a public key."""
    pem, s = Path(path).read_bytes(), _library("serialization")
    try:
        key = s.load_pem_private_key(pem, None).public_key() if b"PRIVATE" in pem else s.load_pem_public_key(pem)
        return str(key.public_bytes_raw().hex())
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{path} does not hold an Ed25519 key") from None


def _library(part: str) -> Any:
    try:
        return import_module(f"cryptography.hazmat.primitives.{part}")
    except ImportError:
        raise ModuleNotFoundError("signatures need the package cryptography: pip install 'sfumato[sign]'") from None
