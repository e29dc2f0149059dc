"""What the loader moves about: one version of a model, and how much of each tier it takes."""

from dataclasses import dataclass

from roundhouse.subjects import encode_token
from roundhouse.vocabulary import Digest, ModelName


@dataclass(frozen=True, slots=True, order=True)
class ModelVersion:
    """A model name with the digest of one content. Two models may share a digest; they are loaded separately."""

    model: ModelName
    digest: Digest

    def __str__(self) -> str:
        return f"{self.model}@{self.digest}"


_DIGEST_DIGITS = 12  # 48 bits: two versions of one model never meet by chance


def triton_model_name(version: ModelVersion) -> str:
    """The name of a version in Triton: two versions of one model stand side by side (docs/decisions/0008)."""
    digits = version.digest.partition(":")[2]
    return f"{encode_token(version.model)}--{digits[:_DIGEST_DIGITS]}"
