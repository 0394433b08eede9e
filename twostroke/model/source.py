"""Where one parameter lies in a checkpoint. Torch-free."""

from __future__ import annotations

from twostroke.record import Record


class Source(Record):
    """Where one parameter comes from."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    rows: tuple[int, int] | None = None  # the parameter's rows of a fused tensor
    paired_heads: int = 0  # number of heads whose rows lie in neighbouring pairs and must be put into halves
    paired_tail: int = 0  # only so many rows at the end of each of the paired heads; 0: all rows
    add: float = 0.0
    entry: int | None = None  # of a tensor whose first axis counts the experts
    step: int = 1  # from one of the parameter's rows to the next: 2 where the rows of two parameters alternate
    transposed: bool = False  # the tensor holds (inputs, outputs)
    integers: bool = False  # the tensor holds whole numbers
    scales: str = ""  # MXFP4 in safetensors: the tensor with the scales of the codes in `tensor`
