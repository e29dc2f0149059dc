"""What is wrong with a declaration, and where: every problem at once, each with file, line and column (case B44)."""

from collections.abc import Sequence
from dataclasses import dataclass

from roundhouse.errors import InvalidInput

SHOWN_MAX = 100  # a file that is wrong throughout is not worth reading further


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position in a text; both count from 1."""

    line: int = 1
    column: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    file: str
    place: Place
    reason: str

    def __str__(self) -> str:
        """As compilers print it, so that editors can jump there."""
        return f"{self.file}:{self.place.line}:{self.place.column}: {self.reason}"


class DeclarationRefused(InvalidInput):
    """A declaration that was not applied, with every problem in it, in the order of the text."""

    default_code = "declaration_refused"

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a refusal names what is wrong"
        self.problems = tuple(sorted(problems, key=lambda problem: problem.place)[:SHOWN_MAX])
        super().__init__("\n".join(str(problem) for problem in self.problems))
