"""Certificates of this machine for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(folder: Path) -> tuple[str, str]:
    """The files of a certificate for localhost, and of its key."""
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*new, "-out", certificate, "-keyout", key, *subject], check=True, capture_output=True)
    return certificate, key
