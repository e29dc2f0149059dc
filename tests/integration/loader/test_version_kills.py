"""kill -9 of the loader in the middle of a version change, on real Triton (case B19)."""

import os
from pathlib import Path

import pytest

from services.loader.domain.versions import ModelVersion, triton_model_name
from tests.builders.checkpoints import knob_model
from tests.infra import TritonServer
from tests.integration.engines.engine_server import EngineServer
from tests.integration.loader.loader_process import (
    LoaderProcess,
    device,
    instance,
    is_ready,
    model_record,
    put_catalogue,
)

WITHIN_S = 90
OLD_BYTES = 100


@pytest.mark.timeout(240)
@pytest.mark.parametrize("new_bytes", [100, 350], ids=["beside", "in its place"])
async def test_the_next_loader_goes_on_with_the_change(
    loader: LoaderProcess, redis_url: str, tmp_path: Path, triton: TritonServer, new_bytes: int
) -> None:
    """Killed while version 2 is fetched at a slow rate, and killed again once it loads: version 1, which the catalogue
    does not name any more, is served by each next process until version 2 is ready. The account is exact throughout."""
    old_folder = knob_model(tmp_path / "v1", tokens=4)
    new_folder = knob_model(tmp_path / "v2", tokens=8, load_ms=1_500)
    (new_folder / "weights.bin").write_bytes(os.urandom(24 * 2**20))
    old = model_record("m", old_folder, device_bytes=OLD_BYTES)
    new = model_record("m", new_folder, device_bytes=new_bytes)
    name = triton_model_name(ModelVersion(old.name, old.digest))
    engine = EngineServer(triton.grpc_address, triton.log)
    await put_catalogue(redis_url, [old])
    loader.extra = {"STAGING_BYTES_PER_SECOND": str(4 * 2**20)}  # the change is no request: it takes six seconds
    async with loader:
        await loader.load(old)
        await loader.wait_for(lambda _: b"sha256" in remembered(loader), within_s=WITHIN_S)
        await put_catalogue(redis_url, [new], generation=2)
        await loader.wait_for(lambda _: any((loader.cache / "incoming").iterdir()), within_s=WITHIN_S)
        await loader.kill()
        loader.extra = {}
        await loader.start()
        state = await loader.state()
        assert is_ready(state, old)
        assert engine.ask(name, "hello", max_tokens=4).error is None
        await loader.wait_for(lambda now: instance(now, new) is not None, within_s=WITHIN_S)
        await loader.kill()
        await loader.start()
        await loader.load(new, first=[old], reason="demand")  # as its waiting requests have the scheduler ask
        state = await loader.wait_for(lambda now: is_ready(now, new), within_s=WITHIN_S)
        taken = new_bytes + (OLD_BYTES if is_ready(state, old) else 0)
        assert device(state) == (taken, 0)
        assert list((loader.cache / "incoming").iterdir()) == []


def remembered(loader: LoaderProcess) -> bytes:
    """What the next process will know."""
    file = loader.cache / "node.json"
    return file.read_bytes() if file.exists() else b""
