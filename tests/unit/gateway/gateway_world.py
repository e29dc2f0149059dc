"""A gateway's operations over fakes, for tests on virtual time."""

from dataclasses import dataclass, field

from roundhouse.catalogue.records import Adapter, Catalogue, Engine, Interface, Limits, Model, Tenant
from roundhouse.vocabulary import AdapterName, Digest, KeyId, ModelName, RequestId, TenantId
from services.gateway.domain.keys import KeyRecord, key_hash
from services.gateway.operations.accounting import Work
from services.gateway.operations.attempts import Attempts
from services.gateway.operations.run_request import RequestParts
from services.gateway.operations.settlements import Settlements
from services.gateway.ports import Caller, EngineRequest, RequestEnded, TensorRequest
from tests.fakes.admission import InMemoryAdmission, InMemoryKeys
from tests.fakes.block_holds import RecordedHolds
from tests.fakes.clock import VirtualClock
from tests.fakes.inference_node import FakeNode
from tests.fakes.scheduler_gateway import FakeScheduler
from tests.fakes.usage_sink import FakeUsageSink

T1 = TenantId("t1")
KEY = "rh_test_key_of_t1"
UNLIMITED = Limits()
INFERENCE = frozenset({"inference"})


def llm_model(name: str = "m", **changes: object) -> Model:
    """A language model with a context of 512 tokens."""
    values: dict[str, object] = {
        "name": ModelName(name),
        "source_path": "/models/m",
        "engine": Engine.REFERENCE,
        "interface": Interface.LLM,
        "digest": Digest("sha256:" + "ab" * 32),
        "context_tokens": 512,
        "tokenizer_path": "/models/m",
    }
    return Model(**{**values, **changes})  # type: ignore[arg-type]  # the fields of the record


def tensor_model(name: str = "scorer") -> Model:
    """A model called with tensors."""
    return llm_model(name, interface=Interface.TENSORS, engine=Engine.ONNX, tokenizer_path="", context_tokens=0)


ADAPTER = Adapter(
    name=AdapterName("tuned"), base=ModelName("m"), source_path="/a", digest=Digest("sha256:" + "cd" * 32)
)


def catalogue(*models: Model, limits: Limits = UNLIMITED) -> Catalogue:
    """Two tenants, the models, and one adapter over `m`."""
    tenants = {TenantId(name): Tenant(name=TenantId(name), limits=limits) for name in ("t1", "t2")}
    held = models or (llm_model(), tensor_model())
    return Catalogue(
        generation=1, tenants=tenants, models={one.name: one for one in held}, adapters={ADAPTER.name: ADAPTER}
    )


@dataclass
class RecordingObserver:
    """`RequestObserver` that remembers."""

    starts: int = 0
    waiting: int = 0
    endings: list[RequestEnded] = field(default_factory=list)

    def started(self, operation: str, model: str) -> None:
        """See `RequestObserver.started`."""
        self.starts += 1

    def queued(self, model: str, change: int) -> None:
        """See `RequestObserver.queued`."""
        self.waiting += change
        assert self.waiting >= 0, "a gauge never goes below zero"

    def ended(self, ended: RequestEnded) -> None:
        """See `RequestObserver.ended`."""
        self.endings.append(ended)


class GatewayWorld:
    """Everything `run_request` needs, and what it did to it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.keys = InMemoryKeys(self.clock)
        self.admission = InMemoryAdmission(self.clock, self.keys)
        self.attempts = Attempts("g1")
        self.scheduler = FakeScheduler(self.attempts)
        self.node = FakeNode()
        self.usage = FakeUsageSink()
        self.holds = RecordedHolds()
        self.observer = RecordingObserver()
        self.settlements = Settlements(self.admission)
        self.parts = RequestParts(
            cluster="c",
            gateway_id="g1",
            admission=self.admission,
            scheduler=self.scheduler,
            node=self.node,
            usage=self.usage,
            attempts=self.attempts,
            settlements=self.settlements,
            holds=self.holds,
            observer=self.observer,
            clock=self.clock,
        )
        self.caller = Caller(T1, KeyId("k1"), INFERENCE, key_hash(KEY))

    async def prepare(self) -> None:
        """Register the key. Call first, inside the virtual loop."""
        await self.keys.add(
            KeyRecord(
                key_id=KeyId("k1"),
                tenant_id=T1,
                key_hash=key_hash(KEY),
                scopes=INFERENCE,
                label="",
                created_ms=self.clock.now_ms(),
                expires_ms=0,
            )
        )

    def work(
        self,
        *,
        output_tokens: int = 3,
        prompt_tokens: int = 10,
        choices: int = 1,
        deadline_ms: int = 60_000,
        limits: Limits = UNLIMITED,
        resumable: bool = False,
    ) -> Work:
        """A chat request of `choices` calls."""
        calls = tuple(
            EngineRequest(
                request_id=RequestId("r1"),
                text_input="x" * prompt_tokens,
                prompt_token_ids=tuple(range(prompt_tokens)),
                sampling_parameters=f'{{"max_tokens":{output_tokens}}}',
                phase="full",
                stream=True,
                salt="00",
                adapter_path="",
                adapter_digest="",
                return_token_ids=resumable,
            )
            for _ in range(choices)
        )
        return Work(
            request_id=RequestId("r1"),
            operation="chat",
            caller=self.caller,
            tenant=Tenant(name=T1, limits=limits),
            model=llm_model(),
            adapter=None,
            input_tokens=prompt_tokens,
            max_output_tokens=output_tokens * choices,
            deadline_unix_ms=self.clock.now_ms() + deadline_ms,
            calls=calls,
            choices=choices,
            block_keys=(b"k1", b"k2"),
        )

    def tensor_work(self, *, deadline_ms: int = 60_000) -> Work:
        """A call of a tensor model."""
        return Work(
            request_id=RequestId("r1"),
            operation="infer",
            caller=self.caller,
            tenant=Tenant(name=T1),
            model=tensor_model(),
            adapter=None,
            input_tokens=1,
            max_output_tokens=0,
            deadline_unix_ms=self.clock.now_ms() + deadline_ms,
            calls=(TensorRequest(RequestId("r1"), (), ()),),
        )
