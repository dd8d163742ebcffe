"""Where daemons run: one launcher an engine, and the agent that stands beside a daemon on another machine."""
