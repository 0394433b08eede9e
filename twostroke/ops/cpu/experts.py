"""A layer's experts as the native library takes them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from twostroke.ops.cpu.arrays import address, norm_reference
from twostroke.ops.cpu.library import ExpertsCall
from twostroke.ops.interface import ExpertSet, Norm

ACTIVATIONS = {"silu": 2, "gelu_tanh": 3, "swiglu_oai": 4, "swiglu_10": 5}  # Before in kernels.h

SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}  # ExpertsCall in experts.h


def describe_experts(experts: ExpertSet, norm: Norm) -> tuple[ExpertsCall, tuple[Any, ...]]:
    """The structure, and what it points into."""
    routing, count = experts.routing, experts.routing.experts
    hidden, width = experts.down[0].outputs, experts.down[0].inputs
    if not 1 <= routing.chosen <= count or count % routing.groups or not 1 <= routing.kept_groups <= routing.groups:
        raise ValueError(f"cannot choose experts by {routing}")
    if routing.chosen > routing.kept_groups * (count // routing.groups) or routing.group_best > count // routing.groups:
        raise ValueError(f"the groups are too small for {routing}")
    shapes = {(one.outputs, one.inputs) for one in experts.gate_up} | {
        (one.inputs, one.outputs) for one in experts.down
    }
    if not len(experts.gate_up) == len(experts.down) == count or shapes != {(2 * width, hidden), (width, hidden)}:
        raise ValueError(f"{count} experts cannot have weights of the shapes {sorted(shapes)}")
    if (experts.router.outputs, experts.router.inputs) != (count, hidden) or len(norm.weight) != hidden:
        raise ValueError(f"the router of {experts.router.outputs} outputs does not fit {count} experts of {hidden}")
    gate_up = (ctypes.c_void_p * count)(*(one.handle for one in experts.gate_up))
    down = (ctypes.c_void_p * count)(*(one.handle for one in experts.down))
    call = ExpertsCall(
        router=experts.router.handle, gate_up=ctypes.addressof(gate_up), down=ctypes.addressof(down),
        norm=norm_reference(norm), experts=count, chosen=routing.chosen, scores=SCORES[routing.scores],
        normalised=routing.normalised, groups=routing.groups, kept_groups=routing.kept_groups,
        group_best=routing.group_best, gate=ACTIVATIONS[experts.gate.activation], factor=routing.factor,
    )  # fmt: skip
    if experts.table is not None:
        if experts.table.shape[1:] != (routing.chosen,) or experts.table.dtype != np.int32:
            raise ValueError(f"a table of shape {experts.table.shape} does not name {routing.chosen} experts")
        call.table, call.vocab = address(experts.table), len(experts.table)
    if experts.correction is not None:
        if experts.correction.shape != (count,):
            raise ValueError(f"a correction of shape {experts.correction.shape} does not fit {count} experts")
        call.correction = address(experts.correction)
    return call, (experts, norm, gate_up, down)
