"""Where KV lives and moves. Block accounting imports no torch."""
