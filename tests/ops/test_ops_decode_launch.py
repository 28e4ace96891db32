"""Which kernel attends in decode steps."""

from __future__ import annotations

import pytest
import torch

from ostinato.ops.decode_launch import decode_kernels, kernel_for

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (33, 64), (64, 64)]
)
def test_rows_fit_in_the_columns(rows: int, columns: int) -> None:
    kernel = kernel_for(BF16, torch.int8, 128, rows, copy_pages=False, batch_invariant=False)
    assert kernel is not None
    assert (kernel.columns, kernel.kv_dtype, kernel.copy_pages) == (columns, "int8", False)


@pytest.mark.parametrize(
    ("dtype", "dim", "rows"),
    [
        *((torch.float32, 128, 1), (BF16, 120, 1), (BF16, 272, 1), (BF16, 128, 65)),
        *((FP16, 256, 33), (FP16, 128, 0)),
    ],
)
def test_there_is_no_kernel_for_others(dtype: torch.dtype, dim: int, rows: int) -> None:
    assert kernel_for(dtype, dtype, dim, rows, copy_pages=True, batch_invariant=False) is None


def test_a_models_steps_take_one_kernel_for_each_kind_of_page() -> None:
    copied, gathered = decode_kernels(FP16, 96, 12)
    assert (copied.copy_pages, gathered.copy_pages) == (True, False)
    assert copied.name == "attention_decode-fp16-d96-c16-split1024"
    assert gathered.name == "attention_decode-fp16-d96-c16-any_page-split1024"
    assert decode_kernels(torch.float32, 96, 12) == []
