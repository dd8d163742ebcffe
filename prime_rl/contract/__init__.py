"""The contract between processes: disk layout, wire types, status files. Layer 0: imports no other layer."""
