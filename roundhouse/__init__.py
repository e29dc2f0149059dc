"""Shared rooms of the Roundhouse services: words, errors, time, wires and edges. No business rule lives here."""
