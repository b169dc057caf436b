"""Weights, shape and tokenizer from a folder in the Hugging Face layout: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError, safe_open

from engine.chat import ChatTemplate
from engine.checkpoints.hfconfig import from_huggingface
from engine.checkpoints.packed import PackedMatrix, Packing
from engine.modelconfig import ModelConfig, UnsupportedModel
from engine.numbers import Quantised
from engine.tokenizer import Tokenizer


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no such file. UnsupportedModel when it is not a JSON object."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UnsupportedModel(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path}: expected a JSON object")
    return content


def _opened(path: Path) -> Any:
    """A file of tensors, memory-mapped. UnsupportedModel when it isn't one, or not whole."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = f"not a whole .safetensors file ({error}); get it again"
        raise UnsupportedModel(f"{path}: {reason}") from None


class HuggingFaceFolder:
    """One file `model.safetensors`, or shards listed in `model.safetensors.index.json`; full weights, or those of GPTQ and AWQ."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        raw = read_json(folder / "config.json")
        if not raw:
            raise UnsupportedModel(f"{folder}: no config.json in this folder")
        try:
            self.config: ModelConfig = from_huggingface(raw)
        except KeyError as missing:
            raise UnsupportedModel(f"{folder / 'config.json'}: {missing} is missing") from None
        except UnsupportedModel:
            raise
        except (AttributeError, ArithmeticError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"{folder / 'config.json'}: a value is not what it should be ({error})") from None
        stated = raw.get("quantization_config")
        self.packing = Packing.of(stated) if isinstance(stated, dict) else None
        self._files = self._find_tensors()
        self._open: dict[Path, Any] = {}

    def _find_tensors(self) -> dict[str, Path]:
        index = read_json(self.folder / "model.safetensors.index.json")
        if index:
            shards = index.get("weight_map")
            if not isinstance(shards, dict):
                raise UnsupportedModel(f"{self.folder / 'model.safetensors.index.json'}: no weight_map")
            files = {name: self.folder / str(shard) for name, shard in shards.items()}
        else:
            files = {}
            for path in sorted(self.folder.glob("*.safetensors")):
                with _opened(path) as opened:
                    files |= dict.fromkeys(opened.keys(), path)
        missing = sorted({path.name for path in files.values() if not path.is_file()})
        if missing:
            raise UnsupportedModel(f"{self.folder}: {missing[0]} is missing ({len(missing)} files of the index)")
        if not files:
            raise UnsupportedModel(f"{self.folder}: no .safetensors file in this folder")
        return files

    def has(self, name: str) -> bool:
        return name in self._files or self._packed(name) is not None

    def tensor(self, name: str) -> torch.Tensor:
        packed = self._packed(name)
        return self._stored(name) if packed is None else packed.weight()

    def numbers(self, name: str) -> Quantised | None:
        packed = self._packed(name)
        return None if packed is None else packed.kept()

    def _packed(self, name: str) -> PackedMatrix | None:
        """The matrix of which `name` is the weight, if it is a packed one."""
        whole = name.removesuffix(".weight")
        if self.packing is None or name in self._files or whole == name or f"{whole}.qweight" not in self._files:
            return None
        return self.packing.matrix(
            whole, lambda part: self._stored(f"{whole}.{part}") if f"{whole}.{part}" in self._files else None
        )

    def _stored(self, name: str) -> torch.Tensor:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        tensor: torch.Tensor = self._open[path].get_tensor(name)
        return tensor

    def tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedModel(f"{self.folder}: no tokenizer.json in this folder")
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UnsupportedModel(f"{path}: not a tokenizer ({error})") from None
        settings = read_json(self.folder / "tokenizer_config.json")
        special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in settings.items()
            if name in ("bos_token", "eos_token", "unk_token", "pad_token") and token is not None
        }
        return Tokenizer(inner, self._end_tokens(inner, special), self._chat_template(settings, special))

    def _end_tokens(self, inner: tokenizers.Tokenizer, special: dict[str, str]) -> frozenset[int]:
        ends: set[int] = set()
        for source in ("generation_config.json", "config.json"):
            value = read_json(self.folder / source).get("eos_token_id")
            ends |= set(value) if isinstance(value, list) else {value} if value is not None else set()
        if "eos_token" in special:
            named = inner.token_to_id(special["eos_token"])
            ends |= {named} if named is not None else set()
        return frozenset(ends)

    def _chat_template(self, settings: dict[str, Any], special: dict[str, str]) -> ChatTemplate | None:
        source = settings.get("chat_template")
        if isinstance(source, list):  # several named templates
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        beside = self.folder / "chat_template.jinja"
        if beside.is_file():
            source = beside.read_text("utf-8")
        return ChatTemplate(source, special) if source else None
