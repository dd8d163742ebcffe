"""Small things that every layer uses. Layer 0."""
