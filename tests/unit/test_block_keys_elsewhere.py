"""Block keys do not depend on the Python that makes them: the committed vectors on every other one that is here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "block_keys.json"
VERSIONS = ("3.10", "3.12", "3.13", "3.14")
SCRIPT = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("block_keys", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["block_keys"] = module
spec.loader.exec_module(module)
vectors = json.load(open(sys.argv[2]))
found = []
for vector in vectors["prefix_block_keys"] + vectors["shared_beginning"]:
    names = "salt", "model_digest", "adapter_digest"
    shared = bytes.fromhex(vector.get("shared_salt", "")), vector.get("shared_blocks", 0)
    fields = [bytes.fromhex(vector[name]) for name in names]
    beginning = module.SharedBeginning(*shared)
    keys = module.prefix_block_keys(*fields, vector["block_tokens"], vector["token_ids"], beginning)
    found.append([key.hex() for key in keys])
print(json.dumps([sys.version_info[:2], found]))
"""


def interpreter(version: str) -> str:
    """A Python of that version, on the path or as pyenv keeps it; skips the test if there is none that starts."""
    kept = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}"))
    for found in [*map(str, kept), shutil.which(f"python{version}")]:
        if found and subprocess.run([found, "-I", "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    pytest.skip(f"there is no Python {version} here")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_another_python_makes_the_same_keys(version: str, hash_seed: str) -> None:
    """In a process of another version and hash seed, with nothing but the standard library."""
    command = [interpreter(version), "-S", "-c", SCRIPT, str(ROOT / "roundhouse" / "block_keys.py"), str(GOLDEN)]
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    ran, found = json.loads(done.stdout)
    vectors = json.loads(GOLDEN.read_text())
    assert found == [vector["keys"] for vector in vectors["prefix_block_keys"] + vectors["shared_beginning"]]
    assert ".".join(map(str, ran)) == version != f"{sys.version_info.major}.{sys.version_info.minor}"
