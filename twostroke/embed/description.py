"""What an embedding checkpoint computes, from its configuration files. Torch-free.

`config.json` names the architecture. The files of sentence-transformers beside it say how tokens become one vector:
`modules.json` lists the steps, `1_Pooling/config.json` says which tokens count, and `sentence_bert_config.json` has the
longest text that the model was trained for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from twostroke.errors import ModelError
from twostroke.ops.cpu.encode import EncodeActivation
from twostroke.record import Record
from twostroke.weights.checkpoint import CONFIG, Checkpoint, open_checkpoint
from twostroke.weights.files import read_json_list, read_json_object

Pooling = Literal["mean", "cls", "last"]
EmbedderKind = Literal["encoder", "cross-encoder", "decoder"]

MODULES = "modules.json"
ENCODERS = ("bert",)  # model_type
CLASSIFIERS = "ForSequenceClassification"
_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last",
}  # fmt: skip
_ACTIVATIONS: dict[str, EncodeActivation] = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip


class EncoderArch(Record):
    hidden: int
    layers: int
    heads: int
    inner: int
    vocab: int
    positions: int
    types: int
    activation: EncodeActivation
    eps: float
    labels: int = 0  # outputs of a classification head


class Description(Record):
    kind: EmbedderKind
    pooling: Pooling = "mean"
    normalize: bool = True
    max_tokens: int = 0  # of one text; 0: as many as the model has positions for


def is_embedder(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is of a model that makes vectors or scores, not text."""
    if checkpoint.kind != "safetensors":
        return False
    return checkpoint.config.get("model_type") in ENCODERS or (checkpoint.path / MODULES).is_file()


def is_embedder_at(path: Path) -> bool:
    """The same for a file or folder; only a folder can hold an embedder."""
    return path.is_dir() and is_embedder(open_checkpoint(path))


def describe(checkpoint: Checkpoint) -> Description:
    folder, config = checkpoint.path, checkpoint.config
    names = [str(name) for name in config.get("architectures") or ()]
    if config.get("model_type") not in ENCODERS:
        pooling, normalize = _modules(folder)
        if pooling != "last":
            raise ModelError(f"{folder}: pools {pooling} of a generative model; only the last token is supported.")
        return Description("decoder", "last", normalize, _max_tokens(folder))
    if any(name.endswith(CLASSIFIERS) for name in names):
        return Description("cross-encoder")
    pooling, normalize = _modules(folder)
    if pooling == "last":
        raise ModelError(f"{folder}: pools the last token of an encoder, which is not supported; mean and cls are.")
    return Description("encoder", pooling, normalize, _max_tokens(folder))


def encoder_arch(config: dict[str, Any], where: str) -> EncoderArch:
    def whole(name: str, least: int = 1) -> int:
        value = config.get(name)
        if type(value) is not int or not least <= value < 1 << 24:
            raise ModelError(f"{where}: {name} is {value!r}; a whole number from {least} is needed.")
        return value

    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(f"{where}: position_embedding_type {config['position_embedding_type']!r} is not supported.")
    activation, eps = config.get("hidden_act", "gelu"), config.get("layer_norm_eps", 1e-12)
    if activation not in _ACTIVATIONS:
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported; {', '.join(_ACTIVATIONS)} are.")
    if not isinstance(eps, float | int) or not 0 <= eps < 1:
        raise ModelError(f"{where}: layer_norm_eps is {eps!r}; a small number is needed.")
    labels = config.get("id2label")
    return EncoderArch(
        hidden=whole("hidden_size"), layers=whole("num_hidden_layers"), heads=whole("num_attention_heads"),
        inner=whole("intermediate_size"), vocab=whole("vocab_size"), positions=whole("max_position_embeddings"),
        types=whole("type_vocab_size"), activation=_ACTIVATIONS[activation], eps=float(eps),
        labels=len(labels) if isinstance(labels, dict) else 2,
    )  # fmt: skip


def _modules(folder: Path) -> tuple[Pooling, bool]:
    """How tokens become a vector, and whether it gets length 1. Without the file: the mean, of length 1."""
    if not (folder / MODULES).is_file():
        return "mean", True
    pooling: Pooling = "mean"
    kinds = []
    for module in read_json_list(folder / MODULES):
        kind = str(module.get("type", "")) if isinstance(module, dict) else ""
        kinds.append(kind.rpartition(".")[2])
        if kinds[-1] == "Pooling":
            pooling = _pooling(folder / _inside(str(module.get("path", ""))) / CONFIG)
    unknown = set(kinds) - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise ModelError(f"{folder}/{MODULES}: has {', '.join(sorted(unknown))}, which is not supported.")
    return pooling, "Normalize" in kinds


def _inside(name: str) -> str:
    """A folder's plain name: a file may not reach outside its own folder."""
    if not name or set(name) & set("/\\:\0") or name.startswith("."):
        raise ModelError(f"{MODULES}: the folder {name[:100]!r} must lie beside it.")
    return name


def _pooling(file: Path) -> Pooling:
    config = read_json_object(file)
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode") and value is True]
    if config.get("include_prompt") is False:
        raise ModelError(f"{file}: leaves the prompt out of the vector, which is not supported.")
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise ModelError(f"{file}: pools by {chosen or 'nothing'}; one of {', '.join(_POOLINGS)} is supported.")
    return _POOLINGS[chosen[0]]


def _max_tokens(folder: Path) -> int:
    file = folder / "sentence_bert_config.json"
    found = read_json_object(file).get("max_seq_length") if file.is_file() else None
    return found if type(found) is int and found > 0 else 0
