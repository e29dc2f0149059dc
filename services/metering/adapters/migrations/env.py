"""Alembic's entry: runs migrations on the connection, and in the transaction, that `migrating` opened."""

from alembic import context

from services.metering.adapters.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
