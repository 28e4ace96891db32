"""Kernels that the GPU tests of the ops launch, compiled side by side before the first of them."""

from __future__ import annotations

import pytest
import torch
from ops_kernels import block_kernels as block_kernels_of_the_tests
from ops_kernels import kernels_of_the_tests

from ostinato.ops.linear.precompile import precompile


@pytest.fixture(scope="session")
def _compiled() -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    precompile(kernels_of_the_tests(sms))


@pytest.fixture(scope="session")
def _blocks_compiled() -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    precompile(block_kernels_of_the_tests(sms))


@pytest.fixture
def block_kernels(request: pytest.FixtureRequest) -> None:
    """Have the kernels with block scales compiled if the test runs on a GPU."""
    if request.node.get_closest_marker("gpu") is not None:
        request.getfixturevalue("_blocks_compiled")


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> None:
    """Have the kernels compiled if the test runs on a GPU."""
    if request.node.get_closest_marker("gpu") is not None:
        request.getfixturevalue("_compiled")
