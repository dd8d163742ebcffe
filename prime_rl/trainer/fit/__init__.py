"""What a pass of the trainer needs in memory, found without the memory: `prl fit`."""
