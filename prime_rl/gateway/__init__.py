"""The endpoint of agents: OpenAI's and Anthropic's forms over HTTP, a session and a key for each rollout. Layer 1."""
