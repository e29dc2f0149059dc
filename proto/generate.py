"""Generate `roundhouse/wire/v1` from `proto/`; with `--check`, fail if the committed files are stale.

The proto package is `roundhouse.v1`, its Python home is `roundhouse.wire.v1`: the one rewrite of import lines below
keeps the wire contract free of our folder names.
"""

import filecmp
import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PLUGINS = Path(sys.executable).parent  # beside this interpreter, whether or not its folder is on the PATH
TARGET = ROOT.parent / "roundhouse" / "wire" / "v1"


def generate(target: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` for every proto file into `target`."""
    with tempfile.TemporaryDirectory() as scratch:
        sources = sorted(str(path) for path in (ROOT / "roundhouse" / "v1").glob("*.proto"))
        well_known = str(resources.files("grpc_tools") / "_proto")
        arguments = ["protoc", f"-I{ROOT}", f"-I{well_known}"]
        arguments += [f"--plugin=protoc-gen-{kind}={PLUGINS / f'protoc-gen-{kind}'}" for kind in ("mypy", "mypy_grpc")]
        arguments += [f"--{kind}_out={scratch}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")]
        if protoc.main(arguments + sources) != 0:
            sys.exit("protoc failed: see above")
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted((Path(scratch) / "roundhouse" / "v1").iterdir()):
            (target / path.name).write_text(_rehome(path.read_text()))
        (target / "__init__.py").write_text("")


def _rehome(text: str) -> str:
    text = re.sub(r"\bfrom roundhouse\.v1 import", "from roundhouse.wire.v1 import", text)
    text = re.sub(r"\bimport roundhouse\.v1\.", "import roundhouse.wire.v1.", text)
    return re.sub(r"(?<![\"'/\w])roundhouse\.v1\.(\w+_pb2)", r"roundhouse.wire.v1.\1", text)


def check() -> None:
    """Exit 1, naming the files, if what is committed differs from what the proto files give."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        names = {path.name for path in fresh.iterdir()} | {path.name for path in TARGET.glob("*.py*")}
        _, different, missing = filecmp.cmpfiles(fresh, TARGET, names, shallow=False)
        if different or missing:
            sys.exit(f"stale generated protobuf, run `make proto`: {', '.join(sorted(different + missing))}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        check()
    else:
        generate(TARGET)
