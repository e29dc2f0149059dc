"""What a gateway keeps on disk, so that no bill is lost with its process: docs/decisions/0110-durable-outbox.md."""
