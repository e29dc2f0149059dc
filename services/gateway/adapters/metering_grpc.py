"""`roundhouse.v1.Metering` behind the gateway's keys: metering itself knows none.

A tenant's key (scope `usage:read`, or `inference`) reads its own usage, records and statements: the tenant in the
question is always its own, and another one is refused (invariant 16). This is the public port, so nobody sees more;
operators ask metering's own. Calls are passed on with what is left of their deadline; nothing is retried.
"""

from typing import Any, TypeVar

import grpc

from roundhouse import telemetry
from roundhouse.errors import Forbidden, Unavailable
from roundhouse.grpc_edge import from_rpc_error, open_channel
from roundhouse.wire.v1 import metering_pb2 as wire
from roundhouse.wire.v1 import metering_pb2_grpc
from services.gateway.adapters.grpc_requests import GrpcCalls
from services.gateway.domain import keys
from services.gateway.ports import Caller

SERVICE = wire.DESCRIPTOR.services_by_name["Metering"]
TIMEOUT_S = 30.0  # a guess: the longest question takes a second on a million rows

Asked = TypeVar("Asked", wire.QueryUsageRequest, wire.ListRecordsRequest)


class MeteringService(metering_pb2_grpc.MeteringServicer):
    """The service. `close` when no call runs any more. With an empty address every call is UNAVAILABLE."""

    def __init__(self, address: str, calls: GrpcCalls) -> None:
        self._calls = calls
        self._channel = open_channel(address) if address else None
        self._stub = metering_pb2_grpc.MeteringStub(self._channel) if self._channel is not None else None

    async def QueryUsage(self, request: wire.QueryUsageRequest, context: Any) -> wire.QueryUsageReply:  # noqa: N802
        """Sums by group. A tenant's key asks for its own."""
        asked = _own(request, await self._calls.identified(context))
        reply: wire.QueryUsageReply = await self._ask("QueryUsage", asked, context)
        return reply

    async def ListRecords(self, request: wire.ListRecordsRequest, context: Any) -> wire.ListRecordsReply:  # noqa: N802
        """Single records. A tenant's key asks for its own."""
        asked = _own(request, await self._calls.identified(context))
        reply: wire.ListRecordsReply = await self._ask("ListRecords", asked, context)
        return reply

    async def GetStatement(self, request: wire.GetStatementRequest, context: Any) -> wire.Statement:  # noqa: N802
        """One month of one tenant. A tenant's key asks for its own."""
        tenant = _tenant(request.tenant, await self._calls.identified(context))
        asked = wire.GetStatementRequest(tenant=tenant, period=request.period)
        reply: wire.Statement = await self._ask("GetStatement", asked, context)
        return reply

    async def ListPeriods(self, request: wire.ListPeriodsRequest, context: Any) -> wire.ListPeriodsReply:  # noqa: N802
        """The closed months with the signed totals of all tenants: never here."""
        await self._calls.identified(context)
        raise Forbidden("Closed months are of all tenants: operators ask metering's own port.")

    async def close(self) -> None:
        """Close the connection to metering."""
        if self._channel is not None:
            await self._channel.close()

    async def _ask(self, method: str, asked: Any, context: Any) -> Any:
        if self._stub is None:
            raise Unavailable("this gateway has no metering to ask")
        left_s = context.time_remaining()
        timeout_s = TIMEOUT_S if left_s is None else min(TIMEOUT_S, left_s)
        try:
            return await getattr(self._stub, method)(asked, timeout=timeout_s, metadata=telemetry.trace_metadata())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "metering does not answer now") from error


def add_to_server(service: MeteringService, server: Any) -> str:
    """Register the service; returns its full name."""
    metering_pb2_grpc.add_MeteringServicer_to_server(service, server)
    return str(SERVICE.full_name)


def _own(request: Asked, caller: Caller) -> Asked:
    asked = type(request)()
    asked.CopyFrom(request)
    asked.filter.tenant = _tenant(request.filter.tenant, caller)
    return asked


def _tenant(asked: str, caller: Caller) -> str:
    """Whose usage this caller may ask for. Raises Forbidden."""
    if not caller.scopes & {keys.USAGE_READ, keys.INFERENCE}:
        raise Forbidden("This key may not read usage.")
    if asked not in ("", caller.tenant_id):
        raise Forbidden("This key may read its own tenant's usage only.", param="tenant")
    return caller.tenant_id
