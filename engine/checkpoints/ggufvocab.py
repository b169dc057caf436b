"""A tokenizer from the vocabulary in a GGUF file: byte-level BPE (Llama 3, Qwen2, SmolLM) or SentencePiece BPE (Llama 2, Gemma)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.modelconfig import UnsupportedModel

CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # llama.cpp's token types

# The regular expressions that these vocabularies were trained with: part of each model's published definition.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_SPLITS: Mapping[str, str | None] = {
    "default": None,
    "gpt-2": None,
    # SmolLM's own definition also cuts off each digit; like transformers we leave that out for GGUF files, and get the
    # same tokens as it does. It differs only where two or more blanks stand before a digit.
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""tokenizer.ggml.pre -> the expression that cuts text before the merges; None: GPT-2's, which the library has built in."""


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The file's tokenizer. UnsupportedModel when it is of a kind that is not known here: wrong tokens are worse than none."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, path)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise UnsupportedModel(f"{path}: tokenizer {kind!r} is not supported; supported: gpt2, llama")
    _add_marked_tokens(tokenizer, metadata)
    _add_begin_and_end(tokenizer, metadata, begin_by_default=kind == "llama")
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise UnsupportedModel(
            f"{path}: pre-tokenizer {pre!r} is not known (known: {', '.join(_SPLITS)}); use the model's safetensors folder"
        )
    vocab = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    split = _SPLITS[pre]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split is _LLAMA3))
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    gemma = str(metadata.get("general.architecture")).startswith("gemma")
    if gemma:  # runs of blanks are stored as blanks; merges are in the order of the tokens, whatever their scores
        tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = metadata.get("tokenizer.ggml.merges")
    scores = [-float(id) for id in range(len(tokens))] if gemma else metadata.get("tokenizer.ggml.scores", ())
    pairs = [_pair(m) for m in merges] if merges else _merges_by_score(tokens, scores)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=pairs,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first" if prefix else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores highest: every way to cut a token in two, best result first."""
    known = {token: id for id, token in enumerate(tokens)}
    found: list[tuple[float, int, int, int, int, int, str, str]] = []
    for id, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                tie = (-len(left), -len(right), id, known[left], known[right])
                found.append((-scores[id], *tie, left, right))
    found.sort()
    return [(entry[-2], entry[-1]) for entry in found]


def _add_marked_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or ()
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in marked if k == CONTROL])
    known = tokenizer.get_vocab()  # what is spelled otherwise there would become a token that the model does not have
    users = [t for t, k in marked if k == USER_DEFINED and t in known]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in users])


def _add_begin_and_end(tokenizer: Tokenizer, metadata: Mapping[str, Any], begin_by_default: bool) -> None:
    begin = _asked_for(metadata, "bos", begin_by_default)
    end = _asked_for(metadata, "eos", False)
    if begin or end:
        pieces = [*(token for token, _ in begin), "$A", *(token for token, _ in end)]
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=begin + end)


def _asked_for(metadata: Mapping[str, Any], name: str, default: bool) -> list[tuple[str, int]]:
    id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if id is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
        return []
    return [(metadata["tokenizer.ggml.tokens"][id], id)]
