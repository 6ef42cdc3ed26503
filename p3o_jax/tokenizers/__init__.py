"""Text to token ids and back: characters and bytes, published tokenizers, chat templates."""
