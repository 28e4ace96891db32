"""Leaves out tests of plug-ins for engines that are not there: these have targets of their own."""

from __future__ import annotations

from importlib.util import find_spec

import torch

# `make test-sglang` has SGLang's Python files.
HAS_SGLANG = find_spec("sglang") is not None
collect_ignore_glob = [] if HAS_SGLANG else ["test_compat_sglang_*.py"]

if HAS_SGLANG:
    # SGLang imports torchvision, for images, whose wheel has operators for CUDA alone.
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets) -> Tensor")
