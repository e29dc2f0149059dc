"""Hatchling's hook: builds the compiled copy of engines/checked_copy into the wheel, where there is a C compiler.

A wheel that was built without it runs everywhere and copies in two passes.
"""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = Path(__file__).parent / "engines" / "checked_copy" / "build.py"


class CheckedCopyHook(BuildHookInterface):  # type: ignore[misc] # hatchling is there while building only
    """Names what it built, and the machine that it runs on, to hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the wheel is put together; also of an editable installation, which uses the file where it lies."""
        spec = importlib.util.spec_from_file_location("checked_copy_build", BUILD)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        why_not = module.build()
        if why_not:
            self.app.display_warning(f"without the compiled copy of KV blocks: {why_not}")
            return
        build_data["artifacts"].append(str(module.LIBRARY.relative_to(self.root)))
        build_data["pure_python"] = False
        machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{machine}"
