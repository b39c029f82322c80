"""Answer pip from the metadata that a source distribution holds, without its build tools.

pip prepares the metadata of whatever it downloads; vLLM's own way needs torch, Rust and CMake.
"""

import shutil
from email.parser import Parser
from pathlib import Path


def prepare_metadata_for_build_wheel(
    metadata_directory: str, _config_settings: object = None
) -> str:
    about = Parser().parsestr(Path("PKG-INFO").read_text(encoding="utf-8"), headersonly=True)
    folder = Path(metadata_directory) / f"{about['Name']}-{about['Version']}.dist-info"
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name
