"""Text comes out whole: no half characters, nothing of a stop string, and in sum exactly the decoded output."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.chat import ChatTemplate, ChatTemplateError
from engine.detokenizer import TextStream
from tests.engine.checkpoints import TEMPLATE, byte_tokenizer

BYTES = byte_tokenizer(264)


def ids(text: str) -> list[int]:
    return list(BYTES.encode(text, add_special_tokens=False).ids)


def feed(stream: TextStream, tokens: list[int]) -> tuple[list[str], bool]:
    pieces = []
    for token in tokens:
        text, stopped = stream.push(token)
        pieces.append(text)
        if stopped:
            return pieces, True
    pieces.append(stream.flush())
    return pieces, False


@given(st.text(max_size=40), st.text(max_size=8))
@settings(max_examples=200, deadline=None)
def test_the_pieces_add_up_to_the_text_and_none_holds_half_a_character(text: str, prompt: str) -> None:
    pieces, stopped = feed(TextStream(BYTES, ids(prompt)), ids(text))
    assert not stopped
    assert "".join(pieces) == BYTES.decode(ids(text))
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=30))
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_decodes_them(tokens: list[int]) -> None:
    pieces, _ = feed(TextStream(BYTES, []), tokens)
    assert "".join(pieces) == BYTES.decode(tokens)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_the_text_ends_before_the_first_stop_string_whatever_it_is(text: str, stops: list[str]) -> None:
    pieces, stopped = feed(TextStream(BYTES, ids("b"), tuple(stops)), ids(text))
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    # tokens are single letters here: the stop that is complete first ends the output, and it began at its own place
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if first is None:
        assert ("".join(pieces), stopped) == (text, False)
    else:
        assert stopped
        complete = text[: min(ends)]
        assert "".join(pieces) == complete[: min(complete.find(stop) for stop in stops if stop in complete)]


def test_what_may_become_a_stop_string_is_held_back_and_shown_when_it_does_not() -> None:
    stream = TextStream(BYTES, [], ("END.",))
    shown = [stream.push(token)[0] for token in ids("the EN")]
    assert "".join(shown) == "the "
    assert stream.push(ids("x")[0]) == ("ENx", False)
    for token in ids("END"):
        assert stream.push(token) == ("", False)
    assert stream.flush() == "END"


def test_special_tokens_are_not_shown() -> None:
    pieces, _ = feed(TextStream(BYTES, []), [*ids("a"), 256, *ids("b"), 257])
    assert "".join(pieces) == "ab"


def test_the_first_token_keeps_its_blank_after_a_prompt() -> None:
    words = Tokenizer(models.BPE(vocab={"▁The": 0, "▁capital": 1, "▁is": 2}, merges=[]))
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    assert words.decode([1]) == "capital"
    assert TextStream(words, [0]).push(1) == (" capital", False)


def test_byte_tokens_that_decode_to_another_beginning_do_not_break_the_stream() -> None:
    vocab = {"a": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    euro = [1 + byte for byte in "€".encode()]
    for tokens in ([0, *euro, 0], [0, 1 + 0xE2, 0, *euro], [*euro[:2], *euro]):
        pieces, _ = feed(TextStream(inner, []), tokens)
        assert "€" in "".join(pieces) or tokens[:2] == euro[:2]
        assert "".join(pieces)


def test_the_chat_template_renders_and_refuses_in_its_own_words() -> None:
    template = ChatTemplate(TEMPLATE + "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}", {})
    message = {"role": "user", "content": "hi"}
    assert template.render([message]) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    with pytest.raises(ChatTemplateError, match="too many"):
        template.render([message] * 3)


def test_a_chat_template_cannot_reach_outside_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(ChatTemplateError):
        template.render([{"role": "user", "content": "hi"}])
