r"""Encryption of blocks at rest: one key a tenant's salt, wrapped by the cluster's key; without it a block is noise.

```
cluster key (32 bytes, a file) --HMAC--> wrapping key -> keys/<id of salt>.key   the salt's own key, wrapped
                                    \--> header key  -> headers of records       names of salts are not readable either
```

Forgetting a salt overwrites and removes its key file: what of its blocks may still lie on the medium, in copies of the
folder or in cells that a drive keeps back, can never be read again. AES-256-GCM with random nonces: safe for 2^32
blocks a key (NIST SP 800-38D, 8.3), more than a drive outlives. Blocks are bound to their block key, headers to their
place. Decision: docs/decisions/0058-encryption-at-rest.md.
"""

import hmac
import os
import threading
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from services.kvstore.ports import BlockCorrupt, DiskFault

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES


class TenantKeys:
    """The keys of one folder. Blocking; from any thread, but one salt is made or forgotten by one thread at a time."""

    def __init__(self, folder: Path, cluster_key: bytes) -> None:
        """Makes the folder. Raises DiskFault, and ValueError if the cluster's key has not 32 bytes."""
        if len(cluster_key) != KEY_BYTES:
            raise ValueError(f"the key of the disk has {KEY_BYTES} bytes")
        self._folder = folder
        self._naming = _derived(cluster_key, b"name")
        self._wrapping = AESGCM(_derived(cluster_key, b"wrap"))
        self._headers = AESGCM(_derived(cluster_key, b"header"))
        self._ciphers: dict[bytes, AESGCM] = {}
        self._changing = threading.Lock()  # else a reader could remember a key that is just being destroyed
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise DiskFault(f"the folder of the keys cannot be used: {error.strerror}") from error

    def seal_header(self, text: bytes, place: bytes) -> bytes:
        """`SEAL_BYTES` longer than `text`; opens only at `place`."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._headers.encrypt(nonce, text, place)

    def open_header(self, sealed: bytes, place: bytes) -> bytes | None:
        """The text; None if it was made with another key, for another place, or changed."""
        try:
            return self._headers.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], place)
        except InvalidTag:
            return None

    def seal(self, salt: bytes, block_key: bytes, plain: memoryview, into: memoryview) -> bytes:
        """Encrypt into `into`, `TAG_BYTES` longer than `plain`; the seal that opens it. Raises DiskFault."""
        nonce = os.urandom(NONCE_BYTES)
        self._cipher(salt, make=True).encrypt_into(nonce, plain, block_key, into)
        return nonce + bytes(into[len(plain) :])

    def unseal(self, salt: bytes, block_key: bytes, seal: bytes, sealed: memoryview, into: memoryview) -> None:
        """Decrypt into `into`; `sealed` is `TAG_BYTES` longer, and its end is overwritten. Raises DiskFault."""
        sealed[len(into) :] = seal[NONCE_BYTES:]
        try:
            self._cipher(salt, make=False).decrypt_into(seal[:NONCE_BYTES], sealed, block_key, into)
        except InvalidTag as error:
            raise BlockCorrupt("a block cannot be decrypted") from error

    def forget(self, salt: bytes) -> None:
        """Destroy the key of a salt; later blocks of it get a new one. Idempotent. Raises DiskFault."""
        path = self._path(salt)
        try:
            with self._changing:
                self._ciphers.pop(salt, None)
                self._destroy(path)
        except OSError as error:
            raise DiskFault(f"a key could not be destroyed: {error.strerror}") from error

    def _destroy(self, path: Path) -> None:
        with suppress(FileNotFoundError), path.open("r+b") as file:
            file.write(os.urandom(path.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        path.unlink(missing_ok=True)
        _sync_folder(self._folder)

    def _cipher(self, salt: bytes, *, make: bool) -> AESGCM:
        cipher = self._ciphers.get(salt)
        if cipher is not None:
            return cipher
        with self._changing:
            key = self._read(salt) or (self._make(salt) if make else None)
            if key is None:
                raise BlockCorrupt("the key of a block is gone")
            self._ciphers[salt] = AESGCM(key)
            return self._ciphers[salt]

    def _read(self, salt: bytes) -> bytes | None:
        path = self._path(salt)
        try:
            wrapped = path.read_bytes()
            return self._wrapping.decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], path.name.encode())
        except (FileNotFoundError, InvalidTag, ValueError):  # none, or of another cluster's key: as good as none
            return None
        except OSError as error:
            raise DiskFault(f"a key could not be read: {error.strerror}") from error

    def _make(self, salt: bytes) -> bytes:
        path, key, nonce = self._path(salt), os.urandom(KEY_BYTES), os.urandom(NONCE_BYTES)
        fresh = path.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(nonce + self._wrapping.encrypt(nonce, key, path.name.encode()))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            raise DiskFault(f"a key could not be written: {error.strerror}") from error
        return key

    def _path(self, salt: bytes) -> Path:
        return self._folder / f"{hmac.digest(self._naming, salt, sha256).hex()}.key"


def _derived(cluster_key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(cluster_key, b"roundhouse/kv-disk/v1/" + purpose, sha256)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
