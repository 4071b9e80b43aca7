"""Triton kernels for what a blend does on a GPU, and their slow twins in plain torch (`naive`)."""
