"""Files and batches as values: what a batch is, which states follow which, what a line is and how its result is told.

Pure: times are arguments, in whole seconds as OpenAI tells them. States and shapes are those of the OpenAI API
reference ("Batch"); a batch whose state is in `ENDED` never changes again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roundhouse.catalogue.records import ScopeLimits
from roundhouse.vocabulary import KeyId, TenantId

LINES_MAX = 50_000  # OpenAI
LINE_BYTES_MAX = 4 * 1024 * 1024  # a guess: a prompt of a million tokens
CUSTOM_ID_CHARACTERS_MAX = 256  # a guess
PROBLEMS_MAX = 100  # of one file, told to its owner
WINDOW_S = 24 * 3600  # OpenAI's only completion window
ACTIVE_MAX = 8  # a guess: batches of one tenant that have not ended
METADATA_ENTRIES_MAX, METADATA_KEY_MAX, METADATA_VALUE_MAX = 16, 64, 512  # OpenAI

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a tenant. `expires_s` 0 = never."""

    file_id: str
    tenant_id: TenantId
    filename: str
    purpose: str  # batch or batch_output
    size: int
    created_s: int
    expires_s: int = 0

    def is_gone(self, now_s: int) -> bool:
        """Whether its time is over."""
        return 0 < self.expires_s <= now_s


@dataclass(frozen=True, slots=True)
class Submitter:
    """Whose key made a batch: what its lines run with. A key that is revoked stops its batches too."""

    key_id: KeyId
    key_hash: str
    limits: ScopeLimits | None = None
    family: KeyId | None = None


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Why a file is no batch."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch. `times` has when each state was entered, Unix seconds."""

    batch_id: str
    tenant_id: TenantId
    submitter: Submitter
    endpoint: str
    input_file_id: str
    created_s: int
    expires_s: int
    status: str = "validating"
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: tuple[LineProblem, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in ENDED


def entered(batch: Batch, status: str, now_s: int) -> Batch:
    """The batch in its next state; a batch that has ended stays as it is."""
    if batch.has_ended or batch.status == status:
        return batch
    return replace(batch, status=status, times={**batch.times, status: now_s})


def ending_of(batch: Batch, now_s: int) -> str:
    """The state in which a batch ends whose lines have stopped: the caller's wish goes before the clock."""
    if "cancelling" in batch.times:
        return "cancelled"
    return "expired" if now_s >= batch.expires_s else "completed"


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch, by where it is in the file."""

    number: int  # from 1
    custom_id: str
    offset: int
    length: int


def read_line(text: bytes, number: int, offset: int, endpoint: str) -> Line | LineProblem:
    """Check one line of an input file; its body is checked when it runs, as a body of the endpoint."""
    if len(text) > LINE_BYTES_MAX:
        return LineProblem("line_too_long", f"A line may have at most {LINE_BYTES_MAX} bytes.", number)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return LineProblem("invalid_json_line", "This line is not parseable as valid JSON.", number)
    if not isinstance(value, dict):
        return LineProblem("invalid_request", "A line must be a JSON object.", number)
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_CHARACTERS_MAX:
        message = f"'custom_id' must be a string of 1 to {CUSTOM_ID_CHARACTERS_MAX} characters."
        return LineProblem("invalid_custom_id", message, number, "custom_id")
    if value.get("method") != "POST":
        return LineProblem("invalid_method", "'method' must be 'POST'.", number, "method")
    if value.get("url") != endpoint:
        return LineProblem("invalid_url", f"'url' must be the batch's endpoint, '{endpoint}'.", number, "url")
    if not isinstance(value.get("body"), dict):
        return LineProblem("invalid_request", "'body' must be a JSON object.", number, "body")
    return Line(number, custom_id, offset, len(text))


@dataclass(frozen=True, slots=True)
class LineResult:
    """What came of one line: an answer with its status, or why there is none."""

    number: int
    custom_id: str
    status: int = 0  # 0: it was not answered; then `code` and `message` say why
    request_id: str = ""
    body: Any = None
    code: str = ""
    message: str = ""

    @property
    def is_success(self) -> bool:
        """Whether it belongs into the output file, not the error file."""
        return self.status == 200


def result_json(batch_id: str, result: LineResult) -> dict[str, Any]:
    """A result as a line of the output or error file."""
    response: dict[str, Any] | None = None
    if result.status:
        response = {"status_code": result.status, "request_id": result.request_id, "body": result.body}
    return {
        "id": f"batch_req_{batch_id.removeprefix('batch_')}_{result.number}",
        "custom_id": result.custom_id,
        "response": response,
        "error": None if result.status else {"code": result.code, "message": result.message},
    }


def missing_result(line: Line, ending: str) -> LineResult:
    """The result of a line that did not run because the batch ended first."""
    code = "batch_cancelled" if ending == "cancelled" else "batch_expired"
    reason = "was cancelled" if ending == "cancelled" else "expired"
    return LineResult(line.number, line.custom_id, code=code, message=f"The batch {reason} before this request ran.")


def file_json(file: StoredFile) -> dict[str, Any]:
    """OpenAI's file object."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created_s,
        "expires_at": file.expires_s or None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def batch_json(batch: Batch) -> dict[str, Any]:
    """OpenAI's batch object."""
    problems = [
        {"code": one.code, "message": one.message, "line": one.line, "param": one.param} for one in batch.problems
    ]
    states = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_s,
        "expires_at": batch.expires_s,
        **{f"{state}_at": batch.times.get(state) for state in states},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata or None,
    }


def metadata_problem(metadata: Mapping[str, str]) -> str | None:
    """Why these cannot be a batch's metadata; None if they can."""
    if len(metadata) > METADATA_ENTRIES_MAX:
        return f"at most {METADATA_ENTRIES_MAX} entries"
    if any(len(name) > METADATA_KEY_MAX or len(value) > METADATA_VALUE_MAX for name, value in metadata.items()):
        return f"names of at most {METADATA_KEY_MAX} and values of at most {METADATA_VALUE_MAX} characters"
    return None
