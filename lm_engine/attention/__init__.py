"""Attention over paged KV: a reference and faster paths behind one Protocol."""
