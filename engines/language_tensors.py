"""The tensor contract of language models as Triton configuration: that of the vLLM backend, and our one input more.

Inputs other than `text_input` are optional. Every response holds one element of each output that was asked for.
"""

from __future__ import annotations

Tensor = dict[str, object]


def _tensor(name: str, data_type: str, dims: int, optional: bool = False) -> Tensor:
    tensor: Tensor = {"name": name, "data_type": data_type, "dims": [dims]}
    return {**tensor, "optional": True} if optional else tensor


def language_inputs() -> list[Tensor]:
    """Inputs of a language model, with our `roundhouse`."""
    flags = (
        "stream",
        "exclude_input_in_output",
        "return_finish_reason",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "return_logprobs",
    )
    return [
        _tensor("text_input", "TYPE_STRING", 1),
        _tensor("sampling_parameters", "TYPE_STRING", 1, optional=True),
        *(_tensor(name, "TYPE_BOOL", 1, optional=True) for name in flags),
        _tensor("roundhouse", "TYPE_STRING", 1, optional=True),
    ]


def language_outputs() -> list[Tensor]:
    """Outputs of a language model, with our `embedding`, `roundhouse` and `token_ids`."""
    return [
        _tensor("text_output", "TYPE_STRING", -1),
        _tensor("finish_reason", "TYPE_STRING", -1),
        _tensor("num_input_tokens", "TYPE_UINT32", -1),
        _tensor("num_output_tokens", "TYPE_UINT32", -1),
        _tensor("logprobs", "TYPE_STRING", -1),
        _tensor("embedding", "TYPE_FP32", -1),
        _tensor("roundhouse", "TYPE_STRING", -1),
        _tensor("token_ids", "TYPE_INT32", -1),
    ]
