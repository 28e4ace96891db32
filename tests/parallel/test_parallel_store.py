"""The store that rank 0 holds where no launcher does."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import torch

from ostinato.graphs.errors import RankError
from ostinato.parallel import start_ranks
from ostinato.parallel.ranks import _listen
from server_process import free_port


def listens(port: int, family: str) -> bool:
    """Whether a socket of this host listens at a port, by /proc/net."""
    lines = Path(f"/proc/net/{family}").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return any(int(f[1].split(":")[1], 16) == port and f[3] == "0A" for f in fields)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port, told to one rank as torchrun would."""
    port = free_port()
    for name, value in [("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "localhost")]:
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(port))
    return port


def test_the_store_needs_no_name_server(port: int) -> None:
    # For a client of a socket of both families torch asks one, and serves nobody until it answers.
    with start_ranks(torch.device("cpu")):
        assert listens(port, "tcp")
        assert not listens(port, "tcp6")


def test_a_port_in_use_is_named_with_its_rank(port: int) -> None:
    with (
        socket.create_server(("", port)),
        pytest.raises(RankError, match="rank 0 does not hold a store") as raised,
    ):
        start_ranks(torch.device("cpu"))
    assert list(raised.value.failures) == [0]


def test_a_port_that_accepts_and_is_silent_is_given_up(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may have been stopped, or the port be another program's."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        socket.create_server(("", port)),
        pytest.raises(RankError, match=rf"rank 0 does not answer at localhost:{port} in 2 s"),
    ):
        start_ranks(torch.device("cpu"), timeout_s=2)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("WORLD_SIZE", "", "WORLD_SIZE: got '' in the environment, expected a number"),
        ("WORLD_SIZE", "0", "WORLD_SIZE: got 0 in the environment, expected at least 1"),
        ("RANK", "-1", "RANK: got '-1' in the environment, expected a number"),
        ("RANK", "1", "RANK: got 1, expected less than WORLD_SIZE, 1"),
        ("MASTER_PORT", "abc", "MASTER_PORT: got 'abc' in the environment, expected a number"),
        ("MASTER_PORT", "99999", "MASTER_PORT: got 99999, expected less than 65536"),
    ],
)
def test_wrong_environments_are_named(
    name: str, value: str, error: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(error)):
        start_ranks(torch.device("cpu"))


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf")])
def test_wrong_times_are_named_before_anything_starts(timeout_s: float, port: int) -> None:
    with pytest.raises(ValueError, match="timeout_s: got"):
        start_ranks(torch.device("cpu"), timeout_s=timeout_s)
    assert not listens(port, "tcp")


def test_an_address_of_ipv6_alone_is_left_to_torch() -> None:
    assert _listen("::1", free_port()) is None
