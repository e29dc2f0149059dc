"""Matrix products whose rows do not depend on how many other rows there are.

BLAS chooses its kernel, and with it the order of additions, by the shape of the whole product, so the same row can
differ in the last bits between a batch of one and a batch of nine; a greedy choice between two near-equal tokens then
depends on the neighbours. Here every product has the same shape: rows are processed in tiles of `ROW_TILE`, padded with
zeros, and wide matrices in column panels of constant width. The property tests show that rows are equal bit for bit.

```
x [rows, K] --> [tiles, 1, ROW_TILE, K]  @  [panels, K, width]  -->  [tiles, panels, ROW_TILE, width]  --> [rows, N]
```
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

# Measured: OpenBLAS on AVX-512 runs 4 rows in its small-matrix kernel, without packing the weights, as fast per row as
# 64 rows in the packed kernel.
ROW_TILE = 4

# The small-matrix kernel is left above about 10^6 multiplications (OpenBLAS 0.3.23, SkylakeX); stay clear of it.
PANEL_PRODUCTS = 900_000


def padded_rows(rows: int) -> int:
    """The next multiple of `ROW_TILE`."""
    return -(-rows // ROW_TILE) * ROW_TILE


def pad_rows(x: Array) -> Array:
    """`x` `[rows, K]` with zero rows added up to a multiple of `ROW_TILE`; `x` itself when none are missing."""
    missing = -len(x) % ROW_TILE
    if not missing:
        return x
    return np.concatenate([x, np.zeros((missing, x.shape[1]), np.float32)])


class TiledMatrix:
    """A weight matrix `[K, N]` laid out for products with padded rows."""

    def __init__(self, weight: Array) -> None:
        """Take `weight` as Hugging Face stores it, `[N, K]` (out, in), and lay it out as `[panels, K, width]`."""
        self.outputs, self.inputs = weight.shape
        panels = max(1, -(-self.outputs * self.inputs * ROW_TILE // PANEL_PRODUCTS))
        width = -(-self.outputs // panels)
        spread = np.zeros((panels * width, self.inputs), np.float32)
        spread[: self.outputs] = weight
        self._panels = np.ascontiguousarray(spread.reshape(panels, width, self.inputs).transpose(0, 2, 1))

    def __call__(self, x: Array) -> Array:
        """`x` `[rows, K]`, `rows` a multiple of `ROW_TILE`, times the matrix: `[rows, N]`."""
        tiles = x.reshape(-1, 1, ROW_TILE, self.inputs)
        product: Array = np.matmul(tiles, self._panels)
        if len(self._panels) > 1:
            product = product.transpose(0, 2, 1, 3)
        return product.reshape(len(x), -1)[:, : self.outputs]
