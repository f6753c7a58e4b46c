"""Decoder mathematics and weight loading."""
