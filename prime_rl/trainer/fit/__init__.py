"""The memory that a pass of the trainer needs, found without the memory: `prl fit`."""
