"""What a loader needs to know of its node. Read once, at start, from the environment."""

from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import Field

from roundhouse.environment import ServiceSettings

GIB = 1024**3
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory


class LoaderSettings(ServiceSettings):
    """Settings of one node's loader; each field is `ROUNDHOUSE_<FIELD>`."""

    node_id: str = Field(min_length=1, description="unique name of the node")
    pool: str = Field(default="shared", min_length=1, description="pool the node belongs to")
    node_role: Literal["mixed", "prefill", "decode"] = Field(default="mixed", description="what the node runs")
    grpc_port: int = Field(default=0, ge=0, le=65535, description="the loader's own gRPC port; 0 picks a free one")
    advertise_host: str = Field(default="127.0.0.1", description="host under which schedulers reach this loader")
    triton_grpc: str = Field(description="host:port of the node's Triton, gRPC")
    triton_advertise: str = Field(default="", description="host:port that gateways dial; empty = TRITON_GRPC")
    triton_repository: Path = Field(description="Triton's --model-repository folder, as this process sees it")
    kvstore_address: str = Field(default="", description="host:port of the node's kvstore; empty = none")
    device_bytes: int = Field(
        default=0,
        ge=0,
        description="bytes that models may take of the node's device, or of each GPU; 0 = as NVML or DEVICES says",
    )
    devices: str = Field(
        default="",
        description="devices as a JSON or YAML list, or the file that has it; 'host' = one of DEVICE_BYTES; empty ="
        " those that NVML sees, and without a GPU as 'host'",
    )
    leak_bytes: int = Field(
        default=GIB,
        ge=0,
        description="growth of Triton's memory beside its models that is a leak; 0 = no leak is looked for",
    )
    host_bytes: int = Field(default=8 * GIB, ge=0, description="bytes of host memory for weights; 0 = no arena")
    host_arena: Path | None = Field(
        default=None, description="file of the host arena, on a memory file system; none = below /dev/shm, by CACHE_DIR"
    )
    host_prefault: bool = Field(
        default=False, description="touch all of the host arena at start, so that the first loads are fast too"
    )
    staging_bytes_per_second: int = Field(
        default=0, ge=0, description="the most that staging moves while no request waits for it; 0 = no limit"
    )
    adapter_host_bytes: int = Field(
        default=256 * 1024**2, ge=0, description="bytes of host memory for adapters, beside the arena; 0 = none"
    )
    source_stall_seconds: float = Field(
        default=30.0, gt=0, description="a source that sends no chunk of 8 MiB for so long has failed"
    )
    source_tokens: str = Field(
        default="", repr=False, description="bearer tokens of https sources: HOST=TOKEN,HOST:PORT=TOKEN"
    )
    disk_bytes: int = Field(default=64 * GIB, ge=0, description="bytes of the disk cache")
    cache_dir: Path = Field(description="folder of the disk cache; Triton must see it under the same path")
    unload_patience_seconds: float = Field(
        default=300.0, gt=0, description="how long running requests may hold up an unload before the model is ended"
    )
    load_timeout_seconds: float = Field(default=60.0, gt=0, description="how long Triton may take to load one model")

    @property
    def arena_path(self) -> Path:
        """The host arena's file: the same for each process with this cache folder, so that the next one finds it."""
        name = sha256(str(self.cache_dir.absolute()).encode()).hexdigest()[:12]
        return self.host_arena or SHARED_MEMORY / f"roundhouse-weights-{name}"

    @property
    def tokens_by_host(self) -> dict[str, str]:
        """`SOURCE_TOKENS` by host; a part that is none is left out."""
        pairs = (part.strip().partition("=") for part in self.source_tokens.split(","))
        return {host: token for host, _, token in pairs if host and token}

    @property
    def adapter_shelf_path(self) -> Path:
        """The folder of adapters in host memory: beside the arena, where engines see it too."""
        return self.arena_path.with_name(f"{self.arena_path.name}-adapters")

    @property
    def berths_path(self) -> Path:
        """The folder of links by which vLLM finds adapters: beside them."""
        return self.arena_path.with_name(f"{self.arena_path.name}-berths")

    @property
    def triton_address_for_gateways(self) -> str:
        """What gateways dial."""
        return self.triton_advertise or self.triton_grpc
