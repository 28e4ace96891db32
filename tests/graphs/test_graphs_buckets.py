import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs import default_batch_sizes
from ostinato.graphs.buckets import check_batch_sizes, smallest_bucket


@pytest.mark.parametrize(
    ("max_batch", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (64, (1, 2, 4, 8, 16, 32, 64)),
        (127, (1, 2, 4, 8, 16, 32, 64, 127)),
        (128, (1, 2, 4, 8, 16, 32, 64, 128)),
        (129, (1, 2, 4, 8, 16, 32, 64, 128, 129)),
        (400, (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 400)),
        (512, (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)),
    ],
)
def test_default_batch_sizes(max_batch, expected):
    assert default_batch_sizes(max_batch) == expected


@pytest.mark.parametrize(
    ("max_batch", "error"),
    [(0, ValueError), (-4, ValueError), (8.0, TypeError), (True, TypeError), (None, TypeError)],
)
def test_default_batch_sizes_of_no_batch(max_batch, error):
    with pytest.raises(error, match=f"max_batch: got {max_batch}, expected"):
        default_batch_sizes(max_batch)


@given(st.integers(1, 4096))
def test_default_batch_sizes_are_valid(max_batch):
    assert check_batch_sizes(default_batch_sizes(max_batch), max_batch)[-1] == max_batch


@pytest.mark.parametrize(
    ("got", "corrected"),
    [
        ([], [1, 2, 4, 8]),
        ([0], [1, 2, 4, 8]),
        ([-3, 4], [4]),
        ([4, 2], [2, 4]),
        ([2, 2, 4], [2, 4]),
        ([2, 9], [2]),
        ([1.0, 2], [2]),
        ([True, 2], [2]),
        (["4"], [1, 2, 4, 8]),
    ],
)
def test_bad_batch_sizes_are_refused_with_the_corrected_list(got, corrected):
    with pytest.raises(ValueError, match="max_batch=8") as info:
        check_batch_sizes(got, 8)
    assert str(info.value).startswith(f"batch_sizes: got {got}, expected")
    assert str(info.value).endswith(f"corrected: {corrected}")


@pytest.mark.parametrize("got", [8, None, torch.tensor(8)])
def test_batch_sizes_that_are_no_sequence(got):
    with pytest.raises(TypeError, match=r"batch_sizes: got .*, expected several integers"):
        check_batch_sizes(got, 8)


@pytest.mark.parametrize("got", [np.array([1, 2]), torch.tensor([1, 2]), {1: "a", 2: "b"}.keys()])
def test_batch_sizes_of_other_libraries(got):
    sizes = check_batch_sizes(got, 8)
    assert sizes == (1, 2)
    assert {type(size) for size in sizes} == {int}


@given(st.sets(st.integers(1, 300), min_size=1), st.data())
def test_smallest_bucket_is_the_smallest_that_holds_the_rows(sizes, data):
    sizes = sorted(sizes)
    n = data.draw(st.integers(1, sizes[-1]))
    assert smallest_bucket(n, sizes) == min(size for size in sizes if size >= n)


@pytest.mark.parametrize("n", [0, -1, 9])
def test_rows_outside_the_buckets(n):
    with pytest.raises(ValueError, match=f"n: got {n} rows, expected 1 to 8"):
        smallest_bucket(n, (1, 8))
