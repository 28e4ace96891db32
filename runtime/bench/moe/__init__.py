"""`bench moe`: blocks of mixtures of experts, ours and the peers'."""
