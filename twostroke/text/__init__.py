"""Strings to tokens and back, chat messages to prompts, tokens to a stream of text."""
