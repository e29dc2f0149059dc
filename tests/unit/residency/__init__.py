"""Unit tests of what is worth keeping warm."""
