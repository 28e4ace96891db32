"""What graphs hold of libraries' memory, over an allocator that is made up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.backends.library_workspaces import LibraryWorkspaces

WORKSPACE = 32


class Pool:
    """Blocks of a pool, of which the smallest that suffices is given, the first of these.

    Args:
        blocks: (bytes, whether it is in use), in the order of their addresses.
    """

    def __init__(self, blocks):
        self.used, self.free, start = {}, {}, 1000
        for size, is_used in blocks:
            (self.used if is_used else self.free)[start] = size
            start += size
        self.end = start

    def blocks(self):
        return dict(self.used), dict(self.free)

    def allocate(self, size, *_place):
        fitting = [(free, start) for start, free in self.free.items() if free >= size]
        found, start = min(fitting, default=(size, self.end))
        if not fitting:
            self.end += size
        self.free.pop(start, None)
        self.used[start] = size
        if found > size:
            self.free[start + size] = found - size
        return start

    def delete(self, address):
        self.free[address] = self.used.pop(address)
        for start in sorted(self.free):  # neighbours become one
            while start in self.free and start + self.free[start] in self.free:
                self.free[start] += self.free.pop(start + self.free[start])


def libraries_of(pool, torchs, patch):
    """Return LibraryWorkspaces over a pool; torch has the workspaces at those addresses."""

    def clear():
        while torchs:
            pool.delete(torchs.pop())

    def blas_handle():
        if not torchs:
            torchs.append(pool.allocate(WORKSPACE))

    patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    patch.setattr(torch.cuda, "current_blas_handle", blas_handle)
    patch.setattr(torch.cuda, "caching_allocator_alloc", pool.allocate)
    patch.setattr(torch.cuda, "caching_allocator_delete", pool.delete)
    return LibraryWorkspaces(pool.blocks, lambda function: function(), "cuda", None)


def test_captures_begin_and_end_without_a_workspace(monkeypatch):
    pool = Pool([(WORKSPACE, True)])
    torchs = [1000]
    libraries = libraries_of(pool, torchs, monkeypatch)
    libraries.begin()
    assert not torchs  # that of the warm-up
    torch.cuda.current_blas_handle()
    libraries.end()
    assert not torchs


def test_later_captures_use_the_same_workspace(monkeypatch):
    pool, torchs = Pool([(WORKSPACE, False), (8, True)]), []
    libraries = libraries_of(pool, torchs, monkeypatch)
    for _ in range(3):
        libraries.begin()
        torch.cuda.current_blas_handle()
        assert torchs == [1000]
        libraries.end()
    assert pool.end == 1000 + WORKSPACE + 8


@given(st.lists(st.tuples(st.sampled_from([8, 16, WORKSPACE, 64]), st.booleans()), max_size=8))
def test_no_capture_gets_what_an_earlier_one_left(blocks):
    with pytest.MonkeyPatch.context() as patch:
        pool, torchs = Pool(blocks), []
        libraries = libraries_of(pool, torchs, patch)
        libraries.begin()
        torch.cuda.current_blas_handle()
        left = dict(pool.used)
        libraries.end()
        for address in list(pool.used):
            pool.delete(address)  # whoever had it
        libraries.begin()
        for address, size in left.items():
            for start, length in pool.blocks()[1].items():
                assert start + length <= address or address + size <= start
        libraries.end()
        libraries.release()
        assert not pool.used
