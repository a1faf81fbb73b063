"""A cluster with TLS and a token, reached by `ray://` on the loopback: a whole run works, and strangers are refused."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

import sfumato as sf
from sfumato.cluster import ray_cluster

pytest.importorskip("cryptography")
ROOT = str(Path(sf.__file__).parents[1])
SECONDS = 600  # a limit for what hangs


def write_certificates(folder: Path, addresses: list[str]) -> None:
    """Write an authority, and a certificate of this machine that it has signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [x509.DNSName("localhost"), *(x509.IPAddress(ip_address(each)) for each in addresses)]
    for file, key, name, extension in (
        ("ca", authority, "authority", x509.BasicConstraints(ca=True, path_length=None)),
        ("machine", own, "machine", x509.SubjectAlternativeName(names)),
    ):
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named("authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(extension, critical=file == "ca")
            .sign(authority, hashes.SHA256())
        )
        (folder / f"{file}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        (folder / f"{file}.key").write_bytes(key.private_bytes(pem, form, plain))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, check=False, capture_output=True, text=True, timeout=SECONDS
    )


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Start a cluster as docs/cluster.md says; return its address and the environment of a driver."""
    ray = pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("r")
    write_certificates(folder, ["127.0.0.1", ray.util.get_node_ip_address()])
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = plain | {
        **{"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)},
        **{"RAY_USE_TLS": "1", "RAY_TLS_CA_CERT": str(folder / "ca.crt")},
        **{"RAY_TLS_SERVER_CERT": str(folder / "machine.crt"), "RAY_TLS_SERVER_KEY": str(folder / "machine.key")},
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    port = free_port()
    options = [f"--port={free_port()}", f"--ray-client-server-port={port}", "--include-dashboard=false"]
    options += ["--num-cpus=2", "--object-store-memory=100000000", f"--temp-dir={folder / 't'}"]
    options += [f"--system-config={json.dumps(ray_cluster.SYSTEM)}"]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options]
    with (folder / "head.log").open("w") as log:
        head = subprocess.Popen(start, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + SECONDS
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert head.poll() is None, (folder / "head.log").read_text()
            assert time.monotonic() < end, "the cluster does not start"
            time.sleep(0.5)
        yield f"ray://127.0.0.1:{port}", environment
    finally:
        head.terminate()  # it ends the processes that it has started
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(60)
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(head.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_on_a_cluster_with_tls_and_a_token(secured: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    address, environment = secured
    synth = ["-m", "sfumato", "synth", "digits", "--method", "dp-merf", "--epsilon", "5", "--set", "features=40"]
    synth += ["--set", "steps=3", "-n", "20", "--device", "cpu", "--workers", "1", "--cluster", address, "--out"]
    found = run([*synth, str(tmp_path / "out")], environment)
    assert found.returncode == 0, found.stderr
    assert "without TLS" not in found.stderr + found.stdout
    assert sf.verify(tmp_path / "out" / "certificate.json")
    lines = (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()
    assert sum('"kind": "charge"' in line or '"kind":"charge"' in line for line in lines) >= 2

    for lost in ("RAY_AUTH_TOKEN", "RAY_USE_TLS"):  # neither a stranger without the token, nor one without TLS
        stranger = {name: value for name, value in environment.items() if name != lost}
        if lost == "RAY_AUTH_TOKEN":
            stranger |= {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        probe = f"import ray; ray.init({address!r}, logging_level='CRITICAL'); print(ray.cluster_resources())"
        refused = run(["-c", probe], stranger)
        assert refused.returncode != 0, lost
        assert "CPU" not in refused.stdout
