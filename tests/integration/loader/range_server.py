"""A small HTTP server with ranges, and enough of S3's listing, for tests of sources. It can stall and break off."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass
class RangeServer:
    """`/BUCKET/KEY` is the file KEY below `root`. Faults are set by hand."""

    root: Path
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    """(key, first, last) of every range that was asked for."""
    stall: threading.Event = field(default_factory=threading.Event)
    """While set, answers do not come."""
    break_next: int = 0
    """So many of the next answers end in the middle."""
    port: int = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def range_server(root: Path) -> Iterator[RangeServer]:
    """Serve `root` until the context ends."""
    state = RangeServer(root)
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            where = urlsplit(self.path)
            while state.stall.is_set() and not released.wait(0.02):
                pass
            query = parse_qs(where.query)
            if "list-type" in query:
                self._answer(200, _listing(state.root, query.get("prefix", [""])[0]), {})
                return
            _, _, key = unquote(where.path).lstrip("/").partition("/")
            path = state.root / key
            if not path.is_file():
                self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", {})
                return
            data = path.read_bytes()
            wanted = self.headers.get("Range")
            if wanted is None:
                self._answer(200, data, {})
                return
            first, last = (int(each) for each in wanted.removeprefix("bytes=").split("-"))
            state.ranges.append((key, first, last))
            body = data[first : last + 1]
            self._answer(206, body, {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(data)}"})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Last-Modified": formatdate(0, usegmt=True), "ETag": '"1"', **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if status == 206 and state.break_next > 0:
                state.break_next -= 1
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
                return
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _listing(root: Path, prefix: str) -> bytes:
    """Answer of S3's ListObjectsV2, all in one page."""
    keys = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>1970-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"1"</ETag><Size>{(root / key).stat().st_size}</Size></Contents>'
        for key in keys
        if key.startswith(prefix)
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
