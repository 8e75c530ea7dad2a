"""PyTorch FSDP2, at any number of ranks, one included."""
