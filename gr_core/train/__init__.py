"""Training from packs: loop, optimizers, checkpoints. Runs with torch, numpy, pyarrow, safetensors alone."""
