"""sweeper finds the fastest LLM inference engine configuration that keeps the context you need."""

__version__ = "0.1.0"
