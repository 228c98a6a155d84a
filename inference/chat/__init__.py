"""Talk with a target in the terminal: the conversation, streamed answers, and how fast they came."""
