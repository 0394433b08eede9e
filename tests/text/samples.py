"""Texts that tokenizers get wrong: shared by the tests of this folder."""

from __future__ import annotations

import random

TEXTS = (
    "Once upon a time",
    "Hello  world   with    spaces",
    "  leading",
    "trailing  ",
    " ",
    "\n",
    "\n\n\t\tdef f(x):\n    return x**2  # comment\r\n",
    "I'm, you're, WE'LL, don't, it'S",
    "12345 1,234.56 0x1F 2024-11-15",
    "½ ² Ⅷ ٣٤ ५",
    "日本語のテキスト。中文，测试 한국어",
    "Привет, мир! שלום עולם مرحبا",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 text",
    "cafe\u0301 n\u0303 A\u030a \u0301alone",
    "a\x00b\x01\x7f\x85c",
    "foo_bar-baz/qux.html?x=1&y=2#z",
    "…—“quotes” «x»",
    "   \n   \n  x",
    "\u3000wide\u00a0space\u200bzero",
    "a" * 300,
    " " * 70 + "x" + " " * 33,
    "CamelCaseHTTPServer snake_case kebab-case",
    "tab\tand\t\ttabs",
    "....!!!???",
    "<0x0A> is not a newline",
)

_POOLS = (
    "abcdefghij XYZ", "0123456789 .,", "\n\r\t  ", "日本語中文かな", "éàüßñ", "👍🏽🇩🇪👩", "<|im_end|>[INST]",
    "'sStTreRE ", "_-+=/\\", "аяЖ", "ºª²½", "٣٤५", "\u200d\u00a0\u3000",
)  # fmt: skip


def mixtures(count: int, seed: int = 0, extra: str = "") -> list[str]:
    """Random texts that change script, case and spacing every few characters."""
    rng = random.Random(seed)
    pools = (*_POOLS, extra) if extra else _POOLS

    def run() -> str:
        pool = rng.choice(pools)
        return "".join(rng.choice(pool) for _ in range(rng.randint(1, 6)))

    return ["".join(run() for _ in range(rng.randint(1, 12))) for _ in range(count)]


def corpus() -> list[str]:
    """What the small vocabularies of these tests are trained on."""
    words = """
        the quick brown fox jumps over the lazy dog and upon a time there was once in the house of many words
        return import class self print value index string number false true none while for
        Straße café naïve über Привет мир日本語 中文 測試 I'm don't we'll they've 2024 1234 100 3.14
    """.split()  # noqa: SIM905
    rng = random.Random(1)
    lines = [" ".join(rng.choice(words) for _ in range(12)) for _ in range(400)]
    return lines + [f"def f{i}(x):\n    return x + {i}\n" for i in range(40)] + list(TEXTS) * 2
