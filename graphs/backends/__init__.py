"""What captures and replays: CUDA graphs, and the step itself where there is no GPU."""
