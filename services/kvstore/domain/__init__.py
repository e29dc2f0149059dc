"""What is stored where, for whom and for how long. Pure: offsets and keys, no bytes, no clock, no I/O."""
