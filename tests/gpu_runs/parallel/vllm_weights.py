"""What vLLM's worker processes can do beside their own: give themselves random weights."""

from __future__ import annotations

from typing import Any

import torch


class RandomWeights:
    """An extension of vLLM's worker (`worker_extension_cls`)."""

    def fill_randomly(self: Any) -> int:
        """Overwrite dummy weights, which are near zero, and return how many parameters there are.

        Near zero a GPU takes less power, and may be faster.
        """
        model = self.get_model()
        generator = torch.Generator(next(model.parameters()).device).manual_seed(1)
        count = 0
        for name, parameter in model.named_parameters():
            x = parameter.data
            count += 1
            if name.endswith("weight_scale"):
                x.fill_(0.02 / 73.3)  # 73.3 is the deviation of such codes
            elif "norm" in name:
                x.fill_(1)
            elif x.dtype == torch.int8:
                x.random_(-127, 128, generator=generator)
            elif x.is_floating_point() and x.dim() >= 2:
                x.normal_(0, 0.02, generator=generator)
        torch.cuda.synchronize()
        return count
