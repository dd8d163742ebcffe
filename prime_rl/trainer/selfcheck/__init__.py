"""Whether neighbours change a run: its recorded batches are trained again, alone and together."""
