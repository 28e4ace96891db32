"""Several processes that serve one model: how they start, agree, and end when one is lost."""

from ..rank_environment import world_size
from .ranks import DEFAULT_TIMEOUT_S, Ranks, rank_here, start_ranks

__all__ = ["DEFAULT_TIMEOUT_S", "Ranks", "rank_here", "start_ranks", "world_size"]
