"""The gateway: an endpoint for agents, in OpenAI's and Anthropic's forms, whose answers are those of a run's policy."""
