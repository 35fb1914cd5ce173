"""Adapters of SGLang's stores."""
