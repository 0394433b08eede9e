"""The same steps for a backend that takes tensors: the model in torch, the choice of tokens in NumPy as everywhere."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from twostroke.ops.arrays import batch_of_tensors
from twostroke.ops.interface import Batch
from twostroke.run.runner import ModelRunner
from twostroke.types import Plan, Result


class TorchRunner(ModelRunner):
    @torch.inference_mode()
    def launch(self, plan: Plan) -> Result:
        return super().launch(plan)

    def _forward(self, batch: Batch) -> Tensor:
        return super()._forward(batch_of_tensors(batch))

    def _logits(self, hidden: Tensor) -> np.ndarray:
        return self.model.logits(hidden).numpy()

    def _argmax(self, logits: np.ndarray) -> np.ndarray:
        return self.ops.argmax(torch.from_numpy(logits)).numpy()
