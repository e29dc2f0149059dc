"""Packaging for Triton's vLLM backend."""
