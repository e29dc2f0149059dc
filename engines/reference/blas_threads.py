"""Holds NumPy's BLAS to one thread.

Many engine processes share few cores, and the products here are too small to gain from threads. The environment
variable comes too late: Triton's stub has imported NumPy before a model's own code runs. So the bundled OpenBLAS is
asked directly; where there is another BLAS, nothing is changed.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np


def use_one_thread() -> bool:
    """Set the thread count of NumPy's bundled OpenBLAS to 1; False when there is none. Idempotent."""
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    for path in sorted(folder.glob("*openblas*")):
        library = ctypes.CDLL(str(path))  # already mapped: this only finds it
        for name in ("openblas_set_num_threads64_", "scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
            setter = getattr(library, name, None)
            if setter is not None:
                setter(1)
                return True
    return False
