"""The catalogue: which tenants, models and adapters there are. Declared in YAML, applied as one generation.

`records` is what services read; `declaration` parses and checks a file; `store` keeps generations in Redis and follows
them. Decision: docs/decisions/0006-catalogue.md.
"""
