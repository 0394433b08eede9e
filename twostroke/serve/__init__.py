"""The server: OpenAI's and Anthropic's APIs over the engine process. Needs the packages of the default install only."""
