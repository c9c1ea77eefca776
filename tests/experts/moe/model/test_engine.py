"""Continuous batching: who is beside whom changes nothing, and what is streamed, ended and counted is right."""

import itertools

import pytest
import torch

from experts.moe.model.text import PromptError, TextCodec

pytest.importorskip("transformers", reason="the extra `moe` is not installed")
import tokenizers

from tests.experts.moe.model.batches import MODEL, Bench, Plain, a_codec, a_model, alone


def generated(prompt: str, new: int) -> list[int]:
    """The tokens that transformers itself adds."""
    tokens = torch.tensor([a_codec().encode(prompt)])
    with torch.no_grad():
        out = MODEL.generate(tokens, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, tokens.shape[1] :].tolist()


PROMPTS = {"a": ("hello", 12), "b": ("a much longer prompt than that", 5), "c": ("x", 20), "d": ("of the board", 9)}


@pytest.mark.promise("Language models", "A text is the same whether it runs alone or beside others that join and leave")
@pytest.mark.parametrize("order", list(itertools.permutations(PROMPTS))[::5])
def test_a_request_gets_the_same_text_alone_and_beside_others_that_join_and_leave(order: tuple[str, ...]) -> None:
    bench = Bench(rows=3)
    for name in order:
        bench.ask(name, *PROMPTS[name])
        bench.step()
    bench.run()
    assert {name: ended.text for name, ended in bench.ended.items()} == {
        name: alone(*PROMPTS[name]) for name in PROMPTS
    }


def test_streamed_pieces_add_up_to_the_text_and_are_numbered() -> None:
    bench = Bench()
    for name, (prompt, new) in PROMPTS.items():
        bench.ask(name, prompt, new)
    bench.run()
    for name, (_, new) in PROMPTS.items():
        assert bench.text_of(name) == bench.ended[name].text
        assert [event.index for event in bench.tokens if event.request == name] == list(range(new))
        assert bench.ended[name].new_tokens == new


def a_codec_that_falls_back_to_bytes() -> TextCodec:
    """As Mixtral's: words, and a token for each byte of what is no word."""
    words = ["?", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "a", "b"]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, [], byte_fallback=True))
    of = tokenizers.decoders
    tokenizer.decoder = of.Sequence([of.Replace("\u2581", " "), of.ByteFallback(), of.Fuse(), of.Strip(" ", 1, 0)])
    return TextCodec(tokenizer, None, frozenset())


@pytest.mark.parametrize("codec", [a_codec(), a_codec_that_falls_back_to_bytes()], ids=["bytes", "fallback"])
def test_whatever_tokens_come_the_text_is_what_was_streamed(codec: TextCodec) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(300):
        tokens = torch.randint(1, 256, (20,), generator=generator).tolist()
        stream = codec.stream()
        pieces = [*map(stream.add, tokens), stream.end()]
        assert "".join(pieces) == stream.text


def test_a_character_is_streamed_whole_and_in_front_of_bytes_that_are_none() -> None:
    codec = a_codec_that_falls_back_to_bytes()
    stream = codec.stream()
    # "the", two bytes of an "e" with an accent, a byte that begins nothing, "a".
    pieces = [stream.add(token) for token in (258, 1 + 0xC3, 1 + 0xA9, 1 + 0xFF, 259)]
    assert pieces[:4] == ["the", "", "\u00e9", ""]
    assert stream.text.startswith("the\u00e9")
    assert stream.text.endswith("\ufffda")
    whole = [258, 257, 1 + 0xC3, 1 + 0xA9, 260]
    stream = codec.stream()
    assert "".join(map(stream.add, whole)) + stream.end() == codec.decode(whole)


def test_a_prefill_is_alone_and_others_get_a_token_between_two() -> None:
    bench = Bench(rows=4)
    bench.ask("a", "hello", 20)
    bench.step()
    for name in "bcd":
        bench.ask(name, "prompt of " + name, 20)
    for _ in range(6):
        bench.step()
    kinds = ["".join(row.request for row in rows) for rows in bench.runtime.steps]
    assert kinds == ["a", "b", "ab", "c", "abc", "d", "abcd"]
    assert [row.tokens for row in bench.runtime.steps[1]] == [len("prompt of b")]


def test_a_text_ends_at_its_end_token_which_is_no_part_of_it() -> None:
    tokens = generated("hello", 12)
    end = tokens[4]
    bench = Bench(ends=frozenset({end}))
    bench.ask("a", "hello", 12)
    bench.run()
    count = tokens.index(end)
    assert bench.ended["a"].new_tokens == count
    # An incomplete character at the end is not part of the text, and was not streamed either.
    assert bench.ended["a"].text == bench.text_of("a") == a_codec().decode(tokens[:count]).rstrip("\ufffd")
    assert len(bench.tokens) == count


def test_a_text_ends_where_the_context_is_full() -> None:
    bench = Bench()
    bench.ask("a", "x" * 60, 50)
    bench.run()
    assert (bench.ended["a"].new_tokens, bench.ended["a"].reason) == (4, None)


def test_empty_and_overlong_prompts_are_named() -> None:
    codec = a_codec()
    for prompt in ("", " \n\t"):
        with pytest.raises(PromptError, match="empty"):
            codec.encode(prompt)
    with pytest.raises(PromptError, match="64 tokens, at most 63 fit"):
        codec.encode("x" * 64)
    assert len(codec.encode("x" * 63)) == 63


def test_a_deadline_ends_what_waits_and_what_runs_and_nobody_else() -> None:
    bench = Bench(rows=2)
    bench.ask("runs", "hello", 30, deadline_s=5.5)
    bench.ask("goes on", "hello", 12)
    bench.ask("waits", "hello", 30, deadline_s=3.5)
    bench.run()
    assert {name: (ended.reason, ended.text is None) for name, ended in bench.ended.items()} == {
        "runs": ("deadline", True),
        "waits": ("deadline", True),
        "goes on": (None, False),
    }
    assert bench.ended["goes on"].text == alone("hello", 12)
    assert bench.ended["waits"].ttft_s is None


def test_weights_that_give_no_numbers_are_named() -> None:
    broken = a_model()
    broken.lm_head.weight.data[5] = float("nan")
    bench = Bench(Plain(broken))
    bench.ask("a", "hello")
    bench.run()
    assert "not a number" in str(bench.ended["a"].error)
