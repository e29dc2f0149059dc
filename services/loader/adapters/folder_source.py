"""Versions in a folder or single file that this machine sees: a disk, NFS, a Hugging Face checkout."""

import os
import stat
from pathlib import Path

from roundhouse.catalogue.digests import version_files
from roundhouse.catalogue.records import ContentFile
from roundhouse.errors import InvalidInput, NotFound
from services.loader.adapters.direct_io import open_for_reading, read_into


class FolderSource:
    """`WeightSource` for paths."""

    def files(self, source: str) -> list[ContentFile]:
        """See `WeightSource.files`."""
        return [ContentFile(name=name, size=_size(path), sha256="") for name, path in version_files(Path(source))]

    def open(self, source: str, file: ContentFile) -> "FileReader":
        """See `WeightSource.open`."""
        path = Path(source)
        return FileReader(path if path.is_file() else path / file.name, file.size)


class FileReader:
    """`SourceReader` of a local file."""

    def __init__(self, path: Path, size: int) -> None:
        """Raises NotFound, InvalidInput."""
        self._path = path
        _size(path)
        try:
            self._descriptor: int | None = open_for_reading(path, size)
        except OSError as error:
            raise NotFound(f"{path} cannot be read: {error.strerror}") from error

    def read_into(self, view: memoryview, offset: int) -> int:
        """See `SourceReader.read_into`."""
        assert self._descriptor is not None, "it is open"
        try:
            return read_into(self._descriptor, view, offset)
        except OSError as error:
            raise NotFound(f"{self._path} cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """See `SourceReader.close`."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _size(path: Path) -> int:
    """Bytes of a regular file: to open anything else may wait for ever. Raises NotFound, InvalidInput."""
    try:
        status = path.stat()
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInput(f"{path} is not a regular file")
    return status.st_size
