"""Builds the compiled copy beside its source: at installation (hatch_build.py), or by running this file.

Imports nothing but the standard library: it runs before the package's dependencies are there. Without a compiler
nothing is built and nothing fails.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("checked_copy.c")
LIBRARY = Path(__file__).with_name("checked_copy.so")
COMPILERS = ("cc", "gcc", "clang")


def build(library: Path = LIBRARY) -> str:
    """Compile into `library`, in one step, so that nobody loads half of it. Why not, or empty."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return "no C compiler"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(made), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{compiler} failed"
        os.replace(made, library)
    return ""


if __name__ == "__main__":
    if problem := build():
        raise SystemExit(problem)
    sys.stdout.write(f"built {LIBRARY}\n")
