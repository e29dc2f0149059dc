"""Ed25519 signatures of closed periods. The private key is a PEM file that only its owner may read.

Whoever has the public key can check a period without us: signature and key are the raw bytes in base64, over the
UTF-8 bytes of the document exactly as it is given out.
"""

import base64
import binascii
import os
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from roundhouse.errors import Unavailable

_OWNER_ONLY: Final = 0o600


class PeriodSigner:
    """Signs with the key in a file, which is made when it is first needed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def sign(self, document: str) -> tuple[str, str]:
        """Signature and public key of a document, base64. Blocking. Raises Unavailable if there is no usable key."""
        key = self._key()
        public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return _text(key.sign(document.encode())), _text(public)

    def _key(self) -> Ed25519PrivateKey:
        try:
            self._make_if_missing()
            key = load_pem_private_key(self._path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise Unavailable(f"the signing key in {self._path} cannot be used") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise Unavailable(f"the signing key in {self._path} is not an Ed25519 key")
        return key

    def _make_if_missing(self) -> None:
        if self._path.exists():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        made = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _OWNER_ONLY)
        try:
            os.write(descriptor, made)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(draft, self._path)  # whole or not at all; the first of several processes wins
        except FileExistsError:
            pass
        finally:
            draft.unlink()


def signature_holds(document: str, signature: str, public_key: str) -> bool:
    """Whether the document is what the owner of the key signed."""
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key, validate=True))
        key.verify(base64.b64decode(signature, validate=True), document.encode())
    except (InvalidSignature, ValueError, binascii.Error):
        return False
    return True


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
