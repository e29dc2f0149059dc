"""Ids of requests: 128 bits of chance, different in every process. Not secret: nothing is guarded by not knowing one.

Not `uuid4`, which asks the kernel for each: that costs more than the rest of a request's admission.
"""

import os
import random

from roundhouse.vocabulary import RequestId

_chance = random.Random(os.urandom(32))  # noqa: S311 - see the module
os.register_at_fork(after_in_child=lambda: _chance.seed(os.urandom(32)))


def new_request_id() -> RequestId:
    """An id that no other request has. 32 hexadecimal digits."""
    return RequestId(f"{_chance.getrandbits(128):032x}")
