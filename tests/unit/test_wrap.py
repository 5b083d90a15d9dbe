"""Wrapping Markdown changes where lines end, and nothing that a reader sees."""

import importlib.util
import re
from pathlib import Path

import markdown
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("wrap", ROOT / "docs" / "wrap.py")
assert spec is not None
assert spec.loader is not None
wrap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(wrap)


def shown(text: str) -> str:
    return re.sub(r"\s+", " ", markdown.markdown(text, extensions=["tables", "fenced_code"]))


WORD = st.sampled_from(["a", "model", "1.", "-", "+", "#", "`--set key=1`", "[a link](x.md)", "**bold words**", "sparse", "=", "3)"])
PARAGRAPH = st.lists(WORD, min_size=1, max_size=80).map(" ".join)
BLOCK = st.one_of(
    PARAGRAPH.map(lambda text: f"Plain {text}"),
    st.lists(PARAGRAPH.map(lambda text: f"- item {text}"), min_size=1, max_size=3).map("\n".join),
    PARAGRAPH.map(lambda text: f"1. first {text}"),
    st.just("```\n" + "code " * 50 + "\n```"),
    st.just("| a | b |\n| --- | --- |\n| " + "cell " * 50 + "| b |"),
    PARAGRAPH.map(lambda text: f"## {text}"),
)


@given(st.lists(BLOCK, min_size=1, max_size=4).map("\n\n".join))
def test_readers_see_the_same(text):
    now = wrap.wrapped(text)
    assert shown(now) == shown(text)
    assert wrap.wrapped(now) == now


def test_paragraphs_and_items_are_wrapped_and_code_is_whole():
    text = "- " + "word " * 30 + "`fedrts run --density 0.1 --seed 1`\n  more"
    lines = wrap.wrapped(text).splitlines()
    assert max(map(len, lines)) <= wrap.WIDTH
    assert [line[:2] for line in lines] == ["- ", "  "]
    assert any("`fedrts run --density 0.1 --seed 1`" in line for line in lines)


def test_narrow_paragraphs_stay_as_they_are():
    text = "One\ntwo\n\n- three\n  four\n"
    assert wrap.wrapped(text) == text
