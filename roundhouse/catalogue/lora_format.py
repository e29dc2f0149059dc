"""What of LoRA adapters in PEFT's format every check of them goes by: the catalogue's, the loader's, the engines'.

Names and limits only, and nothing imported: engines load this at each start. Source: `peft` 0.21, `LoraConfig` and
`save_pretrained`.
"""

import re

RANK_MAX = 64
"""The highest rank that is taken: the cost of a step grows with it, and ranks beyond are rare. A guess."""

_VLLM_RANKS = (8, 16, 32, 64)
"""What vLLM takes as `max_lora_rank`, up to RANK_MAX (vLLM 0.9 to 0.32, `MaxLoRARanks`)."""

LAYER_TENSOR = re.compile(r"^base_model\.model\.model\.layers\.(\d+)\.(\w+\.\w+)\.lora_(A|B)\.weight$")
"""A tensor of a decoder layer: number of the layer, projection with its parent, `A` or `B`."""

ANY_TENSOR = re.compile(r"^base_model\.model\.(?:.+\.)?(\w+)\.lora_(A|B)\.weight$")
"""A tensor of any model: short name of the module, `A` or `B`."""

UNSUPPORTED_SETTINGS = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
"""Settings that change the result in ways that the engines do not compute."""

INITS_THAT_LEAVE_THE_BASE = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of `init_lora_weights`, beside true and false, after which the base is as it was. With the others (PiSSA,
OLoRA, LoftQ) the adapter belongs to changed base weights and would answer wrongly over these. As vLLM 0.32 has it."""


def vllm_rank(rank_max: int) -> int:
    """The least rank that vLLM can be given room for and that holds `rank_max`, at most RANK_MAX."""
    return next(rank for rank in _VLLM_RANKS if rank >= rank_max)
