"""What Triton runs: how each kind of engine is packaged, and the engines that are ours."""
