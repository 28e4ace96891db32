"""Counters and histograms of a runner, and their Prometheus text."""
