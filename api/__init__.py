"""HTTP and the command line; no tensors."""
