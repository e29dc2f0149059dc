"""Which models should be warm: forecast of the next arrival, worth of a place in memory, replicas, the plan.

Pure. It decides nothing about requests and moves nothing: placement and the loaders do.
"""
