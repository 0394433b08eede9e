"""Scales that lie in a tensor beside the codes: one for the matrix, for each output, for groups or for squares."""

from __future__ import annotations

import numpy as np

from twostroke.ops.formats import Stored, dequantize
from twostroke.record import Record


class Scales(Record, eq=False):
    tensor: Stored
    shape: tuple[int, int]  # of the tensor, as rows and columns
    outputs: int  # of the matrix
    each: tuple[int, int]  # outputs and inputs that share a scale

    @property
    def by_output(self) -> bool:
        """Whether all inputs of an output share a scale."""
        return self.shape[1] == 1

    def read(self) -> np.ndarray:
        """(outputs, columns) float32"""
        return self.for_outputs(dequantize(self.tensor))

    def for_outputs(self, values: np.ndarray) -> np.ndarray:
        """Values of the tensor's shape, a row for each output."""
        return np.repeat(values.reshape(self.shape), self.each[0], axis=0)[: self.outputs]


def find_scales(tensor: Stored, matrix: tuple[int, ...], square: tuple[int, int]) -> Scales | None:
    """The scales, and what each of them covers, found by the shapes. None: the shapes do not fit each other. square:
    the size of squares, if these are scales of squares."""
    if len(matrix) != 2 or len(tensor.shape) > 2 or not tensor.nbytes:
        return None
    rows, columns = {0: (1, 1), 1: (*tensor.shape, 1), 2: tensor.shape}[len(tensor.shape)]
    outputs = _share(matrix[0], rows, square[0])
    inputs = _share(matrix[1], columns, square[1])
    if inputs is None and rows == matrix[0] and matrix[1] % columns == 0:
        inputs = matrix[1] // columns  # groups of some other size
    if outputs is None or inputs is None:
        return None
    return Scales(tensor, (rows, columns), matrix[0], (outputs, inputs))


def _share(size: int, count: int, side: int) -> int | None:
    """How many of `size` share one of `count` scales."""
    if count == 1:
        return size
    if count == size:
        return 1
    return side if count == -(-size // side) else None
