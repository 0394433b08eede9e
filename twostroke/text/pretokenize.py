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
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _PLAIN, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITWISE),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),  # Phi-4 and SmolLM3 name themselves so
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
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
