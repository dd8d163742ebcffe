"""Everything that the screens show, made from what was read. Pure: no files, no threads, no widgets."""
