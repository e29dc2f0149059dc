"""The demo's classifier."""
