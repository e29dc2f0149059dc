"""A call of a tensor model, from names and tensors to `Work`. Shared by KServe REST and gRPC.

Nothing is spent here (invariant 15). One call counts as one input token, in limits, fairness and bills alike: tensors
have no tokens, and a model's price list says what one call costs.
"""

from dataclasses import dataclass

from roundhouse.catalogue.records import Interface, Model
from roundhouse.catalogue.store import CatalogueView
from roundhouse.errors import InvalidInput, NotFound
from services.gateway.domain.tensors import Tensor, check_against, check_names, check_tensor
from services.gateway.operations.accounting import Work
from services.gateway.operations.resolve_model import RequestContext, resolve_model
from services.gateway.operations.tensor_statistics import TensorStatistics
from services.gateway.ports import Caller, SignatureSource, TensorRequest

OPERATION = "infer"
CALL_TOKENS = 1
VERSION = "1"  # a name always means its current version; clients that pin one may say so


@dataclass(frozen=True, slots=True)
class TensorCall:
    """A call as it was sent. `version` is empty for the current one."""

    model: str
    version: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]


class TensorWork:
    """Makes `Work` of calls."""

    def __init__(self, catalogue: CatalogueView, signatures: SignatureSource) -> None:
        self._catalogue = catalogue
        self._signatures = signatures
        self.statistics = TensorStatistics()

    def visible(self, caller: Caller, name: str, version: str) -> Model:
        """The model that a tenant calls by this name. Raises NotFound, also for a version there is not."""
        _, model, _ = resolve_model(self._catalogue, caller, name)
        if version not in ("", VERSION):
            raise NotFound(f"The model '{model.name}' has no version '{version[:20]}'.", param="model_version")
        return model

    def names(self, caller: Caller) -> list[str]:
        """Every name that a tenant may call, sorted."""
        return self._catalogue.current.visible_names(caller.tenant_id)

    async def work(self, call: TensorCall, context: RequestContext) -> Work:
        """Check everything that can be checked without the model, and against its signature where that is known.

        Raises NotFound, InvalidInput."""
        model = self.visible(context.caller, call.model, call.version)
        tenant, _, _ = resolve_model(self._catalogue, context.caller, call.model)
        if model.interface is not Interface.TENSORS:
            raise InvalidInput(f"The model '{model.name}' is called with text, under /v1.", code="wrong_interface")
        check_names([tensor.name for tensor in call.inputs])
        for tensor in call.inputs:
            check_tensor(tensor)
        signature = await self._signatures.signature(model)
        if signature is not None:
            check_against(call.inputs, signature.inputs)
            unknown = set(call.outputs) - {spec.name for spec in signature.outputs}
            if unknown:
                raise InvalidInput(f"the model has no output '{min(unknown)[:100]}'.", param="outputs")
        return Work(
            request_id=context.request_id,
            operation=OPERATION,
            caller=context.caller,
            tenant=tenant,
            model=model,
            adapter=None,
            input_tokens=CALL_TOKENS,
            max_output_tokens=0,
            deadline_unix_ms=context.deadline_unix_ms,
            calls=(TensorRequest(context.request_id, call.inputs, call.outputs),),
        )
