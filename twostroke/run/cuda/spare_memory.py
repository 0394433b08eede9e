"""What the KV cache can spare: copies in floats of matrices of few bits (ops/cuda/copies.py)."""

from __future__ import annotations

import logging

from twostroke.config import COPIES_SHARE, Config
from twostroke.model.transformer import Transformer
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.cuda.weights import FloatMatrix
from twostroke.run.cuda.ranked import lead_of

log = logging.getLogger(__name__)


def keep_copies(model: Transformer, config: Config, free: int) -> int:
    """Bytes of the copies that are kept for products of many rows. None where the size of the KV cache is given: then
    the memory is divided already. free: bytes on the device beside the weights."""
    ops = model.ops
    assert isinstance(ops, CudaOps)
    given = config.kv_blocks is not None or config.kv_memory is not None
    if given or ops.one_order or lead_of(model) is not None:
        return 0
    every = [product.weight for layer in model.layers for product in layer.products()] + [model.head]
    narrow = [weight for weight in every if not isinstance(weight, FloatMatrix)]
    size = ops.copies.bytes(narrow)
    if not 0 < size <= COPIES_SHARE * free:
        return 0
    ops.copies.keep(narrow)
    log.info("copies of the weights in %s for products of many rows: %.1f GB", ops.dtype, size / 1e9)
    return size
