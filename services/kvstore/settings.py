"""What a kvstore needs to know of its node. Read once, at start, from the environment."""

from typing import Literal

from pydantic import Field, model_validator

from roundhouse.environment import ServiceSettings

MIB = 1024 * 1024


class KvStoreSettings(ServiceSettings):
    """Settings of one node's kvstore; each field is `ROUNDHOUSE_<FIELD>`."""

    node_id: str = Field(min_length=1, description="unique name of the node")
    grpc_port: int = Field(default=0, ge=0, le=65535, description="port for the node's engines; 0 picks a free one")
    arena_path: str = Field(
        default="", description="file of the arena, in memory; empty = /dev/shm/roundhouse-kv-<INSTANCE_ID>"
    )
    arena_bytes: int = Field(default=256 * MIB, gt=0, description="size of the arena, taken whole at start")
    slot_bytes: int = Field(default=4096, ge=64, description="smallest slot, bytes; a page keeps copies aligned")

    data_dir: str = Field(default="", description="folder of the blocks on disk, for this node alone; empty = no disk")
    disk_bytes: int = Field(default=1024 * MIB, gt=0, description="bound of the blocks on disk, bytes")
    disk_segment_bytes: int = Field(default=64 * MIB, gt=0, description="size of one segment file, bytes")
    disk_salt_bytes: int = Field(default=0, ge=0, description="bound on disk of one tenant, bytes; 0 = none")

    peer_transport: Literal["grpc", "nixl-ucx", "nixl-posix"] = Field(
        default="grpc", description="how blocks come from other nodes; both ends must say the same, else it is grpc"
    )

    disk_key_file: str = Field(
        default="", description="file with 64 hexadecimal digits: blocks on disk are encrypted; empty = they are not"
    )

    @model_validator(mode="after")
    def _has_two_segments(self) -> "KvStoreSettings":
        if self.data_dir and self.disk_bytes < 2 * self.disk_segment_bytes:
            raise ValueError("disk_bytes must hold at least two segments of disk_segment_bytes")
        return self

    @property
    def arena_file(self) -> str:
        """Where the arena is."""
        return self.arena_path or f"/dev/shm/roundhouse-kv-{self.instance_id}"  # noqa: S108 - memory shared on purpose
