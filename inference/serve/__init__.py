"""An OpenAI-compatible server: HTTP in front of one thread that owns the decode loop."""
