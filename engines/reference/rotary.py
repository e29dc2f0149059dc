"""Rotary position embedding, in the half-split form that Hugging Face checkpoints are stored for.

Source: Su et al., RoFormer (arXiv 2104.09864), section 3.4.2; the llama3 stretching as in `transformers`
`modeling_rope_utils.py`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engines.reference.model_config import Llama3Scaling, ModelConfig

Array = NDArray[np.float32]


class RotaryTable:
    """Cosines and sines of every position up to the longest served context."""

    def __init__(self, config: ModelConfig, positions: int) -> None:
        """Compute `[positions, head_dim / 2]` cosines and sines in float32."""
        angles = np.outer(np.arange(positions, dtype=np.float32), inverse_frequencies(config))
        self._cos: Array = np.cos(angles, dtype=np.float32)
        self._sin: Array = np.sin(angles, dtype=np.float32)

    def rotate(self, x: Array, positions: NDArray[np.intp]) -> Array:
        """Rotate `x` `[rows, heads, head_dim]`, row `i` by the angles of `positions[i]`."""
        half = x.shape[-1] // 2
        cos, sin = self._cos[positions][:, None, :], self._sin[positions][:, None, :]
        first, second = x[..., :half], x[..., half:]
        rotated = np.empty_like(x)
        rotated[..., :half] = first * cos - second * sin
        rotated[..., half:] = second * cos + first * sin
        return rotated


def inverse_frequencies(config: ModelConfig) -> Array:
    """Radians a position for each pair of dimensions, `[head_dim / 2]`."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    plain: Array = (1.0 / np.power(np.float32(config.rope_theta), exponents)).astype(np.float32)
    if config.rope_scaling is None:
        return plain
    if isinstance(config.rope_scaling, Llama3Scaling):
        return _llama3(plain, config.rope_scaling)
    return (plain / np.float32(config.rope_scaling)).astype(np.float32)


def _llama3(plain: Array, scaling: Llama3Scaling) -> Array:
    """Keep high frequencies, divide low ones by the factor, blend those between."""
    wavelength = 2.0 * math.pi / plain
    low = scaling.original_positions / scaling.low_freq_factor
    high = scaling.original_positions / scaling.high_freq_factor
    blend = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = (1.0 - blend) * plain / scaling.factor + blend * plain
    stretched = np.where(wavelength > low, plain / scaling.factor, np.where(wavelength < high, plain, smooth))
    return stretched.astype(np.float32)
