"""Vectors and scores are those of transformers, and do not depend on the batch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from tests.embed.checkpoints import TEXTS, save_modules, tiny_bert, tiny_cross_encoder, tiny_decoder
from twostroke import LLM
from twostroke.embed.embedder import Embedder
from twostroke.embed.encoder import EncoderModel
from twostroke.errors import ConfigError, InputError, ModelError
from twostroke.ops.cpu.backend import instruction_sets

NEAR = 1e-5  # of a cosine


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def reference(folder: Path, texts: list[str], pooling: str = "mean") -> np.ndarray:
    """One text at a time, without padding."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    encoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoder.no_truncation()
    encoder.no_padding()
    rows = []
    with torch.no_grad():
        for text in texts:
            hidden = model(torch.tensor([encoder.encode(text).ids])).last_hidden_state[0].double()
            rows.append({"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling].numpy())
    return np.stack(rows)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_cross_encoder(tmp_path_factory.mktemp("cross"))


@pytest.mark.parametrize(
    ("pooling", "name", "changes"),
    [
        ("pooling_mode_mean_tokens", "mean", {}),
        ("pooling_mode_cls_token", "cls", {"hidden_act": "gelu_new"}),
        ("pooling_mode_mean_tokens", "mean", {"hidden_act": "relu", "hidden_size": 128, "num_attention_heads": 2}),
        ("pooling_mode_mean_tokens", "mean", {"hidden_size": 80, "num_attention_heads": 5, "intermediate_size": 144}),
    ],
)
def test_an_encoder_is_as_transformers(tmp_path: Path, pooling: str, name: str, changes: dict[str, object]) -> None:
    folder = tiny_bert(tmp_path, pooling, **changes)
    found = Embedder.open(folder).embed(TEXTS)
    assert cosines(found, reference(folder, TEXTS, name)).min() > 1 - NEAR
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("isa", instruction_sets())
def test_every_instruction_set(bert: Path, isa: str) -> None:
    embedder = Embedder.open(bert, threads=2)
    model = embedder.model
    assert isinstance(model, EncoderModel)
    other = EncoderModel(embedder.checkpoint, model.arch, embedder.description, 1, isa)
    tokens = [embedder.tokenizer.encode(text) for text in TEXTS]
    whole = other.run(tokens)
    assert cosines(whole, reference(bert, TEXTS)).min() > 1 - NEAR
    assert all((other.run([one])[0] == row).all() for one, row in zip(tokens, whole, strict=True))


def test_a_decoder_is_as_transformers(decoder: Path) -> None:
    long = "The quick brown fox jumps over the lazy dog. " * 30
    texts = [*TEXTS, long, "x"]
    found = Embedder.open(decoder).embed(texts)
    assert cosines(found, reference(decoder, texts, "last")).min() > 1 - NEAR


@pytest.mark.parametrize("labels", [1, 2])
def test_a_cross_encoder_is_as_transformers(tmp_path: Path, labels: int) -> None:
    folder = tiny_cross_encoder(tmp_path, labels)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    encoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = []
    with torch.no_grad():
        for text in TEXTS:
            both = encoder.encode(TEXTS[0], text)
            scores = model(torch.tensor([both.ids]), token_type_ids=torch.tensor([both.type_ids])).logits[0]
            expected.append(float(scores.sigmoid()[0] if labels == 1 else scores.softmax(0)[1]))
    ranked = Embedder.open(folder).rank(TEXTS[0], TEXTS)
    assert [one.index for one in ranked] == sorted(range(len(TEXTS)), key=lambda i: -expected[i])
    assert all(abs(one.score - expected[one.index]) < 1e-3 for one in ranked)


@pytest.mark.parametrize("kind", ["bert", "decoder"])
def test_a_vector_has_the_same_bits_in_any_batch(kind: str, request: pytest.FixtureRequest) -> None:
    chance = random.Random(0)
    embedder = Embedder.open(request.getfixturevalue(kind), threads=2)
    words = " ".join(TEXTS).split()
    texts = [" ".join(chance.choices(words, k=chance.randint(1, 40))) for _ in range(60)]
    alone = {text: embedder.embed([text])[0].tobytes() for text in texts}
    other = Embedder.open(request.getfixturevalue(kind), threads=1)
    for size in (2, 3, 17, 60):
        batch = chance.sample(texts, size)
        for one in (embedder, other):
            assert all(row.tobytes() == alone[text] for text, row in zip(batch, one.embed(batch), strict=True))


def test_eight_bits_are_near_and_have_the_same_bits_in_any_batch(bert: Path, decoder: Path) -> None:
    exact, coded = (Embedder.open(bert, threads=1, coded=coded) for coded in (False, True))
    rows = coded.embed(TEXTS)
    assert cosines(rows, exact.embed(TEXTS)).min() > 0.995
    assert all((coded.embed([text])[0] == row).all() for text, row in zip(TEXTS, rows, strict=True))
    with pytest.raises(ConfigError, match="coded"):
        Embedder.open(decoder, coded=True)


def test_token_ids_and_dimensions(bert: Path) -> None:
    embedder = Embedder.open(bert)
    text = embedder.embed([TEXTS[0]])
    ids = list(embedder.tokenizer.encode(TEXTS[0]).ids)
    assert (embedder.embed([ids]) == text).all()
    short = embedder.embed([ids], dimensions=32)
    assert short.shape == (1, 32) and cosines(short, text[:, :32])[0] > 1 - 1e-6
    assert np.isclose(np.linalg.norm(short), 1)


def test_what_cannot_be_read_is_refused_by_name(bert: Path, cross: Path) -> None:
    embedder = Embedder.open(bert)
    for bad, words in ((["x " * 500], "tokens"), ([[10**6]], "token ids"), ([[]], "empty"), (["\ud800"], "surrogate")):
        with pytest.raises(InputError, match=words):
            embedder.embed(bad)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="dimensions"):
        embedder.embed(["x"], dimensions=1000)
    with pytest.raises(InputError, match="scores pairs"):
        Embedder.open(cross).embed(["x"])


def test_a_text_that_spells_a_special_token_is_text(bert: Path) -> None:
    ids = Embedder.open(bert).tokenizer.encode("[SEP]").ids
    assert len(ids) > 3 and ids.count(ids[-1]) == 1


def test_a_long_document_is_cut_to_fit_its_query(cross: Path) -> None:
    embedder = Embedder.open(cross)
    (pair,) = embedder.pair("what is a city", "the cat sat on the mat " * 100)
    assert len(pair.ids) == embedder.max_tokens and pair.ids[-1] == embedder.tokenizer.encode("x").ids[-1]
    assert len(embedder.rank("what", ["the dog " * 500, "a city"])) == 2


def test_a_folder_that_says_something_else_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ModelError, match="Dense"):
        Embedder.open(folder)
    modules[1]["path"] = "../elsewhere"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="beside"):
        Embedder.open(folder)
    save_modules(folder, "pooling_mode_max_tokens")
    with pytest.raises(ModelError, match="pools by nothing"):
        Embedder.open(folder)


def test_from_python(bert: Path, tmp_path: Path) -> None:
    with LLM(bert) as llm:
        assert llm.embed(TEXTS[:2]).shape == (2, 96)
        assert llm.rank(TEXTS[0], TEXTS)[0].index == 0
        with pytest.raises(InputError, match="writes no text"):
            llm.generate("x")
        for ask in (llm.chat, llm.stream):
            with pytest.raises(InputError, match="writes no text"):
                ask([{"role": "user", "content": "x"}])
    with pytest.raises(InputError, match="closed"):
        llm.embed(["x"])
    with pytest.raises(ConfigError, match="kv_blocks"):
        LLM(bert, kv_blocks=4)


@pytest.mark.slow
def test_all_minilm_is_as_transformers_on_200_sentences() -> None:
    embedder = Embedder.open("all-minilm-l6-v2")
    lines = Path(__file__).parents[2].joinpath("benchmarks/data/wikitext2_excerpt.txt").read_text().splitlines()
    texts = [line.strip()[:400] for line in lines if len(line) > 30] + " ".join(lines).split(" . ")
    texts = list(dict.fromkeys(text[:400] for text in texts))[:200]
    assert len(texts) == 200
    found = embedder.embed(texts)
    assert cosines(found, reference(embedder.checkpoint.path, texts)).min() > 1 - NEAR
    assert all((embedder.embed([text])[0] == row).all() for text, row in zip(texts[::9], found[::9], strict=True))
