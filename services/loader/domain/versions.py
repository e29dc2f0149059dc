"""What the loader moves about: one version of a model, and how much of each tier it takes."""

from dataclasses import dataclass

from roundhouse.vocabulary import Digest, ModelName


@dataclass(frozen=True, slots=True, order=True)
class ModelVersion:
    """A model name with the digest of one content. Two models may share a digest; they are loaded separately."""

    model: ModelName
    digest: Digest

    def __str__(self) -> str:
        return f"{self.model}@{self.digest}"
