"""vLLM's own server, run in this process under our checks. Imports vLLM; imported only when it is the chosen engine."""
