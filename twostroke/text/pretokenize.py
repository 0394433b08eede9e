"""How byte-level BPE families split text into words before merging, by the name that a GGUF gives.

A GGUF holds the vocabulary and the merges, but only the *name* of the pre-tokenizer. With a wrong pre-tokenizer the
tokens look plausible and the model gets worse, so an unknown name is refused. The patterns are those of the families'
tokenizer.json files.
"""

from __future__ import annotations

from tokenizers import Regex, normalizers, pre_tokenizers

from twostroke.errors import ModelError
from twostroke.record import Record

_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # 's, 't, … in either case
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """GPT-4's split: contractions, words with one leading character, digits, punctuation, line ends, spaces."""
    return rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, short: str) -> str:
    """GPT-4o's split: as GPT-4's, but a word also ends where lower case turns to upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    word = f"{lead}{upper}*{lower}+{short}|{lead}{upper}+{lower}*{short}"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


# GPT-2's split. What no pattern matches is a word too.
_PLAIN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"  # DeepSeek's first models: Chinese, Korean and what lies between
# Letters of the first DeepSeek models, which their tokenizer.json lists one by one: those of scripts with two cases.
_DEEPSEEK_LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"


def _deepseek(*words: str) -> tuple[str, ...]:
    """The split of DeepSeek's first models: line ends, then words, then Chinese and Korean, then single digits."""
    return (r"[\r\n]", *words, _CJK, r"\p{N}")


# The split of DeepSeek V3: the last step, after digits and after Chinese and Japanese.
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


def _kimi() -> str:
    """GPT-4o's split in which Chinese characters are words of their own."""
    shared = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}{shared}]", rf"[\p{{Ll}}{shared}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    word = f"{lead}{upper}*{lower}+{_SHORT}?|{lead}{upper}+{lower}*{_SHORT}?"
    return rf"\p{{Han}}+|{word}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


class PreTokenizer(Record):
    """How one family splits text. `ignore_merges`: a word that is a token is taken without merging."""

    patterns: tuple[str, ...] = ()
    gpt2: bool = False  # finish with GPT-2's split
    digits: bool = False  # begin by splitting off every digit
    nfc: bool = False  # the family was trained on composed characters
    ignore_merges: bool = False
    add_bos: bool = False  # unless the file says otherwise

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizer(gpt2=True)
_DIGITWISE = PreTokenizer(gpt2=True, digits=True)
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((_words(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), nfc=True)
_GPT4O = PreTokenizer((_cased(r"\p{N}{1,3}", f"{_SHORT}?"),))
_TEKKEN = PreTokenizer((_cased(r"\p{N}", ""),), ignore_merges=True, add_bos=True)
_DEEPSEEK_LLM = PreTokenizer(_deepseek(rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_MARKS}]+", r"\s+$"))
_DEEPSEEK_CODER = PreTokenizer(_deepseek(r"\s?\p{L}+", r"\s?\p{P}+"))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3_WORDS))
_KIMI = PreTokenizer((_kimi(),), ignore_merges=True)
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _PLAIN, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITWISE),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),  # Phi-4 and SmolLM3 name themselves so
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,  # R1 names itself so too
    "kimi-k2": _KIMI,
    "default": _DEFAULT,
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer that a GGUF names."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(
            f"tokenizer.ggml.pre: {name!r} is not a pre-tokenizer this engine knows, and a wrong one would make "
            f"every answer worse; use the safetensors folder of this model with its tokenizer.json (known: {known})"
        ) from None
