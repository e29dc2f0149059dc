"""A model whose process died inside a living Triton: its unload may never be confirmed, and it holds nothing."""

import asyncio
from pathlib import Path

from tests.builders.checkpoints import knob_model
from tests.integration.engines.engine_server import EngineServer
from tests.integration.loader.loader_process import READY, LoaderProcess, device, instance, model_record, put_catalogue


async def test_a_dead_model_leaves_on_order_and_loads_again(
    loader: LoaderProcess, redis_url: str, tmp_path: Path
) -> None:
    """B29, invariant 6: with a stream of the dead process still open, the unload for "broken" ends within 4 s and
    frees the bytes; the next load brings a living one, which answers."""
    folder = knob_model(tmp_path / "dies", tokens=20, token_interval_ms=20, die_after_tokens=3)
    model = model_record("dies", folder, device_bytes=100)
    await put_catalogue(redis_url, [model])
    async with loader:
        loaded = (await loader.load(model, 1))[-1]
        assert loaded.state == READY
        served = EngineServer(loader.triton.grpc_address, loader.triton.log)
        name = loaded.instance.triton_model_name
        stream = served.open(name, "hello")
        for _ in range(3):
            await asyncio.to_thread(stream.next)
        async with asyncio.timeout(20):
            await loader.unload(model, 2, reason="broken")
        assert device(await loader.state()) == (0, 0)
        again = (await loader.load(model, 3))[-1]
        assert again.state == READY
        assert device(await loader.state()) == (100, 0)
        answer = await asyncio.to_thread(served.ask, name, "hello", max_tokens=2)
        assert answer.error is None
        found = instance(await loader.state(), model)
        assert found is not None
        assert (found.state, found.generation) == (READY, 3)
        stream.close()
        served.client.close()
