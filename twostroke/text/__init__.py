"""Strings to tokens and back, chat messages to prompts, tokens to a stream of text."""

from twostroke.text.chat import ChatTemplate
from twostroke.text.stream import StopMatcher, StreamDecoder
from twostroke.text.tokenizer import Tokenizer, from_folder, from_gguf

__all__ = ["ChatTemplate", "StopMatcher", "StreamDecoder", "Tokenizer", "from_folder", "from_gguf"]
